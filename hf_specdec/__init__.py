"""Speculative decoding for transformers' own `generate()`.

drafter = AutoDrafter.from_pretrained(repo, target=model)
model.generate(**inputs, assistant_model=drafter)
"""

from .auto import AutoDrafter
from .config import DrafterConfig
from .drafters import Drafter, NoDrafter, register_drafter
from .integration.hooks import install, uninstall
from .stats import SpeculationStats

__all__ = [
    "AutoDrafter",
    "Drafter",
    "DrafterConfig",
    "NoDrafter",
    "SpeculationStats",
    "install",
    "register_drafter",
    "uninstall",
]

install()
