"""Changes that the static engine makes to a target, or a draft model, while it runs it, and undoes afterwards."""

# Kinds of layers and other parts of models are registered where they are defined; one that is imported later is asked
# first what it finds.
from . import key_layers, recurrent_functions, indexer_probes, compressed_attention  # noqa: F401, I001
from . import attention, length_rope, relative_bias  # noqa: F401
