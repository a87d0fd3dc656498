"""Drafter configurations: the normal form that checkpoints of every dialect are read into and that is saved."""

from .base import (
    AUTO,
    DEFAULT_ROPE_THETA,
    MAX_ASSISTANT_TOKENS,
    DrafterConfig,
    check_num_assistant_tokens,
    check_num_or_auto,
    check_types,
)
from .cache_reader import CacheReaderConfig
from .draft_layers import (
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DraftLayersConfig,
    DSparkConfig,
    Eagle3Config,
    PEagleConfig,
    default_aux_layer_ids,
    default_block_layer_ids,
)
from .draft_model import (
    DraftModelConfig,
    Pard2Config,
)
from .mtp import (
    CHAININGS,
    MtpConfig,
    default_chaining,
    mtp_block_settings,
)

__all__ = [
    "AUTO",
    "CHAININGS",
    "DEFAULT_ROPE_THETA",
    "MAX_ASSISTANT_TOKENS",
    "CacheReaderConfig",
    "DFlash2Config",
    "DFlashConfig",
    "DSparkConfig",
    "DominoConfig",
    "DraftLayersConfig",
    "DraftModelConfig",
    "DrafterConfig",
    "Eagle3Config",
    "MtpConfig",
    "PEagleConfig",
    "Pard2Config",
    "check_num_assistant_tokens",
    "check_num_or_auto",
    "check_types",
    "default_aux_layer_ids",
    "default_block_layer_ids",
    "default_chaining",
    "mtp_block_settings",
]
