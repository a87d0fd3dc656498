"""Trees of drafts: a drafter gives tables of log-probabilities, and `ops.best_paths` takes the likeliest paths.

Any tree is lossless, because drafts are verified by the target's own tokens.
"""

from __future__ import annotations

import torch

from .. import ops
from ..kernels.types import WORD_BITS, Columns, Proposal, Tree
from ..state import DecodeState

# The most children of a node, and the most nodes of a depth that a pass expands, as in EAGLE-2.
MOST_CHILDREN, WIDEST_FRONT = 16, 8


def likeliest_tree(logprobs: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None, num_nodes: int) -> Proposal:
    """The tree of the `num_nodes` likeliest paths. It takes the arguments of `draft_tree_reference.best_paths`."""
    drafts, *tree = ops.best_paths(logprobs, tokens, rows, num_nodes)
    return Proposal(drafts, None, tree=Tree(*tree))


def tree_of_independent(logits: torch.Tensor, target_ids: torch.Tensor | None, num_nodes: int) -> Proposal:
    """The tree of K drafts that do not depend on each other, from their logits `[B, K, V_d]`; `target_ids` is that of
    `ops.best_draft`."""
    logprobs, tokens = likeliest_tokens(logits, target_ids, num_nodes)
    return likeliest_tree(logprobs[:, :, None], tokens[:, :, None], None, num_nodes)


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and tokens `[B, n, W]` of the likeliest children of n nodes, for a tree of `num_nodes`."""
    return ops.likeliest_tokens(logits, target_ids, min(num_nodes, MOST_CHILDREN, logits.shape[-1]))


def tree_of_pairs(logprobs: torch.Tensor, tokens: torch.Tensor, num_nodes: int) -> Proposal:
    """The tree of K drafts, each of which depends on the draft before it. `tokens` `[B, K, C]` int64 are C candidates
    for each draft. `logprobs` `[B, K, C, C]` float32 are theirs, in the last dimension, after each candidate of the
    draft before, in the third; of the first draft row 0 is read."""
    logprobs, order = logprobs.sort(dim=-1, descending=True, stable=True)
    return likeliest_tree(logprobs, tokens[:, :, None].expand_as(order).gather(-1, order), order[:, :-1], num_nodes)


class GrowingTree:
    """A tree in which each draft depends on all drafts before it. It grows layer by layer as in EAGLE-2 (arXiv
    2406.16858): the `width` likeliest paths of a layer are expanded.

    With `width` = the number of nodes, it is the tree of the likeliest paths.

    Args:
        width: see above.
        window: the columns before the tree, the last of which is its root: tokens `[B, w]` int64 and, if passes run
            them again, hidden states `[B, w, H]`.
        depth: number of layers.
    """

    def __init__(self, width: int, window: Columns, depth: int):
        self._width, self._window = width, window.tokens.shape[1]
        self._num_words = (self._window + width * (depth - 1) - 1) // WORD_BITS + 1
        self._keeps_hidden = window.hidden is not None
        self._columns, self._paths = window, None
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows: list[torch.Tensor] = []

    def add(self, logprobs: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add a layer: C candidates, `tokens` `[B, P, C]` int64 with descending `logprobs` float32, for each of the P
        expanded drafts of the layer before, or for the root."""
        self._layers.append((logprobs, tokens))

    def grow(
        self,
        feedback: torch.Tensor | None,
        state: DecodeState | None = None,
        offsets: torch.Tensor | None = None,
        first: int = 0,
        behind: int = 0,
        is_chained: bool = False,
        has_front: bool = True,
    ) -> Columns:
        """The columns of the next pass: all columns so far, and the drafts of the last layer that are expanded.

        Without a state, columns have only tokens, parents and hidden states.

        Args:
            feedback, offsets, first, behind, is_chained: see `draft_tree_reference.grow_tree`.
            has_front: whether any draft is expanded.
        """
        before = self._columns
        layer = (*self._layers[-1], self._paths) if has_front else (None, None, None)
        rows = (None, None, None) if state is None else (state.lengths, state.limits, state.finished)
        sizes = self._window, self._width, first, behind, 0 if state is None else state.dummy_slot
        if not (has_front or is_chained):
            feedback = None  # no column reads it
        hidden = before.hidden if self._keeps_hidden else None
        paths, rows, *found = ops.grow_tree(
            *before[:3], hidden, feedback, *layer, *rows, offsets, *sizes, is_chained, self._num_words
        )
        if has_front:
            self._paths = paths
            self._rows.append(rows)
        grown = Columns(*found)
        self._columns = grown if feedback is not None else grown._replace(hidden=before.hidden)
        return self._columns

    def cut(self, num_nodes: int) -> Proposal:
        """The `num_nodes` likeliest paths of the grown tree, as a proposal."""
        shape = self._layers[-1][0].shape
        kinds = [*zip(*self._layers, strict=True), self._rows]
        tables = [torch.stack([one.expand(shape) for one in kind], dim=1) if kind else None for kind in kinds]
        return likeliest_tree(*tables, num_nodes)
