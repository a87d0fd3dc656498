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
from ..modules.patch import Patch, replaced, runs_engine
from ..modules.signature import signature_of


class RowAdapters:
    """The adapters of the tokens in a pass of the target.

    Attributes:
        bits: `[B, n]` int64, contiguous, see `DecodeState.adapters`; None outside of a pass.
        is_by_row: whether all tokens of a row have the same adapters.
    """

    def __init__(self) -> None:
        self.bits: torch.Tensor | None = None
        self.is_by_row = True

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[tokens]` int64 for the inputs of a layer, `[B, m, in]`: all tokens of the pass, or some of each row; raises
        `ValueError` for other tokens."""
        bits, shape = self.bits, inputs.shape[:-1]
        if shape != bits.shape and self.is_by_row and len(shape) == 2 and shape[0] == len(bits):
            bits = bits[:, :1].expand(shape).contiguous()
        if shape != bits.shape:
            raise ValueError(
                f"A layer with LoRA adapters is given tokens {list(shape)} in a pass of {list(bits.shape)}, so that it "
                'is not known which row each belongs to; expected all of them. Use drafter.configure(engine="stock"), '
                "or merge the adapter."
            )
        return bits.reshape(-1)


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
            update = self._update_of(tuple(map(id, bases)), own, [base.out_features for base in bases])
            if fused is not None:
                fused.update = update
                update = None
            forwards += [(one, functools.partial(_forward, self.rows, one, update)) for one in own if one is not None]
        stack.enter_context(replaced("forward", forwards))

    def _update_of(
        self, key: tuple[int, ...], layers: list[nn.Module | None], sizes: list[int]
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Adds the updates of `layers` with the same inputs to their outputs; None stands for a layer without LoRA."""
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
            self._tables[key] = ops.low_rank_places(down, up, sizes).to(empty.device), factors
        return functools.partial(_add, self.rows, (down, up, *self._tables[key], sizes))


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


def _add(rows: RowAdapters, group: tuple, out: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add the updates of a group of layers to the outputs `[..., sum of out]` of its base layers for `[..., in]`."""
    if rows.bits is not None:
        ops.add_low_rank(out.view(-1, out.shape[-1]), inputs.reshape(-1, inputs.shape[-1]), rows.of(inputs), *group)


def _forward(
    rows: RowAdapters, layer: nn.Module, update: Callable | None, inputs: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if rows.bits is None or args or kwargs or not runs_engine():
        return type(layer).forward(layer, inputs, *args, **kwargs)
    out = base_layer(layer)(inputs)
    if update is not None:
        out = out.contiguous()
        update(out, inputs)
    return out
