"""Triton verification by the target's own tokens; the reference is `verify_tree_reference.verify_tree`.

Shapes: scores `[B, N + 1, V]`, drafts `[B, N]`, parents and depths `[B, N + 1]`, tokens and path `[B, D + 1]`, accepted
and committed `[B]`. With p_i = softmax(scores[b, i]) and e_i = race_times(TARGET) of position lengths[b] + depths[b, i]

    chosen_i = argmax over v of scores[b, i, v], or of p_i(v) / e_i(v) with seeds
    path_0 = 0,    path_(j + 1) = the i with parents[b, i] = path_j and drafts[b, i - 1] = chosen_(path_j)

accepted is the largest j with a path_j, tokens[j] = chosen_(path_j). Without parents, those of node i are i - 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reduction
from .dependent_launch import dependent_launch, wait_for_inputs
from .random import race_times
from .reduction import (
    LEAST_KEY,
    argmax_keys,
    index_of_key,
    is_key_of_nan,
    largest_key,
    merge_softmax_stats,
    softmax_stats,
)
from .types import NO_TOKEN, RandomStream

_TARGET = tl.constexpr(int(RandomStream.TARGET))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


# do_not_specialize: else Triton compiles variants for values that are 1 or divisible by 16, which are no faster.
@triton.jit(do_not_specialize=["seeds_stride", "lengths_stride", "depths_stride", "width", "num_stats"])
def _draw_kernel(
    scores_ptr,
    depths_ptr,
    seeds_ptr,
    lengths_ptr,
    maxima_ptr,
    totals_ptr,
    keys_ptr,
    scores_stride_b,
    scores_stride_n,
    seeds_stride,
    lengths_stride,
    depths_stride,
    width,
    num_stats,
    vocabulary,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key of the maximum of p / e of one block of a node.

    Grid: (B * (N + 1), blocks). Reads `maxima` and `totals` `[B * (N + 1), stat blocks]`, the node's depth, the row's
    seed and length, and BLOCK elements of `scores`; writes one element of `keys` `[B * (N + 1), blocks]`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, node = row // width, row % width
    seed = tl.load(seeds_ptr + batch * seeds_stride)
    position = tl.load(lengths_ptr + batch * lengths_stride)
    if depths_ptr is not None:
        position += tl.load(depths_ptr + batch * depths_stride + node)
    else:
        position += node
    stat = tl.arange(0, STATS)[None, :]
    at = row * num_stats + stat
    maxima = tl.load(maxima_ptr + at, mask=stat < num_stats, other=float("-inf"))
    base, total = merge_softmax_stats(maxima, tl.load(totals_ptr + at, mask=stat < num_stats, other=0.0))
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    scores_ptr += batch * scores_stride_b + node * scores_stride_n
    score = tl.load(scores_ptr + token, mask=is_token, other=float("-inf"))
    prob = tl.exp(score - base) / total
    noise = race_times(seed, position, tl.program_id(1) * BLOCK, position * 0, _TARGET, BLOCK)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), largest_key(prob / noise, token, is_token))


@triton.jit(do_not_specialize=["num_blocks"])
def _choose_kernel(keys_ptr, chosen_ptr, num_blocks, IS_DRAWN: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Merge the keys of a node. Grid: (B * (N + 1),). Reads a row of `keys`; writes one element of `chosen`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    wait_for_inputs(PDL)
    key = tl.max(tl.load(keys_ptr + row * num_blocks + block, mask=block < num_blocks, other=LEAST_KEY), axis=0)
    token = index_of_key(key)
    if IS_DRAWN:
        token = tl.where(is_key_of_nan(key), _NO_TOKEN, token)
    tl.store(chosen_ptr + row, token)


@triton.jit(do_not_specialize=["drafts_stride_b", "drafts_stride_n", "parents_stride", "num_drafts", "depth"])
def _walk_kernel(
    chosen_ptr,
    drafts_ptr,
    parents_ptr,
    tokens_ptr,
    accepted_ptr,
    committed_ptr,
    path_ptr,
    drafts_stride_b,
    drafts_stride_n,
    parents_stride,
    num_drafts,
    depth,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Follow the chosen tokens of one row.

    Grid: (B,). Reads a row of `chosen` `[B, N + 1]`, `drafts` and `parents`; writes one of `tokens` and `path`
    `[B, D + 1]`, and an element of `accepted` and `committed`.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    is_draft = (index > 0) & (index <= num_drafts)
    wait_for_inputs(PDL)
    chosen = tl.load(chosen_ptr + row * (num_drafts + 1) + index, mask=index <= num_drafts, other=0)
    draft_ptr = drafts_ptr + row * drafts_stride_b + (index - 1) * drafts_stride_n
    draft = tl.load(draft_ptr, mask=is_draft, other=_NO_TOKEN)
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + row * parents_stride + index, mask=is_draft, other=-1).to(tl.int32)
    else:
        parent = index - 1
    node = tl.full([], 0, tl.int32)
    accepted = tl.full([], 0, tl.int64)
    tokens_ptr += row * (depth + 1)
    path_ptr += row * (depth + 1)
    for step in range(depth + 1):
        token = tl.sum(tl.where(index == node, chosen, 0), axis=0)
        tl.store(tokens_ptr + step, token)
        tl.store(path_ptr + step, node.to(tl.int64))
        # After the last accepted node the path has moved on as often as there are accepted ones, and stays.
        fits = is_draft & (parent == node) & (draft == token) & (accepted == step) & (step < depth)
        child = tl.min(tl.where(fits, index, NODES), axis=0)
        accepted += tl.where(child < NODES, 1, 0)
        node = tl.where(child < NODES, child, node)
    tl.store(accepted_ptr + row, accepted)
    tl.store(committed_ptr + row, accepted + 1)


def verify_tree(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor | None,
    depths: torch.Tensor | None,
    seeds: torch.Tensor | None,
    lengths: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `verify_tree_reference.verify_tree`; equal, but for tokens that rounding decides. Three or four launches."""
    batch, num_drafts = drafts.shape
    width, vocabulary = num_drafts + 1, scores.shape[2]
    assert scores.shape[:2] == (batch, width), "shapes must agree"
    assert parents is None or (parents.stride(1) == depths.stride(1) == 1 and parents.shape == (batch, width))
    if seeds is None:
        keys = argmax_keys(scores)
    else:
        assert scores.dtype == torch.float32, "scores must be float32"
        stats = softmax_stats(scores)
        blocks = triton.cdiv(vocabulary, reduction.SAMPLE_BLOCK)
        keys = torch.empty(batch * width, blocks, dtype=torch.int64, device=scores.device)
        _draw_kernel[keys.shape](
            scores,
            depths,
            seeds,
            lengths,
            *stats,
            keys,
            *scores.stride()[:2],
            seeds.stride(0),
            lengths.stride(0),
            0 if depths is None else depths.stride(0),
            width,
            stats.shape[2],
            vocabulary,
            STATS=triton.next_power_of_2(stats.shape[2]),
            BLOCK=reduction.SAMPLE_BLOCK,
            num_warps=reduction.SAMPLE_WARPS,
        )
    chosen = drafts.new_empty(batch, width)
    _choose_kernel[(batch * width,)](
        keys,
        chosen,
        keys.shape[1],
        IS_DRAWN=seeds is not None,
        BLOCKS=triton.next_power_of_2(keys.shape[1]),
        num_warps=1,
        **dependent_launch(scores.device),
    )
    tokens, path = (drafts.new_empty(batch, depth + 1) for _ in range(2))
    accepted, committed = (drafts.new_empty(batch) for _ in range(2))
    _walk_kernel[(batch,)](
        chosen,
        drafts,
        parents,
        tokens,
        accepted,
        committed,
        path,
        *drafts.stride(),
        0 if parents is None else parents.stride(0),
        num_drafts,
        depth,
        NODES=triton.next_power_of_2(width),
        num_warps=1,
        **dependent_launch(scores.device),
    )
    return tokens, accepted, committed, path
