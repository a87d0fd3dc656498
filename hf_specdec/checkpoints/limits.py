"""Bounds on what a `config.json` may say, so that nonsense in it is refused before anything of its size is built."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# No published model comes near these; a value beyond them is a damaged file. Lists and loops of that length, and a
# few tables of that width, are built before any shape can be compared with a tensor's.
MOST_LAYERS = 1024
MOST_PARTS = 8192
LARGEST_SIZE = 2**24

# What tells the family of a checkpoint, by the kind of value that it is wherever it is stated.
_KINDS: dict[type, tuple[tuple[str, ...], str]] = {
    str: (("model_type", "speculators_model_type", "spd_type"), "a string"),
    list: (("architectures",), "a list"),
    bool: (("parallel_drafting",), "true or false"),
    dict: (
        (
            "dflash_config",
            "eagle_config",
            "mtp_config",
            "speculators_config",
            "text_config",
            "transformer_layer_config",
        ),
        "an object",
    ),
}

# Configurations are a few levels deep.
DEEPEST = 32

_BOUNDS = (
    (re.compile(r"(^|_)(layers?|modules|depths|steps)$"), MOST_LAYERS),
    (re.compile(r"(^|_)(heads?|experts|groups?|states|per_tok)$"), MOST_PARTS),
    (
        re.compile(
            r"(^|_)(dims?|embd|inner|rank|width|channels)$|(hidden|intermediate|vocab|ffn|mlp|state|embed\w*)_size$"
        ),
        LARGEST_SIZE,
    ),
)
_FINITE = re.compile(r"(^|_)(eps|epsilon|theta|factor|base|scale|scaling|multiplier|range|std)$")
_EPSILON = re.compile(r"(^|_)(eps|epsilon)$")


def check_settings(config: Mapping[str, Any], name: str) -> None:
    """Check that no value of the `config.json` of `name` is beyond what a model can have.

    What the values mean together is for the reader of the checkpoint; a string where a number belongs is for the
    configuration's class.

    Raises:
        ValueError: naming the key, its value and the bound.
    """
    for kind, (keys, expected) in _KINDS.items():
        for key in keys:
            if not isinstance(config.get(key), kind | None):
                raise ValueError(f"{name} has {key} {config[key]!r} in its config.json; expected {expected}.")
    architectures = config.get("architectures") or []
    if not all(isinstance(one, str) for one in architectures):
        raise ValueError(f"{name} has architectures {architectures!r} in its config.json; expected a list of strings.")
    _check_values(config, (), name)


def _check_values(value: Any, path: tuple[str, ...], name: str) -> None:
    if len(path) > DEEPEST:
        raise ValueError(f"{name} has a config.json of more than {DEEPEST} levels inside each other.")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_values(inner, (*path, key), name)
    elif isinstance(value, list):
        key = path[-1] if path else ""
        for inner in value:
            # An element of a list is a value of its key; the level counts, so that lists of lists end, too.
            _check_values(inner, (*path, key), name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        problem = _problem(path[-1], value)
        if problem is not None:
            raise ValueError(f"{name} has {path[-1]} {value!r} in its config.json; expected {problem}.")


def _problem(key: str, value: float) -> str | None:
    """What was expected of the number `value` at `key`; None if it can be."""
    if math.isnan(value):
        return "a number"
    for pattern, most in _BOUNDS:
        if pattern.search(key) and abs(value) > most:
            return f"at most {most}"
    if math.isinf(value) and _FINITE.search(key):
        return "a finite number"
    if _EPSILON.search(key) and not 0 <= value <= 1:
        return "0 to 1"
    if key.endswith("theta") and value <= 0:
        return "more than 0"
    return None
