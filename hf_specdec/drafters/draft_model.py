"""Causal language models as drafters: sequential, or parallel as PARD (arXiv 2504.18583) trains them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..checkpoints.checkpoint import Checkpoint, quiet_loading
from ..checkpoints.dialects import CheckpointReader, Decisions, check_mask_token
from ..checkpoints.mtp_layouts import holds_modules, module_names
from ..config import DraftModelConfig
from ..patching.attention import ATTENTION_NAME, registered_attention
from ..patching.support import num_cache_layers, num_positions, why_not_supported
from ..state import DecodeState
from ..training.unrolled import UNROLLED_NAME, UnrolledAttention, following
from .base import register_drafter
from .cached import CachedDrafter

# Families of checkpoints pad one vocabulary to different multiples (Qwen2.5: 151936 and 152064). Sizes that are
# farther apart than any such padding are those of different tokenizers.
LARGEST_PADDING = 1024

# Trained depth of the published PARD drafters (AMD-AIG-AIMA/PARD, `para_num` of its example configurations).
PARD_DEPTH = 8


def check_vocabulary(own: int, target: PreTrainedConfig, name: str) -> int:
    """Check that a draft model called `name` with `own` tokens has the vocabulary of `target`.

    Returns:
        how many tokens both can say.

    Raises:
        ValueError: the sizes differ by more than padding.
    """
    size = target.get_text_config().vocab_size
    if abs(size - own) >= LARGEST_PADDING:
        raise ValueError(
            f"{name} has a vocabulary of {own} tokens, but {target.name_or_path or target.model_type} has {size}; "
            f"expected sizes that differ by padding only (less than {LARGEST_PADDING}): it was made for another "
            "tokenizer."
        )
    return min(size, own)


def read_draft_model(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> CheckpointReader:
    """Read the config.json of a causal language model: PARD if it names a mask token.

    Args:
        checkpoint: what was published.
        target: the target's configuration, if there is a target. Whether the vocabularies fit is for `bind` to say.
        overrides: by their keywords in `AutoDrafter.from_pretrained`.

    Raises:
        ValueError: not a model that can draft, a configuration that contradicts itself, or an override that does not
            apply.
    """
    own, decisions = checkpoint.config, Decisions(overrides)
    settle = decisions.settle
    unknown = overrides.keys() - {"mask_token_id", "parallel_drafting"}
    if unknown:
        raise ValueError(
            f"{checkpoint.name} is a draft model, which reads tokens only: it has no {', '.join(sorted(unknown))}."
        )

    if holds_modules(own, checkpoint.tensors):
        settle("family", DraftModelConfig.family, _why_as_a_whole(checkpoint))
    model = read_language_model(checkpoint)
    size = model.get_text_config().vocab_size
    token = own.get("pard_token")
    is_pard, stated = own.get("spd_type") == "pard" or token is not None, own.get("parallel_drafting")
    rule = "config.json says PARD (pard_token, spd_type)" if is_pard else "config.json has no pard_token"
    rule = rule if stated is None else "config.json"
    parallel = settle("parallel_drafting", is_pard if stated is None else bool(stated), rule)
    # -1 is what PARD's trainer writes if it was told of no token.
    token = None if token == -1 else token
    if token is not None or "mask_token_id" in overrides:
        token = settle("mask_token_id", token, "pard_token of config.json")
    if parallel and token is None:
        raise ValueError(
            f"{checkpoint.name} is to draft in parallel, but its config.json names no mask token: pard_token is "
            f"{own.get('pard_token')!r}. Pass `mask_token_id=` with the id that it was trained with, or "
            "`parallel_drafting=False`."
        )
    if not parallel and "mask_token_id" in overrides:
        raise ValueError(
            f"{checkpoint.name} was given mask_token_id {token}, but it drafts token by token, where no mask token "
            "stands. Pass `parallel_drafting=True` too, if it was trained for that."
        )
    config = DraftModelConfig(
        model=model.to_dict(),
        vocab_size=size if target is None else target.vocab_size,
        draft_vocab_size=size if target is None else min(size, target.vocab_size),
        parallel_drafting=parallel,
        mask_token_id=None if token is None else check_mask_token(token, size, checkpoint.name),
        num_assistant_tokens=PARD_DEPTH if parallel else DraftModelConfig.num_assistant_tokens,
        dialect="PARD" if is_pard else "transformers",
    )
    return CheckpointReader(config, tuple(decisions.made))


def _why_as_a_whole(checkpoint: Checkpoint) -> str:
    if module_names(checkpoint.config, checkpoint.tensors):
        return "the target is another model than the one that the MTP modules in its weights are for; they are left out"
    return "its config.json speaks of MTP modules, but its weights hold none, and the target is another model"


def _check_loaded(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    """`Checkpoint.check_loaded`, but for MTP modules, which a draft model has no use for."""
    unexpected = set(info["unexpected_keys"])
    left_out = module_names(checkpoint.config, unexpected)
    checkpoint.check_loaded({**info, "unexpected_keys": unexpected - left_out})


def _check_hosted(model: PreTrainedModel, name: str) -> None:
    obstacle = why_not_supported(model, role="the draft model")
    if obstacle is not None:
        raise ValueError(
            f"{name} cannot draft here, where drafters run on a static cache: {obstacle}. Load it with "
            "AutoModelForCausalLM and pass that as assistant_model; transformers supports it itself."
        )


def read_language_model(checkpoint: Checkpoint) -> PreTrainedConfig:
    """transformers' configuration of the causal language model in `checkpoint`.

    Raises:
        ValueError: it is another kind of model, or one that transformers does not have.
    """
    model_type = checkpoint.config.get("model_type")
    found = f"{checkpoint.name} is a checkpoint of model_type {model_type!r}"
    if model_type not in CONFIG_MAPPING:
        if checkpoint.config.get("auto_map"):
            raise ValueError(
                f"{found}, which runs on code of its own ({checkpoint.config['auto_map']}). Such code is not run here; "
                "expected a model that is part of transformers."
            )
        raise ValueError(f"{found}, which transformers {transformers.__version__} does not know; a newer one may.")
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ValueError(f"{found}, an encoder-decoder; expected a decoder-only model, which continues a text.")
    if _auto_class(config) is None:
        raise ValueError(f"{found}, of which transformers has no causal language model; a draft model must be one.")
    return config


def _auto_class(config: PreTrainedConfig) -> type | None:
    """transformers' class that builds the model of `config`: a causal one, or one that also sees; None if none does."""
    mappings = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    )
    return next((auto_class for mapping, auto_class in mappings if type(config) in mapping), None)


