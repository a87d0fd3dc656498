"""Patches that the static engine applies to a target, or a draft model, while it runs it, and undoes afterwards."""

# ruff: noqa: F401, I001
# Kinds of layers and other parts of models are registered where they are defined; `detect` asks those that are imported
# later first.
from ..cache import key_layers
from . import recurrent_functions
from .plugins import indexer_probes, compressed_attention
from . import attention
from .plugins import length_rope, relative_bias
