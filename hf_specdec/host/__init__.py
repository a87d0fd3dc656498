"""The seam with transformers: everything that the package touches of it beyond `from transformers import ...`.

Differences between versions are handled here, so the rest of the package need not know them. A missing part is named,
see `parts.why_broken`; `hf-specdec doctor` shows all of them, and docs/transformers.md is written from the same table.
"""

# Imports the whole table before anything asks which parts are missing.
from . import caches, generation, modeling, quantised, serving

__all__ = ["caches", "generation", "modeling", "quantised", "serving"]
