"""Base of DSpark, Domino, DFlash-2 and DSpine: a pass over a block, then a small step for each of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kernels.types import Columns, Proposal
from ..state import DecodeState
from .dflash import DFlashDrafter
from .trees import MOST_CHILDREN, GrowingTree, likeliest_tokens, tree_of_pairs

# Logits of drafts, or inputs of the head, and the memory of the next step if a family has one.
Step = tuple[torch.Tensor, torch.Tensor | None]


class Places(NamedTuple):
    """n consecutive drafts of a block, as the pass over the block gives them.

    Attributes:
        first: index of the first of them in its block.
        logits: `[..., n, C]`, the head's logits of the candidates.
        candidates: `[..., n, C]` int64, ids in the draft vocabulary; None for all V_d.
        read: tensors `[..., n, ...]` that `WalkingDrafter.read` has computed from the inputs of the head.
    """

    first: int
    logits: torch.Tensor
    candidates: torch.Tensor | None
    read: tuple[torch.Tensor, ...]

    def at(self, step: int, dim: int) -> Places:
        """Draft number `step`; the n drafts are dimension `dim`."""

        def pick(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.narrow(dim, step, 1)

        return Places(step, pick(self.logits), pick(self.candidates), tuple(map(pick, self.read)))


def project(features: torch.Tensor, layer: nn.Linear, candidates: torch.Tensor | None) -> torch.Tensor:
    """Outputs `[..., n, P, V_d]` of `layer`, which has no bias, for `features` `[..., n, P, r]`; only those of the
    `candidates` `[..., n, C]` if given, `[..., n, P, C]`."""
    return layer(features) if candidates is None else features @ layer.weight[candidates].mT


class WalkingDrafter(DFlashDrafter):
    """A DFlash drafter in which each draft depends on the drafts before it, by a small step: `follow` of a family.

    A chain takes a step for each draft token, left to right. A draft token is drawn from its own logits given the
    drafts before it, and verification reads just these distributions. A tree takes a step for many tokens before at
    once, and only for the likeliest candidates by the head.
    """

    # Whether a draft depends on more than the token before it, by a memory that one step hands to the next.
    remembers = False

    @property
    def num_candidates(self) -> int | None:
        """Number of likeliest tokens by the head from which a draft is chosen; None for all."""
        return getattr(self.config, "selector_top_k", None)

    def begin(self, anchors: torch.Tensor, normed: torch.Tensor) -> Step:
        """The columns of `normed` `[..., n, H]`, see `num_read`, that draft a token, and the memory of the first step,
        given `anchors` `[..., 1]`."""
        return normed, None

    def read(self, normed: torch.Tensor, candidates: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Values for `follow` from the inputs of the head, computed once for all drafts; see `Places.read`."""
        return (normed,)

    def follow(self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None) -> Step:
        """Logits of n drafts, each given P possible tokens before it.

        Args:
            tokens: `[..., n, P]` int64, the tokens before, in the target's vocabulary.
            places: the n drafts; n is 1 with memory.
            memory: `[..., n, P, m]` from the step of each of the tokens; None in the first step, or without memory.

        Returns:
            `[..., n, P, C]`, and the memory of the next step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement follow().")

    def head_inputs(self, normed: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError(f"{type(self).__name__} does not implement head_inputs(), which training needs.")

    def draft(self, state: DecodeState, anchors: torch.Tensor, normed: torch.Tensor) -> Sequence[Proposal]:
        if state.num_nodes:
            return [self._draft_tree(state, anchors, normed)]

        def choose(logits: torch.Tensor, step: int) -> tuple[Proposal, torch.Tensor]:
            draft = self.draw(state, logits, first=step)
            return draft, draft.tokens

        return self._walk(anchors, normed, choose)

    def chain(self, anchors: torch.Tensor, normed: torch.Tensor) -> list[torch.Tensor]:
        def choose(logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
            return logits.squeeze(-2), self.target_tokens(logits.argmax(-1))

        return self._walk(anchors[..., None], normed, choose)

    def _head_logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self.logits(normed[..., : self.config.hidden_size])

    def _walk(self, anchors: torch.Tensor, normed: torch.Tensor, choose: Callable[..., tuple]) -> list[Any]:
        """Choose drafts in order after `anchors` `[..., 1]`. `choose` maps logits `[..., 1, V_d]` and the number of a
        draft to a result and tokens; the results are returned."""
        normed, memory = self.begin(anchors, normed)
        logits, candidates = self._head_logits(normed), None
        shape = (*logits.shape[:-2], 1, logits.shape[-1])
        if self.num_candidates is not None:
            logits, candidates = logits.topk(self.num_candidates, dim=-1)
        places, last, results = Places(0, logits, candidates, self.read(normed, candidates)), anchors, []
        for step in range(normed.shape[-2]):
            place = places.at(step, normed.dim() - 2)
            scores, memory = self.follow(last[..., None], place, memory)
            scores = scores[..., 0, :]
            if candidates is not None:
                scores = scores.new_full(shape, -torch.inf).scatter(-1, place.candidates, scores)
            result, last = choose(scores, step)
            results.append(result)
        return results

    def _draft_tree(self, state: DecodeState, anchors: torch.Tensor, normed: torch.Tensor) -> Proposal:
        """The tree of a round. It takes the arguments of `draft`."""
        normed, memory = self.begin(anchors, normed)
        logits = self._head_logits(normed)
        count = min(self.num_candidates or MOST_CHILDREN, logits.shape[-1])
        values, candidates = likeliest_tokens(self.add_noise(state, logits, first=0), None, count)
        tokens, logits = self.target_tokens(candidates), logits.gather(-1, candidates).float()
        places = Places(0, logits, candidates, self.read(normed, candidates))
        # The tokens that are no candidates keep their total probability by the head.
        others = (-torch.expm1(values.logsumexp(-1, keepdim=True)).clamp(max=0.0)).log()
        temperatures = (state.temperature * state.row_temperatures)[:, None, None, None]

        def follow(before: torch.Tensor, at: Places, memory: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            """Log-probabilities `[B, n, P, C]` of the candidates, given the tokens before them, and the memory."""
            rows = slice(at.first, at.first + before.shape[1])
            scores, memory = self.follow(before, at, memory)
            scores = values[:, rows, None] + (scores - at.logits[:, :, None]).float() / temperatures
            whole = torch.logaddexp(scores.logsumexp(-1, keepdim=True), others[:, rows, None])
            return scores - whole, memory

        if not self.remembers:
            before = torch.cat([anchors.expand(-1, count)[:, None], tokens[:, :-1]], dim=1)
            return tree_of_pairs(follow(before, places, None)[0], tokens, state.num_nodes)
        tree, before = GrowingTree(count, Columns(anchors), state.num_draft_tokens, count), anchors
        for step in range(state.num_draft_tokens):
            logprobs, memory = follow(before[:, None], places.at(step, 1), memory)
            layer, chosen = tree.add_layer()
            order = torch.empty_like(chosen)
            torch.sort(logprobs[:, 0], dim=-1, descending=True, stable=True, out=(layer, order))
            torch.gather(tokens[:, step, None].expand_as(order), -1, order, out=chosen)
            if step + 1 < state.num_draft_tokens:
                columns = tree.grow(memory[:, 0])
                before, memory = columns.tokens[:, -count:], columns.hidden[:, None]
        return tree.cut(state.num_nodes)
