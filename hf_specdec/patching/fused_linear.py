"""Products of one input as one product: query, key and value; gate and up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ..device_policy import policy_of
from .linear import PLAIN_WEIGHTS
from .patch import replaced, runs_engine

# Children of one module that are called with the same input, the first one first.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear:
    """Several `nn.Linear` of one input as one, whose outputs are handed out as the layers are called.

    Args:
        layers: that share their memory (see `lying_together`).
        weight: `[sum of out, in]`, of which the layers' weights are parts.
        bias: `[sum of out]` or None.
    """

    def __init__(self, layers: Sequence[nn.Linear], weight: torch.Tensor, bias: torch.Tensor | None):
        self._layers = layers
        self._weight, self._bias = weight, bias
        self._sizes = [len(layer.weight) for layer in layers]  # of a split layer, its part
        # One attribute: calls of two threads must not find the input of one and the outputs of the other.
        self._last: tuple[torch.Tensor | None, tuple[torch.Tensor, ...]] = None, ()

    def forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """`forward` of layer number `index`."""
        layer = self._layers[index]

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if not runs_engine():
                return nn.Linear.forward(layer, inputs)
            if index == 0:
                self._last = inputs, F.linear(inputs, self._weight, self._bias).split(self._sizes, -1)
            last_input, outputs = self._last
            if last_input is not inputs:  # a module that calls its layers in another way
                return F.linear(inputs, layer.weight, layer.bias)
            if index == len(self._layers) - 1:
                self._last = None, ()
            return outputs[index]

        forward.is_fused = True
        return forward


class _Moved:
    """Where tensors lie that were moved next to each other; it keeps none of them alive."""

    def __init__(self) -> None:
        self._places: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()

    def add(self, whole: torch.Tensor) -> None:
        with self._lock:
            self._places = {at: place for at, place in self._places.items() if not place.expired()}
            self._places[whole.data_ptr()] = StorageWeakRef(whole.untyped_storage())

    def starting_at(self, address: int) -> torch.UntypedStorage | None:
        place = self._places.get(address)
        return None if place is None else torch.UntypedStorage._new_with_weak_ptr(place.cdata)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a part of what was moved."""
        storages = (self.starting_at(at) for at in list(self._places) if at <= tensor.data_ptr())
        return any(
            storage is not None and tensor.data_ptr() < storage.data_ptr() + storage.nbytes() for storage in storages
        )


_moved = _Moved()


def _found(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of `tensors` as one tensor, if they were moved there together and are there still."""
    first = tensors[0]
    storage = _moved.starting_at(first.data_ptr())
    if storage is None or storage.device != first.device:
        return None
    address = storage.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous():
            return None
        address += tensor.nbytes
    if address != storage.data_ptr() + storage.nbytes():
        return None
    total = sum(map(len, tensors))
    return first.new_empty(0).set_(storage, 0, (total, *first.shape[1:]))


def _num_users(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def _is_movable(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has memory of its own, in which nobody else would look for it.

    Not so parts of buffers in which somebody keeps several weights, memory that another library or process has lent or
    shares, and tensors of which there are views: those of a `state_dict`, for one, or of other parameters.
    """
    if not tensor.is_contiguous() or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    is_all = storage.data_ptr() == tensor.data_ptr() and storage.nbytes() == tensor.nbytes > 0
    is_lent = not storage.resizable() and not _moved.has(tensor)
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    del storage
    return is_all and not is_lent and not is_shared and _num_users(tensor) == _num_users(torch.empty(1))


def adjacent_storages(*groups: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Memory of each of the `groups` as one tensor; moved there if need be.

    The tensors of a group have equal trailing shapes and come in order. They stay the same objects with the same
    values, and each has a storage of its own, which is a part of the memory and keeps it: what is saved, copied or
    moved is that one tensor.

    Returns:
        None, and nothing was moved, if that cannot be done without somebody's noticing (see `_is_movable`).
    """
    found = [_found(tensors) for tensors in groups]
    missing = [tensors for tensors, whole in zip(groups, found, strict=True) if whole is None]
    for tensors in missing:
        if len(set(map(id, tensors))) < len(tensors) or not all(map(_is_movable, tensors)):
            return None
    return [_move(tensors) if whole is None else whole for tensors, whole in zip(groups, found, strict=True)]


def _move(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([tensor.detach() for tensor in tensors])
    storage, start = whole.untyped_storage(), 0
    for tensor in tensors:
        end = start + tensor.nbytes
        tensor.data = whole.new_empty(0).set_(storage[start:end], 0, tensor.shape, tensor.stride())
        start = end
    _moved.add(whole)
    return whole


def _can_be_fused(layers: Sequence[nn.Module]) -> bool:
    """Plain linear layers of one width, data type and device that nothing wraps, quantises or listens to."""
    if not all(type(layer) is nn.Linear and type(layer.weight) in PLAIN_WEIGHTS for layer in layers):
        return False
    forwards = (vars(layer).get("forward") for layer in layers)
    if not all(forward is None or getattr(forward, "is_fused", False) for forward in forwards):
        return False
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    kinds = {
        (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None, layer.weight.dim())
        for layer in layers
    }
    return len(kinds) == 1 and policy_of(layers[0].weight.device).fused_linear


def _groups(models: Sequence[nn.Module]) -> Iterator[list[nn.Linear]]:
    """The layers of `models` that can be fused."""
    for module in dict.fromkeys(module for model in models for module in model.modules()):
        for names in GROUPS:
            layers = [module._modules.get(name) for name in names]
            if None not in layers and _can_be_fused(layers):
                yield layers


def fused_linears(*models: nn.Module) -> AbstractContextManager[None]:
    """Context in which `GROUPS` of layers of `models` compute as one product each.

    The weights of such layers are moved next to each other and stay there: no second copy is kept, and whoever holds
    the parameters, or saves them, sees no difference (see `lying_together`). Layers that are not plain `nn.Linear`
    (adapters, quantised weights), or that somebody listens to, are left alone.
    """
    forwards: list[tuple[nn.Linear, Callable]] = []
    groups = list(_groups(models))
    places = Counter(id(layer.weight) for layers in groups for layer in layers)
    for layers in groups:
        if any(places[id(layer.weight)] > 1 for layer in layers):
            continue  # which would be moved again for every other place
        parameters = [[layer.weight for layer in layers]]
        if layers[0].bias is not None:
            parameters.append([layer.bias for layer in layers])
        wholes = adjacent_storages(*parameters)
        if wholes is not None:
            fused = FusedLinear(layers, *wholes, *[None] * (2 - len(wholes)))
            forwards += ((layer, fused.forward_of(index)) for index, layer in enumerate(layers))
    return replaced("forward", forwards)
