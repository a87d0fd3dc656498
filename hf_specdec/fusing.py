"""Products of one input as one product: query, key and value; gate and up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from .ops import PLAIN_WEIGHTS

# Children of one module that are called with the same input, the first one first.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# Devices on which one wide product is faster than several narrow ones.
FUSED_DEVICES = {"cuda"}


class FusedLinear:
    """Several `nn.Linear` of one input as one, whose outputs are handed out as the layers are called.

    Args:
        layers: that share their memory (see `share_memory`).
        weight: `[sum of out, in]`, of which the layers' weights are parts.
        bias: `[sum of out]` or None.
    """

    def __init__(self, layers: Sequence[nn.Linear], weight: torch.Tensor, bias: torch.Tensor | None):
        self._layers = layers
        self._weight, self._bias = weight, bias
        self._sizes = [len(layer.weight) for layer in layers]  # of a split layer, its part
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def forward_of(self, index: int):
        """`forward` of layer number `index`."""

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if index == 0:
                self._input, self._outputs = inputs, F.linear(inputs, self._weight, self._bias).split(self._sizes, -1)
            elif self._input is not inputs:  # a module that calls its layers in another way
                return F.linear(inputs, self._layers[index].weight, self._layers[index].bias)
            output = self._outputs[index]
            if index == len(self._layers) - 1:
                self._input, self._outputs = None, ()
            return output

        return forward


def share_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move tensors of equal trailing shape into one piece of memory, in order, if they are not there; return that.

    What the tensors are to their owners stays: parameters are the same objects with the same values.
    """
    first = tensors[0]
    total = sum(len(tensor) for tensor in tensors)
    expected = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != expected or not tensor.is_contiguous():
            break
        expected += tensor.numel() * tensor.element_size()
    else:
        if first.untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr():
            return first.detach().as_strided((total, *first.shape[1:]), first.stride())
    whole = torch.cat([tensor.detach() for tensor in tensors])
    start = 0
    for tensor in tensors:
        tensor.data = whole[start : start + len(tensor)]
        start += len(tensor)
    return whole


def _can_be_fused(layers: Sequence[nn.Module]) -> bool:
    """Plain linear layers of one width, data type and device that nothing wraps, quantises or listens to."""
    if not all(type(layer) is nn.Linear and type(layer.weight) in PLAIN_WEIGHTS for layer in layers):
        return False
    if any("forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    kinds = {
        (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None, layer.weight.dim())
        for layer in layers
    }
    return len(kinds) == 1 and layers[0].weight.device.type in FUSED_DEVICES


@contextmanager
def fused_products(*models: nn.Module) -> Iterator[None]:
    """Context in which `GROUPS` of layers of `models` compute as one product each.

    The weights of such layers are moved next to each other and stay there: no second copy is kept, and whoever holds
    the parameters, or saves them, sees no difference. Layers that are not plain `nn.Linear` (adapters, quantised
    weights), or that somebody listens to, are left alone.
    """
    patched: list[nn.Linear] = []
    try:
        for model in models:
            for module in model.modules():
                children = dict(module.named_children())
                for names in GROUPS:
                    layers = [children.get(name) for name in names]
                    if None in layers or not _can_be_fused(layers):
                        continue
                    weight = share_memory([layer.weight for layer in layers])
                    bias = None if layers[0].bias is None else share_memory([layer.bias for layer in layers])
                    fused = FusedLinear(layers, weight, bias)
                    for index, layer in enumerate(layers):
                        patched.append(layer)
                        layer.forward = fused.forward_of(index)
        yield
    finally:
        for layer in patched:
            vars(layer).pop("forward", None)
