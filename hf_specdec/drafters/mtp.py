"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): modules of a target's own checkpoint, or trained for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from .. import ops
from ..checkpoints.checkpoint import Checkpoint, quiet_loading
from ..checkpoints.dialects import CheckpointReader, Decisions, rope_by_layer_type
from ..checkpoints.mtp_layouts import (
    MtpFamily,
    copies_kept,
    find_family,
    is_speculators_mtp,
    missing_experts,
    module_tensors,
    needed_tensors,
    stated_count,
    text_settings,
)
from ..config import MtpConfig, default_chaining
from ..kernels.types import Proposal, VerificationResult
from ..patching.attention import ATTENTION_NAME, registered_attention
from ..patching.cache import RaggedCache
from ..patching.experts import original_experts_implementation
from ..patching.hidden_states import check_aux_hidden_states
from ..state import DecodeState
from ..training.unrolled import UNROLLED_NAME, UnrolledAttention, following
from .base import (
    check_sizes,
    embed,
    register_drafter,
    score,
)
from .cached import CachedDrafter, DraftMemory
from .shared_weights import SharedWeight

# Draft tokens a round of a single module that does not say for how many it was trained.
SINGLE_MODULE_DEPTH = 3

_OVERRIDES = {
    "chaining",
    "hidden_first",
    "norm_offset",
    "norm_output",
    "parallel_drafting",
    "share_embedding",
    "share_head",
    "zero_first_embedding",
}


