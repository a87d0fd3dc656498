"""Checkpoints of Gemma 4's assistants, read into the normal form `CacheReaderConfig`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..config import CacheReaderConfig
from .checkpoint import Checkpoint
from .decisions import Decisions, NormalizedConfig
from .draft_model import read_language_model
from .overrides import check_not_given

GENERATION_CONFIG_FILE = "generation_config.json"


def read_cache_reader(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read the config.json of an assistant, and K from its generation_config.json.

    Args:
        checkpoint: as published.
        target: the target's text configuration, if there is a target. `bind` checks whether it fits.
        overrides: see `Overrides`.

    Raises:
        ValueError: expected an assistant that transformers knows, and no overrides.
    """
    check_not_given(overrides, overrides, checkpoint.name, CacheReaderConfig.family)
    model, decisions = read_language_model(checkpoint), Decisions(overrides)
    stated = _stated_k(checkpoint)
    size = model.get_text_config().vocab_size
    config = CacheReaderConfig(
        model=model.to_dict(),
        vocab_size=size,
        num_assistant_tokens=CacheReaderConfig.num_assistant_tokens if stated is None else stated,
        dialect="transformers",
    )
    return NormalizedConfig(config, tuple(decisions.made))


def _stated_k(checkpoint: Checkpoint) -> int | None:
    """`num_assistant_tokens` of the checkpoint's generation settings; None if they are not there or do not state it."""
    file = checkpoint.folder / GENERATION_CONFIG_FILE
    stated = json.loads(file.read_text()) if file.is_file() else {}
    return stated.get("num_assistant_tokens") if isinstance(stated, Mapping) else None
