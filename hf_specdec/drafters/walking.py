"""Drafters of blocks whose draft tokens depend on those before them: one pass over a block, then a walk along it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..kernels.types import Proposal
from ..state import DecodeState
from .dflash import DFlashDrafter


class WalkingDrafter(DFlashDrafter):
    """A DFlash drafter with a small step for each draft token, left to right, which a family implements in `walk`.

    A draft token is drawn from its own logits given the ones before it, so that the distributions that verification
    reads are those that the tokens were drawn from.
    """

    def walk(self, anchors: torch.Tensor, normed: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Choose the draft tokens of blocks, in order.

        Args:
            anchors: `[..., 1]` int64, the tokens before the first ones.
            normed: `[..., n, H]`, inputs of the head, see `num_read`.
            choose: returns the tokens `[..., 1]` of the target for logits `[..., 1, V_d]`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement walk().")

    def head_inputs(self, normed: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError(f"{type(self).__name__} does not implement head_inputs(), which training needs.")

    def draft(self, state: DecodeState, anchors: torch.Tensor, normed: torch.Tensor) -> Sequence[Proposal]:
        drafts: list[Proposal] = []

        def draw(logits: torch.Tensor) -> torch.Tensor:
            drafts.append(self.draw(state, logits, first=len(drafts)))
            return drafts[-1].tokens

        self.walk(anchors, normed, draw)
        return drafts

    def chain(self, anchors: torch.Tensor, normed: torch.Tensor) -> list[torch.Tensor]:
        steps: list[torch.Tensor] = []

        def most_likely(logits: torch.Tensor) -> torch.Tensor:
            steps.append(logits.squeeze(-2))
            best = logits.argmax(-1)
            return best if self.target_ids is None else self.target_ids[best]

        self.walk(anchors[..., None], normed, most_likely)
        return steps
