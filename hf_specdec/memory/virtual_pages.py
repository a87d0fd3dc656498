"""Address ranges on a device that are backed by memory in part: the pages of `virtual_memory.RowMemory`.

A GPU uses CUDA's virtual memory management (CUDA driver API). A CPU uses a mapping of the operating system, whose pages
take memory when they are first written.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from .fence import Fence

# Linux's MAP_NORESERVE, which Python names since 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@functools.cache
def driver_can(device: torch.device) -> bool:
    """Whether a GPU and its driver have virtual memory management, and Python has bindings of the driver."""
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
    """The value of a driver call; raises `torch.OutOfMemoryError` or `RuntimeError` if the call has failed."""
    error, *values = result
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("The CUDA driver has no memory left for keys and values.")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"A call of the CUDA driver's virtual memory management failed: {error}.")
    return values[0] if values else None


class HostPages:
    """An address range on a CPU. The operating system provides zeroed memory at the first write. The range is private
    to the process, also after a fork, so it cannot `alias`."""

    can_alias = False

    def __init__(self, size: int, device: torch.device):
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:  # if the system limits addresses
            raise torch.OutOfMemoryError(
                f"There are no addresses for {size} bytes of keys and values: {error}."
            ) from error

    def put(self, start: int, size: int) -> None:
        """Back `size` bytes from `start` with zeroed memory."""

    def alias(self, start: int, size: int, source: int) -> None:
        """Back `size` bytes from `start` with the memory at `source`, too, which one `put` must have put there."""
        raise NotImplementedError

    def take(self, start: int, size: int) -> None:
        """Remove the memory of addresses that the device no longer uses."""
        self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def storage(self, start: int) -> torch.UntypedStorage:
        """The addresses from `start` on, of which the leading ones have memory. The storage keeps them reserved."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start).untyped_storage()


def _allocation_kind(driver: Any, device: torch.device) -> Any:
    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = device.index
    return kind


class DevicePages:
    """An address range in the virtual memory of a GPU; the interface is that of `HostPages`."""

    can_alias = True

    def __init__(self, size: int, device: torch.device):
        self._driver = driver = importlib.import_module("cuda.bindings.driver")
        self._device = torch.device("cuda", _index(device))
        self._kind = kind = _allocation_kind(driver, self._device)
        self._access = access = driver.CUmemAccessDesc()
        access.location = kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.size = size
        self.base = int(_checked(driver, driver.cuMemAddressReserve(size, 0, 0, 0)))
        # Size and memory handle, by start of the mapped range. Each handle is a reference to its memory.
        self._handles: dict[int, tuple[int, Any]] = {}
        # Set after new memory was zeroed.
        self._zeroed = Fence(self._device)
        weakref.finalize(self, _free, driver, self._device, self.base, size, self._handles).atexit = False

    def put(self, start: int, size: int) -> None:
        self._map(start, size, _checked(self._driver, self._driver.cuMemCreate(size, self._kind, 0)))
        self.zero(start, size)

    def alias(self, start: int, size: int, source: int) -> None:
        self._map(start, size, _checked(self._driver, self._driver.cuMemRetainAllocationHandle(self.base + source)))

    def _map(self, start: int, size: int, handle: Any) -> None:
        """Map the memory of `handle` at `start`; on failure the handle is released."""
        driver, at = self._driver, self.base + start
        try:
            _checked(driver, driver.cuMemMap(at, size, 0, handle, 0))
            try:
                _checked(driver, driver.cuMemSetAccess(at, size, [self._access], 1))
            except BaseException:
                driver.cuMemUnmap(at, size)
                raise
        except BaseException:
            driver.cuMemRelease(handle)
            raise
        self._handles[start] = (size, handle)

    def zero(self, start: int, size: int) -> None:
        torch.empty(0, dtype=torch.uint8, device=self._device).set_(self.storage(start), 0, (size,)).zero_()
        self._zeroed.set()

    def take(self, start: int, size: int) -> None:
        self._zeroed.synchronize()  # memory that was just put, and is taken back at once, may still be written
        driver, (_, handle) = self._driver, self._handles.pop(start)
        _checked(driver, driver.cuMemUnmap(self.base + start, size))
        _checked(driver, driver.cuMemRelease(handle))

    def storage(self, start: int) -> torch.UntypedStorage:
        interface = {"shape": (self.size - start,), "typestr": "|u1", "data": (self.base + start, False), "version": 3}
        with torch.cuda.device(self._device):
            region = SimpleNamespace(__cuda_array_interface__=interface, pages=self)  # keeps the addresses reserved
            return torch.as_tensor(region, device=self._device).untyped_storage()


def granularity_on(device: torch.device) -> int:
    """Starts and sizes of ranges with memory on `device` are multiples of this number of bytes."""
    return mmap.PAGESIZE if device.type == "cpu" else _gpu_granularity(torch.device("cuda", _index(device)))


def pages_on(device: torch.device, size: int) -> HostPages | DevicePages:
    """An address range of `size` bytes on `device`; raises `OutOfMemoryError` if there is none."""
    return (HostPages if device.type == "cpu" else DevicePages)(size, device)


@functools.cache
def _gpu_granularity(device: torch.device) -> int:
    driver = importlib.import_module("cuda.bindings.driver")
    kind = _allocation_kind(driver, device)
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    torch.cuda.init()
    return int(_checked(driver, driver.cuMemGetAllocationGranularity(kind, minimum)))


def _free(driver: Any, device: torch.device, base: int, size: int, handles: dict[int, tuple[int, Any]]) -> None:
    """Free addresses and their memory once no tensor refers to them any more."""
    if not torch.cuda.is_current_stream_capturing():
        with contextlib.suppress(RuntimeError):  # if the device itself has failed
            torch.cuda.synchronize(device)
    for start, (length, handle) in handles.items():
        driver.cuMemUnmap(base + start, length)
        driver.cuMemRelease(handle)
    driver.cuMemAddressFree(base, size)
