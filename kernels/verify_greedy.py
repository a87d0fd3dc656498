"""Triton greedy verification of draft tokens; the reference is `verify_greedy_reference.verify_greedy`.

Shapes: scores `[B, K + 1, V]`, drafts `[B, K]`, tokens `[B, K + 1]`, accepted and committed `[B]`.

    tokens[b, i] = argmax over v of scores[b, i, v]
    accepted[b] = number of leading i with drafts[b, i] = tokens[b, i],    committed[b] = accepted[b] + 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs
from .jit import Unspecialised, kernel
from .reduction import LEAST_KEY, argmax_keys, empty_result, index_of_key
from .types import VerificationResult


@kernel
def _merge_greedy_kernel(
    keys_ptr,
    drafts_ptr,
    tokens_ptr,
    accepted_ptr,
    committed_ptr,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    num_drafts: Unspecialised,
    num_blocks: Unspecialised,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the keys of the blocks, and count the accepted drafts of one row.

    Grid: (B,). Reads `keys` `[B, K + 1, blocks]` and `drafts` `[B, K]`; writes `tokens` `[B, K + 1]`, `accepted` `[B]`
    and `committed` `[B]`.
    """
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, STEPS)
    block = tl.arange(0, BLOCKS)
    wait_for_inputs(PDL)
    keys = tl.load(
        keys_ptr + (row * (num_drafts + 1) + step)[:, None] * num_blocks + block[None, :],
        mask=(step <= num_drafts)[:, None] & (block < num_blocks)[None, :],
        other=LEAST_KEY,
    )
    token = index_of_key(tl.max(keys, axis=1))
    is_draft = step < num_drafts
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=is_draft, other=-1)
    accepted = tl.min(tl.where(is_draft & (draft == token), num_drafts, tl.minimum(step, num_drafts)), axis=0)
    tl.store(tokens_ptr + row * (num_drafts + 1) + step, token, mask=step <= num_drafts)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    tl.store(committed_ptr + row, accepted.to(tl.int64) + 1)


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> VerificationResult:
    """See `verify_greedy_reference.verify_greedy`; equal in every element. Two launches.

    The rows of `scores` may have any strides.
    """
    batch, num_drafts = drafts.shape
    assert scores.shape[:2] == (batch, num_drafts + 1), "shapes must agree"
    keys, out = argmax_keys(scores), empty_result(drafts)
    _merge_greedy_kernel[(batch,)](
        keys,
        drafts,
        *out,
        *drafts.stride(),
        num_drafts,
        keys.shape[1],
        STEPS=triton.next_power_of_2(num_drafts + 1),
        BLOCKS=triton.next_power_of_2(keys.shape[1]),
        **dependent_launch(scores.device),
    )
    return out
