"""Embedding and head of the target that a drafter without its own uses: shared weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .. import ops
from ..checkpoints.tensors import is_plain, plain_weight
from ..modules.patch import uses_layer_kernels
from ..modules.signature import places_of, versions_of
from ..modules.weights import tensor_weight
from ..patching.linear import linear

# Rows of a copy that are compared with the target's. Writes through `.data` are not counted by the version of a tensor.
_NUM_SAMPLES = 32


def readable_weight(module: nn.Module | None, what: str, width: int, name: str) -> torch.Tensor:
    """The weight `[V, width]` of the target's `module`, its embedding or head, for a drafter called `name`; raises
    `ValueError` unless it is a floating-point matrix of that width, in memory."""
    weight = tensor_weight(module)
    if weight is None or not weight.is_floating_point():
        reason = f"the target's is {type(module).__name__}; expected a module with a floating-point `weight`."
    elif weight.device.type == "meta":
        reason = "that is offloaded and not in memory; keep it on a device (`device_map`), or use another drafter."
    elif weight.dim() != 2:
        reason = (
            f"that has shape {list(weight.shape)}; expected [vocabulary, width]. It is sharded (DeepSpeed stage 3, "
            "FSDP): load all of the target in every process, or use a drafter that has its own."
        )
    elif weight.shape[1] != width:
        raise ValueError(
            f"{name} has no {what} of its own, and the target's is {weight.shape[1]} wide where the drafter needs "
            f"{width}, so it cannot be shared."
        )
    else:
        return plain_weight(weight)
    raise ValueError(f"{name} has no {what} of its own and must share the target's, but {reason}")


class SharedWeight:
    """The embedding or head (`what`) of a target, used by a drafter `name` that has none.

    It needs the rows `[n]` int64, all if None. See `readable_weight` for errors.

    Attributes:
        weight: `[V or n, width]`, without gradients. The memory of the target's own parameter if all rows are needed
            and it is plain (see `is_plain`), so that the drafter sees every write to it; otherwise a copy, which
            `refresh` updates.
    """

    def __init__(self, module: nn.Module | None, what: str, width: int, name: str, rows: torch.Tensor | None = None):
        self.what = what
        weight = readable_weight(module, what, width, name).detach()
        if rows is not None and (last := int(rows.max())) >= len(weight):
            raise ValueError(f"{name} drafts the token {last}, of which the target's {what} of {len(weight)} has none.")
        # `refresh` writes to it in later calls; a tensor of inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._rows = None if rows is None else rows.to(weight.device)
            self.weight = weight if rows is None else weight[self._rows]
        self._places, self._kind = places_of([module.weight]), _kind(module)
        self._versions = versions_of([module.weight])

    def how_changed(self, module: nn.Module) -> str | None:
        """How the weight of `module` was replaced, moved, cast or resized, for a message; None if it was not."""
        kind = _kind(module)
        if kind != self._kind:
            return f"its {self.what} was {self._kind} and is {kind}"
        return None if places_of([module.weight]) == self._places else f"its {self.what} is another tensor"

    def refresh(self, module: nn.Module) -> None:
        """Update `weight`, if it is a copy, from `module`. It keeps its memory, so captured rounds stay valid."""
        source = module.weight
        shares_memory = self._rows is None and is_plain(source)
        if shares_memory or not self._is_stale(source):
            return
        weight = plain_weight(source).detach()
        with torch.no_grad():
            if self._rows is None:
                self.weight.copy_(weight)
            else:
                torch.index_select(weight, 0, self._rows, out=self.weight)
        self._versions = versions_of([source])

    def _is_stale(self, source: torch.Tensor) -> bool:
        """Whether `source` was written to since it was copied."""
        if source.is_inference() or versions_of([source]) != self._versions:  # writes to the first are not counted
            return True
        if not is_plain(source):  # gathering or dequantising a weight in every call, to compare it, would cost too much
            return False
        step = max(len(self._rows) // _NUM_SAMPLES, 1)
        return not torch.equal(self.weight[::step], source.detach()[self._rows[::step]])


def _kind(module: nn.Module) -> str:
    weight = tensor_weight(module)
    if weight is None:
        return type(module).__name__
    return f"{list(weight.shape)} in {str(weight.dtype).removeprefix('torch.')} on {weight.device}"


def embed(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Embeddings `[..., H]` of `tokens` `[...]` int64 by `weight` `[V, H]`, on the tokens' device."""
    is_here = weight.device == tokens.device and weight.dtype == dtype and tokens.dim() == 2
    if is_here and not weight.requires_grad and uses_layer_kernels(weight):
        return ops.gather_rows(weight[None], tokens, None)
    # The embedding of a target that is split over devices may be on another device than its last layer.
    return F.embedding(tokens.to(weight.device), weight).to(tokens.device, dtype)


def score(normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits `[..., V]` of `normed` `[..., H]` by a head `weight` `[V, H]`, on the device of `normed`."""
    return linear(normed.to(weight.device), weight.to(normed.dtype)).to(normed.device)
