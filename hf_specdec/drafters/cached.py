"""Drafters with a KV cache: a first pass over the tokens that a round committed, then a step for each other draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import ops
from ..cache.key_layers import attention_layers
from ..cache.layer_kinds import LayerKinds, Use
from ..cache.ragged_cache import PackedCache, RaggedCache
from ..config import DrafterConfig
from ..kernels.types import MOST_WORDS, WORD_BITS, Columns, DraftInputs, Proposal, VerificationResult
from ..ops import draw_draft
from ..state import DecodeState
from .base import MATCH, Drafter
from .none import no_drafts
from .trees import MOST_CHILDREN, WIDEST_FRONT, GrowingTree, tree_of_independent
from .unrolled import UnrolledAttention, shift_left

# Logits of the last columns of a pass, and the hidden states that the next pass may read.
Outputs = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass
class DraftMemory:
    """A drafter's memory of a generation.

    Attributes:
        cache: its keys and values.
        draft_ids: `[vocab_size]` int64, the id of each target token in the draft vocabulary (see `Proposal.draft_ids`);
            None if the vocabularies are the same or drafts are not drawn.
    """

    cache: RaggedCache
    draft_ids: torch.Tensor | None

    @property
    def caches(self) -> list[RaggedCache]:
        """All KV caches, which hold keys and values by slot."""
        return [self.cache]


class CachedDrafter(Drafter):
    """A drafter with a KV cache of its own.

    The first pass of a round runs the tokens that the last round committed and, in parallel drafting, K - 1 mask tokens
    after them; its last 1 or K columns give drafts. Each other draft takes a step that reads the draft before it. The
    next round's first pass overwrites the slots of draft and mask tokens. A round without drafts runs the first pass
    without the head.

    A family sets `shift`, and sets `follows_target_positions` to False if it reads only tokens. It implements
    `extend_cache` and `num_cached_layers`, and `combine_hidden_states` and `gather_hidden_states` if it reads hidden
    states. Training also needs `unroll_step` and `head_weight`. `MtpDrafter` overrides `propose`, because each of its
    modules runs a first pass.
    """

    varies_num_draft_tokens = True
    # Position of a slot's token minus the slot: 1 if the drafter pairs a token with the hidden state before it.
    shift = 0
    # Whether its position ids are the target's, where tokens of an image may share one; else they count the tokens.
    follows_target_positions = True
    # Whether a pass over a tree reads the output of the pass before at the slot before, as chained MTP modules do. If
    # not, a node keeps the hidden state that it was drafted with.
    chains_passes = False
    # Whether `extend_cache` can run the nodes of a tree, see `RaggedCache.nodes`. The last `num_logits` nodes are new;
    # the others have run before.
    grows_trees = False
    # Factor on the products of `unroll`'s outputs with `head_weight`, which gives the logits.
    logit_scale = 1.0

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        # `[V_d]` int64: target token of each draft token; None if the vocabularies are the same. Set by `bind`.
        self.register_buffer("target_ids", None, persistent=False)

    @property
    def num_cached_layers(self) -> int:
        """Number of layers of the cache."""
        raise NotImplementedError(f"{type(self).__name__} does not implement num_cached_layers.")

    @property
    def cached_layers(self) -> LayerKinds:
        """The kind of each layer of the cache: keys and values, unless a family overrides this."""
        return attention_layers(self.num_cached_layers)

    @property
    def most_draft_tokens(self) -> int | None:
        return self.config.num_assistant_tokens if self.config.parallel_drafting else None

    @property
    def drafts_trees(self) -> bool:
        return self.config.parallel_drafting or self.grows_trees

    def num_masks(self, num_draft_tokens: int) -> int:
        """Number of mask tokens in the first pass of a round of `num_draft_tokens`."""
        return max(num_draft_tokens - 1, 0) if self.config.parallel_drafting else 0

    def num_passes(self, num_draft_tokens: int) -> int:
        """Number of passes of the layers in a round of `num_draft_tokens`."""
        return num_draft_tokens - self.num_masks(num_draft_tokens)

    def position_ids(self, state: DecodeState, slots: torch.Tensor) -> torch.Tensor:
        """Position ids `[B, n]` int64 of `slots`."""
        return state.position_ids(slots) if self.follows_target_positions else state.text_positions(slots)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        """The drafter's hidden states `[B, n, H]` from the target's `[B, n, width]`; None if the drafter reads none."""
        return None

    def gather_hidden_states(self, hidden: torch.Tensor | None, sources: torch.Tensor) -> torch.Tensor | None:
        """`[B, W, H]`: `hidden` `[B, n, H]` at `sources` `[B, W]`; a mask token's hidden state at sources of -1."""
        return None

    def extend_cache(self, state: DecodeState, columns: Columns, num_logits: int) -> Outputs:
        """Run tokens through the layers, writing their keys and values into the cache.

        Args:
            state: `state.memory.cache` is written. Its `nodes` are set if `columns` are nodes of a tree.
            columns: with hidden states from `combine_hidden_states`, `gather_hidden_states` or the step before.
            num_logits: number of the last columns to compute logits for; may be 0.

        Returns:
            logits `[B, num_logits, V_d]`, or None for 0; and the hidden states that the next step may read, of the same
            columns, `[B, num_logits, H]`, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement extend_cache().")

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight `[V_d, H]` of the draft head."""
        raise NotImplementedError(f"{type(self).__name__} does not implement head_weight.")

    def unroll(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor | None,
        num_steps: int,
        rows: Sequence[int] | None = None,
        first: int = 0,
    ) -> list[torch.Tensor]:
        """Training-time test (EAGLE-3, arXiv 2503.01840): draft from every slot of whole sequences at once.

        Step s at slot p drafts the token at position p + shift + s + 1. It reads the tokens up to p + shift and, unless
        drafting is parallel, the s tokens of the sequence after them. The label is the target's distribution at
        position p + shift + s.

        Args:
            input_ids: `[B, S]` int64, padded only at the end of rows; padding does not affect the slots before it.
            aux_hidden_states: `[B, S, width]` hidden states of the target; None for a drafter that reads none.
            num_steps: number of draft steps.
            rows: for each step, the number of leading rows that it runs, never increasing; None for all.
            first: the first slot that drafts; earlier slots are only read.

        Returns:
            the draft head's inputs: for each step s a tensor `[rows[s], S - first, H]` after the final norm. It is
            undefined at slots whose tokens are beyond the end of the row.
        """
        attend, hidden = UnrolledAttention(), self.unrolled_hidden_states(aux_hidden_states)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        tokens, outputs, num_outputs = shift_left(input_ids) if self.shift else input_ids, [], len(positions[0]) - first
        for step in range(num_steps):
            if rows is not None:
                tokens, hidden = tokens[: rows[step]], None if hidden is None else hidden[: rows[step]]
            columns = Columns(tokens, positions=positions + step, hidden=hidden)
            normed, feedback = self.unroll_step(columns, attend, num_outputs)
            outputs.append(normed)
            if step == 0:  # later steps run only the slots that draft
                tokens, positions = tokens[:, first:], positions[:, first:]
                hidden = None if hidden is None else hidden[:, first:]
            if not self.config.parallel_drafting:
                tokens, hidden = shift_left(tokens), feedback
            elif step == 0:
                tokens, hidden = torch.full_like(tokens, self.config.mask_token_id), self.masked_hidden_states(hidden)
        return outputs

    def unroll_step(
        self, columns: Columns, attend: UnrolledAttention, num_outputs: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A step of `unroll` over columns with tokens, hidden states and positions `[1, S]`. It returns the head's
        inputs and the next step's hidden states, `[B, num_outputs, H]`, of the last slots."""
        raise NotImplementedError(f"{type(self).__name__} does not implement unroll_step(), which training needs.")

    def unrolled_hidden_states(self, aux_hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        """The hidden state that each slot of `unroll`'s sequences reads first; None for a drafter that reads none."""
        return self.combine_hidden_states(aux_hidden_states)

    def masked_hidden_states(self, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """The hidden states of mask tokens, in place of `hidden` `[B, S, H]`, for `unroll`."""
        return hidden

    def new_memory(self, state: DecodeState) -> DraftMemory:
        layers, draft_ids = self.cached_layers.storing(self.key_dtype), None
        if state.draft_probs and self.target_ids is not None:
            draft_ids = ops.invert_draft_vocabulary(self.target_ids, self.config.vocab_size)
        places = state.slots, state.lengths, state.draft_starts
        return DraftMemory(RaggedCache(layers, *places, state.most_draft_tokens, num_again=1), draft_ids)

    def copy_rows(
        self, state: DecodeState, rows: torch.Tensor, source: DecodeState, slots: int, source_rows: torch.Tensor
    ) -> None:
        for cache, other in zip(state.memory.caches, source.memory.caches, strict=True):
            cache.copy_rows(rows, other, slots, source_rows)

    def prefix_margin(self, num_draft_tokens: int, has_trees: bool = False) -> int | None:
        # A slot may hold the token at the next position; the first round reads the hidden state before the last token.
        return 1

    @property
    def packs_prompts(self) -> bool:
        return self.cached_layers.why_not(Use.PACKING) is None

    def as_one_row(self, memory: DraftMemory, batch: int) -> DraftMemory:
        return replace(memory, cache=PackedCache(memory.cache, batch))

    def start_prefill(self, state: DecodeState) -> None:
        state.memory.cache.restart()

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor | None, positions: torch.Tensor) -> None:
        tokens = state.tokens.gather(1, (positions + self.shift).clamp(max=state.dummy_slot))
        hidden = self.combine_hidden_states(aux_hidden_states)
        ids = self.position_ids(state, positions)
        self.extend_cache(state, Columns(tokens, slots=positions, positions=ids, hidden=hidden), num_logits=0)

    def position_offsets(self, state: DecodeState) -> torch.Tensor | None:
        """`[B]` int64, the drafter's position ids minus positions, from the end of the prompt on; None for 0."""
        return state.position_offsets if self.follows_target_positions else None

    def prepare_inputs(
        self,
        state: DecodeState,
        committed: torch.Tensor,
        limits: torch.Tensor,
        width: int,
        num_masks: int,
        num_steps: int = 0,
    ) -> DraftInputs:
        """`ops.prepare_inputs` with the arguments that the state and the family determine."""
        rows = state.tokens, state.lengths, committed, limits, state.finished
        sizes = width, num_masks, self.config.mask_token_id or 0, self.shift, num_steps
        return ops.prepare_inputs(*rows, *sizes, self.position_offsets(state))

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        num_masks = self.num_masks(state.num_draft_tokens)
        width = result.tokens.shape[1] + num_masks
        steps = range(1 + num_masks, state.num_draft_tokens)
        inputs = self.prepare_inputs(state, result.committed, state.limits, width, num_masks, len(steps))
        hidden = self.gather_hidden_states(self.combine_hidden_states(aux_hidden_states), inputs.sources)
        num_logits = 1 + num_masks if state.num_draft_tokens > 0 else 0
        columns = Columns(inputs.tokens, slots=inputs.slots, positions=inputs.positions, hidden=hidden)
        logits, feedback = self.extend_cache(state, columns, num_logits)
        if state.num_draft_tokens == 0:
            return no_drafts(state)
        if state.num_nodes and not self.config.parallel_drafting:
            window = Columns(inputs.tokens[:, -1:], hidden=None if hidden is None else hidden[:, -1:])
            return self._grow(state, logits, feedback, window)
        drafts = [self.draw(state, logits, first=0)]
        for step, slots, positions in zip(steps, inputs.step_slots, inputs.step_positions, strict=True):
            hidden = None if feedback is None else feedback[:, -1:]
            columns = Columns(drafts[-1].tokens, slots=slots, positions=positions, hidden=hidden)
            logits, feedback = self.extend_cache(state, columns, num_logits=1)
            drafts.append(self.draw(state, logits, first=step))
        return self.join(state, drafts)

    def _grow(
        self,
        state: DecodeState,
        logits: torch.Tensor,
        feedback: torch.Tensor | None,
        window: Columns,
        least_passes: int = 0,
    ) -> Proposal:
        """The tree of a round, grown by one pass for each depth.

        Each pass runs the last columns of the first pass again, as a path of nodes that ends in the root of the tree,
        and then all drafts expanded so far. They take slots from the first of these columns on: a node that is no part
        of the text is visible only to its descendants. The expanded drafts are no more than the drafts of the tree, for
        which caches have room.

        With `chains_passes` each pass runs its nodes one slot earlier than the pass before, and a node reads the output
        of that pass at the node before it. The first columns lack such outputs, and nothing is written for them.

        `logits`, of one column, and `feedback` are results of the first pass, see `run_nodes`; `window` has tokens and
        hidden states of its last columns. `least_passes` counts the first pass.
        """
        depth, num_before = min(state.num_draft_tokens, state.num_nodes), window.tokens.shape[1]
        room = min(state.num_nodes, WORD_BITS * MOST_WORDS - num_before)
        width = min(WIDEST_FRONT, room // max(depth - 1, 1), logits.shape[-1])
        num_candidates = min(state.num_nodes, MOST_CHILDREN, logits.shape[-1])
        tree = GrowingTree(width, window, depth, num_candidates)
        self._add_layer(tree, state, logits, 0)
        offsets = self.position_offsets(state)
        for step in range(1, max(depth, least_passes)):
            behind, has_front = step if self.chains_passes else 0, step < depth
            first = -self.shift - num_before - behind
            columns = tree.grow(feedback, state, offsets, first, behind, self.chains_passes, has_front)
            logits, feedback = self.run_nodes(state, step, columns, width if has_front else 0)
            if has_front:
                self._add_layer(tree, state, logits, step)
        return tree.cut(state.num_nodes)

    def _add_layer(self, tree: GrowingTree, state: DecodeState, logits: torch.Tensor, step: int) -> None:
        """Add the likeliest tokens by logits `[B, n, V_d]`, which are all for draft `step` of the round."""
        ops.likeliest_tokens(self.add_noise(state, logits, step, True), self.target_ids, *tree.add_layer())

    def run_nodes(self, state: DecodeState, step: int, columns: Columns, num_logits: int) -> Outputs:
        """`extend_cache` over the nodes of a tree, in pass `step` of a round.

        Returns:
            logits of the last columns, and the hidden states that the next pass may read: of the same columns, or of
            all columns with `chains_passes`.
        """
        with state.memory.cache.running(columns.nodes):
            return self.extend_cache(state, columns, num_logits)

    def limit_attention(self, state: DecodeState, window: int | None) -> None:
        starts = None if window is None else torch.maximum(state.lengths - window, state.draft_starts)
        for cache in state.memory.caches:
            cache.late_starts = starts

    def join(self, state: DecodeState, drafts: Sequence[Proposal]) -> Proposal:
        """One proposal of the draft tokens of a round's steps, in order."""
        if state.num_nodes:
            return drafts[0]
        tokens, probs, *_ = zip(*drafts, strict=True)
        probs = torch.cat(probs, dim=1) if state.draft_probs else None
        return Proposal(torch.cat(tokens, dim=1), probs, state.memory.draft_ids)

    def add_noise(
        self, state: DecodeState, logits: torch.Tensor, first: int, is_one_draft: bool = False
    ) -> torch.Tensor:
        """The logits that drafts are chosen by. With `verification="match"` they include the noise with which the
        target will draw its tokens.

        Args:
            logits: `[B, n, V_d]` of drafts `first` to `first + n - 1` of the round; of `first` with `is_one_draft`.
        """
        if not (state.is_sampling and state.verification == MATCH):
            return logits
        temperatures = state.temperature * state.row_temperatures
        rows = temperatures, state.seeds, state.lengths
        return ops.add_target_noise(logits, self.target_ids, *rows, first, is_one_draft)

    def draw(self, state: DecodeState, logits: torch.Tensor, first: int) -> Proposal:
        """Draft tokens `first` to `first + n - 1` of the round, from their logits `[B, n, V_d]`; or a tree of them."""
        logits = self.add_noise(state, logits, first)
        if state.num_nodes:
            return tree_of_independent(logits, self.target_ids, state.num_nodes)
        if not state.draft_probs:
            return Proposal(ops.best_draft(logits, self.target_ids), None)
        index, probs = draw_draft(logits, state.draft_temperatures, state.seeds, state.lengths, first)
        return Proposal(self.target_tokens(index), probs)

    def target_tokens(self, drafts: torch.Tensor) -> torch.Tensor:
        """The target's tokens for `drafts` `[...]` int64 of the draft vocabulary."""
        return drafts if self.target_ids is None else self.target_ids[drafts]
