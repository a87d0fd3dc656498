"""Linear layers that keep the numbers of the file, and those of compressed-tensors as such.

transformers loads a checkpoint of compressed-tensors as it is, and compressed-tensors converts all of it to plain
weights in the first pass. `keep_stored` must come before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import ops
from ..host.quantised import IS_INITIALIZED, compressor_of
from ..kernels.types import StoredWeight
from .weights import is_known, register_weight_kind

# Names in compressed-tensors: numbers, packed ones, scales, and the number that NVFP4's scales are divided by.
WEIGHT, PACKED, SCALES, DIVISOR = "weight", "weight_packed", "weight_scale", "weight_global_scale"
# Parts that other checkpoints have: zero points, and the inputs in the order of the numbers (see `StoredWeight`).
ZEROS, ORDER = "weight_zero_point", "weight_order"

# The dtypes of the parts of a weight, by kind; in a checkpoint those in float32 may have any. Packed numbers have 4
# bits: e2m1 in uint8, integers in int32.
KINDS = {
    "float8_e4m3fn": {WEIGHT: torch.float8_e4m3fn, SCALES: torch.float32},
    "float8_e5m2": {WEIGHT: torch.float8_e5m2, SCALES: torch.float32},
    "int8": {WEIGHT: torch.int8, SCALES: torch.float32},
    "int4": {PACKED: torch.int32, SCALES: torch.float32},
    "nvfp4": {PACKED: torch.uint8, SCALES: torch.float8_e4m3fn, DIVISOR: torch.float32},
    "mxfp4": {PACKED: torch.uint8, SCALES: torch.uint8},
}
# The published size of blocks, if config.json does not state it.
BLOCK = 128

# `rows`, `group` and `rounds_inputs` of a `StoredWeight`.
Form = tuple[int, int, bool]


class StoredLinear(nn.Linear):
    """A linear layer with the parts of a weight as parameters, named and shaped as in compressed-tensors; perhaps with
    `weight_zero_point` `[out, groups]` uint8 and `weight_order` `[in]` int64.

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
        stored = stored_weight(self._parameters, *self.form)
        if stored.rounds_inputs:
            inputs = ops.rounded_inputs(inputs, stored)
        is_small = stored.scales.itemsize == 1
        dtype = torch.float32 if is_small else torch.promote_types(stored.scales.dtype, inputs.dtype)
        return F.linear(inputs, ops.dequantise_weight(stored, dtype).to(inputs.dtype), self.bias)


def stored_weight(
    parts: Mapping[str, torch.Tensor], rows: int, group: int, rounds_inputs: bool = False
) -> StoredWeight:
    """The weight that consists of `parts`, see `StoredLinear`."""
    packed, scales = parts.get(PACKED), parts[SCALES]
    values = parts[WEIGHT] if packed is None else packed.view(torch.uint8)
    scales = scales.reshape(*scales_shape(values.shape, rows, 1)[:-1], -1)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    codes = "e2m1" if packed is not None and packed.dtype == torch.uint8 else None
    zeros, outer, order = (parts.get(name) for name in (ZEROS, DIVISOR, ORDER))
    return StoredWeight(values, scales, zeros, rows, group, rounds_inputs, codes, outer, order=order)


@register_weight_kind("hf_specdec.StoredLinear")
def _of_stored_linear(layer: StoredLinear) -> StoredWeight | None:
    return stored_weight(layer._parameters, *layer.form)


def scales_shape(shape: Sequence[int], rows: int, group: int) -> tuple[int, ...]:
    """The shape of the scales of a weight of that `shape`."""
    *outer, size_out, size_in = shape
    return *outer, -(-size_out // rows), -(-size_in // group)


def layout_of(
    parts: Mapping[str, torch.Tensor], stated: Iterable[Sequence[int]]
) -> tuple[tuple[int, ...], str, int, int] | None:
    """Shape and kind of the weight that consists of `parts`, and how many outputs and inputs have a common scale: all,
    those of a row, or of a block of a size that is `stated` or usual. None if the parts do not fit together."""
    *outer, size_out, width = parts.get(PACKED, parts.get(WEIGHT)).shape
    size_in = width * 2 * parts[PACKED].itemsize if PACKED in parts else width
    shape, blocks = (*outer, size_out, size_in), [(size_out, size_in), (1, size_in), *stated, (BLOCK, BLOCK)]
    for kind, known in KINDS.items():
        is_kind = known.keys() == parts.keys()
        is_kind = is_kind and all(one in (torch.float32, parts[name].dtype) for name, one in known.items())
        for block in blocks if is_kind and (DIVISOR not in parts or parts[DIVISOR].shape == (1,)) else ():
            if _stripped(parts[SCALES].shape) in ((), _stripped(scales_shape(shape, *block))):
                return shape, kind, *block
    return None


def _stripped(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` without trailing dimensions of size 1, which exporters leave out."""
    return tuple(shape[: max((end for end, size in enumerate(shape, start=1) if size != 1), default=0)])


def store(layer: nn.Linear, form: Form, parts: Mapping[str, torch.Tensor]) -> None:
    """Make `layer` a `StoredLinear` of that `form`, or change it, with `parts` as its parameters besides the bias."""
    layer._parameters = {"bias": layer.bias} | {
        name: nn.Parameter(part, requires_grad=False) for name, part in parts.items()
    }
    layer.__class__, layer.form = StoredLinear, form
    setattr(layer, IS_INITIALIZED, True)  # transformers would initialise a weight that it no longer has


def store_empty(layer: nn.Linear, kind: str, rows: int, group: int) -> None:
    """`store` with parameters that are to be loaded: numbers of that `kind`, and a scale for each block of `rows`
    outputs and `group` inputs."""
    shapes = {WEIGHT: layer.weight.shape, SCALES: scales_shape(layer.weight.shape, rows, group), DIVISOR: (1,)}
    if PACKED in KINDS[kind]:
        shapes[PACKED] = layer.out_features, layer.in_features // (2 * KINDS[kind][PACKED].itemsize)
    device, dtypes = layer.weight.device, KINDS[kind]
    parts = {name: torch.empty(shapes[name], dtype=dtype, device=device) for name, dtype in dtypes.items()}
    store(layer, (rows, group, False), parts)


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
    parts = {name: part for name, part in layer.named_parameters(recurse=False) if name not in ("bias", "weight_shape")}
    layout = layout_of(parts, [weights.block_structure or (1, weights.group_size or size_in)])
    if layout is None or layout[0] != (layer.out_features, size_in):
        return None
    *_, rows, group = layout
    if inputs is not None:
        rounded = {"token": size_in, "group": inputs.group_size}.get(inputs.strategy) or 0
        is_same = min(rounded, size_in) == min(group, size_in)
        if (inputs.type, inputs.num_bits, is_same) != (weights.type, weights.num_bits, True) or not (
            inputs.symmetric and inputs.dynamic is True
        ):
            return None
    form = (rows, group, inputs is not None)
    return form if is_known(stored_weight(parts, *form)) else None
