"""Whether a model may run prompts of several rows packed in one, on a `PackedCache`."""

from __future__ import annotations

from transformers import PreTrainedModel

from .cache import only_keys
from .mask_rules import rules_by_module
from .support import cache_layers, length_limits


def packs_prompts(model: PreTrainedModel) -> bool:
    """Whether `model` may: if its layers store keys and values only, and slots matter by their differences only.

    That is not so with chunks, which are counted from slot 0, and with RoPE that depends on a row's length.
    """
    if not only_keys(cache_layers(model)) or length_limits(model).long is not None:
        return False
    return all(rule.chunk is None for _, rule in rules_by_module(model))
