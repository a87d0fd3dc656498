"""DFlash (arXiv 2602.06036): one pass drafts a block of tokens over keys and values of the target's hidden states."""

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

    A round's block is the newest token, called the anchor, at its own position, and mask tokens at the positions after
    it. With fill-in there are K mask tokens, and each drafts the token at its own position. With `config.anchor_first`
    there are K - 1, and every token of the block drafts the token after it.

    Slot p of the cache holds the keys and values of context position p. The block's keys and values follow the
    context's; the next round's context overwrites them.
    """

    config_class = DFlashConfig
    shift = 1

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(config.aux_hidden_size, width, bias=config.fc_bias)
        self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self._add_head()

    def num_draft_tokens(self, requested: int | str | None, is_bulk: bool = False) -> int | str:
        """As `Drafter.num_draft_tokens`; raises `ValueError` also for a K above `config.depth`."""
        found = super().num_draft_tokens(requested, is_bulk)
        return found if found == AUTO else self.config.check_depth(found)

    @property
    def most_draft_tokens(self) -> int:
        return self.config.depth

    drafts_trees = True

    def num_read(self, num_draft_tokens: int) -> int:
        """Number of the block's last tokens that the head reads: K, unless a family reads more."""
        return num_draft_tokens

    def num_masks(self, num_draft_tokens: int) -> int:
        """Number of tokens of the block, the anchor included, which follow the context in the pass of a round."""
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
        """Context vectors `[..., H]` from `[..., aux_hidden_size]`, concatenated by ascending layer id."""
        return self.hidden_norm(self.fc(aux_hidden_states.to(self.dtype)))

    def run(
        self, context: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, block_length: int
    ) -> torch.Tensor:
        """One pass of the layers over one or several blocks.

        Args:
            context: `[B, c, H]` from `combine_hidden_states`, at context positions that are not in the cache yet.
            tokens: `[B, n]` int64, the tokens of the blocks, one block after the other.
            positions: `[B, c + n]` int64 for RoPE, of the context, then of the blocks.

        Returns:
            inputs of the head, `[B, n, H]`.
        """
        hidden = self.embed(tokens)
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(context, hidden, rotary, attend, block_length)
        return self.norm(hidden)

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor, positions: torch.Tensor) -> None:
        self._store(state, self.combine_hidden_states(aux_hidden_states), positions, state.position_ids(positions))

    def _store(self, state: DecodeState, context: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write keys and values of context vectors `[B, n, H]` to the cache."""
        rotary = self.rotary_emb(context, positions)
        cache = state.memory.cache
        cache.advance(slots, state.live)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.keys_and_values(context, rotary), index)

    def propose(self, state: DecodeState, aux_hidden_states: torch.Tensor, result: VerificationResult) -> Proposal:
        num_context = result.tokens.shape[1]
        num_tokens = self.num_masks(state.num_draft_tokens) if state.num_draft_tokens > 0 else 0
        # `prepare_inputs` assumes that slot p drafts the token at p + 2; here it drafts the token at p + 1, or at p.
        reach = 1 if self.config.anchor_first else 2
        limits, width = state.limits + reach, num_context + num_tokens
        inputs = self.prepare_inputs(state, result.committed, limits, width, num_tokens)
        combined = self.combine_hidden_states(aux_hidden_states)
        context = self.gather_hidden_states(combined, inputs.sources[:, :num_context])
        if state.num_draft_tokens == 0:
            self._store(state, context, inputs.slots, inputs.positions)
            return no_drafts(state)
        anchors = state.last_tokens()
        tokens = torch.cat([anchors, inputs.tokens[:, num_context + 1 :]], dim=1)
        cache = state.memory.cache
        cache.advance(inputs.slots, state.live + 1)  # the block's last slot is one after the drafts'
        ends = self._ends(inputs.slots[:, -num_tokens:], state.dummy_slot)
        normed = self.run(context, tokens, inputs.positions, cached_attend(cache, inputs.slots, ends), num_tokens)
        return self.join(state, self.draft(state, anchors, normed[:, -self.num_read(state.num_draft_tokens) :]))

    def forward(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, num_steps: int = 1
    ) -> list[torch.Tensor]:
        """Logits of the first `num_steps` drafts of a block after every position, with no cache.

        Args:
            input_ids, aux_hidden_states: see `unroll_blocks`.

        Returns:
            `num_steps` tensors `[B, S, V_d]`: place p of tensor s has the logits of the token at p + 2 + s, from the
            block whose anchor is at p + 1. The last place, which has no anchor, is undefined.
        """
        batch, length = input_ids.shape
        anchors = torch.arange(1, length + 1, device=input_ids.device).expand(batch, -1)
        normed = self.unroll_blocks(input_ids, aux_hidden_states, anchors, num_steps)
        return self.chain(input_ids.roll(-1, dims=1), normed)

    def unroll_blocks(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, anchors: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        """Run blocks at many anchors of whole sequences at once, with no cache.

        Draft k of the block whose anchor is at position a is for the token at a + 1 + k. Its label is the target's
        distribution at position a + k.

        Args:
            input_ids: `[B, S]` int64, padded only at the end of rows; padding does not affect blocks before it.
            aux_hidden_states: `[B, S, width]` of the target.
            anchors: `[B, A]` int64, positions of the anchors of A blocks, in any order. The output of a block whose
                anchor is beyond the sequence is undefined.
            num_drafts: number of drafts of each block.

        Returns:
            inputs of the head, `[B, A, n, H]`, of `num_read(num_drafts)` tokens of each block.
        """
        num_tokens, (batch, length) = self.num_masks(num_drafts), input_ids.shape
        places = torch.arange(length, device=input_ids.device)
        block = (anchors[..., None] + torch.arange(num_tokens, device=places.device)).flatten(1)
        tokens = torch.full((*anchors.shape, num_tokens), self.config.mask_token_id, device=places.device)
        tokens[..., 0] = input_ids.gather(1, anchors.clamp(max=length - 1))
        attend = _attention_of_blocks(places, block, num_tokens, self.config.causal)
        positions = torch.cat([places.expand(batch, -1), block], dim=1)
        context = self.combine_hidden_states(aux_hidden_states)
        normed = self.run(context, tokens.flatten(1), positions, attend, num_tokens)
        return normed.unflatten(1, (-1, num_tokens))[:, :, -self.num_read(num_drafts) :]

    def head_inputs(self, normed: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and weight of the product that gives the logits in training, where the text has the tokens before.

        Args:
            normed: `[..., n, H]` from `unroll_blocks` for K drafts.
            before: `[..., K]` int64, the token before each draft.

        Returns:
            inputs `[..., K, width]` and weight `[V_d, width]`.

        Raises:
            ValueError: the logits have a soft cap.
        """
        if self.config.logit_softcap is not None:
            raise ValueError(f"{type(self).__name__} cannot be trained with logit_softcap; expected None.")
        return normed * self.config.logit_scale, self.head_weight

    def confidence(self, normed: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """None: there is no confidence head, see `DSparkDrafter.confidence`."""
        return None

    def chain(self, anchors: torch.Tensor, normed: torch.Tensor) -> list[torch.Tensor]:
        """Logits `[B, S, V_d]` of each draft of S blocks, given anchors `[B, S]` and inputs of the head `[B, S, n, H]`.

        Where a draft depends on earlier drafts, these are the most likely tokens.
        """
        return list(self.logits(normed).unbind(2))

    def draft(self, state: DecodeState, anchors: torch.Tensor, normed: torch.Tensor) -> Sequence[Proposal]:
        """The drafts of a round, in order, given the anchors `[B, 1]` int64 and the inputs of the head, `normed`
        `[B, n, H]`, see `num_read`."""
        return [self.draw(state, self.logits(normed), first=0)]

    def _ends(self, slots: torch.Tensor, dummy_slot: int) -> list[torch.Tensor | None]:
        """For each layer, the last slot that is visible to the block's tokens at `slots` `[B, n]`; None if causal."""
        last = torch.where(slots < dummy_slot, slots, -1).amax(dim=1, keepdim=True).expand_as(slots).contiguous()
        windowed = None if self.config.sliding_window is None else last.minimum(slots + self.config.sliding_window - 1)
        kinds = {"full_attention": last, "sliding_attention": windowed}
        layers = zip(self.config.causal, self.config.layer_types, strict=True)
        return [None if is_causal else kinds[kind] for is_causal, kind in layers]


def _attention_of_blocks(places: torch.Tensor, block: torch.Tensor, num_tokens: int, causal: list[bool]) -> Attend:
    """Attention for blocks of `num_tokens` at positions `block` `[B, n]`. A block sees itself, and those of the context
    positions `places` `[S]` that are before its anchor."""
    first = block.unflatten(1, (-1, num_tokens))[..., :1].expand(-1, -1, num_tokens).flatten(1)
    number = torch.arange(block.shape[1], device=block.device) // num_tokens
    is_own = (number[:, None] == number).expand(len(block), -1, -1)
    distance = block[..., None] - torch.cat([places.expand(len(block), -1), block], dim=1)[:, None]
    everywhere = torch.cat([places < first[..., None], is_own], dim=2)

    @torch.compiler.disable
    def attend(layer, query, key, value, window):
        visible = everywhere & (distance >= 0) if causal[layer.layer_idx] else everywhere
        if window is not None:
            visible = visible & (distance.abs() < window)
        # No fused kernel takes a mask together with fewer key heads than query heads.
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None]).transpose(1, 2)

    return attend
