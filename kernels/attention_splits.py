"""Splits of attention over the keys: how many there are, and the Triton kernel that merges their results.

Shapes: partial `[rows, splits, Dv]` float32, lse `[rows, splits]` float32, out `[rows, Dv]`, for the rows that
`attention` has: B * n * heads. With the normalised result o_i of a split and the base-2 logarithm l_i of its sum of
exponentials:

    out = sum_i 2^(l_i) o_i / sum_i 2^(l_i)
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs

# Programs launched per multiprocessor, one for so many slots and at most as many: two or three run at a time, the rest
# balance rows of unequal length.
_SLOTS_PER_PROGRAM, _MOST_PROGRAMS_PER_MULTIPROCESSOR = 640, 4
# With fewer slots a split costs more to launch and to merge than it saves: the fewest, and those beyond some splits.
_MIN_SLOTS_PER_SPLIT, _SLOTS_PER_FURTHER_SPLIT, _FEW_SPLITS = 64, 256, 8
_MAX_SPLITS = 128
_MERGE_ELEMENTS = 4096


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    VALUE_DIM: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of a query: out = sum_i 2^(lse_i) partial_i / sum_i 2^(lse_i), 0 where every lse is -inf.

    Grid: (B * n * heads, blocks of Dv). Reads `lse` `[B * n * heads, splits]` and, where it is finite, `partial`
    `[B * n * heads, splits, Dv]`; writes `out` `[B * n * heads, Dv]`.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    value_dim = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    at = row * num_splits + split
    wait_for_inputs(PDL)
    weights = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
    # A split without slots has written no partial result.
    is_written = weights > float("-inf")
    partial = tl.load(
        partial_ptr + at[:, None] * VALUE_DIM + value_dim[None, :],
        mask=is_written[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    largest = tl.max(weights, axis=0)
    weights = tl.exp2(weights - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_DIM + value_dim, out.to(out_ptr.dtype.element_ty), mask=value_dim < VALUE_DIM)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_splits(num_programs: int, num_visible: int, num_multiprocessors: int) -> int:
    """Number of splits, if a split takes `num_programs` programs and a query sees at most `num_visible` slots.

    Microseconds with 1 / 2 / 4 / 8 splits, shapes of Llama-3.1-8B, one query, one H200: 400 of 512 slots at batch 1
    8.6 / 6.8 / 5.3 / 4.4, at 8 9.3 / 8.1 / 8.8 / 11.9, at 32 20.9 / 21.0 / 24.3 / 29.2; 2,000 of 2,048 slots 31.4 /
    16.8 / 10.4 / 7.5 (16 splits: 8.6), 32.6 / 20.6 / 20.8 / 25.3, 83.6 / 67.5 / 70.2 / 73.8.
    """
    per_multiprocessor = min(max(num_visible // _SLOTS_PER_PROGRAM, 1), _MOST_PROGRAMS_PER_MULTIPROCESSOR)
    wanted = round(per_multiprocessor * num_multiprocessors / num_programs)
    most = min(num_visible // _MIN_SLOTS_PER_SPLIT, max(num_visible // _SLOTS_PER_FURTHER_SPLIT, _FEW_SPLITS))
    return max(1, min(wanted, most, _MAX_SPLITS))


def merge_splits(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
    """Merge the results `partial` of splits, which are not read where `lse` is -inf, in `out` of as many elements.

    One launch that depends on shapes only.
    """
    num_rows, num_splits, value_dim = partial.shape
    split_block = triton.next_power_of_2(num_splits)
    merge_block = min(max(16, triton.next_power_of_2(value_dim)), max(16, _MERGE_ELEMENTS // split_block))
    _merge_kernel[(num_rows, triton.cdiv(value_dim, merge_block))](
        partial,
        lse,
        out,
        num_splits,
        VALUE_DIM=value_dim,
        SPLIT_BLOCK=split_block,
        VALUE_BLOCK=merge_block,
        num_warps=max(1, min(4, split_block * merge_block // 512)),
        **dependent_launch(out.device),
    )
