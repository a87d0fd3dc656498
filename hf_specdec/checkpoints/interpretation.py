"""Interpretation of a checkpoint: the caller's overrides, and the decisions on what the checkpoint leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ..config import check_positive


class Overrides(TypedDict, total=False):
    """Keywords of `AutoDrafter.from_pretrained`. The checkpoint decides those that are absent or None."""

    aux_hidden_state_layer_ids: list[int] | None
    norm_before_residual: bool | None
    norm_output: bool | None
    final_norm: bool | None
    rope_theta: float | None
    rope_parameters: dict | None
    share_embedding: bool | None
    share_head: bool | None
    parallel_drafting: bool | None
    mask_token_id: int | None
    hidden_first: bool | None
    norm_offset: bool | None
    zero_first_embedding: bool | None
    chaining: str | None
    anchor_first: bool | None
    causal: bool | list[bool] | None


def without_none(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The overrides that are not None."""
    return {name: value for name, value in (overrides or {}).items() if value is not None}


def overridden(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a configuration in normal form, changed by the `given` overrides."""
    others = ("rope_theta", "share_embedding", "share_head")
    changed = {name: value for name, value in given.items() if name not in others}
    if "rope_theta" in given:
        base = {"rope_theta": float(given["rope_theta"])}
        changed["rope_parameters"] = settings.get("rope_parameters", {}) | base
    if "anchor_first" in given:  # it changes the number of tokens that a block drafts
        changed["num_assistant_tokens"] = None
    return {**settings, **changed}


def check_rope_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless `rope_theta` is a number, or `rope_parameters` are complete and given without it."""
    rope = overrides.get("rope_parameters")
    check_positive(rope_theta=overrides.get("rope_theta", 1.0))
    if rope is None:
        return
    if not isinstance(rope, Mapping) or not {"rope_type", "rope_theta"} <= rope.keys():
        raise ValueError(
            f"rope_parameters is {rope!r}; expected all RoPE parameters in transformers' form, such as "
            '{"rope_type": "default", "rope_theta": 10000.0}.'
        )
    if "rope_theta" in overrides:
        raise ValueError("rope_theta and rope_parameters are both given; expected one of them.")


@dataclass(frozen=True)
class Decision:
    """The decision on a property that a checkpoint leaves open. `name` is a keyword of `AutoDrafter.from_pretrained` if
    there is one, `rule` the reason; `doubtful` says that the rule is wrong for some known checkpoints."""

    name: str
    value: Any
    rule: str
    doubtful: bool = False

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.rule}"


class Decisions:
    """The decisions while a checkpoint is read, in order; `given` are the `Overrides` that are not None."""

    def __init__(self, given: Mapping[str, Any]):
        self.given = given
        self.made: list[Decision] = []

    def decide(self, name: str, value: Any, rule: str, doubtful: bool = False) -> Any:
        """Record a decision and return its outcome: the caller's override if given, else `value`."""
        if name in self.given:
            value, rule, doubtful = self.given[name], "given by the caller", False
        self.made.append(Decision(name, value, rule, doubtful))
        return value
