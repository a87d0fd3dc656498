"""Trees of drafts, made of what a drafter says may follow: tables, of which `ops.best_paths` takes the likeliest paths.

Whatever tree there is, texts have their law: drafts are verified by the target's own tokens.
"""

from __future__ import annotations

import torch

from .. import ops
from ..kernels.types import WORD_BITS, Proposal, Tree

# Drafts that follow the same one, at most; and those of a depth that a pass of layers goes on from, as EAGLE-2's.
MOST_CHILDREN, WIDEST_FRONT = 16, 8


def likeliest_tree(logprobs: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None, num_nodes: int) -> Proposal:
    """The tree of the `num_nodes` likeliest paths; arguments as of `draft_tree_reference.best_paths`."""
    drafts, *tree = ops.best_paths(logprobs, tokens, rows, num_nodes)
    return Proposal(drafts, None, tree=Tree(*tree))


def tree_of_independent(logits: torch.Tensor, target_ids: torch.Tensor | None, num_nodes: int) -> Proposal:
    """The tree of drafts that do not depend on each other.

    Args:
        logits: `[B, K, V_d]`, of each of K drafts.
        target_ids: `[V_d]` int64, the target's token of each token of the draft vocabulary; None if they are the same.
    """
    logprobs, tokens = likeliest_tokens(logits, target_ids, num_nodes)
    return likeliest_tree(logprobs[:, :, None], tokens[:, :, None], None, num_nodes)


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and tokens `[B, n, W]` of the drafts that may follow the same one in a tree of `num_nodes`."""
    return ops.likeliest_tokens(logits, target_ids, min(num_nodes, MOST_CHILDREN, logits.shape[-1]))


def tree_of_pairs(logprobs: torch.Tensor, tokens: torch.Tensor, num_nodes: int) -> Proposal:
    """The tree of drafts of which each depends on the one before it.

    Args:
        logprobs: `[B, K, C, C]` float32: of C candidates of a draft, in the last dimension, after each candidate of the
            draft before; of the first draft after the text.
        tokens: `[B, K, C]` int64, the candidates.
    """
    logprobs, order = logprobs.sort(dim=-1, descending=True, stable=True)
    return likeliest_tree(logprobs, tokens[:, :, None].expand_as(order).gather(-1, order), order, num_nodes)


class GrowingTree:
    """A tree of drafts of which each depends on all before it, grown by layers (EAGLE-2, arXiv 2406.16858): of a layer
    the `width` drafts of the likeliest paths are gone on from.

    With a width of the tree's nodes it is the tree of the likeliest paths.
    """

    def __init__(self, width: int):
        self._width = width
        self._paths: torch.Tensor | None = None
        self._layers: list[list[torch.Tensor]] = []

    def add(self, logprobs: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add a layer: what may follow the drafts that the last one is gone on from, or the text.

        Args:
            logprobs: `[B, P, C]` float32, descending, of C candidates after each of these P drafts.
            tokens: `[B, P, C]` int64, the candidates.
        """
        self._layers.append([logprobs, tokens, torch.full_like(tokens, -1)])

    def front(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the drafts of the last layer that are gone on from.

        Returns:
            tokens `[B, width]` int64; and which drafts they follow, of those that the layer before was gone on from.
        """
        logprobs, tokens, rows = self._layers[-1]
        paths = logprobs if self._paths is None else logprobs + self._paths[..., None]
        self._paths, at = paths.flatten(1).topk(self._width)
        rows.view(len(rows), -1).scatter_(1, at, torch.arange(self._width, device=at.device).expand_as(at))
        return tokens.flatten(1).gather(1, at), at // tokens.shape[-1]

    def cut(self, num_nodes: int) -> Proposal:
        """The tree of the `num_nodes` likeliest paths of what was grown."""
        shape = self._layers[-1][0].shape
        kinds = zip(*self._layers, strict=True)
        return likeliest_tree(*[torch.stack([one.expand(shape) for one in kind], dim=1) for kind in kinds], num_nodes)


def descendants(ancestors: torch.Tensor, parents: torch.Tensor, first: int) -> torch.Tensor:
    """Words of ancestors `[B, n, W]`, see `Tree`, of nodes `first` to `first + n - 1`.

    Args:
        ancestors: `[B, P, W]` int64, of nodes.
        parents: `[B, n]` int64, which of these they follow.
    """
    number = torch.arange(first, first + parents.shape[1], device=parents.device)
    bit, word = torch.ones_like(number) << number % WORD_BITS, number // WORD_BITS
    own = torch.stack([torch.where(word == one, bit, 0) for one in range(ancestors.shape[2])], dim=-1)
    return take(ancestors, parents) | own


def take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of `values` `[B, P, width]` those at `index` `[B, n]`."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
