"""The families of drafters."""

from ..kernels.types import Proposal
from .base import Drafter
from .cache_reader import CacheReaderDrafter
from .dflash import DFlashDrafter
from .dflash2 import DFlash2Drafter
from .domino import DominoDrafter
from .draft_model import DraftModelDrafter
from .dspark import DSparkDrafter
from .dspine import DSpineDrafter
from .eagle3 import Eagle3Drafter, PEagleDrafter
from .mtp import MtpDrafter
from .none import NoDrafter
from .pard2 import Pard2Drafter
from .registry import register_drafter
from .suffix import SuffixDrafter

__all__ = [
    "CacheReaderDrafter",
    "DFlash2Drafter",
    "DFlashDrafter",
    "DSparkDrafter",
    "DSpineDrafter",
    "DominoDrafter",
    "DraftModelDrafter",
    "Drafter",
    "Eagle3Drafter",
    "MtpDrafter",
    "NoDrafter",
    "PEagleDrafter",
    "Pard2Drafter",
    "Proposal",
    "SuffixDrafter",
    "register_drafter",
]
