"""Reference of low-rank updates of linear layers, each of an adapter that some rows have (LoRA)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    """Add to outputs of L linear layers of the same inputs the updates of A adapters, with sums in float32 at least.

    Args:
        out: `[n, sum of sizes]`, the outputs of the layers side by side; written to.
        inputs: `[n, in]`.
        adapters: `[n]` int64, whose bit a says whether a row has adapter a.
        down: `[rank, in]` each, of layer l and adapter a number l A + a; the rank may be 0.
        up: `[sizes[l], rank]` each, likewise.
        places: where the kernel finds these, see `low_rank_places`.
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


def low_rank_places(down: Sequence[torch.Tensor], up: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """`[L A, 5]` int64 on the host: of each layer and adapter the addresses of `down` and `up`, the rank, the layer's
    output features, and how many the layers before it have."""
    count, rows = len(down) // len(sizes), []
    for index, (first, second) in enumerate(zip(down, up, strict=True)):
        layer = index // count
        rows.append((first.data_ptr(), second.data_ptr(), len(first), sizes[layer], sum(sizes[:layer])))
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
