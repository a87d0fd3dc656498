"""PEFT's LoRA layers with low-rank updates of the adapters of each row, see `ops.add_low_rank`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import ops
from ..modules.adapters import base_layer
from ..modules.module_hooks import has_hooks
from ..modules.patch import Patch, replaced, runs_engine
from ..modules.signature import signature_of
from ..modules.weights import weight_of
from .linear import runs_linear
from .row_adapters import LowRankUpdates, RowAdapters


class low_rank_updates(Patch):
    """Context in which the LoRA layers of `model`, in a pass of the target, add the updates of the rows' adapters.

    The kernel gets the addresses of PEFT's weights, so in-place training of these takes effect at once. Layers whose
    base layers are fused are updated together.

    Attributes:
        rows: the adapters of the rows; an engine's pass sets them.
    """

    def __init__(self, model: PreTrainedModel):
        adapters = signature_of(model).adapters
        layers = () if adapters.why_not_by_row is not None else adapters.layers
        # If all adapters were deleted, PEFT leaves the layer, which computes its base layer.
        self._layers = [weakref.ref(layer) for layer in layers if len(layer.lora_A)]
        self._names, self.is_empty, self.rows = adapters.names, not self._layers, RowAdapters()
        # Addresses and scales on the device, by the layers of a group; captured graphs read them.
        self._tables: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def _enter(self, stack: ExitStack) -> None:
        layers = {id(layer.base_layer): layer for one in self._layers if (layer := one()) is not None}
        forwards: list[tuple[nn.Module, Callable]] = []
        for fused, bases in _groups(layers):
            own = [layers.get(id(base)) for base in bases]
            updates = self._updates_of(tuple(map(id, bases)), own, [base.out_features for base in bases])
            if fused is not None:
                fused.updates = updates
            for layer in own:
                if layer is not None:
                    forward = functools.partial(_forward, updates, layer, fused is None)
                    if not has_hooks([layer]):
                        forward.fused = fused
                    forwards.append((layer, forward))
        stack.enter_context(replaced("forward", forwards))

    def _updates_of(self, key: tuple[int, ...], layers: list[nn.Module | None], sizes: list[int]) -> LowRankUpdates:
        """Those of `layers` with the same inputs; None stands for a layer without LoRA."""
        like = next(layer for layer in layers if layer is not None)
        empty = next(iter(like.lora_A.values())).weight.detach()
        down, up, scales = [], [], []
        for layer, size in zip(layers, sizes, strict=True):
            for name in self._names:
                has_it = layer is not None and name in layer.lora_A
                down.append(layer.lora_A[name].weight.detach() if has_it else empty[:0])
                up.append(layer.lora_B[name].weight.detach() if has_it else empty.new_empty(size, 0))
                scales.append(float(layer.scaling[name]) if has_it else 0.0)
        if key not in self._tables:
            factors = torch.tensor(scales, dtype=torch.float32, device=empty.device)
            self._tables[key] = ops.low_rank_places(down, up).to(empty.device), factors
        return LowRankUpdates(self.rows, down, up, *self._tables[key], sizes)


def _groups(layers: dict[int, nn.Module]) -> Iterator[tuple[Any, list[nn.Module]]]:
    """The base layers of `layers`: those of a `FusedLinear` together with it, others alone, with None."""
    seen = set()
    for layer in layers.values():
        fused = getattr(vars(layer.base_layer).get("forward"), "fused", None)
        if fused is None:
            yield None, [layer.base_layer]
        elif id(fused) not in seen:
            seen.add(id(fused))
            yield fused, list(fused.layers)


def _forward(
    updates: LowRankUpdates, layer: nn.Module, is_alone: bool, inputs: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The layer's; a base layer that is not `is_alone` adds the updates of all layers that it is fused with."""
    if not updates.is_in_pass or args or kwargs or not runs_engine():
        return type(layer).forward(layer, inputs, *args, **kwargs)
    base = base_layer(layer)
    if not is_alone:
        return base(inputs)
    weight = weight_of(base) if runs_linear(base) and not has_hooks([base]) else None
    return updates.applied(inputs, weight, base.bias, base)
