"""Drafter families; importing a module registers its family."""

from .auto import AutoDrafter
from .base import Drafter, Proposal, register_drafter
from .eagle3 import Eagle3Drafter

__all__ = ["AutoDrafter", "Drafter", "Eagle3Drafter", "Proposal", "register_drafter"]
