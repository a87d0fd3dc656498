"""Changes that the static engine makes to a target, or a draft model, while it runs it, and undoes afterwards."""

# ruff: noqa: F401, I001
# Kinds of layers and other parts of models are registered where they are defined; one that is imported later is asked
# first what it finds.
from ..cache import key_layers
from . import recurrent_functions
from .plugins import indexer_probes, compressed_attention
from . import attention
from .plugins import length_rope, relative_bias
