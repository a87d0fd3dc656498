"""Linear layers with quantised weights that are transformers' own."""

from __future__ import annotations

from .parts import named_in

_FILE = "transformers.integrations.finegrained_fp8"
_WHY = "weights in FP8 with a scale for each block"

FP8_LINEAR = named_in(_FILE, "FP8Linear", why=_WHY, is_needed=False)
FP8_SCALES = named_in(f"{_FILE}:FP8Linear", "weight_scale_inv", why=_WHY, is_needed=False)
FP8_BLOCK = named_in(f"{_FILE}:FP8Linear", "block_size", why=_WHY, is_needed=False)
FP8_INPUTS = named_in(f"{_FILE}:FP8Linear", "activation_scheme", why=_WHY, is_needed=False)
