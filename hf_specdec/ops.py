"""The ops of a round: Triton kernels on devices that run them, else their PyTorch references.

Only this module imports kernels and references; others import `kernels.types` at most. Triton is imported when the
first kernel is called.
"""

# ruff: noqa: F401
# Functions of `kernels` without a choice are imported for others to call here.

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from .kernels import kv_cache_reference, linear_reference
from .kernels.draft_vocabulary import invert_draft_vocabulary, over_vocabulary
from .kernels.float8_reference import FLOAT8, as_bytes, dequantise, quantise
from .kernels.gated_activation_reference import ACTIVATIONS
from .kernels.linear_tiles import (
    MAX_ADAPTED_RANK,
    MAX_ADAPTED_ROWS,
    MAX_GATED_ROWS,
    MAX_ROWS,
    MAX_STORED_ROWS,
    MIN_FEATURES,
    ROWS_OF_LONG_PASSES,
    choose_descriptor_tiles,
    choose_gated_tiles,
    choose_invariant_tiles,
    choose_stored_tiles,
    choose_tiles,
    choose_wide_stored_tiles,
)
from .kernels.low_rank_reference import low_rank_places
from .kernels.random_reference import exponential_sample, row_seeds, uniform
from .kernels.ring_reference import PassPositions, with_dims_of
from .kernels.stored_weight_reference import dequantise as dequantise_weight
from .kernels.top_k_top_p_reference import certain, divide
from .kernels.types import LinearTiles, StoredWeight
from .op_choice import (
    batch_invariant,
    capturing,
    has_kernels,
    is_batch_invariant,
    is_capturing,
    is_compile_only,
    is_for_triton,
    kernel_op,
    references,
    without_launches,
)


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Context in which this thread's ops on `device` compile their kernels, all in parallel, and launch none.

    Ops that return or write integers run the reference, so that indices are valid. Others return zeros, and write
    nothing. Nothing changes where ops run the references, or Triton interprets the kernels.
    """
    launch = _compiled_kernels(device)
    if launch is None:
        yield
    else:
        with launch.compile_only(device), without_launches():
            yield


def start_compiler(device: torch.device) -> None:
    """Get the compiler of the kernels of `device` ready, in another thread and once in a process.

    The first kernel of a process otherwise waits for that: 0.4 s, or 1.5 s if Triton's cache is empty (one H200).
    """
    if has_kernels(device):
        _start_compiler(device)


@functools.cache
def _start_compiler(device: torch.device) -> None:
    def start() -> None:
        launch = _compiled_kernels(device)
        if launch is not None:
            launch.start_compiler(device)

    threading.Thread(target=start, name="compiler", daemon=True).start()


def _compiled_kernels(device: torch.device) -> ModuleType | None:
    """What compiles the kernels of `device`; None if it has none, or Triton interprets them."""
    if not has_kernels(device):
        return None
    from .kernels import launch

    return None if launch.is_interpreted() else launch


# Widest rows that a program of the norm's kernel can keep in registers.
MAX_NORM_WIDTH = 65536


def _linear(inputs, weight, bias=None, activation=None):
    from .kernels.linear import linear

    if isinstance(weight, StoredWeight):
        return _stored_linear(inputs, weight, bias, activation)
    if activation is not None:
        return linear(inputs, weight, bias, choose_gated_tiles(len(inputs), *weight.shape), activation)
    if is_batch_invariant():
        tiles = choose_invariant_tiles(len(inputs), *weight.shape, inputs.itemsize)
    else:
        tiles = choose_tiles(len(inputs), *weight.shape)
    by_descriptors = choose_descriptor_tiles(len(inputs), len(weight), tiles)
    if by_descriptors is not None and (is_capturing() or len(inputs) >= ROWS_OF_LONG_PASSES):
        from .kernels import linear_descriptors

        if linear_descriptors.takes(inputs, weight):
            return linear_descriptors.linear(inputs, weight, bias, by_descriptors)
    if tiles is None or not len(inputs):
        return linear_reference.linear(inputs, weight, bias)
    return linear(inputs, weight, bias, tiles)


def _adapted_linear(inputs, weight, bias, *args):
    from .kernels.low_rank import adapted_linear

    return adapted_linear(inputs, weight, bias, *args, choose_tiles(len(inputs), *weight.shape))


def _stored_linear(inputs, weight, bias, activation):
    from .kernels import linear, linear_stored

    inputs, weight = _rounded(inputs, weight)
    if weight.order is not None:
        inputs, weight = inputs.index_select(1, weight.order), weight._replace(order=None)
    wide = _wide_stored_tiles(inputs, weight) if activation is None else None
    if wide is not None:
        return linear_stored.linear(inputs, weight, bias, *wide)
    return linear.linear(inputs, weight, bias, choose_stored_tiles(len(inputs), weight, inputs.itemsize), activation)


def _expert_linear(inputs, weight, *args):
    from .kernels.experts import expert_linear

    return expert_linear(*_rounded(inputs, weight), *args)


def _rounded(inputs, weight):
    """Inputs as the products read them, and the weight for these."""
    if not (isinstance(weight, StoredWeight) and weight.rounds_inputs):
        return inputs, weight
    return rounded_inputs(inputs, weight), weight._replace(rounds_inputs=False)


def _wide_stored_tiles(inputs: torch.Tensor, weight: StoredWeight) -> tuple[LinearTiles, int] | None:
    """Tiles of wide products; None also if sums must be added in the order of `linear`."""
    return None if is_batch_invariant() else choose_wide_stored_tiles(len(inputs), weight)


def _attention(*args):
    from .kernels.attention import attention

    return attention(*args, fixed_splits=is_batch_invariant())


# Text: slots and tokens of rows (see `round_state_reference`), keys and values, attention, recurrences.
next_slots = kernel_op("round_state.next_slots")
block = kernel_op("round_state.block")
tree_block = kernel_op("round_state.tree_block")
position_ids = kernel_op("round_state.position_ids")
commit = kernel_op("round_state.commit", writes=("tokens", "lengths", "finished", "kept"))
attention = kernel_op("attention.attention", launch=_attention)
write_kv = kernel_op("kv_cache.write_kv", writes=("keys", "values", "scales"))
short_conv = kernel_op("short_conv.short_conv", writes=("ring",))
recurrence = kernel_op("recurrence.recurrence", writes=("state", "ring"))

# Drafts and their verification.
prepare_inputs = kernel_op("round_state.prepare_inputs")
suffix_drafts = kernel_op("suffix_drafts.suffix_drafts")
best_draft = kernel_op("draft_sampling.best_draft")
draw_draft = kernel_op("draft_sampling.draw_draft")
apply_top_k_top_p = kernel_op(
    "top_k_top_p.apply_top_k_top_p",
    fake=lambda logits, *settings: logits.new_empty(logits.shape, dtype=torch.float32),
    is_opaque=True,  # it reads which rows have a setting
)
add_target_noise = kernel_op("draft_sampling.add_target_noise")
likeliest_tokens = kernel_op("logprobs.likeliest_tokens", writes=("logprobs", "tokens"))
best_paths = kernel_op("draft_tree.best_paths")
grow_tree = kernel_op("draft_tree.grow_tree", writes=("rows",))
verify_sampling = kernel_op("verification.verify_sampling")
verify_block = kernel_op("verification.verify_block")
verify_tree = kernel_op("verification.verify_tree")
token_logprobs = kernel_op("logprobs.token_logprobs")

# Linear layers and experts. Use `linear` only where `has_fast_linear` says so, or with an activation
# `has_gated_linear`.
rounded_inputs = kernel_op("stored_weight.rounded_inputs")
linear = kernel_op("linear.linear", launch=_linear)
plan_experts = kernel_op("experts.plan_experts")
sum_experts = kernel_op("experts.sum_experts")
choose_experts = kernel_op("router.choose_experts")
expert_linear = kernel_op(
    "experts.expert_linear",
    launch=_expert_linear,
    fake=lambda inputs, weight, bias, plan, rows, is_transposed: inputs.new_empty(
        plan.shape[1], weight.shape[2 if is_transposed else 1]
    ),
    is_opaque=True,  # it reads the plan
)
# These two read which adapters there are. Use `adapted_linear` only where `has_adapted_linear` says so.
add_low_rank = kernel_op("low_rank.add_low_rank", writes=("out",), is_opaque=True)
adapted_linear = kernel_op(
    "low_rank.adapted_linear",
    launch=_adapted_linear,
    fake=lambda inputs, weight, bias, activation, *args: inputs.new_empty(
        len(inputs), len(weight) if activation is None else len(weight) // 2
    ),
    is_opaque=True,
)


def _like(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Empty tensors `[B, heads, n, D]` with the memory layout of `[B, n, heads, D]`, one for each of `states`."""
    return [one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in states]


