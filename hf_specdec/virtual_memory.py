"""Memory for the keys and values of rows: addresses for the longest texts, and memory for the texts that there are.

Addresses of all rows are reserved at once, and memory is put behind the leading part of each row as it grows. So
buffers keep their addresses, which CUDA graphs and views need, while memory follows the texts. vAttention (arXiv
2405.04437) does the same.

On a GPU this is CUDA's virtual memory management (`cuMemAddressReserve`, `cuMemMap`; CUDA driver API, "Virtual Memory
Management"). On a CPU it is a mapping of the operating system, whose pages take memory when they are first written.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .device_policy import policy_of

# Slots that a row gets at once: more cost fewer calls of the driver (50 us each on one H200, whatever the size), fewer
# leave less memory unused.
STEP_SLOTS = 128
# Bytes that are put behind addresses in one piece, which is also given back in one.
_MOST_PIECE = 64 << 20
# Tokens of a row begin at multiples of a page's bytes divided by this, so that as many slots always fill whole pages.
_MOST_TOKENS_A_PAGE = {"cuda": 4096, "cpu": 64}
# The part of a GPU's memory that is left to other tensors, such as those of a prefill.
_SHARE_LEFT = 1 / 32
# Linux's MAP_NORESERVE, which Python has had a name for since 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def slot_unit(device: torch.device) -> int:
    """The slots of a `RowMemory` on `device` are a multiple of this."""
    return _MOST_TOKENS_A_PAGE[device.type]


def has_virtual_memory(device: torch.device) -> bool:
    """Whether there can be a `RowMemory` on `device`."""
    policy = policy_of(device)
    if device.type == "cpu":
        return policy.virtual_memory and sys.platform == "linux"
    # The references of attention read slots that no query sees.
    return policy.virtual_memory and policy.triton and device.type == "cuda" and _driver_can(device)


@functools.cache
def _driver_can(device: torch.device) -> bool:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        torch.cuda.init()
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return bool(_checked(driver, driver.cuDeviceGetAttribute(attribute, _index(device))))
    except (ImportError, AttributeError, RuntimeError):
        return False


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _checked(driver: Any, result: tuple) -> Any:
    """The value of a call of the driver.

    Raises:
        torch.OutOfMemoryError, RuntimeError: the call has failed.
    """
    error, *values = result
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("The CUDA driver has no memory left for keys and values.")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"A call of the CUDA driver's virtual memory management failed: {error}.")
    return values[0] if values else None


class _Pages(Protocol):
    """A range of addresses on a device, parts of which have memory."""

    granularity: int

    def put(self, start: int, size: int) -> Any:
        """Put zeroed memory behind `size` bytes from `start`; returns what `take` needs."""

    def take(self, start: int, size: int, piece: Any) -> None:
        """Take memory from behind addresses that the device does not use any more."""

    def storage(self, start: int) -> torch.UntypedStorage:
        """The addresses from `start` on, of which the first have memory; keeps them reserved."""


class _HostPages:
    """Anonymous memory of the operating system, which is there when it is written, and is zero."""

    granularity = mmap.PAGESIZE

    def __init__(self, size: int, device: torch.device):
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:  # where the system bounds addresses
            raise torch.OutOfMemoryError(
                f"There are no addresses for {size} bytes of keys and values: {error}."
            ) from error

    def put(self, start: int, size: int) -> None:
        pass

    def take(self, start: int, size: int, piece: None) -> None:
        self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def storage(self, start: int) -> torch.UntypedStorage:
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start).untyped_storage()


class _Region:
    """Addresses of a GPU for `torch.as_tensor`, which keeps them reserved."""

    def __init__(self, pages: _DevicePages, start: int):
        self._pages = pages
        self.__cuda_array_interface__ = {
            "shape": (pages.size - start,),
            "typestr": "|u1",
            "data": (pages.base + start, False),
            "version": 3,
        }


class _DevicePages:
    """Virtual memory of a GPU."""

    def __init__(self, size: int, device: torch.device):
        self._driver = driver = importlib.import_module("cuda.bindings.driver")
        self._device = torch.device("cuda", _index(device))
        self._kind = kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = self._device.index
        self._access = access = driver.CUmemAccessDesc()
        access.location = kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granularity, self.size = _gpu_granularity(self._device), size
        self.base = int(_checked(driver, driver.cuMemAddressReserve(size, 0, 0, 0)))
        # By the start of what they are behind.
        self._pieces: dict[int, tuple[int, Any]] = {}
        weakref.finalize(self, _free, driver, self._device, self.base, size, self._pieces).atexit = False

    def put(self, start: int, size: int, piece: Any = None) -> Any:
        """As of `_Pages`; memory that is there already if it is given."""
        driver, at = self._driver, self.base + start
        new = _checked(driver, driver.cuMemCreate(size, self._kind, 0)) if piece is None else piece
        try:
            _checked(driver, driver.cuMemMap(at, size, 0, new, 0))
            try:
                _checked(driver, driver.cuMemSetAccess(at, size, [self._access], 1))
            except BaseException:
                driver.cuMemUnmap(at, size)
                raise
        except BaseException:
            if piece is None:
                driver.cuMemRelease(new)
            raise
        self._pieces[start] = (size, new if piece is None else None)
        self.zero(start, size)
        return new

    def zero(self, start: int, size: int) -> None:
        """Zero memory on the current stream."""
        torch.empty(0, dtype=torch.uint8, device=self._device).set_(self.storage(start), 0, (size,)).zero_()

    def take(self, start: int, size: int, piece: Any) -> None:
        driver = self._driver
        del self._pieces[start]
        _checked(driver, driver.cuMemUnmap(self.base + start, size))
        _checked(driver, driver.cuMemRelease(piece))

    def storage(self, start: int) -> torch.UntypedStorage:
        with torch.cuda.device(self._device):
            return torch.as_tensor(_Region(self, start), device=self._device).untyped_storage()


@functools.cache
def _gpu_granularity(device: torch.device) -> int:
    driver = importlib.import_module("cuda.bindings.driver")
    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = device.index
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    torch.cuda.init()
    return int(_checked(driver, driver.cuMemGetAllocationGranularity(kind, minimum)))


def _free(driver: Any, device: torch.device, base: int, size: int, pieces: dict[int, tuple[int, Any]]) -> None:
    """Give back addresses and what is behind them, when no tensor refers to them any more."""
    if not torch.cuda.is_current_stream_capturing():
        with contextlib.suppress(RuntimeError):  # if the device itself has failed
            torch.cuda.synchronize(device)
    for start, (length, piece) in pieces.items():
        driver.cuMemUnmap(base + start, length)
        if piece is not None:
            driver.cuMemRelease(piece)
    driver.cuMemAddressFree(base, size)


class _Piece(NamedTuple):
    start: int
    size: int
    handle: Any


# Bytes that rows hold on each device, and the most that they have held since `reset_peak_committed_bytes`.
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
    _count(device, -sum(piece.size for pieces in rows for piece in pieces))


# What may be taken on a device before it is asked again how much it has, which takes 0.2 ms on an H200.
_unasked: dict[torch.device, int] = {}


def available_bytes(device: torch.device) -> int:
    """Bytes that rows on `device` may still get.

    `DevicePolicy.cache_bytes` limits what they hold together. On a GPU also what is free, `1 / 32` of its memory left
    out, and what `torch.cuda.set_per_process_memory_fraction` has left to this process.
    """
    found = _within_limit(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = total * torch.cuda.get_per_process_memory_fraction(device)
        left = min(free, int(allowed) - torch.cuda.memory_reserved(device) - _committed[device])
        found = min(found, left - int(total * _SHARE_LEFT))
    return max(found, 0)


def total_bytes(device: torch.device) -> int:
    """Bytes of memory that `device` has, used or not; `sys.maxsize` where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def _within_limit(device: torch.device) -> int:
    limit = policy_of(device).cache_bytes
    return sys.maxsize if limit is None else max(limit - _committed[device], 0)


