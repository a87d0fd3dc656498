"""The registered drafter classes, by the model type of their configurations."""

from __future__ import annotations

from ..config import DrafterConfig
from .base import Drafter

_FAMILIES: dict[str, type[Drafter]] = {}


def register_drafter(cls: type[Drafter]) -> type[Drafter]:
    """Class decorator: register a `Drafter` subclass for `AutoDrafter`, under the `model_type` of its config class.

    Raises:
        TypeError: expected a `Drafter` subclass with a `DrafterConfig` subclass as `config_class`.
        ValueError: expected a model type that no other class is registered for.
    """
    config_class = getattr(cls, "config_class", None)
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        raise TypeError(f"register_drafter got {cls!r}; expected a subclass of hf_specdec.Drafter.")
    if not (isinstance(config_class, type) and issubclass(config_class, DrafterConfig)):
        raise TypeError(f"{cls.__name__}.config_class is {config_class!r}; expected a subclass of DrafterConfig.")
    taken = _FAMILIES.get(config_class.model_type)
    if taken is not None and taken is not cls:
        raise ValueError(
            f"The model type {config_class.model_type!r} of {cls.__name__} is already registered for {taken.__name__}."
        )
    _FAMILIES[config_class.model_type] = cls
    return cls


def registered_drafters() -> dict[str, type[Drafter]]:
    """Registered drafter classes by the `model_type` of their configs."""
    return dict(_FAMILIES)
