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
    logprobs, tokens = likeliest_tokens(logits, target_ids, min(num_nodes, MOST_CHILDREN))
    return likeliest_tree(logprobs[:, :, None], tokens[:, :, None], None, num_nodes)


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and tokens `[B, n, W]` of the `most` likeliest tokens, see `ops.likeliest_tokens`."""
    logprobs, tokens = _tables(*logits.shape[:2], min(most, logits.shape[2]), device=logits.device)
    ops.likeliest_tokens(logits, target_ids, logprobs, tokens)
    return logprobs, tokens


def _tables(*shape: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised log-probabilities and tokens."""
    return tuple(torch.empty(shape, dtype=one, device=device) for one in (torch.float32, torch.int64))


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
        window: the columns before the tree, the last of which is its root: tokens `[B, w]` int64 and, if passes run
            them again, hidden states `[B, w, H]`.
        num_candidates: C, number of candidates after each draft.
    """

    def __init__(self, width: int, window: Columns, depth: int, num_candidates: int):
        self._width, (batch, self._window) = width, window.tokens.shape
        self._num_words = (self._window + width * (depth - 1) - 1) // WORD_BITS + 1
        self._keeps_hidden = window.hidden is not None
        self._columns, self._paths, self._num_layers = window, None, 0
        self._tables = _tables(batch, depth, width, num_candidates, device=window.tokens.device)
        self._rows = window.tokens.new_empty(batch, depth - 1, width, num_candidates)

    def add_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer, which the caller writes: C candidates for each of the P expanded drafts of the layer before, or
        for the root: descending log-probabilities float32 and tokens int64, `[B, P, C]` each."""
        self._num_layers += 1
        return self._layer_of(*self._tables)

    def _layer_of(self, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The part of the last layer in `tables` `[B, depth, P, C]`."""
        num_drafts = 1 if self._num_layers == 1 else self._width
        return tuple(one[:, self._num_layers - 1, :num_drafts] for one in tables)

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
        layer = (None,) * 4
        if has_front:
            logprobs, tokens, rows = self._layer_of(*self._tables, self._rows)
            layer = logprobs, tokens, self._paths, rows
        text = (None, None, None) if state is None else (state.lengths, state.limits, state.finished)
        sizes = self._window, self._width, first, behind, 0 if state is None else state.dummy_slot
        if not (has_front or is_chained):
            feedback = None  # no column reads it
        hidden = before.hidden if self._keeps_hidden else None
        paths, *found = ops.grow_tree(
            *before[:3], hidden, feedback, *layer, *text, offsets, *sizes, is_chained, self._num_words
        )
        if has_front:
            self._paths = paths
        grown = Columns(*found)
        self._columns = grown if feedback is not None else grown._replace(hidden=before.hidden)
        return self._columns

    def cut(self, num_nodes: int) -> Proposal:
        """The `num_nodes` likeliest paths of the grown tree, as a proposal."""
        return likeliest_tree(*self._tables, self._rows, num_nodes)
