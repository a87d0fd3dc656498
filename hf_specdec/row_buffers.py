"""The buffers of `DecodeState` with an entry for each row: what is in them at first, and how they get it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels.types import NO_TOKEN, NO_TOP_K

# The int64 numbers of a row that holds no text, unless a call or a request says otherwise.
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
# The rest of a row that is admitted, likewise.
NEW_ROW = {"eos": NO_TOKEN, "row_temperatures": 1.0, "row_tail": 0.0, "finished": False}
# All buffers with an entry for each row but tokens and caches.
OF_ROWS = (*NUMBERS, *NEW_ROW)


def set_numbers(state: object, rows: torch.Tensor | slice, count: int, **given: Sequence[int]) -> None:
    """Set the int64 buffers `[B]` of `count` rows of the `DecodeState` `state`, in one upload, by their names."""
    numbers = upload([given.get(name, [default] * count) for name, default in NUMBERS.items()], state.lengths)
    for name, values in zip(NUMBERS, numbers, strict=True):
        getattr(state, name)[rows] = values


def set_rows(buffer: torch.Tensor, rows: torch.Tensor | slice, value: float | bool) -> None:
    """Let `rows` of `buffer`, `[n]` int64 or all, be a number.

    `buffer[rows] = value` would copy the number from pageable memory, for which the host waits until a GPU has done all
    work before it.
    """
    if isinstance(rows, slice):
        buffer[rows] = value
    else:
        buffer.index_fill_(0, rows, value)


def upload(values: int | Sequence | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values` in the dtype and on the device of `like`; a GPU is not waited for."""
    if isinstance(values, torch.Tensor):
        host = values.to(like.dtype)
        host = host.pin_memory() if like.is_cuda else host
    else:
        host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)


def upload_all(values: Sequence[torch.Tensor], like: torch.Tensor) -> Sequence[torch.Tensor]:
    """Tensors `[n]`, all of the host or all on the device of `like`, on the latter, in one upload."""
    if all(one.device == like.device for one in values):
        return values
    return upload(torch.cat(list(values)), like).split([len(one) for one in values])
