"""PyTorch references of low-rank updates of linear layers (LoRA), by adapters that some rows have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .gated_activation_reference import gated_activation
from .linear_reference import linear


def adapted_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    adapters: torch.Tensor,
    down: list[torch.Tensor],
    up: list[torch.Tensor],
    places: torch.Tensor,
    scales: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    """`linear_reference.linear` of L layers with the same inputs, whose outputs `add_low_rank` updates before the
    activation. With an activation the layers are gate, then up."""
    out = linear(inputs, weight, bias)
    add_low_rank(out, inputs, adapters, down, up, places, scales, sizes)
    return out if activation is None else gated_activation(*out.chunk(2, dim=-1), activation)


def add_low_rank(
    out: torch.Tensor,
    inputs: torch.Tensor,
    adapters: torch.Tensor,
    down: list[torch.Tensor],
    up: list[torch.Tensor],
    places: torch.Tensor,
    scales: torch.Tensor,
    sizes: list[int],
) -> None:
    """Add updates of A adapters to the outputs of L linear layers with the same inputs, with sums in float32 or wider.

    Args:
        out: `[n, sum of sizes]`, the outputs of the layers side by side; written to.
        inputs: `[n, in]`.
        adapters: `[n]` int64; bit a is set if the row has adapter a.
        down: `[rank, in]` each; that of layer l and adapter a has number l A + a. The rank may be 0.
        up: `[sizes[l], rank]` each, in the same order.
        places: addresses and sizes for the kernel, from `low_rank_places`.
        scales: `[L A]` float32, factors on the updates.
        sizes: output features of each layer.
    """
    dtype = torch.promote_types(torch.promote_types(inputs.dtype, down[0].dtype), torch.float32)
    total, count = torch.zeros_like(out, dtype=dtype), len(down) // len(sizes)
    for adapter in range(count):
        rows = (adapters >> adapter & 1).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        given = inputs[rows].to(dtype)
        for layer, part in enumerate(total.split(sizes, dim=1)):
            at = layer * count + adapter
            part[rows] += given @ down[at].to(dtype).T @ up[at].to(dtype).T * scales[at]
    out.copy_(out.to(dtype) + total)


def low_rank_places(down: Sequence[torch.Tensor], up: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[L A, 3]` int64 on the host, for each layer and adapter: the addresses of `down` and `up`, and the rank."""
    rows = [(first.data_ptr(), second.data_ptr(), len(first)) for first, second in zip(down, up, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
