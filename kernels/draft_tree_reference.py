"""PyTorch reference of the tree of the likeliest paths; shapes and formula are in `draft_tree`."""

from __future__ import annotations

import torch

from .types import WORD_BITS, Tree

_NONE = float("-inf")


def best_paths(logprobs: torch.Tensor, tokens: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, ...]:
    """The `num_nodes` likeliest paths of drafts of which each is as likely after any others: best first (DDTree, arXiv
    2604.12989). A path is at most as likely as what it begins with, so they are a tree.

    Args:
        logprobs: `[B, D, W]` float32, of the W likeliest tokens of each depth, descending; NaN counts as -inf.
        tokens: `[B, D, W]` int64.
        num_nodes: N, at most `WORD_BITS * MOST_WORDS` - 1.

    Returns:
        tokens `[B, N]`, and the tensors of a `Tree` of them. Nodes come in descending order of their paths, of equal
        ones that which was found first. Where there are fewer than N paths above -inf, the rest has token 0 and parent
        -1.
    """
    (batch, depth, width), device = logprobs.shape, logprobs.device
    logprobs = torch.where(logprobs > _NONE, logprobs, _NONE)
    rows = torch.arange(batch, device=device)
    # Of paths that may be next, by the place where they were found: after node n its next sibling and its first child.
    places = 2 * num_nodes + 1
    scores, before = logprobs.new_full((batch, places), _NONE), logprobs.new_zeros(batch, places)
    depths, ranks, parents = (torch.zeros(batch, places, dtype=torch.int64, device=device) for _ in range(3))
    scores[:, 0] = logprobs[:, 0, 0]
    tree = Tree.allocate(batch, num_nodes, device)
    out = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
    for node in range(1, num_nodes + 1):
        best = scores.amax(dim=1)
        at = (scores == best[:, None]).int().argmax(dim=1)  # the first one, which `max` need not find
        exists, own = best > _NONE, (rows, at)
        scores[own] = _NONE
        d, rank, parent, path = depths[own], ranks[own], parents[own], before[own]
        out[:, node - 1] = torch.where(exists, tokens[rows, d, rank], 0)
        tree.parents[:, node] = torch.where(exists, parent, -1)
        tree.depths[:, node] = torch.where(exists, d + 1, 0)
        word, bit = divmod(node, WORD_BITS)
        tree.ancestors[:, node] = torch.where(exists[:, None], tree.ancestors[rows, parent], 0)
        tree.ancestors[:, node, word] |= 1 << bit if bit < WORD_BITS - 1 else -(1 << bit)
        sibling = torch.where(exists & (rank + 1 < width), logprobs[rows, d, (rank + 1).clamp(max=width - 1)], _NONE)
        child = torch.where(exists & (d + 1 < depth), logprobs[rows, (d + 1).clamp(max=depth - 1), 0], _NONE)
        for place, values in (
            (2 * node - 1, (path + sibling, path, d, rank + 1, parent)),
            (2 * node, (best + child, best, d + 1, torch.zeros_like(rank), torch.full_like(parent, node))),
        ):
            for one, value in zip((scores, before, depths, ranks, parents), values, strict=True):
                one[:, place] = value
        for one in (depths, ranks):  # of places that are never taken
            one[:, 2 * node - 1 : 2 * node + 1].clamp_(max=max(depth, width) - 1)
    return out, *tree
