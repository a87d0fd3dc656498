"""RoPE parameters of draft layers, from every form of `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DEFAULT_ROPE_THETA
from .dialects import SPECULATORS
from .interpretation import Decisions


def rope_by_layer_type(rope: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The entries of RoPE parameters by type of layer; empty if they are not given by type."""
    return {kind: entry for kind, entry in rope.items() if kind.endswith("_attention") and isinstance(entry, Mapping)}


def read_rope(layer: Mapping[str, Any], dialect: str, name: str, decisions: Decisions) -> dict[str, Any]:
    """RoPE in transformers 5's form, from `rope_parameters`, `rope_scaling` and `rope_theta` of `layer`, the draft
    layers' settings in the config.json of `name`. Raises `ValueError` if these contradict each other."""
    stated = _stated_rope(layer, dialect, name, decisions)
    kind, rest = _split(stated)
    inner, outer = stated.get("rope_theta"), layer.get("rope_theta")
    if inner is None and outer is None:
        theta, rule, doubtful = DEFAULT_ROPE_THETA, "not in config.json; the default of every publisher", False
    elif inner is not None and outer is not None and inner != outer:
        rule = f"config.json has {inner} inside rope_parameters or rope_scaling and {outer} at top level; the inner"
        theta, rule, doubtful = inner, rule + " one is transformers 5's", True
    else:
        theta, rule, doubtful = inner if inner is not None else outer, "config.json", False
    return rest | {"rope_type": kind, "rope_theta": decisions.decide("rope_theta", float(theta), rule, doubtful)}


def _stated_rope(layer: Mapping[str, Any], dialect: str, name: str, decisions: Decisions) -> Mapping[str, Any]:
    """`rope_parameters` or `rope_scaling` of config.json; empty if it has neither."""
    given = {key: layer[key] for key in ("rope_parameters", "rope_scaling") if layer.get(key)}
    for key, rope in given.items():
        if not isinstance(rope, Mapping):
            raise ValueError(f"{name} has {key} {rope!r}; expected an object, or null.")
    ropes = [_draft_layers_rope(rope, dialect, name, decisions) for rope in given.values()]
    if len(ropes) == 2 and _split(ropes[0]) != _split(ropes[1]):
        raise ValueError(
            f"{name} contradicts itself: rope_parameters is {given['rope_parameters']} and rope_scaling is "
            f"{given['rope_scaling']}. Pass `rope_parameters=` with what it was trained with."
        )
    return _in_one_dimension(ropes[0], decisions) if ropes else {}


def _draft_layers_rope(rope: Mapping[str, Any], dialect: str, name: str, decisions: Decisions) -> Mapping[str, Any]:
    """The RoPE parameters that all draft layers share; config.json may give them by type of the target's layers."""
    entries = rope_by_layer_type(rope)
    if not entries:
        return rope
    kind = "sliding_attention" if "sliding_attention" in entries else next(iter(entries))
    if dialect == SPECULATORS and kind == "sliding_attention":
        rule = "rope_parameters has RoPE by type of layer; speculators' draft layers all have the sliding one's"
    elif all(entry == entries[kind] for entry in entries.values()):
        rule = "rope_parameters has the same RoPE for each type of layer"
    else:
        raise ValueError(
            f"{name} has rope_parameters by type of layer ({', '.join(sorted(entries))}), but its draft "
            "layers share one RoPE. Pass `rope_parameters=` with the one that they were trained with."
        )
    return decisions.decide("rope_parameters", dict(entries[kind]), rule)


def _in_one_dimension(rope: Mapping[str, Any], decisions: Decisions) -> Mapping[str, Any]:
    """RoPE without M-RoPE's sections: in draft layers a token has one position, as text has in all sections."""
    if not any(key.startswith("mrope_") for key in rope):
        return rope
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    rule = "config.json without the sections of M-RoPE, which are the same for text; only drafts after images differ"
    decisions.decide("rope_parameters", plain, rule)
    return plain


def _split(rope: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The RoPE type, under its key of any transformers version, and the parameters without type and base."""
    rest = {key: value for key, value in rope.items() if key not in ("type", "rope_type", "rope_theta")}
    return rope.get("rope_type", rope.get("type", "default")), rest
