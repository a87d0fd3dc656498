"""Triton search for the tree of the likeliest paths, see `draft_tree_reference`.

A path is found by that with the draft before its last one in the table's row or, if there is none, by its parent: so
the next one is the best of at most 2 N + 1 that are known."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, dependent_launch, kernel, wait_for_inputs
from .types import Tree


@triton.jit
def _at(is_at, values):
    """The element of `values` where `is_at`."""
    return tl.sum(tl.where(is_at, values, 0), axis=0)


@triton.jit
def _load(logprobs_ptr, at, exists):
    """A log-probability, -inf for NaN and where it does not exist."""
    value = tl.load(logprobs_ptr + at, mask=exists, other=float("-inf"))
    return tl.where(value > float("-inf"), value, float("-inf"))


@kernel
def _best_paths_kernel(
    logprobs_ptr,
    tokens_ptr,
    rows_ptr,
    out_ptr,
    tree,
    num_nodes: Unspecialised,
    depth: Unspecialised,
    num_rows: Unspecialised,
    rows_stride: Unspecialised,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tree of one row.

    Grid: (B,). Reads a row of `logprobs`, `tokens` and `rows`; writes one of `out` `[B, N]` and of
    each tensor of `tree`, a `Tree`.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    size = num_rows * WIDTH  # of a depth
    logprobs_ptr += row * depth * size
    tokens_ptr += row * depth * size
    if rows_ptr is not None:
        rows_ptr += row * rows_stride
    out_ptr += row * num_nodes - 1
    parents_ptr = tree.parents + row * (num_nodes + 1)
    depths_ptr = tree.depths + row * (num_nodes + 1)
    ancestors_ptr = tree.ancestors + row * (num_nodes + 1) * NUM_WORDS
    minus_one = tl.full([], -1, tl.int64)
    zero = tl.full([], 0, tl.int64)
    one = tl.full([], 1, tl.int64)
    wait_for_inputs(PDL)
    tl.store(parents_ptr, minus_one)
    tl.store(depths_ptr, zero)
    tl.store(ancestors_ptr, one)
    if NUM_WORDS > 1:
        tl.store(ancestors_ptr + 1, zero)
    # Of known paths: scores, those without the last rank, where that is in the tables, parents and their ancestors.
    scores = tl.where(place == 0, _load(logprobs_ptr, 0, True), float("-inf"))
    before = tl.zeros([PLACES], tl.float32)
    entries = tl.zeros([PLACES], tl.int32)
    parents = tl.zeros([PLACES], tl.int32)
    low = tl.full([PLACES], 1, tl.int64)
    high = tl.zeros([PLACES], tl.int64)
    for node in range(1, num_nodes + 1):
        best = tl.max(scores, axis=0)
        exists = best > float("-inf")
        is_at = place == tl.min(tl.where(scores == best, place, PLACES), axis=0)
        entry = _at(is_at, entries)
        own_depth = entry // size
        parent = _at(is_at, parents)
        path = _at(is_at, before)
        parent_low = _at(is_at, low)
        parent_high = _at(is_at, high)
        own_low = tl.where(exists, parent_low, 0) | tl.where(node < 64, one << node, 0)
        own_high = tl.where(exists, parent_high, 0) | tl.where(node < 64, 0, one << (node - 64))
        token = tl.load(tokens_ptr + entry, mask=exists, other=0)
        tl.store(out_ptr + node, token)
        tl.store(parents_ptr + node, tl.where(exists, parent, -1).to(tl.int64))
        tl.store(depths_ptr + node, tl.where(exists, own_depth + 1, 0).to(tl.int64))
        tl.store(ancestors_ptr + node * NUM_WORDS, own_low)
        if NUM_WORDS > 1:
            tl.store(ancestors_ptr + node * NUM_WORDS + 1, own_high)
        first = (own_depth + 1) * size  # of its children
        has_children = exists & (own_depth + 1 < depth)
        if rows_ptr is not None:
            child_row = tl.load(rows_ptr + entry, mask=has_children, other=-1).to(tl.int32)
            first += child_row * WIDTH
            has_children = has_children & (child_row >= 0)
        sibling = path + _load(logprobs_ptr, entry + 1, exists & ((entry + 1) % WIDTH != 0))
        child = best + _load(logprobs_ptr, first, has_children)
        is_sibling = place == 2 * node - 1
        is_child = place == 2 * node
        scores = tl.where(is_at, float("-inf"), scores)
        scores = tl.where(is_sibling, sibling, tl.where(is_child, child, scores))
        before = tl.where(is_sibling, path, tl.where(is_child, best, before))
        entries = tl.where(is_sibling, entry + 1, tl.where(is_child, first, entries))
        parents = tl.where(is_sibling, parent, tl.where(is_child, node, parents))
        low = tl.where(is_sibling, parent_low, tl.where(is_child, own_low, low))
        high = tl.where(is_sibling, parent_high, tl.where(is_child, own_high, high))


def best_paths(logprobs, tokens, rows, num_nodes):
    """See `draft_tree_reference.best_paths`; equal. One launch."""
    batch, depth, num_rows, width = logprobs.shape
    assert tokens.shape == logprobs.shape, "tables must be of one shape"
    if rows is not None:
        assert rows.shape == (batch, depth - 1, num_rows, width), "there must be a row for each draft that has children"
        rows = None if depth == 1 else rows if rows[0].is_contiguous() else rows.contiguous()
    assert logprobs.dtype == torch.float32, "scores are added up in float32"
    parents, depths = (torch.empty(batch, num_nodes + 1, dtype=torch.int64, device=tokens.device) for _ in range(2))
    words = num_nodes // 64 + 1
    tree = Tree(parents, depths, parents.new_empty(batch, num_nodes + 1, words))
    out = parents.new_empty(batch, num_nodes)
    _best_paths_kernel[(batch,)](
        logprobs.contiguous(),
        tokens.contiguous(),
        rows,
        out,
        tree,
        num_nodes,
        depth,
        num_rows,
        0 if rows is None else rows.stride(0),
        WIDTH=width,
        PLACES=triton.next_power_of_2(2 * num_nodes + 1),
        NUM_WORDS=words,
        num_warps=1,
        **dependent_launch(tokens.device),
    )
    return out, *tree
