"""The ops of a `DecodeState`: what a round does with lengths, slots and tokens of its rows.

They are chosen and registered as those of `ops`; see `kernels.round_state_reference` for what they compute.
"""

from __future__ import annotations

from .kernels.types import VerificationResult
from .op_choice import kernel_op

next_slots = kernel_op(
    "round_state.next_slots",
    "(Tensor lengths, Tensor limits, Tensor finished, int first, int count, int dummy) -> Tensor",
    lambda lengths, limits, finished, first, count, dummy: lengths.new_empty(len(lengths), count),
)
block = kernel_op(
    "round_state.block",
    "(Tensor tokens, Tensor lengths, Tensor limits, Tensor finished, Tensor drafts, int dummy) -> (Tensor, Tensor)",
    lambda tokens, lengths, limits, finished, drafts, dummy: tuple(
        lengths.new_empty(len(lengths), drafts.shape[1] + 1) for _ in range(2)
    ),
)
tree_block = kernel_op(
    "round_state.tree_block",
    "(Tensor tokens, Tensor lengths, Tensor limits, Tensor finished, Tensor drafts, Tensor parents, Tensor depths, "
    "int dummy) -> (Tensor, Tensor, Tensor)",
    lambda tokens, lengths, limits, finished, drafts, parents, *rest: tuple(
        parents.new_empty(parents.shape) for _ in range(3)
    ),
)
position_ids = kernel_op(
    "round_state.position_ids",
    "(Tensor slots, Tensor? offsets, int dummy) -> Tensor",
    lambda slots, offsets, dummy: slots.new_empty(slots.shape),
)
commit = kernel_op(
    "round_state.commit",
    "(Tensor(a!) tokens, Tensor(b!) lengths, Tensor(c!) finished, Tensor limits, Tensor ends, "
    "Tensor new_tokens, Tensor accepted, Tensor committed, Tensor(d!)? kept_tokens, Tensor(e!)? kept_accepted, "
    "Tensor(f!)? kept_committed) -> Tensor",
    lambda tokens, lengths, *rest: lengths.new_empty(lengths.shape),
    groups={5: VerificationResult, 6: VerificationResult},
)