def read_mtp(checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]) -> CheckpointReader:
    """Read the MTP modules of a checkpoint of any supported family.

    Args:
        checkpoint: of a target, or of a module published on its own.
        target: the target's text configuration, if there is a target. Whether it fits is for `bind` to say.
        overrides: by their keywords in `AutoDrafter.from_pretrained`.

    Raises:
        ValueError: config.json contradicts itself or the tensors, or an override does not apply.
    """
    name, config, decisions = checkpoint.name, checkpoint.config, Decisions(overrides)
    settle = decisions.settle
    unknown = overrides.keys() - _OVERRIDES
    if unknown or overrides.get("parallel_drafting"):
        wrong = ", ".join(sorted(unknown)) or "parallel drafting"
        raise ValueError(f"{name} holds MTP modules, which draft token by token from one hidden state: no {wrong}.")
    family, num_modules = find_family(config), _count_modules(checkpoint)
    text = _text_config(checkpoint, family, settle)
    own, rule = copies_kept(family, {}), f"as {family.title} publishes and runs them"
    output_rule = rule if family.norm_output else "as vLLM; transformers hands on the stream after the final norm"
    hidden_first = settle("hidden_first", family.hidden_first, rule)
    norm_offset = settle("norm_offset", family.norm_offset, rule)
    norm_output = settle("norm_output", family.norm_output, output_rule)
    share_embedding = settle("share_embedding", "embed_tokens" not in own, "the modules have copies of the target's")
    heads = "each module has a trained head" if "lm_head" in own else "the modules have copies of the target's, or none"
    share_head = settle("share_head", "lm_head" not in own, heads)
    chaining = settle("chaining", default_chaining(num_modules), f"{num_modules} module(s)")
    zero_first_embedding = settle("zero_first_embedding", False, "as in training; vLLM zeroes it for some families")
    return CheckpointReader(
        config_for(
            text,
            _block(text, text_settings(config), num_modules),
            hidden_first=hidden_first,
            norm_offset=norm_offset,
            norm_output=norm_output,
            own_embedding=not share_embedding,
            own_head=not share_head,
            chaining=chaining,
            zero_first_embedding=zero_first_embedding,
            num_assistant_tokens=_depth(config, num_modules),
            dialect=family.title,
            target_name_or_path=(config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path"),
        ),
        tuple(decisions.made),
    )


def _count_modules(checkpoint: Checkpoint) -> int:
    """How many modules the checkpoint holds; config.json and tensors must agree."""
    config, family = checkpoint.config, find_family(checkpoint.config)
    stated = stated_count(config)
    key, count = stated or ("no key", None)
    found = {tensor.index for tensor in module_tensors(config, checkpoint.tensors)} - {None}
    if not found:
        raise ValueError(
            f"{checkpoint.name} has {count or 'some'} MTP module(s) by its config.json ({key}), but its weights hold "
            f"no tensors of them ({family.layout.where}): they were left out when it was exported. Use the original "
            f"checkpoint; or, if it is to draft as a whole model, set {key} to 0 in its config.json."
        )
    if found != set(range(count or len(found))):
        raise ValueError(
            f"{checkpoint.name} contradicts itself: it has {count or 'no stated number of'} MTP module(s) by its "
            f"config.json ({key}), but its weights hold the modules {sorted(found)} ({family.layout.where})."
        )
    if is_speculators_mtp(config) and len(found) != 1:
        raise ValueError(f"{checkpoint.name} holds {len(found)} MTP modules; expected 1 in speculators' form.")
    return len(found)


def _depth(config: Mapping[str, Any], num_modules: int) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    default = num_modules if num_modules > 1 else SINGLE_MODULE_DEPTH
    return methods[0].get("speculative_tokens") or default


def _text_config(checkpoint: Checkpoint, family: MtpFamily, settle: Callable[..., Any]) -> PreTrainedConfig:
    """transformers' configuration of the layers that a checkpoint's modules are made of; `settle` notes decisions."""
    settings = dict(checkpoint.config)
    if is_speculators_mtp(settings):
        settings = dict(text_settings(settings))
        rope = rope_by_layer_type(settings.get("rope_parameters") or {}).get("sliding_attention")
        if rope is not None:
            settings["rope_parameters"] = rope
            settle("rope_parameters", rope, "speculators' layers all have the RoPE of the target's sliding ones")
    model_type = settings.pop("model_type", None)
    # Each is known to transformers under one of the two: MiMo-7B not under its own name.
    known = model_type if model_type in CONFIG_MAPPING else family.block
    if known not in CONFIG_MAPPING:
        raise ValueError(
            f"{checkpoint.name} has MTP modules of model_type {model_type!r}, whose decoder layers ({family.block}) "
            f"transformers {transformers.__version__} does not have; a newer one may."
        )
    return CONFIG_MAPPING[known].from_dict(settings).get_text_config()


def _block(text: PreTrainedConfig, published: Mapping[str, Any], num_modules: int) -> dict[str, Any]:
    """`block_settings`, with what a published configuration lists for the modules behind the target's layers."""
    block, num_layers = block_settings(text, num_modules), text.num_hidden_layers
    lists = {name: value for name, value in published.items() if name in block and isinstance(value, list)}
    longer = {name: value[num_layers:] for name, value in lists.items() if len(value) == num_layers + num_modules}
    return block | longer


def block_settings(text: PreTrainedConfig, num_modules: int) -> dict[str, Any]:
    """The settings of a decoder that has one layer for each of `num_modules` modules and is otherwise like `text`.

    A module's layer is a full-attention one with experts where the target has any, unless the configuration says
    otherwise (`mtp_layer_types`, `mtp_mlp_layer_types`).

    Raises:
        ValueError: `text` does not say how many layers there are under the usual name.
    """
    settings = text.to_dict()
    if "num_hidden_layers" not in settings:
        raise ValueError(
            f"Layers of model_type {text.model_type!r} cannot be those of MTP modules: its configuration has no "
            "num_hidden_layers."
        )
    kinds = getattr(text, "mtp_layer_types", None) or ["full_attention"] * num_modules
    changes: dict[str, Any] = {
        "num_hidden_layers": num_modules,
        "layer_types": kinds,
        "mlp_layer_types": getattr(text, "mtp_mlp_layer_types", None) or ["sparse"] * num_modules,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        # Neither an embedding nor a head is built.
        "vocab_size": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # What it holds for each layer is derived anew from the layers' types.
    for name in ("per_layer_config", "num_nextn_predict_layers", "num_mtp_layers", "architectures", "auto_map"):
        settings.pop(name, None)
    return settings | {name: value for name, value in changes.items() if name in settings}


def config_for(text: PreTrainedConfig, block: dict[str, Any], **settings: Any) -> MtpConfig:
    """The configuration of modules for a target.

    Args:
        text: the target's text configuration.
        block: of the modules' decoder layers, from `block_settings` of the target, or like it with other MLPs.
        settings: further fields of `MtpConfig`.
    """
    return MtpConfig(
        block=block,
        num_modules=block["num_hidden_layers"],
        hidden_size=text.hidden_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", MtpConfig.rms_norm_eps),
        initializer_range=getattr(text, "initializer_range", MtpConfig.initializer_range),
        vocab_size=text.vocab_size,
        **settings,
    )


def build_decoder(block: PreTrainedConfig) -> PreTrainedModel:
    """transformers' model of the layers that `block` describes, without embedding and final norm.

    Raises:
        ValueError: transformers has none, or one whose layers are not handed their RoPE.
    """
    if type(block) in MODEL_MAPPING:
        decoder_class = MODEL_MAPPING[type(block)]
    elif block.model_type == "step3p5":  # Only the model with a vision tower around it is in the mapping.
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel as decoder_class
    else:
        raise ValueError(
            f"transformers {transformers.__version__} has no decoder layers of model_type {block.model_type!r}."
        )
    decoder = decoder_class(block)
    if not hasattr(decoder, "rotary_emb"):
        raise ValueError(
            f"Layers of model_type {block.model_type!r} cannot be those of MTP modules: {decoder_class.__name__} has "
            "no rotary_emb; expected one that embeds positions for all its layers."
        )
    decoder.embed_tokens = decoder.norm = None
    decoder.set_attn_implementation(ATTENTION_NAME)
    return decoder


class MtpFrame(nn.Module):
    """What a module has around its decoder layer."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        width, norm = config.hidden_size, Qwen3NextRMSNorm if config.norm_offset else LlamaRMSNorm
        self.hidden_first = config.hidden_first
        self.embedding_norm = norm(width, eps=config.rms_norm_eps)
        self.hidden_norm = norm(width, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.final_norm = norm(width, eps=config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False) if config.own_head else None

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the decoder layer reads, `[B, n, H]`."""
        pair = [self.embedding_norm(embeds), self.hidden_norm(hidden)]
        return self.projection(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))


@dataclass
class MtpMemory(DraftMemory):
    """What MTP modules keep through a generation.

    Attributes:
        later_caches: of modules that are applied again, see `MtpDrafter`.
        hidden: `[B, K + 1, H]`, the target's hidden states of each row's last slots, the newest last.
        whole: `[B]` int64, K + 1: how many columns of a round's first pass hold a token.
    """

    later_caches: list[RaggedCache]
    hidden: torch.Tensor
    whole: torch.Tensor

    def remember(self, hidden: torch.Tensor, count: torch.Tensor) -> None:
        """Append the first `count` `[B]` of each row's `[B, n, H]` hidden states."""
        known = torch.cat([self.hidden, hidden.to(self.hidden.dtype)], dim=1)
        columns = count[:, None] + torch.arange(self.hidden.shape[1], device=count.device)
        self.hidden.copy_(known.gather(1, columns[..., None].expand(-1, -1, known.shape[2])))


@register_drafter
class MtpDrafter(CachedDrafter):
    """MTP modules of a target.

    Module k at slot p pairs a hidden state with the embedding of the token at position p + k + 1, has RoPE position p,
    and predicts the token at position p + k + 2. Module 0 reads the target's hidden state at p, after its final norm.
    Step k of a round runs module k % n of n. What the others read is `config.chaining`:

    * `"modules"`: module k reads what module k - 1 made of slot p, as in training. All steps of a round end at the slot
      before the newest token. A module that is applied again in a round is another module with the same weights: it has
      a cache of its own. vLLM runs several modules so, and transformers' `use_mtp=True`.
    * `"target"`: every module is run as module 0 on the tokens that are committed, so its cache is refreshed with the
      target's hidden states. Behind these a draft counts as a committed token, and what a module made of the slot that
      it was drafted from as the hidden state there. So step k ends k slots further. vLLM and SGLang run a single module
      so.

    With one module and K = 1 the two are the same.

    With `"modules"`, slots of module k that read a draft are wrong once it is rejected. They begin at most K slots
    before the newest token, and the slots that a round adds at most K + 1 before it. So every round runs the last K + 1
    slots again, with the committed tokens and the target's hidden states, which the memory keeps for as many slots:
    mending makes no pass wider. vLLM packs the slots to be mended into those that a rejection left unused; here the
    window is the same whatever was accepted, and with `"target"`, too.
    """

    config_class = MtpConfig
    shift = 1

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        self.decoder = build_decoder(AutoConfig.for_model(**(config.block or {})))
        self.frames = nn.ModuleList([MtpFrame(config) for _ in range(config.num_modules)])
        takes_type = "layer_type" in inspect.signature(self.decoder.rotary_emb.forward).parameters
        self._layer_types = self.decoder.config.layer_types if takes_type else None
        self.post_init()

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: MtpConfig) -> None:
        if _is_own(checkpoint):
            super().check_checkpoint(checkpoint, config)
            return
        scales = [name for name in checkpoint.tensors if "scale" in name.rpartition(".")[2]]
        if scales:
            raise ValueError(
                f"The MTP modules of {checkpoint.name} are quantised (they have {scales[0]}); expected weights in "
                "bfloat16, float16 or float32. Use a checkpoint whose modules are not quantised."
            )
        experts = missing_experts(module_tensors(checkpoint.config, checkpoint.tensors))
        checkpoint.refuse_tensors(missing=experts, unexpected=(), reshaped=())
        blanks = {
            name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta")
            for name, tensor in checkpoint.tensors.items()
        }
        with checkpoint.building():
            _, info = cls._load(checkpoint, config, blanks, device_map="meta", ignore_mismatched_sizes=True)
        checkpoint.check_loaded(info)

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: MtpConfig, **options: Any) -> MtpDrafter:
        if _is_own(checkpoint):
            return super().load_checkpoint(checkpoint, config, **options)
        options.pop("use_safetensors", None)
        drafter, info = cls._load(checkpoint, config, checkpoint.read_all(), **options)
        checkpoint.check_loaded(info)
        return drafter

    @classmethod
    def _load(
        cls, checkpoint: Checkpoint, config: MtpConfig, weights: Mapping[str, torch.Tensor], **options: Any
    ) -> tuple[MtpDrafter, Mapping[str, Any]]:
        """A drafter with `weights` under their published names, and transformers' loading info."""
        shared = {"share_head": not config.own_head, "share_embedding": not config.own_embedding}
        # What all modules share becomes each one's own, as a saved checkpoint must have it.
        state = {
            name: weights[tensor.published] if tensor.index is not None else weights[tensor.published].clone()
            for tensor in needed_tensors(checkpoint.config, weights, shared)
            for name in tensor.names(config.num_modules)
        }
        with quiet_loading():
            return cls.from_pretrained(None, config=config, state_dict=state, output_loading_info=True, **options)

    @property
    def sharing_modules(self) -> list[nn.Module]:
        return list(self.frames)

    @property
    def reads_last_hidden_state(self) -> bool:
        return True

    @property
    def num_cached_layers(self) -> int:
        return self.config.num_modules

    @property
    def _chains_modules(self) -> bool:
        return self.config.chaining == "modules"

    @torch.inference_mode(False)  # a gathered or dequantised weight is kept
    def bind(self, target: PreTrainedModel) -> None:
        config, name = self.config, f"{type(self).__name__} ({self.config.name_or_path or 'unnamed'})"
        check_sizes(config.hidden_size, config.vocab_size, target.config, name)
        loans = {}
        if not config.own_embedding:
            loans["embedding"] = SharedWeight(target.get_input_embeddings(), "embedding", config.hidden_size, name)
        if not config.own_head:
            loans["head"] = SharedWeight(target.get_output_embeddings(), "head", config.hidden_size, name)
        check_aux_hidden_states(target, [], True, config.hidden_size, name)
        if self.decoder._can_set_experts_implementation():
            self.decoder.set_experts_implementation(original_experts_implementation(target))
        self._shared_weights = loans
        self._note_binding(target)

    def new_memory(self, state: DecodeState) -> MtpMemory:
        memory = super().new_memory(state)
        batch, width = memory.inputs.tokens.shape
        device, num_modules = state.lengths.device, self.config.num_modules
        num_caches = -(-state.num_draft_tokens // num_modules) if self._chains_modules else 1
        return MtpMemory(
            memory.cache,
            memory.inputs,
            memory.draft_ids,
            [RaggedCache(num_modules, state.slots, state.draft_starts) for _ in range(num_caches - 1)],
            torch.zeros(batch, width, self.config.hidden_size, dtype=self.dtype, device=device),
            torch.full((batch,), width, dtype=torch.int64, device=device),
        )

    def run(
        self, state: DecodeState, step: int, tokens: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the module of `step` over `[B, n]` slots.

        Args:
            state: its memory's caches are told where to write.
            step: of the round, 0 to K - 1.
            tokens: `[B, n]` int64 to embed.
            slots: `[B, n]` int64.
            hidden: `[B, n, H]` beside the embeddings.

        Returns:
            what the head reads and what is handed on, both `[B, n, H]`.
        """
        cycle, index = divmod(step, self.config.num_modules)
        memory = state.memory
        cache = memory.later_caches[cycle - 1] if cycle > 0 and self._chains_modules else memory.cache
        cache.advance(slots, state.live)
        return self._run_module(
            index,
            tokens,
            slots,
            state.position_ids(slots),
            hidden,
            attention_mask=cache.attention_mask(slots),
            past_key_values=cache,
            use_cache=True,
        )

    def _run_module(
        self,
        index: int,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        **attention: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Module `index` over `[B, n]` slots, as for `run`; `attention` is what its attention is called with."""
        frame = self.frames[index]
        weight = self._shared_weights["embedding"].weight if frame.embed_tokens is None else frame.embed_tokens.weight
        embeds = embed(tokens, weight, self.dtype)
        if self.config.zero_first_embedding:
            embeds = torch.where(slots[..., None] == 0, 0.0, embeds)
        inputs = frame(embeds, hidden)
        output = self.decoder.layers[index](
            inputs,
            position_ids=positions,
            position_embeddings=self._rotary(index, inputs, positions),
            **attention,
        )
        normed = frame.final_norm(output)
        return normed, normed if self.config.norm_output else output

    def _rotary(self, index: int, inputs: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of module `index` for `[B, n]` positions."""
        rotary = self.decoder.rotary_emb
        if self._layer_types is not None:
            return rotary(inputs, positions, layer_type=self._layer_types[index])
        # M-RoPE: a text's tokens have the same position in all three rows.
        return rotary(inputs, positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions)

    def logits(self, step: int, normed: torch.Tensor) -> torch.Tensor:
        """`[..., H]` after the final norm to `[..., V]`, by the head of the module of `step`."""
        head = self.frames[step % self.config.num_modules].lm_head
        weight = self._shared_weights["head"].weight if head is None else head.weight
        return score(normed, weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """`[V, H]`, the target's, or the head of a single module.

        Raises:
            ValueError: there are several modules, and each has a head of its own.
        """
        if not self.config.own_head:
            return self._shared_weights["head"].weight
        if len(self.frames) > 1:
            raise ValueError(
                f"{type(self).__name__} ({self.config.name_or_path or 'unnamed'}) cannot be trained here: each of its "
                f"{len(self.frames)} modules has a head of its own; expected own_head = False, or a single module."
            )
        return self.frames[0].lm_head.weight

    def unroll(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        num_steps: int,
        rows: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        rows = [len(input_ids)] * num_steps if rows is None else rows
        unrolled = self._unroll_by_modules if self._chains_modules else self._unroll_by_target
        with registered_attention(self.decoder, UNROLLED_NAME):
            return unrolled(input_ids, aux_hidden_states.to(self.dtype), rows[:num_steps])

    def _unroll_by_modules(self, tokens: torch.Tensor, hidden: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        """`unroll`: a step runs all slots once, with what the step before made of them, in a cache of its own."""
        slots, outputs = torch.arange(tokens.shape[1], device=tokens.device)[None], []
        for step, count in enumerate(rows):
            tokens, hidden, index = following(tokens[:count]), hidden[:count], step % self.config.num_modules
            normed, hidden = self._unroll_module(index, tokens, slots, hidden, UnrolledAttention())
            outputs.append(normed)
        return outputs

    def _unroll_by_target(self, tokens: torch.Tensor, hidden: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        """`unroll`: a step's module first reads what chains of it lack, from the target's hidden states onwards."""
        slots, outputs = torch.arange(tokens.shape[1], device=tokens.device)[None], []
        attend, chains = UnrolledAttention(), []
        for step, count in enumerate(rows):
            tokens = following(tokens[:count])
            chains = [(read[:count], beside[:count]) for read, beside in (*chains, (tokens, hidden))]
            for ahead in range(max(step - self.config.num_modules + 1, 0), step + 1):
                read, beside = chains[ahead]
                index = step % self.config.num_modules
                normed, hidden = self._unroll_module(index, read, slots + ahead, beside, attend)
            outputs.append(normed)
        return outputs

    def _unroll_module(
        self, index: int, tokens: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor, attend: UnrolledAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run_module(index, tokens, slots, slots, hidden, attention_mask=None, attend=attend)

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor, positions: torch.Tensor) -> None:
        hidden, num_drafts = aux_hidden_states.to(self.dtype), state.num_draft_tokens
        for step in range(num_drafts if self._chains_modules else min(num_drafts, self.config.num_modules)):
            ahead = step if self._chains_modules else 0
            tokens = state.tokens.gather(1, (positions + self.shift + ahead).clamp(max=state.dummy_slot))
            _, handed_on = self.run(state, step, tokens, positions, hidden)
            if self._chains_modules:
                hidden = handed_on
        # The last of them comes once more, with the round that prefill makes of the prompt's last token.
        state.memory.remember(aux_hidden_states, (positions < state.lengths[:, None] - 2).sum(dim=1))

    def propose(self, state: DecodeState, aux_hidden_states: torch.Tensor, result: VerificationResult) -> Proposal:
        memory = state.memory
        memory.remember(aux_hidden_states, result.committed)
        ops.prepare_inputs(
            state.tokens,
            state.lengths,
            memory.whole,
            state.limits,
            state.finished,
            memory.inputs,
            num_masks=0,
            mask_token=0,
            shift=self.shift,
        )
        drafts = self._draft_by_modules(state) if self._chains_modules else self._draft_by_target(state)
        return self.join(state, drafts)

    def _draft_by_modules(self, state: DecodeState) -> list[Proposal]:
        tokens, slots, hidden = state.memory.inputs.tokens, state.memory.inputs.slots, state.memory.hidden
        drafts = []
        for step in range(state.num_draft_tokens):
            normed, hidden = self.run(state, step, tokens, slots, hidden)
            drafts.append(self.draw(state, self.logits(step, normed[:, -1:]), first=step))
            tokens = torch.cat([tokens[:, 1:], drafts[-1].tokens], dim=1)
        return drafts

    def _draft_by_target(self, state: DecodeState) -> list[Proposal]:
        tokens, slots, hidden = state.memory.inputs.tokens, state.memory.inputs.slots, state.memory.hidden
        width, num_modules = tokens.shape[1], self.config.num_modules
        drafts = []
        for step in range(state.num_draft_tokens):
            # A module that ran before in this round lacks the slots since then, the others all.
            new = slice(0 if step < num_modules else width + step - num_modules, None)
            normed, handed_on = self.run(state, step, tokens[:, new], slots[:, new], hidden[:, new])
            drafts.append(self.draw(state, self.logits(step, normed[:, -1:]), first=step))
            tokens = torch.cat([tokens, drafts[-1].tokens], dim=1)
            slots = torch.cat([slots, state.slot_of(state.lengths - self.shift + step)[:, None]], dim=1)
            hidden = torch.cat([hidden, handed_on[:, -1:]], dim=1)
        return drafts


def _is_own(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is in the normal form that `save_pretrained` writes."""
    return checkpoint.config.get("model_type") == MtpConfig.model_type
