"""Configuration of drafters that read the target's cache."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from .base import DrafterConfig


class CacheReaderConfig(DrafterConfig):
    """A drafter whose layers attend to the target's keys and values: Google's assistants of Gemma 4.

    Args:
        model: settings of the assistant's own configuration, with its `model_type`.
    """

    model_type = "hf_specdec_cache_reader"
    family = "Gemma 4 assistant"

    model: dict | None = None

    @property
    def model_config(self) -> PreTrainedConfig:
        """The assistant's own configuration, as transformers' class."""
        return AutoConfig.for_model(**(self.model or {"model_type": "gemma4_assistant"}))
