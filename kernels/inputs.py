"""Triton input preparation of a drafter's first pass; defined by `reference.prepare_inputs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .types import DraftInputs


# Triton would build anew for those of the arguments so named that are 1 or divisible by 16, to no gain.
@triton.jit(
    do_not_specialize=[
        "tokens_stride",
        "lengths_stride",
        "committed_stride",
        "limits_stride",
        "finished_stride",
        "out_tokens_stride",
        "out_slots_stride",
        "out_positions_stride",
        "out_sources_stride",
        "num_slots",
        "num_kept",
        "width",
        "mask_token",
        "shift",
    ]
)
def _prepare_inputs_kernel(
    tokens_ptr,
    lengths_ptr,
    committed_ptr,
    limits_ptr,
    finished_ptr,
    out_tokens_ptr,
    out_slots_ptr,
    out_positions_ptr,
    out_sources_ptr,
    tokens_stride,
    lengths_stride,
    committed_stride,
    limits_stride,
    finished_stride,
    out_tokens_stride,
    out_slots_stride,
    out_positions_stride,
    out_sources_stride,
    num_slots,
    num_kept,
    width,
    mask_token,
    shift,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row * lengths_stride)
    committed = tl.load(committed_ptr + row * committed_stride)
    # No slot lies below a limit of 0.
    limit = tl.where(tl.load(finished_ptr + row * finished_stride), 0, tl.load(limits_ptr + row * limits_stride))

    column = tl.arange(0, BLOCK).to(tl.int64)
    slot = length - shift - num_kept + column
    source = column - num_kept + tl.minimum(tl.maximum(committed, 0), num_kept)
    is_mask = column >= num_kept
    is_live = (is_mask | (source >= 0)) & (slot >= 0) & (slot + 1 + shift < limit)
    is_kept = is_live & (column < num_kept)
    kept = tl.load(tokens_ptr + row * tokens_stride + tl.minimum(slot + shift, num_slots - 1), mask=is_kept, other=0)

    is_column = column < width
    token = tl.where(is_live & is_mask, mask_token, kept)
    tl.store(out_tokens_ptr + row * out_tokens_stride + column, token, mask=is_column)
    tl.store(out_slots_ptr + row * out_slots_stride + column, tl.where(is_live, slot, num_slots - 1), mask=is_column)
    tl.store(out_positions_ptr + row * out_positions_stride + column, tl.where(is_live, slot, 0), mask=is_column)
    tl.store(out_sources_ptr + row * out_sources_stride + column, tl.where(is_kept, source, -1), mask=is_column)


def prepare_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    out: DraftInputs,
    num_masks: int,
    mask_token: int,
    shift: int,
) -> None:
    """See `reference.prepare_inputs`, bit for bit. One launch, one program a row; a CUDA graph can hold it.

    Reads one element a row of `lengths`, `committed`, `limits` and `finished`, and of `tokens` the kept ones, never
    outside the row; writes every element of the four tensors of `out` and nothing else. All may be slices of larger
    buffers; the host looks at shapes and strides only.
    """
    batch, width = out.tokens.shape
    assert tokens.stride(1) == 1 and all(buffer.stride(1) == 1 for buffer in out), "rows must have unit stride"
    assert all(buffer.shape == (batch, width) for buffer in out) and len(tokens) == batch, "shapes must agree"
    _prepare_inputs_kernel[(batch,)](
        tokens,
        lengths,
        committed,
        limits,
        finished,
        *out,
        tokens.stride(0),
        lengths.stride(0),
        committed.stride(0),
        limits.stride(0),
        finished.stride(0),
        *(buffer.stride(0) for buffer in out),
        num_slots=tokens.shape[1],
        num_kept=width - num_masks,
        width=width,
        mask_token=mask_token,
        shift=shift,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
