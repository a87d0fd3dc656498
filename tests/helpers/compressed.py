"""Checkpoints of compressed-tensors, as llm-compressor writes them, with scales by the largest numbers."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel


def arguments(num_bits, kind, strategy, **others):
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=num_bits, type=kind, strategy=strategy, **others)


def save_compressed(model: PreTrainedModel, folder: Path, weights, inputs=None, ignore=("lm_head",)) -> None:
    """Quantise the linear layers of `model` to `arguments` and save it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=list(ignore)))
    for layer in [one for one in model.modules() if hasattr(one, "quantization_scheme")]:
        size_out, size_in = layer.weight.shape
        group = (1, weights.group_size)
        blocks = {"group": group, "tensor_group": group, "channel": (1, size_in), "tensor": (size_out, size_in)}
        rows, columns = blocks.get(weights.strategy, weights.block_structure)
        padded = nn.functional.pad(layer.weight.data, (0, -size_in % columns, 0, -size_out % rows))
        parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        if hasattr(layer, "weight_global_scale"):
            layer.weight_global_scale.data = generate_gparam(*layer.weight.data.aminmax())
        outer = getattr(layer, "weight_global_scale", None)
        scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), weights, outer)
        layer.weight_scale.data = scale.reshape(layer.weight_scale.shape)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data = zero.reshape(layer.weight_scale.shape)
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(torch.tensor(0.05))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
