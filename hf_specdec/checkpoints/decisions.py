"""What a checkpoint leaves open, and how it was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import DrafterConfig
from .overrides import without_none


@dataclass(frozen=True)
class Decision:
    """One property that a checkpoint leaves open, and how it was decided.

    Attributes:
        name: of the property; a keyword of `AutoDrafter.from_pretrained` where there is one.
        value: the outcome.
        rule: the reason.
        doubtful: whether published checkpoints are known for which the rule would be wrong.
    """

    name: str
    value: Any
    rule: str
    doubtful: bool = False

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.rule}"


class Decisions:
    """The decisions made while one checkpoint is read, in order.

    Args:
        overrides: see `Overrides`.
    """

    def __init__(self, overrides: Mapping[str, Any]):
        self.overrides = without_none(overrides)
        self.made: list[Decision] = []

    def decide(self, name: str, value: Any, rule: str, doubtful: bool = False) -> Any:
        """Record a decision and return its outcome: the caller's override if there is one, else `value`."""
        if name in self.overrides:
            value, rule, doubtful = self.overrides[name], "given by the caller", False
        self.made.append(Decision(name, value, rule, doubtful))
        return value


@dataclass(frozen=True)
class NormalizedConfig:
    """A checkpoint's configuration in normal form, and the decisions that led to it."""

    config: DrafterConfig
    decisions: tuple[Decision, ...]
