"""transformers' own linear layers with quantised weights, and how it loads those of others."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .parts import lazy_part, named_in, part, uses

_FILE = "transformers.integrations.finegrained_fp8"
_WHY = "weights in FP8 with a scale for each block"

FP8_LINEAR = named_in(_FILE, "FP8Linear", why=_WHY, is_needed=False)
FP8_EXPERTS = named_in(_FILE, "FP8Experts", why=_WHY, is_needed=False)
ALL_FP8_EXPERTS_FUNCTIONS = part(
    _FILE, "ALL_FP8_EXPERTS_FUNCTIONS", why="where the engine's are registered for FP8", is_needed=False
)
FP8_SCALES = named_in(f"{_FILE}:FP8Linear", "weight_scale_inv", why=_WHY, is_needed=False)
FP8_BLOCK = named_in(f"{_FILE}:FP8Linear", "block_size", why=_WHY, is_needed=False)
FP8_INPUTS = named_in(f"{_FILE}:FP8Linear", "activation_scheme", why=_WHY, is_needed=False)

_STORED = "checkpoints in AWQ, GPTQ and MXFP4 that stay as they are in the file"
register_quantizer = part("transformers.quantizers.auto", "register_quantizer", why=_STORED)
HfQuantizer = part("transformers.quantizers.base", "HfQuantizer", why=_STORED)
QuantizationMethod = part("transformers.utils.quantization_config", "QuantizationMethod", why=_STORED)
IS_INITIALIZED = named_in("transformers:PreTrainedModel", "_is_hf_initialized", why=_STORED)
should_convert_module = part("transformers.quantizers.quantizers_utils", "should_convert_module", why=_STORED)
AWQ_SCALED_ACTIVATIONS = lazy_part("transformers.integrations.awq", "AWQ_SCALES_MAPPINGS", why=_STORED)


@uses(
    "transformers.quantizers.quantizer_compressed_tensors:CompressedTensorsHfQuantizer",
    "compressor",
    why="checkpoints of compressed-tensors that stay as they are",
    is_needed=False,
)
def compressor_of(model: PreTrainedModel) -> Any:
    """compressed-tensors' `ModelCompressor` of a model that it would decompress in the next pass; else None."""
    return model.hf_quantizer.compressor if hasattr(model, "ct_decompress_hook") else None
