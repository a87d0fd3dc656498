"""PyTorch reference of causal depthwise convolutions over the last W positions, for blocks of drafts.

The formula is in `short_conv`. A ring holds the inputs of earlier positions, slot = position mod Rc. Nothing is rolled
back: inputs of rejected drafts are overwritten by the block that covers their positions.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu as apply_silu

from .ring_reference import find_block, keep, read_ring, write_ring


def short_conv(
    inputs: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    dummy: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Convolve a block of columns, and write its inputs to the ring (those of its last Rc positions).

    The live columns of a row are adjacent, at consecutive positions; columns at `dummy` or beyond are no tokens, and
    may stand before and behind them. A row without a live column changes nothing. With K drafts Rc >= W - 1 + 2 K + 2
    holds all that a later block may read; only slots of the W - 1 positions before the block are read.

    Args:
        inputs: `[B, n, C]`.
        ring: `[B, Rc, C]` in the dtype of `inputs`, in place.
        positions: `[B, n]` int64, the position of each column.
        dummy: the position of columns that are no tokens.
        weight: `[C, W]`; the last one is that of the column itself.
        bias: `[C]` or None.
        silu: apply SiLU to the result.

    Returns:
        `[B, n, C]` in the dtype of `inputs`, summed in float32 (float64 if `inputs` are); 0 in columns that are no
        tokens.
    """
    num_columns, width = inputs.shape[1], weight.shape[1]
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    block = find_block(positions, dummy)
    before = block.first[:, None] - torch.arange(width - 1, 0, -1, device=positions.device)
    has_live = block.is_live.any(dim=1, keepdim=True)
    # The W - 1 inputs before the block, and the block's own live columns moved to the front.
    shifted = (block.begin[:, None] + torch.arange(num_columns, device=positions.device)) % num_columns
    rows = torch.arange(len(inputs), device=inputs.device)[:, None]
    live = keep(inputs, block.is_live)[rows, shifted]
    sequence = torch.cat([read_ring(ring, before, (before >= 0) & has_live), live], dim=1).to(dtype)
    weight = weight.to(dtype)
    total = sequence[:, :num_columns] * weight[:, 0]
    for tap in range(1, width):
        total = total + sequence[:, tap : tap + num_columns] * weight[:, tap]
    if bias is not None:
        total = total + bias.to(dtype)
    if silu:
        total = apply_silu(total)
    restored = (torch.arange(num_columns, device=positions.device) - block.begin[:, None]) % num_columns
    out = keep(total[rows, restored], block.is_live).to(inputs.dtype)
    write_ring(ring, inputs, block, block.first)
    return out
