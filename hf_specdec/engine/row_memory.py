"""Sessions whose keys and values are in a `RowMemory`: the memory that a row takes follows its text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import ops
from ..cache.layer_kinds import Use
from ..drafters.base import Drafter
from ..drafters.cached import CachedDrafter
from ..errors import first_line
from ..memory.virtual_memory import RowMemory, has_virtual_memory, slot_unit, total_bytes
from ..op_choice import noting_attended
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.support import cache_layers
from ..state import DecodeState, Shape
from .hosted_target import HostedTarget
from .key_layout import KeyLayout, caches_of
from .rounds import draft_and_forward
from .session_prefill import SessionPrefill
from .sessions import Session

# Tokens of a text for which addresses are reserved where requests arrive, if the target has positions for more; a
# longer one moves all rows to a larger session.
MOST_RESERVED = 65536
# Rounds are captured for texts of up to so many tokens, or a power of the second times as many. Attention over 300 of
# 1,024 slots or of 4,096, shapes of Llama-3.1-8B, four queries, one H200: 12 or 21 us at batch 32.
FEWEST_SPAN, SPAN_STEP = 1024, 4
# Token ids of the longest texts may take one part in so many of a device's memory; what goes with them takes more.
SHARE_FOR_TOKENS = 16


def can_grow(target: HostedTarget) -> bool:
    """Whether keys and values of a session may be in a `RowMemory`: attention reads only slots that it may see.

    Processes that run one model together need the same rows, but may have different memory.
    """
    model, drafter = target.model, target.drafter
    if tensor_parallel_group(model) is not None:
        return False
    kinds = [cache_layers(model)]
    if isinstance(drafter, CachedDrafter):
        kinds.append(drafter.cached_layers)
    elif type(drafter).new_memory is not Drafter.new_memory:
        return False
    # The references, which attention in float64 runs, read all slots.
    if any(one.dtype == torch.float64 for module in (model, drafter) for one in module.parameters()):
        return False
    is_allowed = all(one.why_not(Use.ROW_MEMORY) is None for one in kinds)
    return is_allowed and any(one.stores_keys for one in kinds) and has_virtual_memory(model.device)


def slots_in_memory(longest: int, device: torch.device) -> int:
    """Slots of a `RowMemory` on `device` for texts of up to `longest` tokens."""
    unit = slot_unit(device)
    return unit * -(-(longest + 1) // unit) + unit


def span_for(live: int, slots: int) -> int:
    """For how many leading slots a round is captured, if `live` are in use or are to be written."""
    span = FEWEST_SPAN
    while span < live + 3:  # the slot after the last one is taken for the dummy slot; blocks may end one later
        span *= SPAN_STEP
    return min(span, slots)


@contextmanager
def spanning(state: DecodeState, span: int) -> Iterator[None]:
    """Context in which kernels are given `span` leading slots of the caches."""
    caches = caches_of(state)
    for cache in caches:
        cache.kernel_span = span
    try:
        yield
    finally:
        for cache in caches:
            cache.kernel_span = cache.slots


@contextmanager
def allocating(shape: Shape, device: torch.device) -> Iterator[None]:
    """Context in which buffers of `shape` are allocated on `device`.

    Raises:
        torch.OutOfMemoryError: there is no memory for them, also on a CPU, where torch raises another error, or the
            system gives more than there is and ends the process when it is written.
    """
    wanted, available = 8 * shape.batch * shape.slots, total_bytes(device) // SHARE_FOR_TOKENS
    if wanted > available:
        raise torch.OutOfMemoryError(
            f"Token ids of {shape.batch} texts of {shape.slots} tokens take {wanted} bytes, of {available} at most."
        )
    try:
        yield
    except RuntimeError as error:
        if device.type == "cpu" and "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(first_line(error)) from None
        raise


def place_in_memory(state: DecodeState, target: HostedTarget, shape: Shape) -> None:
    """Let `state`, new and of `shape`, have its keys and values in a `RowMemory`; `target` has a layout of them."""
    layout = target.key_layout
    memory = RowMemory(shape.batch, shape.slots, layout.token_bytes, state.tokens.device)
    layout.place(caches_of(state), memory)


def layout_of(target: HostedTarget, shape: Shape) -> KeyLayout | None:
    """`find_layout`, once for all calls as long as target and drafter are the same."""
    if shape.num_draft_tokens not in target.hosting.layouts:
        found = find_layout(target, shape)  # patching may move weights, which makes another hosting
        target.hosting.layouts[shape.num_draft_tokens] = found
    return target.hosting.layouts[shape.num_draft_tokens]


def find_layout(target: HostedTarget, shape: Shape) -> KeyLayout | None:
    """Run one token through target and drafter, and see what they store.

    Returns:
        its layout; None if something else than attention reads it, which may read slots that have no memory: as models
        do that store what keys and values are computed from.
    """
    slots = max(64, 8 * (shape.num_draft_tokens + 1))
    model, drafter = target.model, target.drafter
    state = drafter.new_state(shape._replace(batch=1, slots=slots), cache_layers(model), model.device)
    with ops.references(), noting_attended() as attended:
        SessionPrefill(Session(state), target, None, is_continuous=False).run(())
        with state.idle():
            draft_and_forward(state, target(), drafter)
    buffers = [one for cache in caches_of(state) for layer in cache.layers for one in layer.slot_buffers]
    stored = {one.untyped_storage().data_ptr() for one in buffers}
    return KeyLayout.of(caches_of(state)) if stored <= attended else None
