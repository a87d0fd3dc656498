"""Linear layers with the same input as one matmul: query, key and value; gate and up; inputs of linear attention."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..device_policy import policy_of
from ..kernels.types import StoredWeight
from ..modules.adapters import base_layer
from ..modules.hidden_states import modules_of
from ..modules.module_hooks import has_hooks
from ..modules.patch import Patch, replaced, runs_engine
from ..modules.weights import tensors_of, weight_of
from .linear import computes, linear, runs_linear
from .row_adapters import LowRankUpdates

# Names of children of a module that are called with the same input, in the order in which they are called.
GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),  # gate and up of LFM2
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # linear attention of Qwen3.5
    ("in_proj_qkvz", "in_proj_ba"),  # and of Qwen3-Next
)


@dataclass(eq=False)
class FusedLinear:
    """Several linear layers of one input as one matmul; a call of a layer returns its slice of the output.

    The layers, in the order in which they are called, have adjacent storages (see `adjacent_storages`): `weight`
    `[sum of out, in]` is the memory of all weights, `bias` `[sum of out]` that of all biases, if there are any. `sizes`
    are the output sizes; under tensor parallelism those of this rank's shards.
    """

    layers: Sequence[nn.Linear]
    weight: torch.Tensor | StoredWeight
    bias: torch.Tensor | None
    sizes: Sequence[int]
    updates: LowRankUpdates | None = None  # of all layers
    # A single attribute, so that a thread never pairs the input of one call with the outputs of another's.
    _last: tuple[torch.Tensor | None, tuple[torch.Tensor, ...]] = (None, ())

    def forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = self.layers[index]

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if not runs_engine():
                return type(layer).forward(layer, inputs)
            if index == 0:
                self._last = inputs, self._outputs(inputs)
            last_input, outputs = self._last
            if last_input is not inputs:  # layers are called with different inputs, or in another order
                weight = weight_of(layer)
                is_alone = self.updates is None and computes(inputs, weight)
                return linear(inputs, weight, layer.bias) if is_alone else self._outputs(inputs)[index]
            if index == len(self.layers) - 1:
                self._last = None, ()
            return outputs[index]

        forward.fused = self
        return forward

    def _outputs(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.updates is not None and self.updates.is_in_pass:
            out = self.updates.applied(inputs, self.weight, self.bias, self._without_updates)
        else:
            out = self._without_updates(inputs)
        return out.split(self.sizes, -1)

    def _without_updates(self, inputs: torch.Tensor) -> torch.Tensor:
        if computes(inputs, self.weight):
            return linear(inputs, self.weight, self.bias)
        return torch.cat([type(layer).forward(layer, inputs) for layer in self.layers], -1)

    def computes(self, *layers: nn.Module) -> bool:
        """Whether its layers are `layers`, in that order, with equal sizes."""
        return len(set(self.sizes)) == 1 and list(map(id, self.layers)) == list(map(id, layers))


def fused_parameters(
    gate: nn.Module, up: nn.Module
) -> tuple[torch.Tensor | StoredWeight, torch.Tensor | None, LowRankUpdates | None] | None:
    """Weight `[2 N, in]`, bias and low-rank updates of the matmul of `gate` and then `up`, which may be one layer; None
    if not fused, or if updates are due but not known."""
    if gate is up:
        weight = weight_of(gate) if runs_linear(gate) and not has_hooks([gate]) else None
        return None if weight is None else (weight, gate.bias, None)
    fused, other = (getattr(vars(one).get("forward"), "fused", None) for one in (gate, up))
    if fused is None or fused is not other or not fused.computes(base_layer(gate), base_layer(up)):
        return None
    if fused.updates is not None and not fused.updates.is_in_pass:
        return None
    return fused.weight, fused.bias, fused.updates


class _FusedStorages:
    """Weak references to the storages that `_move` has allocated, by address."""

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()

    def add(self, fused: torch.Tensor) -> None:
        with self._lock:
            self._references = {at: one for at, one in self._references.items() if not one.expired()}
            self._references[fused.data_ptr()] = StorageWeakRef(fused.untyped_storage())

    def starting_at(self, address: int) -> torch.UntypedStorage | None:
        reference = self._references.get(address)
        return None if reference is None else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

    def contain(self, tensor: torch.Tensor) -> bool:
        storages = (self.starting_at(at) for at in list(self._references) if at <= tensor.data_ptr())
        return any(
            storage is not None and tensor.data_ptr() < storage.data_ptr() + storage.nbytes() for storage in storages
        )


_fused_storages = _FusedStorages()


def _find_fused(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of `tensors` as one tensor, if an earlier `_move` made them adjacent and they still are; else None."""
    first = tensors[0]
    storage = _fused_storages.starting_at(first.data_ptr())
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


