"""Causal language models as drafters, sequential or trained to draft in parallel (PARD, arXiv 2504.18583)."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.layer_kinds import LayerKinds, Use
from ..checkpoints.checkpoint import Checkpoint, quiet_loading
from ..checkpoints.mtp_layouts import module_names
from ..checkpoints.read_models import auto_class
from ..config import DraftModelConfig
from ..kernels.types import Columns
from ..modules.hidden_states import decoder_of, text_decoder
from ..modules.stored_linear import keep_stored
from ..patching.attention import set_ragged_attention
from ..patching.masked_attention import why_not_masked
from ..patching.stored_checkpoints import stored_options
from ..patching.support import (
    cache_layers,
    cache_name,
    cache_windows,
    num_positions,
    position_markers,
    registered_attention,
    uses_attention_interface,
    why_not_supported,
    why_not_used,
)
from ..state import DecodeState
from .base import Reads
from .cached import CachedDrafter, Outputs
from .unrolled import UNROLLED_NAME, UnrolledAttention

# Largest difference of logits, relative to their spread, if attention takes a mask; rounding in any dtype is below.
DIFFERENCE_LIMIT = 0.25


def load_language_model(
    checkpoint: Checkpoint, config: DraftModelConfig, ignored: Collection[str] = (), **options: Any
) -> PreTrainedModel:
    """The language model of a checkpoint; `options` are those of `PreTrainedModel.from_pretrained`. Raises `ValueError`
    if a tensor is missing, or is unexpected and neither `ignored` nor one of MTP modules, which a draft model does not
    use."""
    model, info = auto_class(config.model_config).from_pretrained(
        checkpoint.folder,
        variant=checkpoint.variant,
        output_loading_info=True,
        trust_remote_code=False,
        **stored_options(checkpoint.config) | options,
    )
    unexpected = set(info["unexpected_keys"])
    unexpected -= module_names(checkpoint.config, unexpected) | set(ignored)
    checkpoint.check_differences(info["missing_keys"], unexpected, info["mismatched_keys"], info["error_msgs"])
    return model


# Options to load a model without its weights, to check names of tensors, which only transformers can map.
WITHOUT_WEIGHTS = {"device_map": "meta", "ignore_mismatched_sizes": True}


def _check_supported(model: PreTrainedModel, name: str) -> None:
    """Raise `ValueError` unless the model can run on a `RaggedCache`; `name` is the drafter's, or empty."""
    obstacle = why_not_supported(model, role="the draft model")
    if obstacle is None and not uses_attention_interface(model) and model.device.type != "meta":
        obstacle = why_not_masked(model, DIFFERENCE_LIMIT)
    if obstacle is not None:
        kind = type(model).__name__
        raise ValueError(
            f"{f'{name} ({kind})' if name else kind} cannot draft here, where drafters run on a static cache: "
            f"{obstacle}. Load it with AutoModelForCausalLM and pass that as assistant_model; transformers supports it "
            "itself."
        )


