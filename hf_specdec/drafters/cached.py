"""Drafting with a cache: one pass over what a round kept, and one step for every draft token that is then missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..config import DrafterConfig
from ..kernels.types import DraftInputs, Proposal, VerificationResult
from ..ops import draw_draft
from ..patching.cache import RaggedCache
from ..state import DecodeState
from .base import Drafter


@dataclass
class DraftMemory:
    """What such a drafter keeps through a generation.

    Attributes:
        cache: its keys and values.
        inputs: buffers of a round's first pass.
        draft_ids: `[vocab_size]` int64, where the target's tokens are in the draft vocabulary; None where the two
            agree or nobody asks.
    """

    cache: RaggedCache
    inputs: DraftInputs
    draft_ids: torch.Tensor | None


class CachedDrafter(Drafter):
    """A drafter that extends a cache of its own.

    The first pass of a round runs the tokens that the round kept and, when drafting in parallel, K - 1 mask tokens
    after them; its last columns draft 1 or K tokens. Every token that is then missing takes a step that reads the one
    before it. What a draft or a mask wrote into the cache is overwritten with what was kept in the next round.

    A family implements `extend`, `num_cached_layers` and, if it reads hidden states, `spread`; and says its `shift`.
    MTP modules, each of which runs the first pass, have another loop than `propose` over the same inputs and draws.
    To be trained it implements `unroll` and `head_weight`.
    """

    # Places between a slot and the token in it: 1 for drafters that pair a token with the hidden state before it.
    shift = 0
    # Factor on the products of `unroll`'s outputs and `head_weight`.
    logit_scale = 1.0

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        # `[V_d]` int64: what the head scores, in the vocabulary of the target; None if they agree. Set by `bind`.
        self.register_buffer("target_ids", None, persistent=False)

    @property
    def num_cached_layers(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not say how many layers its cache has.")

    def num_masks(self, num_draft_tokens: int) -> int:
        """Mask tokens in the first pass of a round of `num_draft_tokens`."""
        return num_draft_tokens - 1 if self.config.parallel_drafting else 0

    def combine(self, aux_hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        """What `extend` reads of `[B, n, width]` taps, `[B, n, H]`; None for a drafter that reads none."""
        return None

    def spread(self, hidden: torch.Tensor | None, sources: torch.Tensor) -> torch.Tensor | None:
        """Rows `sources` `[B, W]` of `hidden` `[B, n, H]`, and the mask's hidden state where a source is -1."""
        return None

    def extend(
        self,
        state: DecodeState,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        num_logits: int,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run `[B, n]` `tokens` at `[B, n]` `slots` of the cache, with RoPE `positions`.

        Args:
            state: its memory's cache is told where to write.
            tokens, slots, positions: int64.
            hidden: `[B, n, H]`, from `combine` or `spread`, or what the step before fed back; or None.
            num_logits: how many of the last columns to score; 0 for none.

        Returns:
            logits `[B, num_logits, V_d]`, or None; and what the next step reads, `[B, 1, H]`, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement extend().")

    @property
    def head_weight(self) -> torch.Tensor:
        """`[V_d, H]` of the draft head."""
        raise NotImplementedError(f"{type(self).__name__} does not implement head_weight.")

    def unroll(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor | None,
        num_steps: int,
        rows: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Draft from every slot of whole sequences at once: training-time test.

        Step s at slot p drafts the token at position p + shift + s + 1 from the tokens up to p + shift and, unless
        drafting in parallel, the s tokens after them as committed. It is to be compared with the target's
        distribution at position p + shift + s.

        Args:
            input_ids: `[B, S]` int64, without padding inside a row; a padded tail is harmless to what precedes it.
            taps: `[B, S, tap_width]` hidden states of the target; None for a drafter that reads none.
            num_steps: depth of the unrolled chains.
            rows: how many leading rows of the batch each step runs, never growing; all if None.

        Returns:
            what the head reads in each step: `num_steps` tensors `[rows[s], S, H]`, after the final norm. Slots whose
            tokens would lie beyond the row are meaningless.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement unroll().")

    def new_memory(self, state: DecodeState) -> DraftMemory:
        batch, num_drafts = state.lengths.shape[0], state.num_draft_tokens
        width = num_drafts + 1 + self.num_masks(num_drafts)
        return DraftMemory(
            RaggedCache(self.num_cached_layers, state.slots, state.draft_starts),
            DraftInputs.allocate(batch, width, state.lengths.device),
            ops.invert_draft_vocabulary(self.target_ids, self.config.vocab_size)
            if state.draft_probs and self.target_ids is not None
            else None,
        )

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor | None, positions: torch.Tensor) -> None:
        tokens = state.tokens.gather(1, (positions + self.shift).clamp(max=state.dummy_slot))
        self.extend(
            state, tokens, positions, state.position_ids(positions), self.combine(aux_hidden_states), num_logits=0
        )

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        num_masks = self.num_masks(state.num_draft_tokens)
        inputs = state.memory.inputs
        ops.prepare_inputs(
            state.tokens,
            state.lengths,
            result.committed,
            state.limits,
            state.finished,
            inputs,
            num_masks=num_masks,
            mask_token=self.config.mask_token_id or 0,
            shift=self.shift,
        )
        hidden = self.spread(self.combine(aux_hidden_states), inputs.sources)
        logits, feedback = self.extend(
            state, inputs.tokens, inputs.slots, inputs.positions, hidden, num_logits=1 + num_masks
        )
        drafts = [self.draw(state, logits, first=0)]
        for step in range(1 + num_masks, state.num_draft_tokens):
            slots = state.slot_of(state.lengths - 1 - self.shift + step)[:, None]
            last = drafts[-1].tokens
            logits, feedback = self.extend(state, last, slots, state.position_ids(slots), feedback, num_logits=1)
            drafts.append(self.draw(state, logits, first=step))
        return self.join(state, drafts)

    def join(self, state: DecodeState, drafts: Sequence[Proposal]) -> Proposal:
        """What the steps of a round drew, one after the other, as the round's proposal."""
        tokens, probs, _ = zip(*drafts, strict=True)
        return Proposal(
            torch.cat(tokens, dim=1), torch.cat(probs, dim=1) if state.draft_probs else None, state.memory.draft_ids
        )

    def draw(self, state: DecodeState, logits: torch.Tensor, first: int) -> Proposal:
        """Draft tokens number `first` and following from their logits `[B, n, V_d]`."""
        target_ids = self.target_ids
        if not state.draft_probs:
            return Proposal(ops.best_draft(logits, target_ids), None)
        temperatures = state.temperature * state.row_temperatures
        index, probs = draw_draft(logits, temperatures, state.seeds, state.lengths, first)
        return Proposal(index if target_ids is None else target_ids[index], probs)
