"""Triton search for the tree of the likeliest paths, and growth of a tree by a layer; see `draft_tree_reference`.

A path becomes known after its previous sibling, which has the next likelier last token, or after its parent if it has
the likeliest last token. So the next of N nodes is the best of at most 2 N + 1 known paths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .reduction import LEAST_ORDER, order_of, take_largest, value_of, without_nan
from .types import Tree

# Elements of a hidden state that a program of `grow_tree`, which is one warp, copies.
BLOCK = 1024


@triton.jit
def _at(is_at, values):
    """The element of 32-bit `values` where `is_at`."""
    return tl.sum(tl.where(is_at, values.to(tl.int32, bitcast=True), 0), axis=0).to(values.dtype, bitcast=True)


@triton.jit
def _word_at(is_at, words):
    """The element of int64 `words` where `is_at`."""
    half = _at(is_at, words.to(tl.uint32))
    return (_at(is_at, (words >> 32).to(tl.int32)).to(tl.int64) << 32) | half.to(tl.int64)


@triton.jit
def _load(logprobs_ptr, at, exists):
    """A log-probability; -inf for NaN, and unless `exists`."""
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
    wait_for_inputs()
    tl.store(parents_ptr, minus_one)
    tl.store(depths_ptr, zero)
    tl.store(ancestors_ptr, one)
    if NUM_WORDS > 1:
        tl.store(ancestors_ptr + 1, zero)
    # Known paths: order of scores, scores without the last rank, its entry in the tables, parents, and their ancestors.
    order = tl.where(place == 0, order_of(_load(logprobs_ptr, 0, True), True), LEAST_ORDER)
    before = tl.zeros([PLACES], tl.float32)
    entries = tl.zeros([PLACES], tl.int32)
    parents = tl.zeros([PLACES], tl.int32)
    low = tl.full([PLACES], 1, tl.int64)
    high = tl.zeros([PLACES], tl.int64)
    for node in range(1, num_nodes + 1):
        largest, at, order = take_largest(order, place)
        best = value_of(largest)  # NaN if there is none
        exists = best > float("-inf")
        is_at = place == at
        entry = _at(is_at, entries)
        own_depth = entry // size
        parent = _at(is_at, parents)
        path = _at(is_at, before)
        parent_low = _word_at(is_at, low)
        parent_high = _word_at(is_at, high) if NUM_WORDS > 1 else zero
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
        order = tl.where(is_sibling, order_of(sibling, True), tl.where(is_child, order_of(child, True), order))
        before = tl.where(is_sibling, path, tl.where(is_child, best, before))
        entries = tl.where(is_sibling, entry + 1, tl.where(is_child, first, entries))
        parents = tl.where(is_sibling, parent, tl.where(is_child, node, parents))
        low = tl.where(is_sibling, parent_low, tl.where(is_child, own_low, low))
        if NUM_WORDS > 1:
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
    )
    return out, *tree


@kernel
def _grow_tree_kernel(
    columns,
    hidden_ptr,
    feedback_ptr,
    candidates,
    texts,
    out,
    tokens_stride: Unspecialised,
    candidates_stride: Unspecialised,
    rows_stride: Unspecialised,
    hidden_strides,
    feedback_strides,
    size,
    count: Unspecialised,
    num_drafts: Unspecialised,
    window: Unspecialised,
    first: Unspecialised,
    behind: Unspecialised,
    dummy: Unspecialised,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A column and BLOCK elements of its hidden state.

    Grid: (B, n, blocks of H). Reads a row of `logprobs` and `paths`, and the column's inputs; writes its element of
    each result in `out`. The first program of the first column also writes a row of `rows` and of the paths in `out`.
    """
    tokens_ptr, parents_ptr, ancestors_ptr = columns
    logprobs_ptr, drafts_ptr, paths_ptr, rows_ptr = candidates
    lengths_ptr, limits_ptr, finished_ptr, offsets_ptr = texts
    out_paths_ptr, out_tokens_ptr, out_parents_ptr, out_ancestors_ptr = out[:4]
    places_ptr, slots_ptr, positions_ptr, out_hidden_ptr = out[4:]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    num_columns = tl.num_programs(1)
    is_new = column >= count
    is_first_block = tl.program_id(2) == 0
    chosen = tl.full([], 0, tl.int64)
    parent = tl.full([], 0, tl.int64)
    followed = tl.full([], 0, tl.int64)
    wait_for_inputs()
    token = tl.load(tokens_ptr + row * tokens_stride + column, mask=column < count, other=0)
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + row * count + column, mask=column < count, other=0)
    else:
        parent += tl.maximum(column - 1, 0)
    if logprobs_ptr is not None:
        num_candidates = num_drafts * CANDIDATES
        place = tl.arange(0, PLACES)
        is_place = place < num_candidates
        score = tl.load(logprobs_ptr + row * candidates_stride + place, mask=is_place, other=float("-inf"))
        if paths_ptr is not None:
            score += tl.load(paths_ptr + row * num_drafts + place // CANDIDATES, mask=is_place, other=0.0)
        order = order_of(without_nan(score), is_place)
        ranks = tl.full([PLACES], -1, tl.int64)
        is_writer = column + tl.program_id(2) == 0
        for rank in range(WIDTH):
            largest, at, order = take_largest(order, place)
            ranks = tl.where(place == at, rank, ranks)
            chosen = tl.where(column == count + rank, at, chosen)
            tl.store(out_paths_ptr + row * WIDTH + rank, value_of(largest), mask=is_writer)
        num_written = tl.where(is_writer, num_candidates, 0)
        tl.store(rows_ptr + row * rows_stride + place, ranks, mask=place < num_written)
        followed = chosen // CANDIDATES
        draft = tl.load(drafts_ptr + row * candidates_stride + chosen, mask=is_new, other=0)
        token = tl.where(is_new, draft, token)
        parent = tl.where(is_new, count - num_drafts + followed, parent)
    to = row * num_columns + column
    tl.store(out_tokens_ptr + to, token, mask=is_first_block)
    tl.store(out_parents_ptr + to, parent, mask=is_first_block)
    if lengths_ptr is not None:
        source = tl.where(is_new, parent, column)
        bit = tl.full([], 1, tl.int64) << (column & 63).to(tl.int64)
        for word in tl.static_range(NUM_WORDS):
            if ancestors_ptr is not None:
                bits = tl.load(ancestors_ptr + (row * count + source) * NUM_WORDS + word)
            else:  # the window, whose ancestors are in one word
                bits = (tl.full([], 2, tl.int64) << source) - 1 if word == 0 else tl.full([], 0, tl.int64)
            bits |= tl.where(column // 64 == word, bit, 0)  # already set in old columns
            tl.store(out_ancestors_ptr + to * NUM_WORDS + word, bits, mask=is_first_block)
        start = tl.load(lengths_ptr + row) + first
        position = start + tl.where(column < window, column, window + (column - window) // WIDTH)
        is_run = (tl.load(finished_ptr + row) == 0) & (position <= tl.load(limits_ptr + row) - 2)
        is_written = is_run & (position >= 0) & (column >= behind)
        tl.store(places_ptr + to, tl.where(is_run, position, dummy), mask=is_first_block)
        tl.store(slots_ptr + to, tl.where(is_written, start + column, dummy), mask=is_first_block)
        position = tl.maximum(position, 0)
        if offsets_ptr is not None:
            position += tl.load(offsets_ptr + row)
        tl.store(positions_ptr + to, tl.where(is_run, position, 0), mask=is_first_block)
    if feedback_ptr is not None:
        dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        at = parent if IS_CHAINED else followed
        num_found = size if IS_CHAINED else tl.where(is_new, size, 0)
        found_ptr = feedback_ptr + row * feedback_strides[0] + at * feedback_strides[1]
        values = tl.load(found_ptr + dim, mask=dim < num_found, other=0.0)
        if hidden_ptr is not None and not IS_CHAINED:
            kept_ptr = hidden_ptr + row * hidden_strides[0] + column * hidden_strides[1]
            kept = tl.load(kept_ptr + dim, mask=dim < size - num_found, other=0.0)
            values = tl.where(is_new, values, kept)
            num_found = size
        elif not IS_CHAINED:  # new columns only
            to = row * (num_columns - count) + column - count
        tl.store(out_hidden_ptr + to * size + dim, values, mask=dim < num_found)


def grow_tree(
    tokens,
    parents,
    ancestors,
    hidden,
    feedback,
    logprobs,
    drafts,
    paths,
    rows,
    lengths,
    limits,
    finished,
    offsets,
    window,
    width,
    first,
    behind,
    dummy,
    is_chained,
    num_words,
):
    """See `draft_tree_reference.grow_tree`; equal. One launch, which depends only on shapes and strides."""
    (batch, count), device = tokens.shape, tokens.device
    small = parents, ancestors, paths, lengths, limits, finished, offsets
    assert tokens.stride(1) == 1 and all(one is None or one.is_contiguous() for one in small)
    layer = [one for one in (logprobs, drafts, rows) if one is not None]
    assert all(one[0].is_contiguous() for one in layer), "a row of the batch must be contiguous"
    strides = [one.stride(0) for one in layer[1:]] or [0, 0]
    assert logprobs is None or logprobs.stride(0) == strides[0], "candidates must have the same strides"
    large = [one for one in (feedback, hidden) if one is not None]
    assert all(one.stride(2) == 1 and one.dtype == feedback.dtype for one in large), "hidden states must be alike"
    num_drafts, num_candidates = (1, 1) if logprobs is None else logprobs.shape[1:]
    assert logprobs is None or (logprobs.dtype == torch.float32 and width <= num_drafts * num_candidates)
    is_first = lengths is not None and ancestors is None
    assert not is_first or window == count <= 64, "what there is before the first layer is the window, of one word"

    num_columns = count + (0 if logprobs is None else width)
    shape, size = (batch, num_columns), 0 if feedback is None else feedback.shape[2]
    chosen = () if logprobs is None else (batch, width)
    out_paths = torch.empty(chosen or 0, dtype=torch.float32, device=device)
    out_ancestors, places, slots, positions = (
        torch.empty(0 if lengths is None else shape, dtype=torch.int64, device=device) for _ in range(4)
    )
    if lengths is not None:
        out_ancestors = out_ancestors.new_empty(*shape, num_words)
    out_tokens, out_parents = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    num_states = num_columns if is_chained or hidden is not None else num_columns - count
    out_hidden = tokens.new_empty(0) if feedback is None else feedback.new_empty(batch, num_states, size)
    out = out_paths, out_tokens, out_parents, out_ancestors, places, slots, positions, out_hidden
    _grow_tree_kernel[(batch, num_columns, max(triton.cdiv(size, BLOCK), 1))](
        (tokens, parents, ancestors),
        hidden,
        feedback,
        (logprobs, drafts, paths, rows),
        (lengths, limits, finished, offsets),
        out,
        tokens.stride(0),
        *strides,
        (0, 0) if hidden is None else hidden.stride()[:2],
        (0, 0) if feedback is None else feedback.stride()[:2],
        size,
        count,
        num_drafts,
        window,
        first,
        behind,
        dummy,
        CANDIDATES=num_candidates,
        WIDTH=width,
        PLACES=triton.next_power_of_2(num_drafts * num_candidates),
        NUM_WORDS=num_words,
        IS_CHAINED=is_chained,
        BLOCK=BLOCK,
        num_warps=1,
    )
    return out
