"""Memory for the keys and values of rows: addresses for the longest texts, and memory for the texts that there are.

Addresses of all rows are reserved at once, and memory is put behind the leading part of each row as it grows, as
vAttention (arXiv 2405.04437) does. So buffers keep their addresses, which CUDA graphs and views need. What texts have
in common is in memory once, where the device can put the same memory behind several addresses (`virtual_pages`).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device_policy import policy_of
from ..errors import first_line
from .virtual_pages import driver_can, granularity_on, pages_on

# Slots that a row gets at once: more cost fewer calls of the driver (50 us each on one H200, whatever the size), fewer
# leave less memory unused.
STEP_SLOTS = 128
# Most bytes that are put behind addresses in one piece, which is also shared, and given back, in one.
_MOST_PIECE = 16 << 20
# Tokens of a row begin at multiples of a page's bytes divided by this, so that as many slots always fill whole pages.
_MOST_TOKENS_A_PAGE = {"cuda": 4096, "cpu": 64}
# The part of a GPU's memory that is left to other tensors, such as those of a prefill.
_SHARE_LEFT = 1 / 32
# Token ids of the longest texts may take one part in so many of a device's memory; what goes with them takes more.
_SHARE_FOR_TOKENS = 16


def slot_unit(device: torch.device) -> int:
    """The slots of a `RowMemory` on `device` are a multiple of this."""
    return _MOST_TOKENS_A_PAGE[device.type]


def has_virtual_memory(device: torch.device) -> bool:
    """Whether there can be a `RowMemory` on `device`."""
    policy = policy_of(device)
    if device.type == "cpu":
        return policy.virtual_memory and sys.platform == "linux"
    # The references of attention read slots that no query sees.
    return policy.virtual_memory and policy.triton and device.type == "cuda" and driver_can(device)


@dataclass(eq=False)
class _Memory:
    users: int = 1


class _Piece(NamedTuple):
    """A part of a row, in bytes, which has memory."""

    start: int
    size: int
    memory: _Memory


def _bytes_of(pieces: Iterable[_Piece]) -> int:
    """Bytes of the memory that is behind `pieces` and behind no others."""
    users = Counter(piece.memory for piece in pieces)
    sizes = {piece.memory: piece.size for piece in pieces}
    return sum(size for memory, size in sizes.items() if users[memory] == memory.users)


_committed: defaultdict[torch.device, int] = defaultdict(int)
_peak_committed: defaultdict[torch.device, int] = defaultdict(int)
_counting = threading.Lock()


def committed_bytes(device: torch.device) -> int:
    """Bytes of memory that the rows of all `RowMemory` on `device` hold."""
    return _committed[device]


def peak_committed_bytes(device: torch.device) -> int:
    """The most of `committed_bytes` since the start of the process or `reset_peak_committed_bytes`."""
    return _peak_committed[device]


def reset_peak_committed_bytes(device: torch.device) -> None:
    with _counting:
        _peak_committed[device] = _committed[device]


def _count(device: torch.device, size: int) -> None:
    with _counting:
        _committed[device] += size
        _peak_committed[device] = max(_peak_committed[device], _committed[device])


def _uncount(device: torch.device, rows: list[list[_Piece]]) -> None:
    _count(device, -_bytes_of([piece for pieces in rows for piece in pieces]))


# What may be taken on a device before it is asked again how much it has, which takes 0.2 ms on an H200.
_unasked: dict[torch.device, int] = {}


def available_bytes(device: torch.device) -> int:
    """Bytes that rows on `device` may still get: `DevicePolicy.cache_bytes` limits what they hold together; on a GPU so
    do what is free, `1 / 32` of its memory left out, and what `torch.cuda.set_per_process_memory_fraction` has left."""
    found = _within_limit(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = total * torch.cuda.get_per_process_memory_fraction(device)
        left = min(free, int(allowed) - torch.cuda.memory_reserved(device) - committed_bytes(device))
        found = min(found, left - int(total * _SHARE_LEFT))
    return max(found, 0)


def total_bytes(device: torch.device) -> int:
    """Bytes of memory that `device` has, used or not; `sys.maxsize` where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def taken_bytes(device: torch.device) -> int:
    """Bytes of a GPU that tensors and rows of this process take; 0 on other devices."""
    return torch.cuda.memory_allocated(device) + committed_bytes(device) if device.type == "cuda" else 0


def _within_limit(device: torch.device) -> int:
    limit = policy_of(device).cache_bytes
    return sys.maxsize if limit is None else max(limit - committed_bytes(device), 0)


