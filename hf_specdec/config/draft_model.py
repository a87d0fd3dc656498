"""Configuration of draft models."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from .base import DrafterConfig


class DraftModelConfig(DrafterConfig):
    """A causal language model as drafter, sequential (arXiv 2211.17192) or parallel (PARD, arXiv 2504.18583).

    Args:
        model: settings of the model's own configuration, with its `model_type`.
    """

    model_type = "hf_specdec_draft_model"
    family = "draft model"

    model: dict | None = None

    @property
    def model_config(self) -> PreTrainedConfig:
        """The model's own configuration, as transformers' class."""
        return AutoConfig.for_model(**(self.model or {}))

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size if self.model is None else self.model_config.get_text_config().vocab_size
