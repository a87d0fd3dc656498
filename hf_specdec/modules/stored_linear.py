"""Linear layers that keep the numbers of the file, and those of compressed-tensors as such.

transformers loads a checkpoint of compressed-tensors as it is, and compressed-tensors converts all of it to plain
weights in the first pass. `keep_stored` must come before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import ops
from ..host.quantised import IS_INITIALIZED, compressor_of
from ..kernels.types import StoredWeight
from .weights import is_known, register_weight_kind

# Names in compressed-tensors: packed numbers, scales, and the number that NVFP4's scales are divided by.
PACKED, SCALES, _DIVISOR = "weight_packed", "weight_scale", "weight_global_scale"
# Parts that other checkpoints have: zero points, and the inputs in the order of the numbers (see `StoredWeight`).
ZEROS, ORDER = "weight_zero_point", "weight_order"


# `rows`, `group`, `rounds_inputs` and `codes` of a `StoredWeight`.
Form = tuple[int, int, bool, str | None]


class StoredLinear(nn.Linear):
    """A linear layer with `weight` or `weight_packed`, and `weight_scale`, named and shaped as in compressed-tensors;
    perhaps with `weight_zero_point` `[out, groups]` uint8 and `weight_order` `[in]` int64.

    Attributes:
        form: of its `StoredWeight`.
    """

    form: Form

    def __getattr__(self, name: str) -> Any:
        is_packed = name == "weight" and PACKED in self._parameters
        return super().__getattr__(PACKED if is_packed else name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StoredLinear:
        """Casts do not change 8-bit numbers and scales, whose dtypes are not the model's."""
        return super()._apply(
            lambda one: fn(one) if one.itemsize > 1 else fn(one.view(torch.uint8)).view(one.dtype), recurse
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stored = _stored(self, *self.form)
        if stored.rounds_inputs:
            inputs = ops.rounded_inputs(inputs, stored)
        is_small = stored.scales.itemsize == 1
        dtype = torch.float32 if is_small else torch.promote_types(stored.scales.dtype, inputs.dtype)
        return F.linear(inputs, ops.dequantise_weight(stored, dtype).to(inputs.dtype), self.bias)


def _stored(layer: nn.Linear, rows: int, group: int, rounds_inputs: bool, codes: str | None) -> StoredWeight:
    parts = layer._parameters
    values = parts[PACKED].view(torch.uint8) if PACKED in parts else parts["weight"]
    scales = parts[SCALES].reshape(-(-layer.out_features // rows), -1)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    zeros, outer, order = (parts.get(name) for name in (ZEROS, _DIVISOR, ORDER))
    return StoredWeight(values, scales, zeros, rows, group, rounds_inputs, codes, outer, order=order)


@register_weight_kind("hf_specdec.StoredLinear")
def _of_stored_linear(layer: StoredLinear) -> StoredWeight | None:
    return _stored(layer, *layer.form)


def store(layer: nn.Linear, form: Form, parts: Mapping[str, torch.Tensor]) -> None:
    """Make `layer` a `StoredLinear` of that `form`, or change it, with `parts` as its parameters besides the bias."""
    layer._parameters = {"bias": layer.bias} | {
        name: nn.Parameter(part, requires_grad=False) for name, part in parts.items()
    }
    layer.__class__, layer.form = StoredLinear, form
    setattr(layer, IS_INITIALIZED, True)  # transformers would initialise a weight that it no longer has


def store_eight_bits(layer: nn.Linear, dtype: torch.dtype, rows: int, group: int) -> None:
    """`store` with the weight cast to `dtype`, and a float32 scale of 1 for each block of `rows` outputs and `group`
    inputs: parameters that are to be loaded."""
    shape = -(-layer.out_features // rows), -(-layer.in_features // group)
    scales = torch.ones(shape, dtype=torch.float32, device=layer.weight.device)
    store(layer, (rows, group, False, None), {"weight": layer.weight.detach().to(dtype), SCALES: scales})


def keep_stored(model: PreTrainedModel) -> PreTrainedModel:
    """Convert the compressed-tensors layers of `model` to `StoredLinear`s, and return it.

    If a layer has a form that the kernels do not know, or the embedding or head is quantised, the model gets plain
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
    for layer, layer.form in zip(layers, forms, strict=True):
        layer.__class__ = StoredLinear
        del layer.forward  # compressed-tensors', for plain weights
    compressor.remove_decompression_hook(model)
    return model


def _form_of(layer: nn.Module) -> Form | None:
    """The `form` of a compressed-tensors layer; None if it cannot be a `StoredLinear`."""
    scheme = layer.quantization_scheme
    if type(layer) is not nn.Linear or scheme.output_activations is not None:
        return None
    weights, inputs, size_in = scheme.weights, scheme.input_activations, layer.in_features
    block = {
        "tensor": (layer.out_features, size_in),
        "channel": (1, size_in),
        "group": (1, weights.group_size),
        "tensor_group": (1, weights.group_size),
        "block": weights.block_structure,
    }.get(weights.strategy)
    codes = "e2m1" if (weights.type, weights.num_bits) == ("float", 4) else None
    names = {name for name, part in layer.named_parameters(recurse=False)} - {"bias"}
    packed = {"tensor_group": {_DIVISOR}, "group": set()}.get(weights.strategy) if codes else {"weight_shape"}
    is_packed = packed is not None and names == {"weight_packed", "weight_scale", *packed} and weights.num_bits == 4
    if block is None or not (is_packed or names == {"weight", "weight_scale"}):
        return None
    if inputs is not None:
        group = {"token": size_in, "group": inputs.group_size}.get(inputs.strategy)
        if (inputs.type, inputs.num_bits, group) != (weights.type, weights.num_bits, block[1]) or not (
            inputs.symmetric and inputs.dynamic is True
        ):
            return None
    form = (*block, inputs is not None, codes)
    stored = _stored(layer, *form)
    return form if stored.shape == (layer.out_features, size_in) and is_known(stored) else None