def _take_bytes(device: torch.device, wanted: int) -> None:
    """Take `wanted` of the bytes that are available on `device`; with fewer a `torch.OutOfMemoryError` is raised."""
    unasked = _unasked.get(device, 0) - wanted
    if unasked < 0 or wanted > _within_limit(device):
        available = available_bytes(device)
        if wanted > available:
            raise torch.OutOfMemoryError(
                f"A row needs {wanted} bytes more for keys and values, of {available} that there are."
            )
        unasked = (available - wanted) // 16
    _unasked[device] = unasked


class RowMemory:
    """Rows of slots, of which the leading ones of each row have memory; a slot holds a token of all layers.

    Rows may share the memory of leading slots, which none of them writes then. The last slot of each row, the dummy
    slot, always has memory, on a GPU the same in all rows.

    Args:
        slots: of each row; a multiple of `slot_unit`.
        token_bytes: least bytes of a slot.

    Attributes:
        capacity: slots of a row that can have memory.
        token_bytes: bytes from one slot to the next.
    """

    def __init__(self, rows: int, slots: int, token_bytes: int, device: torch.device):
        granularity = granularity_on(device)
        unit = granularity // slot_unit(device)
        self.token_bytes = unit * -(-token_bytes // unit)
        self._rows, self._slots, self._device = rows, slots, device
        self._row_bytes = slots * self.token_bytes
        assert self._row_bytes % granularity == 0, f"{slots} slots of {self.token_bytes} bytes fill no whole pages"
        tail = granularity * -(-self.token_bytes // granularity)
        self.capacity = (self._row_bytes - tail) // self.token_bytes
        if self.capacity < 1:
            raise ValueError(f"{slots} slots of {self.token_bytes} bytes have no room beside the dummy slot.")
        self._granularity = granularity
        self._pages = pages_on(device, rows * self._row_bytes)
        self._pieces: list[list[_Piece]] = [[] for _ in range(rows)]
        weakref.finalize(self, _uncount, device, self._pieces).atexit = False
        self._bytes = [0] * rows
        if device.type == "cuda":
            starts = [(row + 1) * self._row_bytes - tail for row in range(rows)]
            self._pages.put(starts[0], tail)
            for start in starts[1:]:
                self._pages.alias(start, tail, starts[0])
        # Pointers of all layers' tensors begin in the first slot, so that keeps its memory, which is not counted.
        self._tail, self._floors = tail, [tail] + [0] * (rows - 1)
        self._pages.put(0, tail)
        self._bytes[0] = tail

    def view(self, offset: int, dtype: torch.dtype, heads: int, dim: int) -> torch.Tensor:
        """`[rows, slots, heads, dim]` at `offset` bytes from the begin of each slot."""
        width = dtype.itemsize
        strides = (self._row_bytes // width, self.token_bytes // width, dim, 1)
        blank = torch.empty(0, dtype=dtype, device=self._device)
        # A storage of its own: a compiler of functions that write to views of one storage may copy all of it.
        return blank.set_(self._pages.storage(offset), 0, (self._rows, self._slots, heads, dim), strides)

    def committed_slots(self, row: int) -> int:
        return min(self._bytes[row] // self.token_bytes, self.capacity)

    @property
    def committed(self) -> int:
        return self.held(range(self._rows))

    def bytes_for(self, slots: int) -> int:
        """Bytes that a row of `slots` slots holds at least."""
        step = self._granularity * -(-STEP_SLOTS * self.token_bytes // self._granularity)
        most = self._granularity * -(-self.capacity * self.token_bytes // self._granularity)
        return min(step * -(-slots * self.token_bytes // step), most)

    def held(self, rows: Sequence[int]) -> int:
        """Bytes that `rows` hold, without what others share with them."""
        return _bytes_of([piece for row in rows for piece in self._pieces[row]])

    def commit(self, row: int, slots: int) -> None:
        """Let the leading `slots` slots of `row` have memory; that is zero on the current stream where it is new. If
        there is not enough, `OutOfMemoryError` is raised, and the row has what it had."""
        assert slots <= self.capacity, f"{slots} of {self.capacity} slots"
        before = self._bytes[row]
        wanted = self.bytes_for(slots) - before
        if wanted <= 0:
            return
        _take_bytes(self._device, wanted)
        try:
            while wanted > 0:
                # The first slots of the first row are a piece by themselves, so they are in every row.
                most = _MOST_PIECE if self._bytes[row] else self._tail
                wanted -= self._put(row, min(wanted, most))
        except BaseException:
            self._take(row, before)
            raise

    def trim(self, row: int, slots: int = 0) -> None:
        """Give back what `row` holds beyond `slots` slots. The device must not use it any more."""
        self._take(row, self.bytes_for(slots))

    def free(self) -> None:
        """Give back what all rows hold, for good. The device must not use it any more."""
        for row in range(self._rows):
            self._take(row, 0)

    def can_share(self, row: int, source: int, slots: int) -> bool:
        """Whether `row` can have memory of the leading `slots` slots of `source`."""
        return self._pages.can_alias and row != source and bool(self._shareable(row, source, slots))

    def share(self, row: int, source: int, slots: int) -> bool:
        """Let `row`, which then holds nothing else, have memory of up to `slots` leading slots of `source`; returns
        whether it has, if not, it holds nothing. The device must not use what `row` has held."""
        shared = self._shareable(row, source, slots)
        self._take(row, 0)
        try:
            own = shared[0].start - self._bytes[row]
            if own:
                _take_bytes(self._device, own)
                self._put(row, own)
            for piece in shared:
                starts = [number * self._row_bytes + piece.start for number in (row, source)]
                self._pages.alias(starts[0], piece.size, starts[1])
                piece.memory.users += 1
                self._append(row, piece.size, piece.memory)
        except torch.OutOfMemoryError:
            self._take(row, 0)
            return False
        return True

    def unshare(self, row: int, slots: int) -> int:
        """Let `row` write from `slots` on: a piece that it shares there, and has a part of the leading `slots` slots,
        becomes a copy of its own, and what lies behind is given back. Without memory for the copy the row gives back
        all that it shares. The device must not use the row; returns how many of the leading slots it still has."""
        written = self._shared(row, slots)
        if written:
            first, begin = written[0], self._shared(row)[0].start
            blank = torch.empty(0, dtype=torch.uint8, device=self._device)
            size = max(slots * self.token_bytes - first.start, 0)
            part = blank.set_(self._pages.storage(row * self._row_bytes + first.start), 0, (size,))
            copy = part.to("cpu", copy=True)
            self._take(row, first.start)
            if size:
                try:
                    _take_bytes(self._device, first.size)
                    self._put(row, first.size)
                    part.copy_(copy)
                except torch.OutOfMemoryError:
                    self._take(row, begin)
        return min(slots, self.committed_slots(row))

    def is_shared(self, row: int, slots: int) -> bool:
        """Whether `row` shares memory from `slots` on."""
        return bool(self._shared(row, slots))

    def _shared(self, row: int, slots: int = 0) -> list[_Piece]:
        end = slots * self.token_bytes
        return [one for one in self._pieces[row] if one.memory.users > 1 and one.start + one.size > end]

    def _shareable(self, row: int, source: int, slots: int) -> list[_Piece]:
        """The pieces of `source` within its leading `slots` slots, behind what `row` always has memory for."""
        end = slots * self.token_bytes
        return [one for one in self._pieces[source] if self._floors[row] <= one.start and one.start + one.size <= end]

    def _put(self, row: int, size: int) -> int:
        self._pages.put(row * self._row_bytes + self._bytes[row], size)
        self._append(row, size, _Memory())
        _count(self._device, size)
        return size

    def _append(self, row: int, size: int, memory: _Memory) -> None:
        self._pieces[row].append(_Piece(self._bytes[row], size, memory))
        self._bytes[row] += size

    def _take(self, row: int, kept: int) -> None:
        pieces = self._pieces[row]
        while pieces and pieces[-1].start >= kept:
            piece = pieces.pop()
            self._pages.take(row * self._row_bytes + piece.start, piece.size)
            self._bytes[row] = piece.start
            piece.memory.users -= 1
            if not piece.memory.users:
                _count(self._device, -piece.size)


def aligned(size: int) -> int:
    """`size` bytes rounded up to a multiple of what kernels load at once."""
    return 16 * -(-size // 16)


def slots_in_memory(longest: int, device: torch.device) -> int:
    """Slots of a `RowMemory` on `device` for texts of up to `longest` tokens."""
    unit = slot_unit(device)
    return unit * -(-(longest + 1) // unit) + unit


@contextmanager
def allocating(rows: int, slots: int, device: torch.device) -> Iterator[None]:
    """Context in which buffers for texts, of `rows` times `slots` tokens, are allocated on `device`; raises
    `OutOfMemoryError` if there is no memory for them, also on a CPU, where torch raises another error or the system
    gives more than there is."""
    wanted, available = 8 * rows * slots, total_bytes(device) // _SHARE_FOR_TOKENS
    if wanted > available:
        raise torch.OutOfMemoryError(
            f"Token ids of {rows} texts of {slots} tokens take {wanted} bytes, of {available} at most."
        )
    try:
        yield
    except RuntimeError as error:
        if device.type == "cpu" and "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(first_line(error)) from None
        raise
