"""Which attention implementation a model runs: an entry of its configurations."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from ..host.modeling import ATTENTION_ENTRY
from ..modules.hidden_states import modules_of
from ..modules.patch import Replacements, constant, original


def registered_attention(model: PreTrainedModel, name: str) -> Replacements:
    """Context in which `model` runs the attention implementation that is registered with transformers as `name`."""
    return Replacements({ATTENTION_ENTRY: [(config, constant(name)) for config in submodel_configs(model)]})


def submodel_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations that modules of `model` read, each once."""
    configs = (getattr(module, "config", None) for module in modules_of(model))
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def runs_flash_attention(model: PreTrainedModel) -> bool:
    """Whether the text model of `model` runs flash attention outside of `registered_attention`; it is given no mask."""
    return "flash" in str(original(model.config.get_text_config(), ATTENTION_ENTRY))
