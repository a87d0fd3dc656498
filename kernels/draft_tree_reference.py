"""PyTorch references of the tree of the likeliest paths, and of the growth of a tree by a layer."""

from __future__ import annotations

import torch

from .types import WORD_BITS, Tree

_NONE = float("-inf")


def best_paths(
    logprobs: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `num_nodes` likeliest paths of drafts, best first (DDTree, arXiv 2604.12989). They are a tree, because a path
    is at most as likely as its beginning.

    Each depth has a table of P rows of possible tokens. Drafts that have the same tokens after them share a row: there
    is one row if drafts do not depend on each other, one for each token if a draft depends on the draft before it, and
    one for each expanded path if it depends on all drafts before it (EAGLE-2, arXiv 2406.16858).

    Args:
        logprobs: `[B, D, P, W]` float32, of the W likeliest tokens, descending; NaN counts as -inf. At the first depth
            only row 0 is read.
        tokens: `[B, D, P, W]` int64.
        rows: `[B, D - 1, P, W]` int64, the row of each token's children at the next depth, -1 for no children; None
            for all 0.
        num_nodes: N, at most `WORD_BITS * MOST_WORDS` - 1.

    Returns:
        tokens `[B, N]`, and the tensors of their `Tree`. Nodes are in descending order of their paths; of equal paths
        the one found first is first. If fewer than N paths are above -inf, other nodes have token 0 and parent -1.
    """
    (batch, depth, num_rows, width), device = logprobs.shape, logprobs.device
    size = num_rows * width
    logprobs = torch.where(logprobs > _NONE, logprobs, _NONE).flatten(1)
    tokens, rows = tokens.flatten(1), None if rows is None or depth == 1 else rows.flatten(1)
    of_batch = torch.arange(batch, device=device)

    def load(at: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        return torch.where(exists, logprobs[of_batch, at.clamp(0, depth * size - 1)], _NONE)

    # Known paths, by the place where they were found: each node adds its next sibling and its first child.
    places = 2 * num_nodes + 1
    scores, before = logprobs.new_full((batch, places), _NONE), logprobs.new_zeros(batch, places)
    entries, parents = (torch.zeros(batch, places, dtype=torch.int64, device=device) for _ in range(2))
    scores[:, 0] = logprobs[:, 0]
    tree = Tree.allocate(batch, num_nodes, device)
    out = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
    for node in range(1, num_nodes + 1):
        best = scores.amax(dim=1)
        at = (scores == best[:, None]).int().argmax(dim=1)  # the first one; `max` may find another
        exists, own = best > _NONE, (of_batch, at)
        scores[own] = _NONE
        entry, parent, path = torch.where(exists, entries[own], 0), parents[own], before[own]
        own_depth = entry // size
        out[:, node - 1] = torch.where(exists, tokens[of_batch, entry], 0)
        tree.parents[:, node] = torch.where(exists, parent, -1)
        tree.depths[:, node] = torch.where(exists, own_depth + 1, 0)
        word, bit = divmod(node, WORD_BITS)
        tree.ancestors[:, node] = torch.where(exists[:, None], tree.ancestors[of_batch, parent], 0)
        tree.ancestors[:, node, word] |= 1 << bit if bit < WORD_BITS - 1 else -(1 << bit)
        first, has_children = (own_depth + 1) * size, exists & (own_depth + 1 < depth)  # of its children
        if rows is not None:
            child_row = rows[of_batch, entry.clamp(max=rows.shape[1] - 1)]
            first, has_children = first + child_row * width, has_children & (child_row >= 0)
        sibling = path + load(entry + 1, exists & ((entry + 1) % width != 0))
        child = best + load(first, has_children)
        for place, values in (
            (2 * node - 1, (sibling, path, entry + 1, parent)),
            (2 * node, (child, best, first, torch.full_like(parent, node))),
        ):
            for one, value in zip((scores, before, entries, parents), values, strict=True):
                one[:, place] = value
    return out, *tree


def grow_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    hidden: torch.Tensor | None,
    feedback: torch.Tensor | None,
    logprobs: torch.Tensor | None,
    drafts: torch.Tensor | None,
    paths: torch.Tensor | None,
    rows: torch.Tensor | None,
    lengths: torch.Tensor | None,
    limits: torch.Tensor | None,
    finished: torch.Tensor | None,
    offsets: torch.Tensor | None,
    window: int,
    width: int,
    first: int,
    behind: int,
    dummy: int,
    is_chained: bool,
    num_words: int,
) -> tuple[(torch.Tensor,) * 8]:
    """Choose the drafts of a layer to expand (EAGLE-2, arXiv 2406.16858), and lay out the next pass over all columns:
    the `window`, where each column follows the one before and the last is the root, and `width` drafts of each layer.

    Args:
        tokens: `[B, m]` int64, tokens of the columns so far.
        parents, ancestors: `[B, m]` and `[B, m, words]` int64, see `Columns`; None if there is only the window.
        hidden: `[B, m, H]`, hidden states of the columns so far; None if they have none.
        feedback: hidden states from the last pass: `[B, P, H]` of the P drafts that it expanded, its last columns; with
            `is_chained` `[B, m, H]` of all columns. None if passes read none.
        logprobs: `[B, P, C]` float32, of C candidates after each of them; NaN counts as -inf. None for no new drafts.
        drafts: `[B, P, C]` int64, the candidates.
        paths: `[B, P]` float32, log-probabilities of the paths to the P drafts; None for the root.
        rows: `[B, P, C]` int64; written with the index of each candidate among the new drafts, -1 for others.
        lengths, limits, finished: see `DecodeState`; None to choose drafts only.
        offsets: `[B]` int64, offsets of position ids; None for 0.
        window, width: see above; width is at most P C.
        first: position of the first column minus `lengths`.
        behind: number of leading columns that write nothing.
        dummy: the dummy slot.
        is_chained: whether every column reads its parent's feedback; if not, a draft reads it once and keeps it.
        num_words: words of ancestors.

    Returns:
        the paths `[B, width]` float32 of the chosen drafts, descending, of equal ones the first first; and the tensors
        of `Columns` `[B, m + width]`, with hidden states only of the new drafts if there were none before. Results that
        are not computed are empty tensors.
    """
    (batch, count), device, nothing = tokens.shape, tokens.device, tokens.new_empty(0)
    if parents is None:  # the window, where each column follows the one before
        parents = (torch.arange(count, device=device) - 1).clamp(min=0).expand(batch, -1)
    found, followed = tokens.new_empty(0, dtype=torch.float32), parents[:, :0]
    if logprobs is not None:
        scores = logprobs if paths is None else logprobs + paths[..., None]
        scores = torch.where(scores > _NONE, scores, _NONE).flatten(1)
        found, at = (one[:, :width].contiguous() for one in scores.sort(dim=1, descending=True, stable=True))
        followed = at // drafts.shape[2]
        rows.fill_(-1).flatten(1).scatter_(1, at, torch.arange(width, device=device).expand_as(at))
        tokens = torch.cat([tokens, drafts.flatten(1).gather(1, at)], dim=1)
        parents = torch.cat([parents, count - drafts.shape[1] + followed], dim=1)
    if feedback is None:
        hidden = nothing
    elif is_chained:
        hidden = _take(feedback, parents)
    else:
        new = _take(feedback, followed)
        hidden = new if hidden is None else torch.cat([hidden, new], dim=1)
    if lengths is None:
        return found, tokens, parents, nothing, nothing, nothing, nothing, hidden

    number = torch.arange(tokens.shape[1], device=device)
    if ancestors is None:
        ancestors = torch.zeros(batch, count, num_words, dtype=torch.int64, device=device)
        ancestors[..., 0] = (2 << number[:count]) - 1
    new = number[count:]
    own = torch.zeros(len(new), num_words, dtype=torch.int64, device=device)
    own.scatter_(1, (new // WORD_BITS)[:, None], (torch.ones_like(new) << new % WORD_BITS)[:, None])
    ancestors = torch.cat([ancestors, _take(ancestors, parents[:, count:]) | own], dim=1)
    steps = torch.where(number < window, number, window + (number - window) // width)
    start = (lengths + first)[:, None]
    places = torch.where(finished[:, None] | (start + steps > limits[:, None] - 2), dummy, start + steps)
    is_written = (places >= 0) & (places < dummy) & (number >= behind)
    slots = torch.where(is_written, start + number, dummy)
    positions = places.clamp(min=0) + (0 if offsets is None else offsets[:, None])
    positions = torch.where(places < dummy, positions, 0)
    return found, tokens, parents, ancestors, places, slots, positions, hidden


def _take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`[B, n, width]`: `values` `[B, P, width]` at `index` `[B, n]`."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
