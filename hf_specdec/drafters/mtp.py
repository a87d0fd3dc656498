"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): MTP modules of the target's checkpoint, or trained for it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import ops
from ..cache.ragged_cache import RaggedCache
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.mtp_layouts import missing_experts, module_tensors, needed_tensors
from ..config import MtpConfig
from ..errors import first_line
from ..host.caches import cache_parameter
from ..host.modeling import switches_experts
from ..kernels.types import WORD_BITS, Columns, Proposal, VerificationResult
from ..modules.hidden_states import NUM_PROBE_TOKENS, check_aux_hidden_states
from ..patching.experts import original_experts_implementation
from ..patching.support import registered_attention
from ..state import DecodeState
from .cached import CachedDrafter, DraftMemory, Outputs
from .mtp_layers import MtpFrame, build_decoder
from .none import no_drafts
from .shared_weights import SharedWeight, embed, score
from .unrolled import UNROLLED_NAME, UnrolledAttention, shift_left


@dataclass
class MtpMemory(DraftMemory):
    """The memory of MTP modules in a generation.

    Attributes:
        later_caches: caches of the later runs of modules that run more than once in a round, see `MtpDrafter`.
        hidden: `[B, W + 1, H]`, the target's hidden states at each row's last W slots: slot p is in place p mod W. The
            last place is for columns that are not kept.
    """

    later_caches: list[RaggedCache]
    hidden: torch.Tensor

    @property
    def caches(self) -> list[RaggedCache]:
        return [self.cache, *self.later_caches]

    @property
    def width(self) -> int:
        """W, the most columns of a row in a round's first pass."""
        return self.hidden.shape[1] - 1

    def keep(self, hidden: torch.Tensor, slots: torch.Tensor, is_kept: torch.Tensor) -> None:
        """Keep hidden states `[B, n, H]` of `slots` `[B, n]` int64 where `is_kept`: at most W adjacent slots a row."""
        places = torch.where(is_kept, slots % self.width, self.width)
        self.hidden.scatter_(1, places[..., None].expand_as(hidden), hidden.to(self.hidden.dtype))

    def last(self, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """Hidden states `[B, count, H]` at the last slots before the newest token's; `lengths` are those of texts."""
        slots = (lengths - 1 - count)[:, None] + torch.arange(count, device=lengths.device)
        return ops.gather_rows(self.hidden, slots % self.width, None)


class MtpDrafter(CachedDrafter):
    """MTP modules of a target.

    Module k at slot p pairs a hidden state with the embedding of the token at position p + k + 1, has RoPE position p,
    and predicts the token at position p + k + 2. Module 0 reads the target's hidden state at p, after its final norm.
    Step k of a round runs module k % n of n. `config.chaining` decides which hidden states the other modules read:

    * `"modules"`: module k reads the output of module k - 1 at slot p, as in training. All steps of a round end at the
      slot before the newest token. A module that runs more than once in a round has a KV cache for each run, like
      several modules with the same weights. vLLM runs several modules this way, and so does transformers'
      `use_mtp=True`.
    * `"target"`: every module runs over committed tokens as module 0 does, so its cache holds keys and values from the
      target's hidden states. Draft tokens after them are treated as committed tokens; the hidden state at the slot that
      drafted a token is the output of the module there. So step k ends k slots further. vLLM and SGLang run a single
      module this way.

    With one module and K = 1 the two are the same.

    With `"modules"`, slots of module k that read a draft token become invalid when it is rejected. These begin at most
    K slots before the newest token, and the slots that a round adds begin at most K + 1 before it. So every round runs
    the last K + 1 slots again, with the committed tokens and the target's hidden states, which the memory keeps for
    these slots. The first pass has the same width anyway. K is here the largest of the generation, and a round with
    fewer drafts also runs the steps that draft nothing. vLLM packs the slots to run again into the slots that a
    rejection left unused; here the window does not depend on acceptance, also with `"target"`. With trees no slot of
    the text reads a draft token; then the last 2 K slots may be wrong, whatever was accepted, and are run again.
    """

    config_class = MtpConfig
    shift = 1
    reads_last_hidden_state = True
    reads_embeddings = True
    grows_trees = True
    packs_prompts = False  # hidden states of the last tokens are kept row by row

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        self.decoder = build_decoder(config.block or {})
        self.frames = nn.ModuleList([MtpFrame(config) for _ in range(config.num_modules)])
        self._cache_name = cache_parameter(type(self.decoder.layers[0]).forward)
        takes_type = "layer_type" in inspect.signature(self.decoder.rotary_emb.forward).parameters
        self._layer_types = self.decoder.config.layer_types if takes_type else None
        self.post_init()

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: MtpConfig) -> None:
        if checkpoint.config.get("model_type") != MtpConfig.model_type:
            checkpoint.check_not_quantised(checkpoint.tensors, "MTP modules")
            experts = missing_experts(module_tensors(checkpoint.config, checkpoint.tensors))
            checkpoint.check_differences(missing=experts)
        super().check_checkpoint(checkpoint, config)

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, config: MtpConfig) -> dict[str, str]:
        if checkpoint.config.get("model_type") == MtpConfig.model_type:  # the normal form
            return super().tensor_names(checkpoint, config)
        shared = {"share_head": not config.own_head, "share_embedding": not config.own_embedding}
        tensors = needed_tensors(checkpoint.config, checkpoint.tensors, shared)
        return {name: tensor.published for tensor in tensors for name in tensor.names(config.num_modules)}

    @property
    def sharing_modules(self) -> list[nn.Module]:
        return list(self.frames)

    @property
    def num_cached_layers(self) -> int:
        return self.config.num_modules

    @property
    def most_draft_tokens(self) -> int | None:
        return self.config.num_modules if self.chains_passes else None

    @property
    def chains_passes(self) -> bool:
        return self.config.chaining == "modules"

    @property
    def most_tree_depth(self) -> int | None:
        # The 2 K slots that are run again are nodes, too, and their ancestors must fit in one word.
        return None if self.config.num_modules == 1 and not self.chains_passes else WORD_BITS // 2 - 1

    @property
    def smallest_window(self) -> int | None:
        return getattr(self.decoder.config, "sliding_window", None)

    def _fit(self, target: PreTrainedModel) -> None:
        config, name = self.config, self.title
        config.check_fit(target.config, 0, name)
        lacking = [what for what in ("embedding", "head") if not getattr(config, f"own_{what}")]
        shared = {what: SharedWeight(target, what, config.hidden_size, name) for what in lacking}
        check_aux_hidden_states(target, [], True, config.hidden_size, name)
        self._check_layers(name)
        if switches_experts(self.decoder):
            self.decoder.set_experts_implementation(original_experts_implementation(target))
        self._shared_weights = shared

    def prefix_margin(self, num_draft_tokens: int, has_trees: bool = False) -> int | None:
        # Step k reads k + 1 tokens ahead; the first round reads hidden states at the slots that it runs again.
        return self._num_rerun(num_draft_tokens, has_trees) - 1

    def new_memory(self, state: DecodeState) -> MtpMemory:
        memory, num_modules = super().new_memory(state), self.config.num_modules
        batch, device = len(state.lengths), state.lengths.device
        width = self._num_rerun(state.most_draft_tokens, state.most_nodes > 0)
        places = state.slots, state.lengths, state.draft_starts
        num_caches = -(-state.most_draft_tokens // num_modules) if self.chains_passes else 1
        later_caches = [RaggedCache(memory.cache.kinds, *places) for _ in range(num_caches - 1)]
        hidden = torch.zeros(batch, width + 1, self.config.hidden_size, dtype=self.dtype, device=device)
        return MtpMemory(memory.cache, memory.draft_ids, later_caches, hidden)

    def copy_rows(
        self, state: DecodeState, rows: torch.Tensor, source: DecodeState, slots: int, source_rows: torch.Tensor
    ) -> None:
        super().copy_rows(state, rows, source, slots, source_rows)
        state.memory.hidden[rows] = source.memory.hidden[source_rows]

    def _num_rerun(self, num_draft_tokens: int, has_trees: bool) -> int:
        """Number of slots that the first pass of each round runs, see the class."""
        return max(num_draft_tokens + 1, 2 * num_draft_tokens if has_trees and self.chains_passes else 0)

    def run(
        self, state: DecodeState, step: int, columns: Columns, embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the module of a step over columns of `[B, n]` slots: tokens of a text, or nodes of a tree.

        Args:
            state: one cache of `state.memory` is written.
            step: the step of the round, 0 to K - 1.
            columns: with tokens, slots and hidden states; for nodes of a tree with all fields.
            embeds: `[B, n, H]`, embeddings in place of those of the tokens.

        Returns:
            inputs of the head and of the next module (feedback), both `[B, n, H]`.
        """
        cycle, index = divmod(step, self.config.num_modules)
        memory = state.memory
        cache = memory.later_caches[cycle - 1] if cycle > 0 and self.chains_passes else memory.cache
        slots, nodes = columns.slots, columns.nodes
        cache.advance(slots, state.live)
        if columns.ancestors is None:
            columns, nodes = columns._replace(places=slots, positions=self.position_ids(state, slots)), None
        with cache.running(nodes):
            attention = {"attention_mask": cache.attention_mask(slots), self._cache_name: cache, "use_cache": True}
            return self._run_module(index, columns, embeds, **attention)

    def position_ids(self, state: DecodeState, slots: torch.Tensor) -> torch.Tensor:
        """Position ids `[B, n]` int64 of `slots`; `[sections, B, n]` with M-RoPE."""
        return state.position_ids(slots, sections=True)

    def run_nodes(self, state: DecodeState, step: int, columns: Columns, num_logits: int) -> Outputs:
        normed, feedback = self.run(state, step, columns)
        logits = self.logits(step, normed[:, -num_logits:]) if num_logits else None
        return logits, feedback if self.chains_passes else feedback[:, -max(num_logits, 1) :]

    def _run_module(
        self, index: int, columns: Columns, embeds: torch.Tensor | None = None, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run module `index` over columns with places, see `run`; `attention` has arguments of its decoder layer."""
        frame = self.frames[index]
        weight = self._shared_weights["embedding"].weight if frame.embed_tokens is None else frame.embed_tokens.weight
        embeds = embed(columns.tokens, weight, self.dtype) if embeds is None else embeds.to(self.dtype)
        if self.config.zero_first_embedding:
            embeds = torch.where(columns.places[..., None] == 0, 0.0, embeds)
        output = self._run_layer(index, frame(embeds, columns.hidden), columns.positions, **attention)
        normed = frame.final_norm(output)
        return normed, normed if self.config.norm_output else output

    def _run_layer(self, index: int, inputs: torch.Tensor, positions: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Run the decoder layer of module `index`, `[B, n, H]` to `[B, n, H]`, see `_run_module`. Positions are
        `[B, n]`, or `[sections, B, n]` with M-RoPE."""
        rotary, rotated_to = self.decoder.rotary_emb, positions
        if hasattr(rotary, "mrope_section"):  # tokens of text have the same position in all three sections
            rotated_to = positions.expand(3, -1, -1)
        elif positions.dim() == 3:
            rotated_to = positions[0]
        of_layer = {} if self._layer_types is None else {"layer_type": self._layer_types[index]}
        angles = rotary(inputs, rotated_to, **of_layer)
        return self.decoder.layers[index](inputs, position_ids=positions, position_embeddings=angles, **attention)

    @torch.no_grad()
    def _check_layers(self, name: str) -> None:
        """Raise `ValueError` unless the layers return hidden states when they run over a few tokens."""
        if self.device.type == "meta":
            return
        inputs = torch.zeros(1, NUM_PROBE_TOKENS, self.config.hidden_size, device=self.device, dtype=self.dtype)
        positions = torch.arange(NUM_PROBE_TOKENS, device=self.device)[None]

        def unfit(why: str) -> ValueError:
            return ValueError(
                f"{name} has layers of model_type {self.decoder.config.model_type!r}, which cannot be those of MTP "
                f"modules: {why}. Use a drafter of another family."
            )

        for index in range(self.config.num_modules):
            try:
                with ops.references():
                    found = self._run_layer(index, inputs, positions, attention_mask=positions[:, None, :, None])
            except RuntimeError:  # an operation, such as experts' products, that rounds run in another form
                continue
            except Exception as error:  # a layer may raise anything about what it is given
                raise unfit(f"they fail on a few tokens ({type(error).__name__}: {first_line(error)})") from error
            if not isinstance(found, torch.Tensor) or found.shape != inputs.shape:
                shape = list(inputs.shape)
                raise unfit(f"over {NUM_PROBE_TOKENS} tokens they return no hidden states of shape {shape}")

    def logits(self, step: int, normed: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of `[..., H]` after the final norm, by the head of the step's module."""
        head = self.frames[step % self.config.num_modules].lm_head
        weight = self._shared_weights["head"].weight if head is None else head.weight
        return score(normed, weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight `[V, H]` of the target's head, or of a single module's own head; raises `ValueError` if several
        modules have their own."""
        if not self.config.own_head:
            return self._shared_weights["head"].weight
        if len(self.frames) > 1:
            raise ValueError(
                f"{self.title} cannot be trained here: each of its {len(self.frames)} modules has a head of its own; "
                "expected own_head = False, or a single module."
            )
        return self.frames[0].lm_head.weight

    def unroll(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        num_steps: int,
        rows: Sequence[int] | None = None,
        first: int = 0,
    ) -> list[torch.Tensor]:
        rows = [len(input_ids)] * num_steps if rows is None else rows[:num_steps]
        tokens, hidden, outputs = input_ids, aux_hidden_states.to(self.dtype), []
        slots = torch.arange(tokens.shape[1], device=tokens.device)[None]
        attend, inputs = UnrolledAttention(), []  # tokens and hidden states of the steps in these keys
        with registered_attention(self.decoder, UNROLLED_NAME):
            for step, count in enumerate(rows):
                if self.chains_passes:  # each step has keys of its own, and reads the output of the step before
                    attend, inputs = UnrolledAttention(), []
                tokens, index = shift_left(tokens[:count]), step % self.config.num_modules
                inputs = [(ids[:count], states[:count]) for ids, states in (*inputs, (tokens, hidden))]
                # A module first runs the earlier steps that its keys still lack.
                for ahead in range(max(len(inputs) - self.config.num_modules, 0), len(inputs)):
                    places, (ids, states) = slots + ahead, inputs[ahead]
                    columns = Columns(ids, places=places, positions=places, hidden=states)
                    normed, hidden = self._run_module(index, columns, attention_mask=None, attend=attend)
                outputs.append(normed[:, first:])
        return outputs

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor, positions: torch.Tensor) -> None:
        hidden, num_drafts = aux_hidden_states.to(self.dtype), state.most_draft_tokens
        for step in range(num_drafts if self.chains_passes else min(num_drafts, self.config.num_modules)):
            ahead = step if self.chains_passes else 0
            tokens = state.tokens.gather(1, (positions + self.shift + ahead).clamp(max=state.dummy_slot))
            embeds = None if state.records is None else state.records.embeddings(positions + self.shift + ahead)
            _, feedback = self.run(state, step, Columns(tokens, slots=positions, hidden=hidden), embeds)
            if self.chains_passes:
                hidden = feedback
        memory = state.memory
        first_kept = state.lengths[:, None] - 1 - memory.width
        memory.keep(aux_hidden_states, positions, (positions >= first_kept) & (positions < state.dummy_slot))

    def propose(self, state: DecodeState, aux_hidden_states: torch.Tensor, result: VerificationResult) -> Proposal:
        memory, columns = state.memory, torch.arange(result.tokens.shape[1], device=state.lengths.device)
        slots = (state.lengths - 1 - result.committed)[:, None] + columns
        memory.keep(aux_hidden_states, slots, columns < result.committed[:, None])
        width = memory.width if self.chains_passes else len(columns)
        # All columns of the first pass are tokens of the text, whatever the last round has committed.
        inputs = self.prepare_inputs(state, state.lengths, state.limits, width, num_masks=0)
        columns = Columns(inputs.tokens, slots=inputs.slots, hidden=memory.last(state.lengths, width))
        if state.num_nodes and state.num_draft_tokens:
            return self._draft_tree(state, columns)
        drafts = self._draft_by_modules(state, columns) if self.chains_passes else self._draft_by_target(state, columns)
        return self.join(state, drafts) if drafts else no_drafts(state)

    def _draft_tree(self, state: DecodeState, columns: Columns) -> Proposal:
        normed, feedback = self.run(state, 0, columns)
        logits = self.logits(0, normed[:, -1:])
        if self.chains_passes:
            return self._grow(state, logits, feedback, columns, state.most_draft_tokens)
        # The caches of later modules lack the slots that the last round added.
        num_runs = min(state.most_draft_tokens, self.config.num_modules)
        first = -1 if num_runs == 1 else 0
        window = Columns(columns.tokens[:, first:], hidden=columns.hidden[:, first:])
        return self._grow(state, logits, feedback[:, -1:], window, num_runs)

    def _draft_by_modules(self, state: DecodeState, columns: Columns) -> list[Proposal]:
        drafts = []
        # Steps that draft nothing in this round run to fill their caches; the next round runs them over missing tokens.
        for step in range(state.most_draft_tokens):
            normed, hidden = self.run(state, step, columns)
            if step < state.num_draft_tokens:
                drafts.append(self.draw(state, self.logits(step, normed[:, -1:]), first=step))
            following = drafts[-1].tokens if step < state.num_draft_tokens else torch.zeros_like(columns.tokens[:, :1])
            columns = columns._replace(tokens=torch.cat([columns.tokens[:, 1:], following], dim=1), hidden=hidden)
        return drafts

    def _draft_by_target(self, state: DecodeState, columns: Columns) -> list[Proposal]:
        tokens, slots, hidden = columns.tokens, columns.slots, columns.hidden
        width, num_modules = tokens.shape[1], self.config.num_modules
        # Modules that draft nothing in this round run to fill their caches.
        for step in range(state.num_draft_tokens, min(state.most_draft_tokens, num_modules)):
            self.run(state, step, columns)
        drafts = []
        for step in range(state.num_draft_tokens):
            # A module that has run in this round runs only the slots added since; another module runs all slots.
            new = slice(0 if step < num_modules else width + step - num_modules, None)
            columns = Columns(tokens[:, new], slots=slots[:, new], hidden=hidden[:, new])
            normed, feedback = self.run(state, step, columns)
            drafts.append(self.draw(state, self.logits(step, normed[:, -1:]), first=step))
            tokens = torch.cat([tokens, drafts[-1].tokens], dim=1)
            slots = torch.cat([slots, state.next_slots(step - self.shift)], dim=1)
            hidden = torch.cat([hidden, feedback[:, -1:]], dim=1)
        return drafts
