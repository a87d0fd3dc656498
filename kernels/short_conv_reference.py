"""PyTorch reference of causal depthwise convolutions over the last W positions, for blocks of drafts:

    out[p, c] = f(bias[c] + sum_t weight[c, t] x[p - W + 1 + t, c]),    f = SiLU or the identity

with x[p, c] of position p, 0 if p < 0. A ring holds the inputs of earlier positions; see `ring_reference`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu as apply_silu

from .ring_reference import PassPositions, keep


def short_conv(
    inputs: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    dummy: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Convolve a block of columns and write the inputs of its last Rc positions to the ring.

    A row without a live column changes nothing. With K drafts Rc >= W - 1 + 2 K + 2 is enough for all later blocks.
    Only slots of the W - 1 positions before the block are read.

    Args:
        inputs: `[B, n, C]`.
        ring: `[B, Rc, C]` in the dtype of `inputs`; updated in place.
        positions: `[B, n]` int64, the position of each column.
        dummy: the position of padding columns.
        weight: `[C, W]`; the last tap is that of the column itself.
        bias: `[C]` or None.
        silu: whether to apply SiLU to the result.

    Returns:
        `[B, n, C]` in the dtype of `inputs`, summed in float32 (in float64 for float64 inputs); 0 in padding columns.
    """
    num_columns, width = inputs.shape[1], weight.shape[1]
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    block = PassPositions.of(positions, dummy)
    # The W - 1 positions before column 0, then those of the columns.
    places = block.first + torch.arange(1 - width, num_columns, device=positions.device)
    sequence = keep(block.at(places, ring, inputs), places >= 0).to(dtype)
    weight = weight.to(dtype)
    total = sequence[:, :num_columns] * weight[:, 0]
    for tap in range(1, width):
        total = total + sequence[:, tap : tap + num_columns] * weight[:, tap]
    if bias is not None:
        total = total + bias.to(dtype)
    if silu:
        total = apply_silu(total)
    block.keep(ring, inputs)
    return keep(total, positions < dummy).to(inputs.dtype)