class DraftModelDrafter(CachedDrafter):
    """An `AutoModelForCausalLM` checkpoint that drafts from tokens alone.

    Slot p holds token p and predicts token p + 1. With `config.parallel_drafting` (PARD) the K - 1 slots after the
    newest token hold the mask token, and one pass drafts K tokens.

    The attention of `model` is replaced by attention over the drafter's cache; `model` is None for random weights.
    """

    config_class = DraftModelConfig
    # Names of tensors in the files that belong to the drafter and not to the model.
    own_tensors: frozenset[str] = frozenset()
    follows_target_positions = False

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel | None = None):
        super().__init__(config)
        if model is None:
            model = auto_class(config.model_config).from_config(config.model_config)
        keep_stored(model)
        _check_supported(model, config.name_or_path)
        set_ragged_attention(model)
        self.model = model
        config.model = config.model or model.config.to_dict()
        self._num_embeddings = model.config.get_text_config().vocab_size
        self._num_positions = num_positions(model)
        self._position_markers = position_markers(model)
        self._cache_name = cache_name(model)
        self._packs_prompts = model.device.type != "meta" and why_not_used(model, Use.PACKING) is None

    def prefix_margin(self, num_draft_tokens: int, has_trees: bool = False) -> int | None:
        is_reused = why_not_used(self.model, Use.PREFIX_REUSE) is None
        return 0 if is_reused else None  # a slot depends on the tokens up to its own

    @property
    def packs_prompts(self) -> bool:
        return self._packs_prompts

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: DraftModelConfig) -> None:
        with quiet_loading():
            model = load_language_model(checkpoint, config, cls.own_tensors, **WITHOUT_WEIGHTS)
        _check_supported(model, checkpoint.name)

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: DraftModelConfig, **options: Any) -> DraftModelDrafter:
        return cls(config, load_language_model(checkpoint, config, cls.own_tensors, **options))

    @property
    def grows_trees(self) -> bool:
        return why_not_used(self.model, Use.TREES) is None

    @property
    def smallest_window(self) -> int | None:
        windows = () if self.config.parallel_drafting else cache_windows(self.model)
        return min(filter(None, windows), default=None)

    @property
    def cached_layers(self) -> LayerKinds:
        return cache_layers(self.model)

    @property
    def attention_config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config()

    def round_reads(self, num_draft_tokens: int) -> Reads:
        embedding = list(map(id, self.model.get_input_embeddings().parameters()))
        decoder = [one for one in text_decoder(self.model).parameters() if id(one) not in embedding]
        passes = self.num_passes(num_draft_tokens)
        return passes, [(passes, [*decoder, *self.model.get_output_embeddings().parameters()])]

    def _fit(self, target: PreTrainedModel) -> None:
        DraftModelConfig.check_fit(self.config, target.config, 0, self.title)  # PARD-2 has already checked its layers
        self.config.vocab_size = target.config.get_text_config().vocab_size
        self.config.draft_vocab_size = min(self.config.vocab_size, self._num_embeddings)

    def model_inputs(self, tokens: torch.Tensor, hidden: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The model's inputs for `tokens` `[B, n]` int64 and, for PARD-2, their hidden states `[B, n, H]`."""
        return {"input_ids": tokens}

    def extend_cache(self, state: DecodeState, columns: Columns, num_logits: int) -> Outputs:
        cache = state.memory.cache
        cache.advance(columns.slots, state.live)
        positions = columns.positions
        if self._num_positions is not None:  # the target may support more positions; drafts beyond are only worse
            positions = positions.clamp(max=self._num_positions - 1)
        for mark in self._position_markers:
            positions = mark(positions, state.prompt_lengths, state.prompt_length_gap)
        logits = self.model(
            # The target may have tokens that this model cannot embed; any token may stand in for them.
            **self.model_inputs(columns.tokens.clamp(max=self._num_embeddings - 1), columns.hidden),
            attention_mask=cache.attention_mask(columns.slots),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=num_logits or 1,
            return_dict=True,
            **{self._cache_name: cache},
        ).logits
        # Classes without `logits_to_keep` compute logits of all tokens.
        return logits[:, -num_logits:, : self.config.draft_vocab_size] if num_logits else None, None

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight `[V_d, H]` of the model's head. Raises `ValueError` if the model cannot be trained here, or if the
        logits have a bias, scale or soft cap besides the product with the weight."""
        head, text = self.model.get_output_embeddings(), self.model.config.get_text_config()
        factors = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
        found = [name for name in factors if getattr(text, name, None) not in (None, 1.0)]
        if getattr(head, "bias", None) is not None:
            found.append("bias of the head")
        if not uses_attention_interface(self.model):
            raise ValueError(
                f"{type(self.model).__name__} cannot be trained here: it does not use transformers' attention "
                "interface, through which training attends; expected a draft model of a class that does."
            )
        if found:
            raise ValueError(f"{type(self.model).__name__} cannot be trained here: its logits have {', '.join(found)}.")
        return head.weight[: self.config.draft_vocab_size]

    def unroll(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor | None, num_steps: int, *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        if num_steps > 1 and (reason := self.cached_layers.why_not(Use.UNROLLED_STEPS)) is not None:
            raise ValueError(f"{type(self.model).__name__} cannot be trained in {num_steps} steps: it has {reason}.")
        return super().unroll(input_ids, aux_hidden_states, num_steps, *args, **kwargs)

    def unroll_step(self, columns: Columns, attend: UnrolledAttention, num_outputs: int) -> tuple[torch.Tensor, None]:
        with registered_attention(self.model, UNROLLED_NAME):
            inputs = self.model_inputs(columns.tokens, columns.hidden)
            output = decoder_of(self.model)(**inputs, position_ids=columns.positions, use_cache=False, attend=attend)
        return output.last_hidden_state[:, -num_outputs:], None

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the model as transformers does, so that `AutoModelForCausalLM` loads it, too.

        With a mask token config.json has PARD's keys: `parallel_drafting` says whether the mask token is used, and
        `para_num` is the number of tokens drafted at once.
        """
        own = self.model.config
        if self.config.mask_token_id is not None:
            own.update({"pard_token": self.config.mask_token_id, "spd_type": "pard"})
        if getattr(own, "spd_type", None) == "pard":
            own.update({"parallel_drafting": self.config.parallel_drafting})
        if self.config.parallel_drafting:
            own.update({"para_num": self.config.num_assistant_tokens})
        self.model.save_pretrained(save_directory, **kwargs)
