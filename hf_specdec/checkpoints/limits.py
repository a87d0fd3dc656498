"""Bounds on the values of a `config.json`, which are checked before anything of their size is built."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import repeat
from typing import Any

# Far above every published model: a larger value means a damaged file. Lists and loops of this length, and a few tables
# of this width, are built before shapes can be compared with tensors.
MAX_LAYERS = 1024
MAX_PARTS = 8192  # heads, experts, groups, states
MAX_SIZE = 2**24

# Most levels of nesting. Published configurations have a few.
MAX_DEPTH = 32

# Types of values by which a checkpoint's family is detected, with the types' names and the keys.
_OBJECTS = ("dflash", "dspark", "eagle", "mtp", "speculators", "text", "transformer_layer")
_TYPES = (
    (str, "a string", ("model_type", "speculators_model_type", "spd_type")),
    (list, "a list", ("architectures",)),
    (bool, "true or false", ("parallel_drafting",)),
    (dict, "an object", tuple(f"{name}_config" for name in _OBJECTS)),
)

_BOUNDS = (
    (re.compile(r"(^|_)(layers?|modules|depths|steps)$"), MAX_LAYERS),
    (re.compile(r"(^|_)(heads?|experts|groups?|states|per_tok)$"), MAX_PARTS),
    (
        re.compile(
            r"(^|_)(dims?|embd|inner|rank|width|channels)$|(hidden|intermediate|vocab|ffn|mlp|state|embed\w*)_size$"
        ),
        MAX_SIZE,
    ),
)
_FINITE = re.compile(r"(^|_)(eps|epsilon|theta|factor|base|scale|scaling|multiplier|range|std)$")
_UP_TO_ONE = re.compile(r"(^|_)(eps|epsilon|rotary_factors?|rotary_pct)$")


def check_settings(config: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` if a value of the `config.json` of `name` has a wrong type or is out of its bounds. The
    readers and configurations check more."""
    for value_type, expected, keys in _TYPES:
        for key in keys:
            if not isinstance(config.get(key), value_type | None):
                raise ValueError(f"{name} has {key} {config[key]!r} in its config.json; expected {expected}.")
    architectures = config.get("architectures") or []
    if not all(isinstance(one, str) for one in architectures):
        raise ValueError(f"{name} has architectures {architectures!r} in its config.json; expected a list of strings.")
    _check_values(config, "", 0, name)


def _check_values(value: Any, key: str, depth: int, name: str) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} has a config.json of more than {MAX_DEPTH} levels of nesting; expected fewer.")
    if isinstance(value, Mapping | list):
        # Elements of a list are checked as values of its key. A list counts as a level, which bounds nested lists.
        for own_key, inner in value.items() if isinstance(value, Mapping) else zip(repeat(key), value):
            _check_values(inner, own_key, depth + 1, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and (problem := _problem(key, value)):
        raise ValueError(f"{name} has {key} {value!r} in its config.json; expected {problem}.")


def _problem(key: str, value: float) -> str | None:
    """What was expected of the number `value` at `key`; None if it is within bounds."""
    if math.isnan(value):
        return "a number"
    for pattern, bound in _BOUNDS:
        if pattern.search(key) and abs(value) > bound:
            return f"at most {bound}"
    if math.isinf(value) and _FINITE.search(key):
        return "a finite number"
    if _UP_TO_ONE.search(key) and not 0 <= value <= 1:
        return "0 to 1"
    if key.endswith("theta") and value <= 0:
        return "more than 0"
    return None


def check_mask_token(token: Any, num_embeddings: int, name: str) -> int:
    """The mask token of the drafter called `name` as an integer. Raises `ValueError` unless it is one of the
    `num_embeddings` tokens that the drafter embeds."""
    number = int(token) if str(token).lstrip("-").isdigit() else None
    if number is None or not 0 <= number < num_embeddings:
        raise ValueError(
            f"{name} has the mask token {token!r}; expected one of the {num_embeddings} tokens that it embeds. Pass "
            "`mask_token_id=` with the id that it was trained with."
        )
    return number
