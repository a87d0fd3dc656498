"""The seam with transformers: everything that the package touches of it beyond `from transformers import ...`.

What differs between versions is settled here; the rest of the package asks. A part that is not found is named, see
`parts.why_broken`; `hf-specdec doctor` shows all of them, and docs/transformers.md is written from the same table.
"""

# All of the table, before anything asks what of it is missing.
from . import caches, generation, modeling, quantised, serving

__all__ = ["caches", "generation", "modeling", "quantised", "serving"]
