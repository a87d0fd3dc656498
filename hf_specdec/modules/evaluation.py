"""Evaluation mode during a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from .hidden_states import modules_of


class Evaluation(AbstractContextManager[None]):
    """Context in which all modules of `models` are in evaluation mode; on exit each returns to its earlier mode.

    `model.train(before)` would also switch modules that their owner has put into evaluation mode.
    """

    def __init__(self, *models: nn.Module):
        self._models = models

    def __enter__(self) -> None:
        self._training = [module for module in modules_of(*self._models) if module.training]
        for module in self._training:
            module.training = False

    def __exit__(self, *exception: Any) -> None:
        for module in self._training:
            module.training = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context, within this one, in which modules are in their earlier modes, which may be changed there."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
