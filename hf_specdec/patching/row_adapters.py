"""The adapters of the rows in a pass, and the low-rank updates (LoRA) of linear layers by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from ..device_policy import policy_of
from ..kernels.types import StoredWeight


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


class LowRankUpdates:
    """The low-rank updates of layers with the same inputs, by the adapters of the rows; `weights` are the arguments of
    `ops.add_low_rank` from `down` on."""

    def __init__(self, rows: RowAdapters, *weights: Any):
        self._rows, self._args, self._rank = rows, weights, max(map(len, weights[0]))

    @property
    def is_in_pass(self) -> bool:
        """Whether the adapters of the rows are known, as in a pass of the target."""
        return self._rows.bits is not None

    def add(self, out: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the updates of inputs `[..., in]` to the outputs of the layers, `[..., sum of out]`."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        ops.add_low_rank(out.view(-1, out.shape[-1]), flat, self._rows.of(inputs), *self._args)

    def applied(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | StoredWeight | None,
        bias: torch.Tensor | None,
        forward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """`outputs`, or what `forward`, the layers without updates, returns for `inputs`, with the updates added."""
        out = self.outputs(inputs, weight, bias)
        if out is None:
            out = forward(inputs).contiguous()
            self.add(out, inputs)
        return out

    def outputs(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor | StoredWeight | None,
        bias: torch.Tensor | None,
        activation: str | None = None,
    ) -> torch.Tensor | None:
        """The updated outputs of the layers, `[..., sum of out]` for `[..., in]`, by their weights as one; with an
        activation `activation(gate) * up`. None if it is as fast to add the updates to what the layers compute."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if weight is None or not policy_of(inputs.device).few_row_linear:
            return None
        if not ops.has_adapted_linear(flat, weight, self._rank):
            return None
        out = ops.adapted_linear(flat, weight, bias, activation, self._rows.of(inputs), *self._args)
        return out.reshape(*inputs.shape[:-1], out.shape[-1])
