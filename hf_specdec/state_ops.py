"""The ops of a `DecodeState`: what a round does with lengths, slots and tokens of its rows.

They are chosen and registered as those of `ops`.
"""

from __future__ import annotations

import torch

from .kernels import random_reference, round_state_reference
from .kernels.types import VerificationResult
from .op_choice import choose, is_for_triton, register_op

__all__ = ["block", "commit", "next_slots", "position_ids", "row_uniform"]


@register_op(
    "hf_specdec::next_slots",
    schema="(Tensor lengths, Tensor limits, Tensor finished, int first, int count, int dummy) -> Tensor",
)
def _next_slots(lengths, limits, finished, first, count, dummy):
    from .kernels.round_state import next_slots

    return next_slots(lengths, limits, finished, first, count, dummy)


@_next_slots.register_fake
def _(lengths, limits, finished, first, count, dummy):
    return lengths.new_empty(len(lengths), count)


@register_op(
    "hf_specdec::block",
    schema="(Tensor tokens, Tensor lengths, Tensor limits, Tensor finished, Tensor drafts, int dummy) "
    "-> (Tensor, Tensor)",
)
def _block(tokens, lengths, limits, finished, drafts, dummy):
    from .kernels.round_state import block

    return block(tokens, lengths, limits, finished, drafts, dummy)


@_block.register_fake
def _(tokens, lengths, limits, finished, drafts, dummy):
    shape = len(lengths), drafts.shape[1] + 1
    return lengths.new_empty(shape), lengths.new_empty(shape)


@register_op("hf_specdec::position_ids", schema="(Tensor slots, Tensor? offsets, int dummy) -> Tensor")
def _position_ids(slots, offsets, dummy):
    from .kernels.round_state import position_ids

    return position_ids(slots, offsets, dummy)


@_position_ids.register_fake
def _(slots, offsets, dummy):
    return slots.new_empty(slots.shape)


@register_op(
    "hf_specdec::commit",
    mutates_args=("tokens", "lengths", "finished", "kept_tokens", "kept_accepted", "kept_committed"),
    schema="(Tensor(a!) tokens, Tensor(b!) lengths, Tensor(c!) finished, Tensor limits, Tensor ends, "
    "Tensor new_tokens, Tensor accepted, Tensor committed, Tensor(d!)? kept_tokens, Tensor(e!)? kept_accepted, "
    "Tensor(f!)? kept_committed) -> Tensor",
)
def _commit(tokens, lengths, finished, limits, ends, new_tokens, accepted, committed, *kept):
    from .kernels.round_state import commit

    result = VerificationResult(new_tokens, accepted, committed)
    return commit(
        tokens, lengths, finished, limits, ends, result, None if kept[0] is None else VerificationResult(*kept)
    )


@_commit.register_fake
def _(tokens, lengths, *rest):
    return lengths.new_empty(lengths.shape)


@register_op("hf_specdec::row_uniform", schema="(Tensor seeds, Tensor positions, Tensor tokens, int stream) -> Tensor")
def _row_uniform(seeds, positions, tokens, stream):
    from .kernels.random import row_uniform

    return row_uniform(seeds, positions, tokens, stream)


@_row_uniform.register_fake
def _(seeds, positions, tokens, stream):
    return seeds.new_empty(seeds.shape, dtype=torch.float32)


def next_slots(lengths: torch.Tensor, *args: torch.Tensor | int) -> torch.Tensor:
    """See `kernels.round_state_reference.next_slots`; a Triton kernel on GPUs."""
    return choose(_next_slots, round_state_reference.next_slots, lengths)(lengths, *args)


def block(tokens: torch.Tensor, *args: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.round_state_reference.block`; a Triton kernel on GPUs."""
    return choose(_block, round_state_reference.block, tokens)(tokens, *args)


def position_ids(slots: torch.Tensor, *args: torch.Tensor | int | None) -> torch.Tensor:
    """See `kernels.round_state_reference.position_ids`; a Triton kernel on GPUs."""
    return choose(_position_ids, round_state_reference.position_ids, slots)(slots, *args)


def commit(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    limits: torch.Tensor,
    ends: torch.Tensor,
    result: VerificationResult,
    kept: VerificationResult | None,
) -> torch.Tensor:
    """See `kernels.round_state_reference.commit`; a Triton kernel on GPUs."""
    if is_for_triton(tokens):
        return _commit(tokens, lengths, finished, limits, ends, *result, *(kept or (None, None, None)))
    return round_state_reference.commit(tokens, lengths, finished, limits, ends, result, kept)


def row_uniform(seeds: torch.Tensor, *args: torch.Tensor | int) -> torch.Tensor:
    """`[B]` numbers of `kernels.random_reference.uniform`, of `[B]` tensors each; a Triton kernel on GPUs."""
    return choose(_row_uniform, random_reference.uniform, seeds)(seeds, *args)
