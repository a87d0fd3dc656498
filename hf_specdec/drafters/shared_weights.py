"""Weights of a target that a drafter reads in place of some of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..checkpoints.tensors import is_plain, plain_weight
from ..parallel.tensor_parallel import local_shard

# Rows of a copy that are compared with what they were copied from. Writing through `.data` leaves no other trace.
_NUM_SAMPLES = 32


def readable_weight(module: nn.Module | None, what: str, width: int, name: str) -> torch.Tensor:
    """The weight `[V, width]` of the target's `module`, its embedding or head, for a drafter called `name`.

    Raises:
        ValueError: it has none that can be read, or one of another width.
    """
    weight = getattr(module, "weight", None)
    if weight is None or not weight.is_floating_point():
        raise ValueError(
            f"{name} has no {what} of its own and must borrow the target's, but the target's is "
            f"{type(module).__name__}; expected a module with a floating-point `weight`."
        )
    if weight.device.type == "meta":
        raise ValueError(
            f"{name} has no {what} of its own and must borrow the target's, but that is offloaded and not in "
            f"memory; keep it on a device (`device_map`), or use a drafter that has its own."
        )
    if weight.dim() != 2:
        raise ValueError(
            f"{name} has no {what} of its own and must borrow the target's, but that has shape "
            f"{list(weight.shape)}; expected [vocabulary, width]. It is sharded (DeepSpeed stage 3, FSDP): load "
            "all of the target in every process, or use a drafter that has its own."
        )
    if weight.shape[1] != width:
        raise ValueError(
            f"{name} has no {what} of its own, and the target's is {weight.shape[1]} wide where the drafter needs "
            f"{width}, so it cannot be borrowed."
        )
    return plain_weight(weight)


class SharedWeight:
    """The embedding or head of a target, lent to a drafter that has none.

    Args:
        module: the target's.
        what: `"embedding"` or `"head"`.
        width, name: as for `borrow_weight`, whose errors are raised.
        rows: `[n]` int64, those that the drafter wants; all if None.

    Attributes:
        weight: `[V or n, width]`. The target's own parameter where all of it is wanted and it is ordinary, so that
            what its owner writes is read at once; otherwise a copy, which `refresh` keeps right.
    """

    def __init__(self, module: nn.Module | None, what: str, width: int, name: str, rows: torch.Tensor | None = None):
        self.what = what
        weight = readable_weight(module, what, width, name)
        # It outlives the call, so it must not be a tensor of inference mode, which nobody could write to outside.
        with torch.inference_mode(False), torch.no_grad():
            self._rows = None if rows is None else rows.to(weight.device)
            self.weight = weight if rows is None else weight.detach()[self._rows]
        self._place, self._version = _place(module.weight), _version(module.weight)

    def how_changed(self, module: nn.Module) -> str | None:
        """What the owner has done to the weight of `module` besides writing into it; None if nothing."""
        place = _place(module.weight)
        if place == self._place:
            return None
        (*before, _), (*now, _) = self._place, place
        if before == now:
            return f"its {self.what} is another tensor"
        return f"its {self.what} was {_words(*before)} and is {_words(*now)}"

    def refresh(self, module: nn.Module) -> None:
        """Write what `module` holds now into the copy, if this is one. Its place stays, so captured rounds do too."""
        lender = module.weight
        shares_memory = self._rows is None and is_plain(lender)
        if shares_memory or not self._is_stale(lender):
            return
        weight = plain_weight(lender).detach()
        with torch.no_grad():
            if self._rows is None:
                self.weight.copy_(weight)
            else:
                torch.index_select(weight, 0, self._rows, out=self.weight)
        self._version = _version(lender)

    def _is_stale(self, lender: torch.Tensor) -> bool:
        version = _version(lender)
        if version is None or version != self._version:
            return True
        if not is_plain(lender):  # To gather or dequantise it is too much for every call.
            return False
        step = max(len(self._rows) // _NUM_SAMPLES, 1)
        return not torch.equal(self.weight[::step], lender.detach()[self._rows[::step]])


def _place(weight: torch.Tensor) -> tuple[Any, ...]:
    # A quantised weight has no memory but that of its parts.
    return weight.shape, weight.dtype, weight.device, local_shard(weight).data_ptr() or id(weight)


def _version(weight: torch.Tensor) -> int | None:
    """How often `weight` was written to in place; None if nobody counts."""
    return None if weight.is_inference() else weight._version


def _words(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} in {str(dtype).removeprefix('torch.')} on {device}"
