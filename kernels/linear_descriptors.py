"""Triton linear layer with tensor descriptors, for many rows on Hopper and later; see `linear_reference.linear`.

Tensor descriptors (TMA) load and store the tiles. Inputs that do not fill their tiles are loaded by pointers with a
mask, because descriptors are slower for missing rows than for others (4096 x 14336 on one H200: 54 us for 33 rows in a
tile of 64, 33 us for 64 rows); so is the last row in place of missing ones (65 us). One program adds all products of an
output in float32, with k ascending, by the same instructions as `linear`: both give the same bits, whatever the number
of rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_splits import num_multiprocessors
from .launch import Unspecialised, has_pdl, kernel, wait_for_inputs
from .linear import GROUP, request_lines
from .types import LinearTiles

# Descriptors need rows of a multiple of so many bytes.
_ALIGNMENT = 16
_HOPPER = (9, 0)


@kernel
def _linear_kernel(
    inputs_desc,
    inputs_ptr,
    weight_desc,
    weight_ptr,
    bias_ptr,
    out_desc,
    num_rows: Unspecialised,
    size_out,
    size_in,
    inputs_stride,
    weight_stride,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Tiles of FEATURES output features of ROWS rows.

    Grid: (P programs,), each of which computes every P-th tile. Reads the rows of `inputs` and `weight` of its tiles;
    writes their `out`.
    """
    row_blocks, feature_blocks = tl.cdiv(num_rows, ROWS), tl.cdiv(size_out, FEATURES)
    if has_pdl():
        _, feature_block = tl.swizzle2d(
            tl.program_id(0) // feature_blocks, tl.program_id(0) % feature_blocks, row_blocks, feature_blocks, GROUP
        )
        first = (feature_block * FEATURES).to(tl.int64)
        request_lines(weight_ptr + first * weight_stride, weight_stride * 2, size_out - first, 128, FEATURES)
    wait_for_inputs()
    for tile in tl.range(tl.program_id(0), row_blocks * feature_blocks, tl.num_programs(0)):
        row_block, feature_block = tl.swizzle2d(
            tile // feature_blocks, tile % feature_blocks, row_blocks, feature_blocks, GROUP
        )
        row, feature = row_block * ROWS, feature_block * FEATURES
        total = tl.zeros([ROWS, FEATURES], tl.float32)
        own_row, depth = (row + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, DEPTH)
        is_own = (own_row < num_rows)[:, None]
        for start in range(0, size_in, DEPTH):
            w = weight_desc.load([feature, start])
            if inputs_desc is not None:
                x = inputs_desc.load([row, start])
            else:
                inputs = inputs_ptr + own_row[:, None] * inputs_stride + (start + depth)[None, :]
                is_loaded = is_own if IS_EVEN else is_own & (depth < size_in - start)[None, :]
                x = tl.load(inputs, mask=is_loaded, other=0.0)
            total = tl.dot(x, w.T, total)
        if bias_ptr is not None:
            own = feature + tl.arange(0, FEATURES)
            total += tl.load(bias_ptr + own, mask=own < size_out, other=0.0).to(tl.float32)[None, :]
        out_desc.store([row, feature], total.to(out_desc.dtype))


@functools.cache
def _has_descriptors(device: torch.device) -> bool:
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= _HOPPER)


def takes(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` takes `inputs` `[n, in]` and `weight` `[out, in]`: they must be aligned and of 16 bits."""
    if inputs.itemsize != 2 or not _has_descriptors(inputs.device):
        return False
    sizes = (weight.shape[0], inputs.stride(0), weight.stride(0))
    return all(size * 2 % _ALIGNMENT == 0 for size in sizes) and not (
        inputs.data_ptr() % _ALIGNMENT or weight.data_ptr() % _ALIGNMENT
    )


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: LinearTiles) -> torch.Tensor:
    """See `linear_reference.linear`, for tensors that it `takes`. One launch, by shapes and strides only."""
    (num_rows, size_in), size_out = inputs.shape, len(weight)
    assert weight.shape[1] == size_in and inputs.stride(1) == weight.stride(1) == 1, "rows must have unit stride"
    out = inputs.new_empty(num_rows, size_out)
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(size_out, tiles.features)
    fills_tiles = num_rows % tiles.rows == 0
    _linear_kernel[(min(num_tiles, num_multiprocessors(inputs.device)),)](
        TensorDescriptor.from_tensor(inputs, [tiles.rows, tiles.depth]) if fills_tiles else None,
        inputs,
        TensorDescriptor.from_tensor(weight, [tiles.features, tiles.depth]),
        weight,
        bias,
        TensorDescriptor.from_tensor(out, [tiles.rows, tiles.features]),
        num_rows,
        size_out,
        size_in,
        inputs.stride(0),
        weight.stride(0),
        IS_EVEN=size_in % tiles.depth == 0,
        **tiles.options,
    )
    return out
