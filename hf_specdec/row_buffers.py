"""The buffers of `DecodeState` with an entry for each row: their initial values, and how they are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels.types import NO_TOKEN, NO_TOP_K

# The int64 numbers of a row without a text, and their defaults in a row that is admitted.
NUMBERS = {
    "lengths": 1,
    "limits": 1,
    "prompt_lengths": 1,
    "seeds": 0,
    "row_top_k": NO_TOP_K,
    "cached": 0,
    "draft_starts": 0,
    "position_offsets": 0,
    "prompt_length_gap": 0,
    "adapters": 0,
}
# Initial values of the other buffers of a row that is admitted.
NEW_ROW = {"eos": NO_TOKEN, "row_temperatures": 1.0, "row_tail": 0.0, "finished": False}


def blank_numbers(batch: int, device: torch.device) -> torch.Tensor:
    """`[len(NUMBERS), batch]` int64: the numbers of rows without a text, in one buffer that one copy can set."""
    # Kernels take `[batch]` views; for an address that 16 does not divide, Triton would compile another variant.
    numbers = torch.empty(len(NUMBERS), batch + batch % 2, dtype=torch.int64, device=device)[:, :batch]
    return numbers.copy_(numbers_of(batch, numbers))


def numbers_of(count: int, like: torch.Tensor, **given: Sequence[int]) -> torch.Tensor:
    """`[len(NUMBERS), count]` on the device of `like`: the `given` numbers of `count` rows, and defaults for others."""
    return upload([given.get(name, [default] * count) for name, default in NUMBERS.items()], like)


def set_rows(buffer: torch.Tensor, rows: torch.Tensor | slice, value: float | bool) -> None:
    """Set `rows` of `buffer`, `[n]` int64 or a slice of all, to a number.

    `buffer[rows] = value` would copy the number from pageable memory, and the host would wait until a GPU has done all
    its earlier work.
    """
    if isinstance(rows, slice):
        buffer[rows] = value
    else:
        buffer.index_fill_(0, rows, value)


def upload(values: int | Sequence | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values` in the dtype and on the device of `like`, without waiting for a GPU."""
    if isinstance(values, torch.Tensor) and values.device == like.device:
        return values.to(like.dtype)
    if isinstance(values, torch.Tensor):
        host = values.to(like.dtype)
        host = host.pin_memory() if like.is_cuda else host
    else:
        host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)
