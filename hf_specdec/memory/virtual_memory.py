"""Memory for keys and values of rows: addresses for the longest texts, but memory only for the texts that there are.

The addresses of all rows are reserved at once, and each row gets memory for its leading part as it grows, as in
vAttention (arXiv 2405.04437). So buffers keep their addresses, which CUDA graphs and views need. A prefix that texts
share is in memory once, if the device can map the same memory to several addresses (`virtual_pages`).
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

# Slots that a row gets at once. More slots take fewer calls of the driver (50 us each on one H200, whatever the size);
# fewer slots leave less memory unused.
STEP_SLOTS = 128
# Most bytes of a piece of memory, which is mapped, shared and given back as a whole.
_MOST_PIECE = 16 << 20
# Tokens of a row begin at multiples of a page's bytes divided by this, so that this many slots always fill whole pages.
_MOST_TOKENS_A_PAGE = {"cuda": 4096, "cpu": 64}
# Share of a GPU's memory that is left to other tensors, such as those of a prefill.
_SHARE_LEFT = 1 / 32
# Token ids of the longest texts may take one part in so many of a device's memory; buffers beside them take more.
_SHARE_FOR_TOKENS = 16


def slot_unit(device: torch.device) -> int:
    """The number of slots of a `RowMemory` on `device` must be a multiple of this."""
    return _MOST_TOKENS_A_PAGE[device.type]


def has_virtual_memory(device: torch.device) -> bool:
    """Whether `device` supports a `RowMemory`."""
    policy = policy_of(device)
    if device.type == "cpu":
        return policy.virtual_memory and sys.platform == "linux"
    # The references of attention would read slots that no query sees.
    return policy.virtual_memory and policy.triton and device.type == "cuda" and driver_can(device)


@dataclass(eq=False)
class _Memory:
    users: int = 1


class _Piece(NamedTuple):
    """A part of a row that has memory; start and size in bytes."""

    start: int
    size: int
    memory: _Memory


def _bytes_of(pieces: Iterable[_Piece]) -> int:
    """Bytes of the memory that only `pieces` use."""
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
    """The maximum of `committed_bytes` since the start of the process or `reset_peak_committed_bytes`."""
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


# Bytes that may be taken on a device before it is queried again, which takes 0.2 ms on an H200.
_unasked: dict[torch.device, int] = {}


def available_bytes(device: torch.device) -> int:
    """Bytes that rows on `device` may still get. `DevicePolicy.cache_bytes` limits what all rows hold; on a GPU free
    memory without `1 / 32` of the total, and `torch.cuda.set_per_process_memory_fraction`, are limits, too."""
    found = _within_limit(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = total * torch.cuda.get_per_process_memory_fraction(device)
        left = min(free, int(allowed) - torch.cuda.memory_reserved(device) - committed_bytes(device))
        found = min(found, left - int(total * _SHARE_LEFT))
    return max(found, 0)


def total_bytes(device: torch.device) -> int:
    """Bytes of memory of `device`, used or not; `sys.maxsize` if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def tensor_bytes(device: torch.device) -> int:
    """Bytes of a GPU that tensors of this process take, without the rows of `RowMemory`; 0 on other devices."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _within_limit(device: torch.device) -> int:
    limit = policy_of(device).cache_bytes
    return sys.maxsize if limit is None else max(limit - committed_bytes(device), 0)


def _take_bytes(device: torch.device, wanted: int) -> None:
    """Take `wanted` bytes of those available on `device`; raises `torch.OutOfMemoryError` if there are fewer."""
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
    """Rows of slots, of which the leading slots have memory; a slot holds a token of all layers.

    Rows may share the memory of leading slots, which none of them writes then. The last slot of each row, the dummy
    slot, always has memory; on a GPU all rows share it.

    Args:
        slots: slots of each row; a multiple of `slot_unit`.
        token_bytes: least bytes of a slot.

    Attributes:
        capacity: number of slots of a row that can have memory.
        token_bytes: bytes from one slot to the next.
        committed_slots: number of leading slots of each row that have memory.
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
        self._bytes, self.committed_slots = [0] * rows, [0] * rows
        if device.type == "cuda":
            starts = [(row + 1) * self._row_bytes - tail for row in range(rows)]
            self._pages.put(starts[0], tail)
            for start in starts[1:]:
                self._pages.alias(start, tail, starts[0])
        # The tensors of all layers begin in the first slot of row 0, so it always has memory, which is not counted.
        self._tail, self._floors = tail, [tail] + [0] * (rows - 1)
        self._pages.put(0, tail)
        self._set_bytes(0, tail)

    def view(self, offset: int, dtype: torch.dtype, heads: int, dim: int) -> torch.Tensor:
        """`[rows, slots, heads, dim]` at `offset` bytes from the beginning of each slot."""
        width = dtype.itemsize
        strides = (self._row_bytes // width, self.token_bytes // width, dim, 1)
        blank = torch.empty(0, dtype=dtype, device=self._device)
        # A storage of its own: a compiler may copy a whole storage for functions that write to several views of it.
        return blank.set_(self._pages.storage(offset), 0, (self._rows, self._slots, heads, dim), strides)

    @property
    def committed(self) -> int:
        return self.held(range(self._rows))

    def bytes_for(self, slots: int) -> int:
        """Bytes that a row of `slots` slots holds at least."""
        step = self._granularity * -(-STEP_SLOTS * self.token_bytes // self._granularity)
        most = self._granularity * -(-self.capacity * self.token_bytes // self._granularity)
        return min(step * -(-slots * self.token_bytes // step), most)

    def held(self, rows: Sequence[int]) -> int:
        """Bytes that `rows` hold, without memory that other rows share with them."""
        return _bytes_of([piece for row in rows for piece in self._pieces[row]])

    def commit(self, row: int, slots: int) -> None:
        """Give the leading `slots` slots of `row` memory; new memory is zeroed on the current stream. Raises
        `OutOfMemoryError` if there is not enough; the row then keeps what it had."""
        assert slots <= self.capacity, f"{slots} of {self.capacity} slots"
        before = self._bytes[row]
        wanted = self.bytes_for(slots) - before
        if wanted <= 0:
            return
        _take_bytes(self._device, wanted)
        try:
            while wanted > 0:
                # The first slots of row 0 are a piece of their own, so they are in every row, too.
                most = _MOST_PIECE if self._bytes[row] else self._tail
                wanted -= self._put(row, min(wanted, most))
        except BaseException:
            self._take(row, before)
            raise

    def trim(self, row: int, slots: int = 0) -> None:
        """Give back the memory of `row` beyond `slots` slots. The device must not use it any more."""
        self._take(row, self.bytes_for(slots))

    def free(self) -> None:
        """Give back the memory of all rows for good. The device must not use it any more."""
        for row in range(self._rows):
            self._take(row, 0)

    def can_share(self, row: int, source: int, slots: int) -> bool:
        """Whether `row` can share memory of the leading `slots` slots of `source`."""
        return self._pages.can_alias and row != source and bool(self._shareable(row, source, slots))

    def share(self, row: int, source: int, slots: int) -> bool:
        """Let `row` share memory of up to `slots` leading slots of `source`, and hold nothing else. Returns False, and
        leaves `row` empty, if memory is short. The device must no longer use what `row` has held."""
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
        """Let `row` write from `slots` on. A shared piece there that also has some of the leading `slots` slots becomes
        the row's own copy, and later pieces are given back. Without memory for the copy, the row gives back all that it
        shares. The device must not use the row. Returns how many of the leading slots it still has."""
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
        return min(slots, self.committed_slots[row])

    def is_shared(self, row: int, slots: int) -> bool:
        """Whether `row` shares memory from slot `slots` on."""
        return bool(self._shared(row, slots))

    def _shared(self, row: int, slots: int = 0) -> list[_Piece]:
        end = slots * self.token_bytes
        return [one for one in self._pieces[row] if one.memory.users > 1 and one.start + one.size > end]

    def _shareable(self, row: int, source: int, slots: int) -> list[_Piece]:
        """Pieces of `source` in its leading `slots` slots, except where `row` always has its own memory."""
        end = slots * self.token_bytes
        return [one for one in self._pieces[source] if self._floors[row] <= one.start and one.start + one.size <= end]

    def _put(self, row: int, size: int) -> int:
        self._pages.put(row * self._row_bytes + self._bytes[row], size)
        self._append(row, size, _Memory())
        _count(self._device, size)
        return size

    def _append(self, row: int, size: int, memory: _Memory) -> None:
        self._pieces[row].append(_Piece(self._bytes[row], size, memory))
        self._set_bytes(row, self._bytes[row] + size)

    def _set_bytes(self, row: int, size: int) -> None:
        self._bytes[row] = size
        self.committed_slots[row] = min(size // self.token_bytes, self.capacity)

    def _take(self, row: int, kept: int) -> None:
        pieces = self._pieces[row]
        while pieces and pieces[-1].start >= kept:
            piece = pieces.pop()
            self._pages.take(row * self._row_bytes + piece.start, piece.size)
            self._set_bytes(row, piece.start)
            piece.memory.users -= 1
            if not piece.memory.users:
                _count(self._device, -piece.size)


def slots_in_memory(longest: int, device: torch.device) -> int:
    """Slots of a `RowMemory` on `device` for texts of up to `longest` tokens."""
    unit = slot_unit(device)
    return unit * -(-(longest + 1) // unit) + unit


@contextmanager
def allocating(rows: int, slots: int, device: torch.device) -> Iterator[None]:
    """Context in which buffers for texts are allocated on `device`, for `rows` times `slots` tokens. Raises
    `OutOfMemoryError` if there is no memory for them, also on a CPU, where torch raises another error, or the system
    grants more memory than there is."""
    wanted, available = 8 * rows * slots, total_bytes(device) // _SHARE_FOR_TOKENS
    if wanted > available:
        raise torch.OutOfMemoryError(
            f"There is no memory for {rows} sequences of {slots} tokens: their token ids alone take {wanted} bytes, of "
            f"{available} at most. Pass fewer prompts at once, or a smaller max_new_tokens."
        )
    try:
        yield
    except RuntimeError as error:
        if device.type == "cpu" and "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(first_line(error)) from None
        raise