# Operations of layers that take PyTorch several kernels each: norms, rotary embeddings, gated activations.
rms_norm = kernel_op("rms_norm.rms_norm")
add_rms_norm = kernel_op("rms_norm.add_rms_norm")
joined_norms = kernel_op("rms_norm.joined_norms")
rotary = kernel_op("rotary.rotary", fake=lambda cos, sin, states, kind: _like(states))
rotate_and_store = kernel_op(
    "rotary.rotate_and_store",
    writes=("keys", "values", "scales"),
    fake=lambda cos, sin, states, *rest: _like(states[:-1]),
)
rotary_angles = kernel_op("rotary.rotary_angles")
gated_activation = kernel_op("gated_activation.gated_activation")
gather_rows = kernel_op("gather_rows.gather_rows")
join_rows = kernel_op("gather_rows.join_rows", writes=("out",))
# Reductions of rows with a fixed order of summation.
row_sum = kernel_op("row_reductions.row_sum")
row_softmax = kernel_op("row_reductions.row_softmax")
row_cumsum = kernel_op("row_reductions.row_cumsum")


class SlotMoves:
    """`kernels.kv_cache_reference.move_slots` for the same buffers in every round; a Triton kernel on GPUs."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self._table: Any = None  # a `kernels.kv_cache.SlotTable`

    def __call__(
        self, buffers: Sequence[torch.Tensor], path: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor
    ) -> None:
        if not is_for_triton(path):
            kv_cache_reference.move_slots(buffers, path, lengths, committed)
            return
        from .kernels.kv_cache import SlotTable, move_slots

        with torch.cuda.device_of(path):
            key = tuple((one.data_ptr(), one.stride()) for one in buffers)
            if key != self._key:  # never during a capture: the round has run before
                self._key, self._table = key, SlotTable.of(buffers)
            move_slots(self._table, path, lengths, committed)


def has_fast_linear(inputs: torch.Tensor, weight: torch.Tensor | StoredWeight) -> bool:
    """Whether `linear` of `[n, in]` by `[out, in]` computes what PyTorch, or the library that stores the weight, does,
    and is faster.

    In the context `batch_invariant`: whether it computes that.
    """
    is_stored = isinstance(weight, StoredWeight)
    if is_batch_invariant():
        return not torch.is_autocast_enabled(inputs.device.type) and (is_stored or inputs.dtype == weight.dtype)
    if is_stored:
        is_taken = len(inputs) <= MAX_STORED_ROWS or choose_wide_stored_tiles(len(inputs), weight) is not None
        return is_taken and _is_fast_stored(inputs, weight)
    if len(inputs) <= MAX_ROWS:
        return _has_tiles(choose_tiles, inputs, weight)
    return _has_whole_tiles(inputs, weight)


def has_gated_linear(inputs: torch.Tensor, weight: torch.Tensor | StoredWeight) -> bool:
    """Whether `linear` of `[n, in]` by `[2 N, in]` with an activation is faster than without one and then
    `gated_activation`; the bits are the same."""
    if isinstance(weight, StoredWeight):
        is_taken = has_fast_linear(inputs, weight) and _wide_stored_tiles(inputs, weight) is None
        return is_taken and weight.shape[0] % 2 == 0 and is_for_triton(inputs)
    return len(inputs) <= MAX_GATED_ROWS and len(weight) % 2 == 0 and _has_tiles(choose_gated_tiles, inputs, weight)


def has_adapted_linear(inputs: torch.Tensor, weight: torch.Tensor | StoredWeight, rank: int) -> bool:
    """Whether `adapted_linear` of `[n, in]` by `[out, in]` and adapters of up to `rank` is faster than `linear`,
    `add_low_rank`, and perhaps `gated_activation`; the bits are the same."""
    is_small = len(inputs) <= MAX_ADAPTED_ROWS and rank <= MAX_ADAPTED_RANK
    return is_small and not isinstance(weight, StoredWeight) and _has_tiles(choose_tiles, inputs, weight)


def _has_whole_tiles(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether descriptors are faster for more than `MAX_ROWS` rows: in captures, since the host is slower with them."""
    if not is_capturing() or min(weight.shape) < MIN_FEATURES:
        return False
    if not _has_tiles(lambda rows, size_out, _: choose_descriptor_tiles(rows, size_out, None), inputs, weight):
        return False
    from .kernels import linear_descriptors

    return linear_descriptors.takes(inputs, weight)


def _is_16_bit(inputs: torch.Tensor) -> bool:
    """Whether the 16-bit floating point kernels take `inputs` as they are."""
    is_taken = inputs.dtype in (torch.bfloat16, torch.float16) and is_for_triton(inputs) and inputs.stride(1) == 1
    return is_taken and not torch.is_autocast_enabled(inputs.device.type)


def _is_fast_stored(inputs: torch.Tensor, weight: StoredWeight) -> bool:
    is_aligned = weight.values.stride(0) % 16 == 0 and weight.values.data_ptr() % 16 == 0
    return len(inputs) > 0 and _is_16_bit(inputs) and is_aligned


def _has_tiles(
    choose_for: Callable[[int, int, int], LinearTiles | None], inputs: torch.Tensor, weight: torch.Tensor
) -> bool:
    is_like = inputs.dtype == weight.dtype and weight.stride(1) == 1
    return is_like and _is_16_bit(inputs) and choose_for(len(inputs), *weight.shape) is not None
