"""Linear layers of compressed-tensors that stay as they are in the file.

transformers loads such a checkpoint as it is, and compressed-tensors makes plain weights of all of it in the first
pass. `keep_stored` comes before that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import ops
from ..host.quantised import compressor_of
from ..kernels.types import StoredWeight
from .weights import is_known, register_weight_kind


class StoredLinear(nn.Linear):
    """A linear layer with `weight` or `weight_packed`, and `weight_scale`, as compressed-tensors names them.

    Attributes:
        block, rounds_inputs: `(rows, group)` and `rounds_inputs` of its `StoredWeight`.
    """

    block: tuple[int, int]
    rounds_inputs: bool

    def __getattr__(self, name: str) -> Any:
        is_packed = name == "weight" and "weight_packed" in self._parameters
        return super().__getattr__("weight_packed" if is_packed else name)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stored = _stored(self, self.block, self.rounds_inputs)
        if stored.rounds_inputs:
            inputs = ops.round_inputs(inputs, stored).to(inputs.dtype)
        return F.linear(inputs, ops.dequantise_weight(stored, stored.scales.dtype).to(inputs.dtype), self.bias)


@register_weight_kind("hf_specdec.StoredLinear")
def _of_layer(layer: StoredLinear) -> StoredWeight:
    return _stored(layer, layer.block, layer.rounds_inputs)


def _stored(layer: nn.Linear, block: tuple[int, int], rounds_inputs: bool) -> StoredWeight:
    parts = layer._parameters
    values = parts["weight_packed"].view(torch.uint8) if "weight_packed" in parts else parts["weight"]
    scales = parts["weight_scale"].reshape(-(-layer.out_features // block[0]), -1)
    return StoredWeight(values, scales, None, *block, rounds_inputs)


def keep_stored(model: PreTrainedModel) -> PreTrainedModel:
    """Make `StoredLinear`s of the layers of compressed-tensors of `model`, and return it.

    A model with a layer in a form that the kernels do not know, or with a quantised embedding or head, gets plain
    weights now.
    """
    compressor = compressor_of(model)
    if compressor is None:
        return model
    layers = [one for one in model.modules() if getattr(getattr(one, "quantization_scheme", None), "weights", None)]
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    forms = [None if id(layer) in ends else _form_of(layer) for layer in layers]
    if None in forms:
        compressor.decompress_model(model)
        return model
    for layer, (block, rounds_inputs) in zip(layers, forms, strict=True):
        layer.block, layer.rounds_inputs = block, rounds_inputs
        layer.__class__ = StoredLinear
        del layer.forward  # compressed-tensors' own, for plain weights
    compressor.remove_decompression_hook(model)
    return model


def _form_of(layer: nn.Module) -> tuple[tuple[int, int], bool] | None:
    """`block` and `rounds_inputs` of a layer of compressed-tensors; None if it is no `StoredLinear`."""
    scheme = layer.quantization_scheme
    if type(layer) is not nn.Linear or scheme.output_activations is not None:
        return None
    weights, inputs, size_in = scheme.weights, scheme.input_activations, layer.in_features
    block = {
        "tensor": (layer.out_features, size_in),
        "channel": (1, size_in),
        "group": (1, weights.group_size),
        "block": weights.block_structure,
    }.get(weights.strategy)
    names = {name for name, part in layer.named_parameters(recurse=False)} - {"bias"}
    is_packed = names == {"weight_packed", "weight_scale", "weight_shape"} and weights.num_bits == 4
    if block is None or not (is_packed or names == {"weight", "weight_scale"}):
        return None
    if inputs is not None:
        group = {"token": size_in, "group": inputs.group_size}.get(inputs.strategy)
        if (inputs.type, inputs.num_bits, group) != (weights.type, weights.num_bits, block[1]) or not (
            inputs.symmetric and inputs.dynamic is True
        ):
            return None
    stored = _stored(layer, tuple(block), inputs is not None)
    is_whole = stored.shape == (layer.out_features, size_in) and is_known(stored)
    return (tuple(block), stored.rounds_inputs) if is_whole else None