def _num_references(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def _is_movable(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the only user of its storage and may get another: not shared, nor another library's."""
    if not tensor.is_contiguous() or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    is_whole = storage.data_ptr() == tensor.data_ptr() and storage.nbytes() == tensor.nbytes > 0
    is_foreign = not storage.resizable() and not _fused_storages.contain(tensor)
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    del storage  # it would count as a reference
    has_views = _num_references(tensor) != _num_references(torch.empty(1))
    return is_whole and not is_foreign and not is_shared and not has_views


def adjacent_storages(*groups: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The memory of each group's tensors, which have equal trailing shapes, as one tensor; tensors that are not
    adjacent yet are moved. None, with nothing moved, if a tensor shares its memory with others (see `_is_movable`).

    Tensors stay the same objects. Each gets its own storage, a slice of the common memory that keeps it alive: saving,
    copying or moving a tensor affects its slice only.
    """
    found = [_find_fused(tensors) for tensors in groups]
    missing = [tensors for tensors, fused in zip(groups, found, strict=True) if fused is None]
    for tensors in missing:
        if len(set(map(id, tensors))) < len(tensors) or not all(map(_is_movable, tensors)):
            return None
    return [_move(tensors) if fused is None else fused for tensors, fused in zip(groups, found, strict=True)]


def _move(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [tensor.detach() for tensor in tensors]
    # As bytes, since torch cannot concatenate all 8-bit types on all devices.
    fused = torch.cat([part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]).view(parts[0].dtype)
    storage, start = fused.untyped_storage(), 0
    for tensor in tensors:
        end = start + tensor.nbytes
        tensor.data = fused.new_empty(0).set_(storage[start:end], 0, tensor.shape, tensor.stride())
        start = end
    _fused_storages.add(fused)
    return fused


def _can_be_fused(layers: Sequence[nn.Module]) -> bool:
    """Whether all are linear layers of one input width, dtype and device, without hooks or patched forwards."""
    for layer in layers:
        if not isinstance(layer, nn.Linear) or weight_of(layer) is None:
            return False
        if type(layer) is nn.Linear and layer._parameters.keys() != {"weight", "bias"}:
            return False
        is_patched = "forward" in vars(layer) and not hasattr(layer.forward, "fused")
        if is_patched or layer._forward_hooks or layer._forward_pre_hooks:
            return False
    kinds = {
        (type(layer), type(one), layer.in_features, one.dtype, one.device, layer.bias is None, one.dim())
        for layer, one in ((layer, layer.weight) for layer in layers)
    }
    return len(kinds) == 1 and policy_of(layers[0].weight.device).fused_linear


def _groups(models: Sequence[nn.Module]) -> Iterator[list[nn.Linear]]:
    for module in modules_of(*models):
        children = module._modules
        for names in GROUPS:
            if names[0] in children:
                layers = [None if (one := children.get(name)) is None else base_layer(one) for name in names]
                if None not in layers and _can_be_fused(layers):
                    yield layers


def _memory_of(stored: StoredWeight) -> dict[str, torch.Tensor]:
    return {name: part for name, part in stored._asdict().items() if isinstance(part, torch.Tensor)}


@dataclass(frozen=True)
class _Group:
    """Layers that are fused, held weakly.

    Attributes:
        layers: in the order in which they are called.
        sizes: output size of each layer.
        names: names of a layer's tensors (see `tensors_of`) that are the parts of its weight, and its bias.
        form: the first layer's weight on the meta device; None if weights are plain.
    """

    layers: tuple[weakref.ref, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    form: StoredWeight | None

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> _Group | None:
        """None if weights have different forms, blocks that cross layers, scales of scales, or an order of inputs, or
        if their parts are not whole tensors of the layers."""
        weights, biases = [weight_of(layer) for layer in layers], () if layers[0].bias is None else ("bias",)
        found = tuple(map(weakref.ref, layers)), tuple(weight.shape[0] for weight in weights)
        if not isinstance(weights[0], StoredWeight):
            return cls(*found, ("weight", *biases), None)
        forms, names = [], set()
        for layer, weight in zip(layers, weights, strict=True):
            memory = _memory_of(weight)
            whole = {(one.data_ptr(), one.nbytes): name for name, one in tensors_of(layer).items()}
            names.add(tuple(whole.get((part.data_ptr(), part.nbytes)) for part in memory.values()))
            forms.append(
                weight._replace(**{name: torch.empty_like(part, device="meta") for name, part in memory.items()})
            )
        is_divided = all(
            weight.shape[0] % weight.rows == 0 and weight.outer is weight.order is None for weight in weights
        )
        kinds = {
            tuple([(one.dtype, one.shape[1:]) if isinstance(one, torch.Tensor) else one for one in form])
            for form in forms
        }
        if len(kinds) > 1 or len(names) > 1 or any(None in one for one in names) or not is_divided:
            return None
        return cls(*found, (*names.pop(), *biases), forms[0])

    def tensors(self, layers: Sequence[nn.Linear]) -> list[list[torch.Tensor]]:
        """For each name, the tensors of all layers."""
        found = [tensors_of(layer) for layer in layers]
        return [[one[name] for one in found] for name in self.names]

    def fused(self) -> FusedLinear | None:
        """None if a layer no longer exists, or if their memory is not adjacent."""
        layers = [layer() for layer in self.layers]
        if None in layers:
            return None
        found = [_find_fused(tensors) for tensors in self.tensors(layers)]
        if any(one is None for one in found):
            return None
        bias = found.pop() if self.names[-1] == "bias" else None
        if self.form is None:
            return FusedLinear(layers, *found, bias, self.sizes)
        parts = zip(_memory_of(self.form).items(), found, strict=True)
        views = {name: one.view(part.dtype).view(-1, part.shape[1]) for (name, part), one in parts}
        return FusedLinear(layers, self.form._replace(**views), bias, self.sizes)


class fused_linears(Patch):
    """Context in which each group of layers (`GROUPS`) of `models` computes as one matmul.

    The constructor moves the weights of such layers (the base layers of LoRA layers) next to each other, where they
    stay (see `adjacent_storages`). Quantised weights are moved with their scales, if the kernels know their format.
    Other layers, and those with hooks, are left as they are.
    """

    def __init__(self, *models: nn.Module):
        groups = list(_groups(models))
        uses = Counter(id(layer.weight) for layers in groups for layer in layers)
        # A tied weight can be adjacent in one group only.
        groups = [layers for layers in groups if all(uses[id(layer.weight)] == 1 for layer in layers)]
        found = ((layers, _Group.of(layers)) for layers in groups)
        self._groups = [
            group
            for layers, group in found
            if group is not None and adjacent_storages(*group.tensors(layers)) is not None
        ]

    def _enter(self, stack: ExitStack) -> None:
        every = [fused for group in self._groups if (fused := group.fused()) is not None]
        forwards = [(layer, fused.forward_of(index)) for fused in every for index, layer in enumerate(fused.layers)]
        stack.enter_context(replaced("forward", forwards))
