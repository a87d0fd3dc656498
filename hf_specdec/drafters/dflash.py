"""DFlash (arXiv 2602.06036): drafts a block of tokens in one pass, over keys and values of the target's states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ..config import AUTO, DFlashConfig
from ..host.modeling import LlamaRMSNorm
from ..kernels.types import Proposal, VerificationResult
from ..patching.attention import cached_attend
from ..state import DecodeState
from .draft_layers import DraftLayersDrafter
from .layers import Attend, BlockDecoderLayer
from .none import no_drafts


class DFlashDrafter(DraftLayersDrafter):
    """DFlash drafter.

    A round's block has the newest token, the anchor, at its own position, and mask tokens at the positions after it:
    K of them, each of which drafts the token at its position (fill-in), or K - 1, if every token of the block drafts
    the token after it (`config.anchor_first`).

    Slot p of the cache holds the keys and values of context position p, which the target has processed, and after them
    those of the block. The next round writes its context from the slot on where this block began.
    """

    config_class = DFlashConfig
    shift = 1
    # DSpark's confidence head may be there without a Markov head. Then DSpark is DFlash that drafts from the anchor on.
    _keys_to_ignore_on_load_unexpected = [
        *DraftLayersDrafter._keys_to_ignore_on_load_unexpected,
        r"^confidence_(head\.)?proj\.",
    ]

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(config.aux_hidden_size, width, bias=config.fc_bias)
        self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self._add_head()

    def num_draft_tokens(self, requested: int | str | None, is_bulk: bool = False) -> int | str:
        """See `Drafter.num_draft_tokens`; K is at most `config.depth`."""
        found = super().num_draft_tokens(requested, is_bulk)
        return found if found == AUTO else self.config.check_depth(found)

    @property
    def most_draft_tokens(self) -> int:
        return self.config.depth

    drafts_trees = True

    def num_read(self, num_draft_tokens: int) -> int:
        """How many of the last tokens of the block the head reads: those that draft one, unless a family needs more."""
        return num_draft_tokens

    def num_masks(self, num_draft_tokens: int) -> int:
        """Tokens of the block, which follow the context in the first pass of a round; the first one is the anchor."""
        return num_draft_tokens if self.config.anchor_first else num_draft_tokens + 1

    def num_passes(self, num_draft_tokens: int) -> int:
        return 1

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embeds = super().embed(tokens)
        return embeds if self.config.embedding_scale == 1.0 else embeds * self.config.embedding_scale

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits, softcap = super().logits(normed), self.config.logit_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., aux_hidden_size]`, those of ascending layer ids concatenated, to context vectors `[..., H]`."""
        return self.hidden_norm(self.fc(aux_hidden_states.to(self.dtype)))

    def run(
        self, context: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, block_length: int
    ) -> torch.Tensor:
        """One pass of the layers over a block, or over several.

        Args:
            context: `[B, c, H]` from `combine_hidden_states`, context positions that are not in the cache yet.
            tokens: `[B, n]` int64, the tokens of the block, or of blocks one after the other.
            positions: `[B, c + n]` int64 for RoPE, of context and block.

        Returns:
            inputs of the head, `[B, n, H]`.
        """
        hidden = self.embed(tokens)
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(context, hidden, rotary, attend, block_length)
        return self.norm(hidden)

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor | None, positions: torch.Tensor) -> None:
        self._store(state, self.combine_hidden_states(aux_hidden_states), positions, state.position_ids(positions))

    def _store(self, state: DecodeState, context: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write keys and values of context vectors `[B, n, H]` to the cache."""
        rotary = self.rotary_emb(context, positions)
        cache = state.memory.cache
        cache.advance(slots, state.live)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.keys_and_values(context, rotary), index)

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        num_context = result.tokens.shape[1]
        num_tokens = self.num_masks(state.num_draft_tokens) if state.num_draft_tokens > 0 else 0
        # A column with slot p is taken to draft the token at p + 2, but drafts that at p + 1, or at p.
        reach = 1 if self.config.anchor_first else 2
        limits, width = state.limits + reach, num_context + num_tokens
        inputs = self.prepare_inputs(state, result.committed, limits, width, num_tokens)
        combined = self.combine_hidden_states(aux_hidden_states)
        context = self.gather_hidden_states(combined, inputs.sources[:, :num_context])
        positions = inputs.positions + state.position_offsets[:, None]
        if state.num_draft_tokens == 0:
            self._store(state, context, inputs.slots, positions)
            return no_drafts(state)
        anchors = state.last_tokens()
        tokens = torch.cat([anchors, inputs.tokens[:, num_context + 1 :]], dim=1)
        cache = state.memory.cache
        cache.advance(inputs.slots, state.live + 1)  # The last slot of the block is one after those of the drafts.
        ends = self._ends(inputs.slots[:, -num_tokens:], state.dummy_slot)
        normed = self.run(context, tokens, positions, cached_attend(cache, inputs.slots, ends), num_tokens)
        return self.join(state, self.draft(state, anchors, normed[:, -self.num_read(state.num_draft_tokens) :]))

    def forward(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, num_steps: int = 1
    ) -> list[torch.Tensor]:
        """Logits of the first `num_steps` drafts of a block after every position, with no cache.

        Args:
            input_ids: `[B, S]` int64, padded at most at the end of a row.
            aux_hidden_states: `[B, S, width]` of the target.

        Returns:
            `num_steps` tensors `[B, S, V_d]`: at place p of tensor s are the logits of the token at p + 2 + s, from the
            block whose first token is the one at p + 1. Those at the last place, which has none, are undefined.
        """
        batch, length = input_ids.shape
        anchors = torch.arange(1, length + 1, device=input_ids.device).expand(batch, -1)
        normed = self.unroll_blocks(input_ids, aux_hidden_states, anchors, num_steps)
        return self.chain(input_ids.roll(-1, dims=1), normed)

    def unroll_blocks(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, anchors: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        """Run blocks after many tokens of whole sequences at once, with no cache.

        Draft k of a block whose first token is the one at position a is for the token at a + 1 + k. It is to be
        compared with the target's distribution at position a + k.

        Args:
            input_ids: `[B, S]` int64, padded at most at the end of a row; padding does not affect blocks before it.
            aux_hidden_states: `[B, S, width]` of the target.
            anchors: `[B, A]` int64, positions of the first tokens of A blocks, in any order. What a block after the
                sequence has as its first token is undefined.
            num_drafts: drafts of each block.

        Returns:
            inputs of the head, `[B, A, n, H]`, of `num_read(num_drafts)` tokens of each block.
        """
        num_tokens, (batch, length) = self.num_masks(num_drafts), input_ids.shape
        places = torch.arange(length, device=input_ids.device)
        block = (anchors[..., None] + torch.arange(num_tokens, device=places.device)).flatten(1)
        tokens = torch.full((*anchors.shape, num_tokens), self.config.mask_token_id, device=places.device)
        tokens[..., 0] = input_ids.gather(1, anchors.clamp(max=length - 1))
        attend = _BlocksAttention(places, block, num_tokens, self.config.causal)
        positions = torch.cat([places.expand(batch, -1), block], dim=1)
        context = self.combine_hidden_states(aux_hidden_states)
        normed = self.run(context, tokens.flatten(1), positions, attend, num_tokens)
        return normed.unflatten(1, (-1, num_tokens))[:, :, -self.num_read(num_drafts) :]

    def head_inputs(self, normed: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the logits of drafts are products of, for training, where the tokens before a draft are the text's.

        Args:
            normed: `[..., n, H]` from `unroll_blocks`, for K drafts.
            before: `[..., K]` int64, the token before each draft.

        Returns:
            `[..., K, width]` and `[V_d, width]`.

        Raises:
            ValueError: expected logits without a soft cap.
        """
        if self.config.logit_softcap is not None:
            raise ValueError(f"{type(self).__name__} cannot be trained with logit_softcap; expected None.")
        return normed * self.config.logit_scale, self.head_weight

    def confidence(self, normed: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """See `DSparkDrafter.confidence`: None, there is no such head."""
        return None

    def chain(self, anchors: torch.Tensor, normed: torch.Tensor) -> list[torch.Tensor]:
        """Logits `[B, S, V_d]` of each draft of S blocks, given anchors `[B, S]` and inputs of the head `[B, S, n, H]`.

        Where a draft depends on the ones before it, these are the most likely ones.
        """
        return list(self.logits(normed).unbind(2))

    def draft(self, state: DecodeState, anchors: torch.Tensor, normed: torch.Tensor) -> Sequence[Proposal]:
        """Draft tokens of a round, in order, after the newest tokens `anchors` `[B, 1]` int64, by `normed` `[B, n, H]`,
        inputs of the head, see `num_read`."""
        return [self.draw(state, self.logits(normed), first=0)]

    def _ends(self, slots: torch.Tensor, dummy_slot: int) -> list[torch.Tensor | None]:
        """For each layer, the last slot that the tokens of the block at `slots` `[B, n]` see; None for their own."""
        last = torch.where(slots < dummy_slot, slots, -1).amax(dim=1, keepdim=True).expand_as(slots).contiguous()
        windowed = None if self.config.sliding_window is None else last.minimum(slots + self.config.sliding_window - 1)
        kinds = {"full_attention": last, "sliding_attention": windowed}
        layers = zip(self.config.causal, self.config.layer_types, strict=True)
        return [None if is_causal else kinds[kind] for is_causal, kind in layers]


class _BlocksAttention:
    """`Attend` of blocks at `block` `[B, n]`, `num_tokens` each: they see themselves, and of the context at `places`
    `[S]` what is before their first token."""

    def __init__(self, places: torch.Tensor, block: torch.Tensor, num_tokens: int, causal: list[bool]):
        self._causal = causal
        first = block.unflatten(1, (-1, num_tokens))[..., :1].expand(-1, -1, num_tokens).flatten(1)
        number = torch.arange(block.shape[1], device=block.device) // num_tokens
        is_own = (number[:, None] == number).expand(len(block), -1, -1)
        self._distance = block[..., None] - torch.cat([places.expand(len(block), -1), block], dim=1)[:, None]
        self._visible = torch.cat([places < first[..., None], is_own], dim=2)

    @torch.compiler.disable
    def __call__(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        visible = self._visible
        if self._causal[layer.layer_idx]:
            visible = visible & (self._distance >= 0)
        if window is not None:
            visible = visible & (self._distance.abs() < window)
        # No fused kernel takes both a mask and fewer heads of keys than of queries.
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None]).transpose(1, 2)
