"""Trees of drafts, made of what a drafter says may follow: tables, of which `ops.best_paths` takes the likeliest paths.

Whatever tree there is, texts have their law: drafts are verified by the target's own tokens.
"""

from __future__ import annotations

import torch

from .. import ops
from ..kernels.types import WORD_BITS, Columns, Proposal, Tree
from ..state import DecodeState

# Drafts that follow the same one, at most; and those of a depth that a pass of layers goes on from, as EAGLE-2's.
MOST_CHILDREN, WIDEST_FRONT = 16, 8


def likeliest_tree(logprobs: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor | None, num_nodes: int) -> Proposal:
    """The tree of the `num_nodes` likeliest paths; arguments as of `draft_tree_reference.best_paths`."""
    drafts, *tree = ops.best_paths(logprobs, tokens, rows, num_nodes)
    return Proposal(drafts, None, tree=Tree(*tree))


def tree_of_independent(logits: torch.Tensor, target_ids: torch.Tensor | None, num_nodes: int) -> Proposal:
    """The tree of drafts that do not depend on each other, by the logits `[B, K, V_d]` of each of K; `target_ids` as of
    `ops.best_draft`."""
    logprobs, tokens = likeliest_tokens(logits, target_ids, num_nodes)
    return likeliest_tree(logprobs[:, :, None], tokens[:, :, None], None, num_nodes)


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and tokens `[B, n, W]` of the drafts that may follow the same one in a tree of `num_nodes`."""
    return ops.likeliest_tokens(logits, target_ids, min(num_nodes, MOST_CHILDREN, logits.shape[-1]))


def tree_of_pairs(logprobs: torch.Tensor, tokens: torch.Tensor, num_nodes: int) -> Proposal:
    """The tree of K drafts of which each depends on the one before it, by `logprobs` `[B, K, C, C]` float32: of C
    candidates of a draft, `tokens` `[B, K, C]` int64, in the last dimension, after each candidate of the draft before;
    of the first draft after the text."""
    logprobs, order = logprobs.sort(dim=-1, descending=True, stable=True)
    return likeliest_tree(logprobs, tokens[:, :, None].expand_as(order).gather(-1, order), order[:, :-1], num_nodes)


class GrowingTree:
    """A tree of drafts of which each depends on all before it, grown by layers (EAGLE-2, arXiv 2406.16858): of a layer
    the `width` drafts of the likeliest paths are gone on from.

    With a width of the tree's nodes it is the tree of the likeliest paths.

    Args:
        width: see above.
        window: what is run before the drafts, which follow the last of it: tokens `[B, w]` int64 and, if passes run
            these again, hidden states `[B, w, H]`.
        depth: how many layers there will be.
    """

    def __init__(self, width: int, window: Columns, depth: int):
        self._width, self._window = width, window.tokens.shape[1]
        self._num_words = (self._window + width * (depth - 1) - 1) // WORD_BITS + 1
        self._keeps_hidden = window.hidden is not None
        self._columns, self._paths = window, None
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows: list[torch.Tensor] = []

    def add(self, logprobs: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add a layer: C candidates, `tokens` `[B, P, C]` int64 with descending `logprobs` float32, that may follow
        each of the P drafts that the last one is gone on from, or the window."""
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
        """What the next pass runs: all columns so far, and the drafts of the last layer that are gone on from.

        Without a state columns have tokens, parents and hidden states only.

        Args:
            feedback, offsets, first, behind, is_chained: see `draft_tree_reference.grow_tree`.
            has_front: whether any draft is gone on from.
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
        """The tree of the `num_nodes` likeliest paths of what was grown."""
        shape = self._layers[-1][0].shape
        kinds = [*zip(*self._layers, strict=True), self._rows]
        tables = [torch.stack([one.expand(shape) for one in kind], dim=1) if kind else None for kind in kinds]
        return likeliest_tree(*tables, num_nodes)
