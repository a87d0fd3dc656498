"""Drafter families; importing a module registers its family."""

from ..kernels.types import Proposal
from .base import Drafter, register_drafter
from .cache_reader import CacheReaderDrafter
from .dflash import DFlashDrafter
from .draft_model import DraftModelDrafter
from .dspark import DSparkDrafter
from .eagle3 import Eagle3Drafter
from .mtp import MtpDrafter
from .none import NoDrafter
from .peagle import PEagleDrafter

__all__ = [
    "CacheReaderDrafter",
    "DFlashDrafter",
    "DSparkDrafter",
    "DraftModelDrafter",
    "Drafter",
    "Eagle3Drafter",
    "MtpDrafter",
    "NoDrafter",
    "PEagleDrafter",
    "Proposal",
    "register_drafter",
]
