"""What may be done with the keys and values of prompts: packing several in one row, and reusing a beginning."""

from __future__ import annotations

from transformers import PreTrainedModel

from .cache import only_keys
from .mask_rules import rules_by_module
from .support import cache_layers, has_compressed_layers, has_recurrent_layers, length_limits


def packs_prompts(model: PreTrainedModel) -> bool:
    """Whether `model` may: if its layers store keys and values only, and slots matter by their differences only.

    That is not so with chunks, which are counted from slot 0, and with RoPE that depends on a row's length.
    """
    if not only_keys(cache_layers(model)) or length_limits(model).long is not None:
        return False
    return all(rule.chunk is None for _, rule in rules_by_module(model))


def reuses_prefixes(model: PreTrainedModel) -> bool:
    """Whether what `model` stores at a slot is a function of the tokens up to it, wherever a text begins with them.

    That is so of keys and values, also with windows and chunks. It is not so of a recurrent state and of what a
    compressor keeps of tokens, which are those of the last positions only, nor with RoPE that depends on the length of
    the whole prompt.
    """
    limits = length_limits(model)
    is_by_slot = not has_recurrent_layers(model) and not has_compressed_layers(model)
    return is_by_slot and limits.long is None and limits.fixed is None