def _take_bytes(device: torch.device, wanted: int) -> None:
    """Take `wanted` of the bytes that are available on `device`.

    Raises:
        torch.OutOfMemoryError: there are fewer.
    """
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

    The last slot of each row, the dummy slot, always has memory. On a GPU that is the same in all rows, since it is
    written only.

    Args:
        rows: how many.
        slots: of each; a multiple of `slot_unit`.
        token_bytes: least bytes of a slot.
        device: of the memory.

    Attributes:
        capacity: slots of a row that can have memory.
        token_bytes: bytes from one slot to the next.
    """

    def __init__(self, rows: int, slots: int, token_bytes: int, device: torch.device):
        pages = _HostPages if device.type == "cpu" else _DevicePages
        granularity = mmap.PAGESIZE if device.type == "cpu" else _gpu_granularity(torch.device("cuda", _index(device)))
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
        self._pages: _Pages = pages(rows * self._row_bytes, device)
        self._pieces: list[list[_Piece]] = [[] for _ in range(rows)]
        weakref.finalize(self, _uncount, device, self._pieces).atexit = False
        self._bytes = [0] * rows
        if device.type == "cuda":
            dummy = None
            for row in range(rows):
                dummy = self._pages.put((row + 1) * self._row_bytes - tail, tail, dummy)
        # Pointers of all layers' tensors begin in the first slot, so that keeps its memory, which is not counted.
        self._floors = [tail] + [0] * (rows - 1)
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
        """Leading slots of `row` that have memory."""
        return min(self._bytes[row] // self.token_bytes, self.capacity)

    @property
    def committed(self) -> int:
        """Bytes that all rows hold."""
        return self.held(range(self._rows))

    def bytes_for(self, slots: int) -> int:
        """Bytes that a row of `slots` slots holds at least."""
        step = self._granularity * -(-STEP_SLOTS * self.token_bytes // self._granularity)
        most = self._granularity * -(-self.capacity * self.token_bytes // self._granularity)
        return min(step * -(-slots * self.token_bytes // step), most)

    def held(self, rows: Sequence[int]) -> int:
        """Bytes that `rows` hold."""
        return sum(self._bytes[row] - self._floors[row] for row in rows)

    def commit(self, row: int, slots: int) -> None:
        """Let the leading `slots` slots of `row` have memory; that is zero on the current stream where it is new.

        Raises:
            torch.OutOfMemoryError: there is not enough; the row has what it had.
        """
        assert slots <= self.capacity, f"{slots} of {self.capacity} slots"
        before = self._bytes[row]
        wanted = self.bytes_for(slots) - before
        if wanted <= 0:
            return
        _take_bytes(self._device, wanted)
        try:
            while wanted > 0:
                start, size = self._bytes[row], min(wanted, _MOST_PIECE)
                handle = self._pages.put(row * self._row_bytes + start, size)
                self._pieces[row].append(_Piece(start, size, handle))
                self._resize(row, start + size)
                wanted -= size
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

    def _take(self, row: int, kept: int) -> None:
        pieces = self._pieces[row]
        while pieces and pieces[-1].start >= kept:
            piece = pieces.pop()
            self._pages.take(row * self._row_bytes + piece.start, piece.size, piece.handle)
            self._resize(row, piece.start)

    def _resize(self, row: int, size: int) -> None:
        before, self._bytes[row] = self._bytes[row], size
        _count(self._device, size - before)


def aligned(size: int) -> int:
    """`size` bytes rounded up to a multiple of what kernels load at once."""
    return 16 * -(-size // 16)