@register_drafter
class DraftModelDrafter(CachedDrafter):
    """An `AutoModelForCausalLM` checkpoint that drafts from tokens alone.

    Slot p holds token p and predicts token p + 1. With `config.parallel_drafting` (PARD) the K - 1 places after the
    newest token hold the mask token, and one pass drafts K tokens.

    Args:
        config: holds the model's own configuration.
        model: the model, which from now on runs on the drafter's cache only; None for one with random weights.
    """

    config_class = DraftModelConfig

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel | None = None):
        super().__init__(config)
        if model is None:
            model = _auto_class(config.own).from_config(config.own)
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model
        self._num_embeddings = model.config.get_text_config().vocab_size
        self._num_positions = num_positions(model)
        _check_hosted(model, type(model).__name__)

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: DraftModelConfig) -> None:
        """As for every family; how such files' names become those of a model is transformers' to know, so it loads."""
        with quiet_loading():
            model, info = _auto_class(config.own).from_pretrained(
                checkpoint.folder,
                device_map="meta",
                use_safetensors=checkpoint.uses_safetensors,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        _check_hosted(model, f"{checkpoint.name} ({type(model).__name__})")
        _check_loaded(checkpoint, info)

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: DraftModelConfig, **options: Any) -> DraftModelDrafter:
        model, info = _auto_class(config.own).from_pretrained(
            checkpoint.folder, output_loading_info=True, trust_remote_code=False, **options
        )
        _check_loaded(checkpoint, info)
        return cls(config, model)

    @property
    def num_cached_layers(self) -> int:
        return num_cache_layers(self.model)

    def bind(self, target: PreTrainedModel) -> None:
        name = f"{type(self).__name__} ({self.config.name_or_path or 'unnamed'})"
        shared = check_vocabulary(self._num_embeddings, target.config, name)
        self.config.vocab_size = target.config.get_text_config().vocab_size
        self.config.draft_vocab_size = shared
        self._note_binding(target)

    def extend(
        self,
        state: DecodeState,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        hidden: None,
        num_logits: int,
    ) -> tuple[torch.Tensor | None, None]:
        cache = state.memory.cache
        cache.advance(slots, state.live)
        if self._num_positions is not None:  # the target's texts may be longer than this model's; drafts get worse then
            positions = positions.clamp(max=self._num_positions - 1)
        logits = self.model(
            # The target may know tokens that this model cannot embed; any other drafts as badly after them.
            input_ids=tokens.clamp(max=self._num_embeddings - 1),
            attention_mask=cache.attention_mask(slots),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_logits or 1,
            return_dict=True,
        ).logits
        return logits[..., : self.config.draft_vocab_size] if num_logits else None, None

    @property
    def head_weight(self) -> torch.Tensor:
        """`[V_d, H]`.

        Raises:
            ValueError: the model's logits are more than products with it.
        """
        head, text = self.model.get_output_embeddings(), self.model.config.get_text_config()
        factors = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
        found = [name for name in factors if getattr(text, name, None) not in (None, 1.0)]
        if getattr(head, "bias", None) is not None:
            found.append("bias of the head")
        if found:
            raise ValueError(f"{type(self.model).__name__} cannot be trained here: its logits have {', '.join(found)}.")
        return head.weight[: self.config.draft_vocab_size]

    def unroll(
        self, input_ids: torch.Tensor, aux_hidden_states: None, num_steps: int, rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        attend, decoder = UnrolledAttention(), self.model.get_decoder()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        tokens, outputs = input_ids, []
        with registered_attention(self.model, UNROLLED_NAME):
            for step in range(num_steps):
                if rows is not None:
                    tokens = tokens[: rows[step]]
                read = decoder(input_ids=tokens, position_ids=positions + step, use_cache=False, attend=attend)
                outputs.append(read.last_hidden_state)
                if not self.config.parallel_drafting:
                    tokens = following(tokens)
                elif step == 0:
                    tokens = torch.full_like(tokens, self.config.mask_token_id)
        return outputs

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write an ordinary checkpoint of the model, which AutoModelForCausalLM loads too.

        With a mask token its config.json names it as PARD's does; `parallel_drafting` says whether it is used.
        """
        own = self.model.config
        if self.config.mask_token_id is not None:
            own.update({"pard_token": self.config.mask_token_id, "spd_type": "pard"})
        if getattr(own, "spd_type", None) == "pard":
            own.update({"parallel_drafting": self.config.parallel_drafting})
        self.model.save_pretrained(save_directory, **kwargs)
