"""Speculative decoding for transformers' own `generate()`.

drafter = AutoDrafter.from_pretrained(repo, target=model)
model.generate(**inputs, assistant_model=drafter)
"""

from __future__ import annotations

import warnings

__version__ = "0.1.0"

__all__ = [
    "AutoDrafter",
    "AwqConfig",
    "Drafter",
    "DrafterConfig",
    "GPTQConfig",
    "Mxfp4Config",
    "NoDrafter",
    "SpeculationStats",
    "SuffixDrafter",
    "install",
    "register_drafter",
    "uninstall",
]

from .host.parts import why_broken

if why_broken() is None:
    from .auto import AutoDrafter
    from .config import DrafterConfig
    from .drafters import Drafter, NoDrafter, SuffixDrafter, register_drafter
    from .install import install, uninstall
    from .patching.stored_checkpoints import AwqConfig, GPTQConfig, Mxfp4Config
    from .stats import SpeculationStats

    install()
else:
    warnings.warn(f"hf_specdec runs nothing. {why_broken()}.", stacklevel=2)

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(f"hf_specdec cannot run: {why_broken()}. Install a tested version of transformers.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
