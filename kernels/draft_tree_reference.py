"""PyTorch reference of the tree of the likeliest paths."""

from __future__ import annotations

import torch

from .types import WORD_BITS, Tree

_NONE = float("-inf")


def best_paths(
    logprobs: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `num_nodes` likeliest paths of drafts: best first (DDTree, arXiv 2604.12989). A path is at most as likely as
    what it begins with, so they are a tree.

    Tables say what may follow: those of a depth have P rows, of which each is for drafts before that have the same
    drafts after them. There is one row where drafts do not depend on each other, one for each token where they depend
    on the one before, and one for each path that was gone on from where they depend on all (EAGLE-2, arXiv 2406.16858).

    Args:
        logprobs: `[B, D, P, W]` float32, of the W likeliest tokens, descending; NaN counts as -inf. Of the first depth
            row 0 is read.
        tokens: `[B, D, P, W]` int64.
        rows: `[B, D - 1, P, W]` int64, the row of the next depth for what follows a token, -1 if nothing does; None for
            0.
        num_nodes: N, at most `WORD_BITS * MOST_WORDS` - 1.

    Returns:
        tokens `[B, N]`, and the tensors of a `Tree` of them. Nodes come in descending order of their paths, of equal
        ones that which was found first. Where there are fewer than N paths above -inf, the rest has token 0 and parent
        -1.
    """
    (batch, depth, num_rows, width), device = logprobs.shape, logprobs.device
    size = num_rows * width
    logprobs = torch.where(logprobs > _NONE, logprobs, _NONE).flatten(1)
    tokens, rows = tokens.flatten(1), None if rows is None or depth == 1 else rows.flatten(1)
    of_batch = torch.arange(batch, device=device)

    def load(at: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        return torch.where(exists, logprobs[of_batch, at.clamp(0, depth * size - 1)], _NONE)

    # Of paths that may be next, by the place where they were found: after node n its next sibling and its first child.
    places = 2 * num_nodes + 1
    scores, before = logprobs.new_full((batch, places), _NONE), logprobs.new_zeros(batch, places)
    entries, parents = (torch.zeros(batch, places, dtype=torch.int64, device=device) for _ in range(2))
    scores[:, 0] = logprobs[:, 0]
    tree = Tree.allocate(batch, num_nodes, device)
    out = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
    for node in range(1, num_nodes + 1):
        best = scores.amax(dim=1)
        at = (scores == best[:, None]).int().argmax(dim=1)  # the first one, which `max` need not find
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
