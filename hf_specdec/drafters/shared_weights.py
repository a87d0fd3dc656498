"""Shared weights: the target's embedding and head, used by a drafter that has none of its own."""

from __future__ import annotations

from operator import methodcaller

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..checkpoints.tensors import is_plain, plain_weight
from ..modules.deferred import rows_at
from ..modules.patch import uses_layer_kernels
from ..modules.signature import places_of, versions_of
from ..modules.weights import tensor_weight
from ..patching.linear import linear

# Number of rows of a copy that are compared with the target's, because a write through `.data` counts no version.
_NUM_SAMPLES = 32

_MODULES = {"embedding": methodcaller("get_input_embeddings"), "head": methodcaller("get_output_embeddings")}


def readable_weight(module: nn.Module | None, what: str, width: int, name: str) -> torch.Tensor:
    """The weight `[V, width]` of the target's embedding or head, `module`, for a drafter called `name`. Raises
    `ValueError` unless it is a floating-point matrix of that width in memory."""
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
    """The `"embedding"` or `"head"` of `target` (`what`), used by a drafter called `name` that has none.

    The drafter needs `rows` `[n]` int64, or all if None. `readable_weight` has the errors.

    Attributes:
        weight: `[V or n, width]`, without gradients. It has the memory of the target's parameter if all rows are needed
            and the parameter is plain (see `is_plain`), so that the drafter sees every write. Otherwise it is a copy,
            which `refresh` updates.
    """

    def __init__(self, target: PreTrainedModel, what: str, width: int, name: str, rows: torch.Tensor | None = None):
        self.what, module = what, _MODULES[what](target)
        weight = readable_weight(module, what, width, name).detach()
        if rows is not None and (last := int(rows.max())) >= len(weight):
            raise ValueError(f"{name} drafts the token {last}, of which the target's {what} of {len(weight)} has none.")
        # `refresh` writes to it in later calls, and an inference tensor cannot be written to outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._rows = None if rows is None else rows.to(weight.device)
            self.weight = weight if rows is None else weight[self._rows]
        self._places, self._kind = places_of([module.weight]), _kind(module)
        self._versions = versions_of([module.weight])

    def how_changed(self, target: PreTrainedModel) -> str | None:
        """A message part on how the weight of `target` was replaced, moved, cast or resized; None if it was not."""
        module = _MODULES[self.what](target)
        kind = _kind(module)
        if kind != self._kind:
            return f"its {self.what} was {self._kind} and is {kind}"
        return None if places_of([module.weight]) == self._places else f"its {self.what} is another tensor"

    def refresh(self, target: PreTrainedModel) -> None:
        """Update `weight` from `target` if it is a copy. It keeps its memory, so captured rounds stay valid."""
        if not self.is_stale(target):
            return
        source = _MODULES[self.what](target).weight
        weight = plain_weight(source).detach()
        with torch.no_grad():
            if self._rows is None:
                self.weight.copy_(weight)
            else:
                torch.index_select(weight, 0, self._rows, out=self.weight)
        self._versions = versions_of([source])

    def is_stale(self, target: PreTrainedModel) -> bool:
        """Whether the weight of `target` was written to since it was copied."""
        source = _MODULES[self.what](target).weight
        if self._rows is None and is_plain(source):  # they share memory
            return False
        if source.is_inference() or versions_of([source]) != self._versions:  # inference tensors count no writes
            return True
        if not is_plain(source):  # to gather or dequantise a weight in every call would cost too much
            return False
        step = max(len(self._rows) // _NUM_SAMPLES, 1)
        return not torch.equal(self.weight[::step], source.detach()[self._rows[::step]])


def _kind(module: nn.Module) -> str:
    weight = tensor_weight(module)
    if weight is None:
        return type(module).__name__
    return f"{list(weight.shape)} in {str(weight.dtype).removeprefix('torch.')} on {weight.device}"


def embed(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Embeddings `[..., H]` of `tokens` `[...]` int64 by `weight` `[V, H]`, in `dtype` on the tokens' device."""
    is_here = weight.device == tokens.device and weight.dtype == dtype and tokens.dim() == 2
    if is_here and not torch.is_grad_enabled() and uses_layer_kernels(weight):
        return rows_at(tokens, weight)
    # In a target that is split over devices, the embedding may be on another device than the last layer.
    return F.embedding(tokens.to(weight.device), weight).to(tokens.device, dtype)


def score(normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits `[..., V]` of `normed` `[..., H]` by a head `weight` `[V, H]`, on the device of `normed`."""
    return linear(normed.to(weight.device), weight.to(normed.dtype)).to(normed.device)
