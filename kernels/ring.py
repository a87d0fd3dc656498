"""Blocks of columns in Triton kernels; see `ring_reference`."""

import triton
import triton.language as tl


@triton.jit
def find_block(positions_ptr, stride, num_columns, dummy, COLUMN_BLOCK: tl.constexpr):
    """The first live column of a row with `positions` `[n]` int64, its position, and the number of live columns.

    A row without a live column has position `dummy` and number 0.
    """
    begin = num_columns
    first = dummy
    count = 0
    for start in range(0, num_columns, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        at = positions_ptr + column.to(tl.int64) * stride
        position = tl.load(at, mask=column < num_columns, other=dummy).to(tl.int32)
        is_live = position < dummy
        begin = tl.minimum(begin, tl.min(tl.where(is_live, column, num_columns), axis=0))
        first = tl.minimum(first, tl.min(position, axis=0))
        count += tl.sum(is_live.to(tl.int32), axis=0)
    return begin, first, count
