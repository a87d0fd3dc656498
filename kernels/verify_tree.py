"""Triton verification by the target's own tokens; the reference is `verify_tree_reference.verify_tree`.

Shapes: scores `[B, N + 1, V]`, drafts `[B, N]`, parents and depths `[B, N + 1]`, tokens and path `[B, D + 1]`, accepted
and committed `[B]`. With p_i = softmax(scores[b, i]) and e_i = race_times(TARGET) of position lengths[b] + depths[b, i]

    chosen_i = argmax over v of scores[b, i, v], or of p_i(v) / e_i(v) with seeds
    path_0 = 0,    path_(j + 1) = the i with parents[b, i] = path_j and drafts[b, i - 1] = chosen_(path_j)

accepted is the largest j with a path_j, tokens[j] = chosen_(path_j). Without parents, those of node i are i - 1, and
tokens are all of chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .draft_sampling import draw_keys
from .launch import Unspecialised, block_of_steps, dependent_launch, kernel, wait_for_inputs
from .reduction import LEAST_KEY, argmax_keys, empty_result, index_of_key, is_key_of_nan
from .types import NO_TOKEN, RandomStream

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@kernel
def _walk_kernel(
    keys_ptr,
    drafts_ptr,
    parents_ptr,
    out,
    path_ptr,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    parents_stride: Unspecialised,
    num_drafts: Unspecialised,
    num_blocks: Unspecialised,
    depth: Unspecialised,
    IS_DRAWN: tl.constexpr,
    NODES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the keys of the blocks, and follow the chosen tokens of one row.

    Grid: (B,). Reads a row of `keys` `[B, N + 1, blocks]`, `drafts` and `parents`; writes one of `tokens` of `out`,
    a `VerificationResult`, and of `path`, `[B, D + 1]` each, and an element of `accepted` and `committed`.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    block = tl.arange(0, BLOCKS)
    tokens_ptr = out.tokens + row * (depth + 1)
    path_ptr += row * (depth + 1)
    drafts_ptr += row * drafts_stride_b
    wait_for_inputs(PDL)
    keys = tl.load(
        keys_ptr + (row * (num_drafts + 1) + index)[:, None] * num_blocks + block[None, :],
        mask=(index <= num_drafts)[:, None] & (block < num_blocks)[None, :],
        other=LEAST_KEY,
    )
    key = tl.max(keys, axis=1)
    chosen = index_of_key(key)
    if IS_DRAWN:
        chosen = tl.where(is_key_of_nan(key), _NO_TOKEN, chosen)
    if parents_ptr is None:
        is_draft = index < num_drafts
        draft = tl.load(drafts_ptr + index * drafts_stride_n, mask=is_draft, other=_NO_TOKEN)
        accepted = tl.min(tl.where(is_draft & (draft == chosen), num_drafts, tl.minimum(index, num_drafts)), axis=0)
        accepted = accepted.to(tl.int64)
        tl.store(tokens_ptr + index, chosen, mask=index <= num_drafts)
        tl.store(path_ptr + index, index.to(tl.int64), mask=index <= num_drafts)
    else:
        is_draft = (index > 0) & (index <= num_drafts)
        draft = tl.load(drafts_ptr + (index - 1) * drafts_stride_n, mask=is_draft, other=_NO_TOKEN)
        parent = tl.load(parents_ptr + row * parents_stride + index, mask=is_draft, other=-1).to(tl.int32)
        node = tl.full([], 0, tl.int32)
        accepted = tl.full([], 0, tl.int64)
        for step in range(depth + 1):
            token = tl.sum(tl.where(index == node, chosen, 0), axis=0)
            tl.store(tokens_ptr + step, token)
            tl.store(path_ptr + step, node.to(tl.int64))
            # After the last accepted node the path has moved on as often as there are accepted ones, and stays.
            fits = is_draft & (parent == node) & (draft == token) & (accepted == step) & (step < depth)
            child = tl.min(tl.where(fits, index, NODES), axis=0)
            accepted += tl.where(child < NODES, 1, 0)
            node = tl.where(child < NODES, child, node)
    tl.store(out.accepted + row, accepted)
    tl.store(out.committed + row, accepted + 1)


def verify_tree(scores, drafts, parents, depths, seeds, lengths, depth):
    """See `verify_tree_reference.verify_tree`; equal, but for tokens that rounding decides. Two or three launches.

    The rows of `scores` may have any strides.
    """
    batch, num_drafts = drafts.shape
    width = num_drafts + 1
    assert scores.shape[:2] == (batch, width), "shapes must agree"
    assert depth == num_drafts if parents is None else parents.shape == (batch, width), "shapes must agree"
    assert parents is None or parents.stride(1) == depths.stride(1) == 1, "rows must have unit stride"
    if seeds is None:
        keys = argmax_keys(scores)
    else:
        assert scores.dtype == torch.float32, "scores must be float32"
        keys = draw_keys(scores, None, depths, seeds, lengths, None, None, RandomStream.TARGET)
    out, path = empty_result(batch, depth, scores.device), drafts.new_empty(batch, depth + 1)
    nodes, blocks = block_of_steps(width), triton.next_power_of_2(keys.shape[1])
    _walk_kernel[(batch,)](
        keys,
        drafts,
        parents,
        out,
        path,
        *drafts.stride(),
        0 if parents is None else parents.stride(0),
        num_drafts,
        keys.shape[1],
        depth,
        IS_DRAWN=seeds is not None,
        NODES=nodes,
        BLOCKS=blocks,
        num_warps=4 if nodes * blocks <= 4096 else 8,
        **dependent_launch(scores.device),
    )
    return *out, path
