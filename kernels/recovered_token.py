"""Triton sampling of the recovered or bonus token after the accepted drafts, see `recovered_token_reference`.

Whether the residual is 0 everywhere is known only when all blocks of a row are done, so every program writes the keys
(see `reduction`) of both maxima, and the merging kernel chooses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import reduction
from .jit import Unspecialised, kernel
from .random import race_times
from .reduction import LEAST_KEY, index_of_key, is_key_of_nan, largest_key
from .types import NO_TOKEN, RandomStream, VerificationResult

_TARGET = tl.constexpr(int(RandomStream.TARGET))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


class Laws(NamedTuple):
    """An argument of kernels: what the tokens of a round are drawn from, and strides of rows and steps.

    Attributes:
        scores: `[B, K + 1, V]` float32, of whose softmax the target's tokens are.
        draft_probs: `[B, K, V_d]` float32, distributions of the drafts; None of point masses.
        draft_ids: `[V]` int64, index of each token in the draft vocabulary; None if that is the first V_d tokens.
        vocabulary, draft_vocabulary: V and V_d.
    """

    scores: torch.Tensor
    draft_probs: torch.Tensor | None
    draft_ids: torch.Tensor | None
    scores_strides: tuple[int, int]
    draft_probs_strides: tuple[int, int] | None
    vocabulary: int
    draft_vocabulary: int | None

    @classmethod
    def of(
        cls, scores: torch.Tensor, drafts: torch.Tensor, probs: torch.Tensor | None, ids: torch.Tensor | None
    ) -> Laws:
        """With their shapes, dtypes and strides checked, of the arguments of `verify_sampling` and `verify_block`."""
        batch, num_drafts = drafts.shape
        assert scores.shape[:2] == (batch, num_drafts + 1), "shapes must agree"
        assert scores.dtype == torch.float32, "scores must be float32"
        assert ids is None or (ids.shape == scores.shape[2:] and ids.is_contiguous()), "draft_ids must be contiguous"
        if probs is None:
            return cls(scores, None, ids, scores.stride()[:2], None, scores.shape[2], None)
        assert probs.shape[:2] == (batch, num_drafts), "shapes must agree"
        assert probs.shape[2] <= scores.shape[2], "the draft vocabulary must be a part of the target's"
        assert probs.dtype == torch.float32, "draft_probs must be float32"
        assert probs.stride(2) == 1 or probs.shape[2] == 1, "rows must have unit stride"
        return cls(scores, probs, ids, scores.stride()[:2], probs.stride()[:2], scores.shape[2], probs.shape[2])

    def empty_keys(self) -> torch.Tensor:
        """Uninitialised keys `[2, B, blocks]`."""
        blocks = triton.cdiv(self.vocabulary, reduction.SAMPLE_BLOCK)
        return torch.empty(2, len(self.scores), blocks, dtype=torch.int64, device=self.scores.device)


@triton.jit
def score_of(laws, row, step, token, mask):
    """Score of `token`, int64, at steps of a row; -inf where `mask` is false."""
    at = laws.scores + row * laws.scores_strides[0] + step * laws.scores_strides[1]
    return tl.load(at + token, mask=mask, other=float("-inf"))


@triton.jit
def draft_prob(laws, row, step, token, mask):
    """Draft probability q of `token`, int64 in the target's vocabulary, likewise; 0 where `mask` is false."""
    index = token
    if laws.draft_ids is not None:
        index = tl.load(laws.draft_ids + token, mask=mask, other=-1)
    at = laws.draft_probs + row * laws.draft_probs_strides[0] + step * laws.draft_probs_strides[1]
    return tl.load(at + index, mask=mask & (index >= 0) & (index < laws.draft_vocabulary), other=0.0)


@triton.jit
def has_probs(draft_prob):
    """Whether a draft was drawn from a distribution, by its probability q: not where the drafter's logits have none."""
    return draft_prob < float("inf")


@triton.jit
def store_next(keys_ptr, out, residual, p_next, seed, length, accepted, token, is_token, BLOCK: tl.constexpr):
    """Write the keys of one block, of the maximum of residual / e and of the maximum of p_next / e, and the counts.

    For grids (B, blocks). Writes one element each of `keys[0]` and `keys[1]`, `[B, blocks]`, and in the first block of
    a row one of `accepted` and `committed` `[B]` of `out`, a `VerificationResult`.
    """
    position = length + accepted
    row = tl.program_id(0).to(tl.int64)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    num_cells = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    noise = race_times(seed, position, tl.program_id(1) * BLOCK, position * 0, _TARGET, BLOCK)
    tl.store(keys_ptr + cell, largest_key(residual / noise, token, is_token))
    tl.store(keys_ptr + num_cells + cell, largest_key(p_next / noise, token, is_token))
    if tl.program_id(1) == 0:
        tl.store(out.accepted + row, accepted.to(tl.int64))
        tl.store(out.committed + row, accepted.to(tl.int64) + 1)


@kernel
def _merge_recovered_kernel(
    keys_ptr,
    drafts_ptr,
    out,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    num_drafts: Unspecialised,
    num_blocks: Unspecialised,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Merge the keys of a row, and write its tokens: the drafts, and the next token at index `accepted`.

    Grid: (B,). Reads `keys` `[2, B, blocks]`, `drafts` `[B, K]` and of `out` `accepted`; writes its `tokens`.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    cell = row * num_blocks + block
    num_cells = tl.num_programs(0).to(tl.int64) * num_blocks
    from_residual = tl.max(tl.load(keys_ptr + cell, mask=block < num_blocks, other=LEAST_KEY), axis=0)
    from_probs = tl.max(tl.load(keys_ptr + num_cells + cell, mask=block < num_blocks, other=LEAST_KEY), axis=0)
    # The upper half of a key is 0 if no weight is positive.
    next_token = index_of_key(tl.where((from_residual >> 32) > 0, from_residual, from_probs))
    next_token = tl.where(is_key_of_nan(from_probs), _NO_TOKEN, next_token)
    step = tl.arange(0, STEPS)
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=step < num_drafts, other=0)
    token = tl.where(step == tl.load(out.accepted + row), next_token, draft)
    tl.store(out.tokens + row * (num_drafts + 1) + step, token, mask=step <= num_drafts)


def merge_recovered(keys: torch.Tensor, drafts: torch.Tensor, out: VerificationResult) -> None:
    """Write `out.tokens` from the `keys` `[2, B, blocks]`, once `out.accepted` is written."""
    batch, num_drafts = drafts.shape
    _merge_recovered_kernel[(batch,)](
        keys,
        drafts,
        out,
        *drafts.stride(),
        num_drafts,
        keys.shape[2],
        STEPS=triton.next_power_of_2(num_drafts + 1),
        BLOCKS=triton.next_power_of_2(keys.shape[2]),
    )
