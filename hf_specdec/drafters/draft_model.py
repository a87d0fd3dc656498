"""Causal language models as drafters: sequential, or parallel as PARD (arXiv 2504.18583) trains them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..attention import ATTENTION_NAME
from ..config import DraftModelConfig
from ..hosting import why_not_hosted
from ..taps import decoder_layers
from .base import register_drafter
from .cached import CachedDrafter
from .checkpoints import Checkpoint
from .dialects import Decision, Reading

if TYPE_CHECKING:
    from ..state import DecodeState

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


def read_draft_model(checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]) -> Reading:
    """Read the config.json of a causal language model: PARD if it names a mask token.

    Args:
        checkpoint: what was published.
        target: the target's configuration, if there is a target.
        overrides: by their keywords in `AutoDrafter.from_pretrained`.

    Raises:
        ValueError: the configuration contradicts itself, or an override does not apply.
    """
    own, decisions = checkpoint.config, []
    unknown = overrides.keys() - {"mask_token_id", "parallel_drafting"}
    if unknown:
        raise ValueError(f"{checkpoint.name} is a draft model: it has no {', '.join(sorted(unknown))}.")

    def settle(name: str, value: Any, rule: str) -> Any:
        if name in overrides:
            value, rule = overrides[name], "given by the caller"
        decisions.append(Decision(name, value, rule))
        return value

    token, is_pard = own.get("pard_token"), own.get("spd_type") == "pard" or own.get("pard_token") is not None
    if token is not None and token < 0:  # Its trainer's way to say that none was configured.
        token = None
    rule = "pard_token of config.json" if token is not None else "config.json has no pard_token"
    mask_token_id = settle("mask_token_id", token, rule)
    rule = "config.json says PARD (pard_token, spd_type)" if is_pard else "config.json has no pard_token"
    parallel = settle("parallel_drafting", is_pard, rule)
    if parallel and mask_token_id is None:
        raise ValueError(
            f"{checkpoint.name} is to draft in parallel, but its config.json names no mask token: pard_token is "
            f"{own.get('pard_token')!r}. Pass `mask_token_id=` with the id that it was trained with, or "
            "`parallel_drafting=False`."
        )
    model = AutoConfig.for_model(**own)
    size = model.get_text_config().vocab_size
    config = DraftModelConfig(
        model=model.to_dict(),
        vocab_size=size if target is None else target.get_text_config().vocab_size,
        draft_vocab_size=size if target is None else check_vocabulary(size, target, checkpoint.name),
        parallel_drafting=parallel,
        mask_token_id=mask_token_id,
        num_assistant_tokens=PARD_DEPTH if parallel else DraftModelConfig.num_assistant_tokens,
        dialect="PARD" if is_pard else "transformers",
    )
    return Reading(config, tuple(decisions))


@register_drafter
class DraftModelDrafter(CachedDrafter):
    """An `AutoModelForCausalLM` checkpoint that drafts from tokens alone.

    Slot p holds token p and predicts token p + 1. With `config.parallel_drafting` (PARD) the K - 1 places after the
    newest token hold the mask token, and one pass drafts K tokens.

    Args:
        config: holds the model's own configuration.
        model: the model; None for one with random weights.
    """

    config_class = DraftModelConfig

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel | None = None):
        super().__init__(config)
        if model is None:
            own = AutoConfig.for_model(**(config.model or {}))
            model = AutoModelForCausalLM.from_config(own, attn_implementation=ATTENTION_NAME)
        self.model = model
        obstacle = why_not_hosted(model, role="the draft model")
        if obstacle is not None:
            raise ValueError(
                f"{type(model).__name__} cannot draft here, where drafters run on a static cache: {obstacle}. Load it "
                "with AutoModelForCausalLM and pass that as assistant_model; transformers supports it itself."
            )

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: DraftModelConfig, **options: Any) -> DraftModelDrafter:
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, attn_implementation=ATTENTION_NAME, output_loading_info=True, **options
        )
        checkpoint.check_loaded(info)
        return cls(config, model)

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: DraftModelConfig) -> None:
        """The names in such files are transformers' to know: `load_checkpoint` checks them."""

    @property
    def num_cached_layers(self) -> int:
        return len(decoder_layers(self.model))

    def bind(self, target: PreTrainedModel) -> None:
        name = f"{type(self).__name__} ({self.config.name_or_path or 'unnamed'})"
        shared = check_vocabulary(self.config.num_embeddings, target.config, name)
        self.config.vocab_size = target.config.get_text_config().vocab_size
        self.config.draft_vocab_size = shared
        self._target_config = target.config

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
        logits = self.model(
            # The target may know tokens that this model cannot embed; any other drafts as badly after them.
            input_ids=tokens.clamp(max=self.model.config.get_text_config().vocab_size - 1),
            attention_mask=slots[:, None, :, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_logits or 1,
            return_dict=True,
        ).logits
        return logits[..., : self.config.draft_vocab_size] if num_logits else None, None

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write an ordinary checkpoint of the model, with `pard_token` in its config.json if it drafts in parallel."""
        if self.config.parallel_drafting:
            self.model.config.pard_token = self.config.mask_token_id
            self.model.config.spd_type = "pard"
        self.model.save_pretrained(save_directory, **kwargs)
