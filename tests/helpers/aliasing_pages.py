"""Pages of a CPU that rows can share as on a GPU, and that detect writes to shared memory."""

import ctypes
import mmap
import os
import weakref

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _NO_RESERVE = 0x10, 0x4000
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


def _map(at, size, flags, file=-1, offset=0):
    found = _LIBC.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return found


def _close(base, size, file):
    _LIBC.munmap(base, size)
    os.close(file)


class AliasingPages:
    """`virtual_pages.HostPages` in a file in memory; parts of it are mapped at several addresses.

    Attributes:
        num_aliased: how often a piece was mapped again, over all ranges of addresses.
    """

    can_alias = True
    num_aliased = 0

    def __init__(self, size, device):
        self._base = _map(None, size, _EMPTY)
        self._file, self._size, self._end = os.memfd_create("rows"), size, 0
        # Offset in the file by start; what a piece held when it was shared, and how many rows have it, by offset.
        self._offsets, self._shared = {}, {}
        weakref.finalize(self, _close, self._base, size, self._file)

    def put(self, start, size):
        os.ftruncate(self._file, self._end + size)
        self._map_piece(start, size, self._end)
        self._end += size

    def alias(self, start, size, source):
        offset = self._offsets[source]
        text, users = self._shared.get(offset, (self._bytes(source, size), 1))
        self._map_piece(start, size, offset)
        self._shared[offset] = text, users + 1
        type(self).num_aliased += 1

    def take(self, start, size):
        offset = self._offsets.pop(start)
        if offset in self._shared:
            text, users = self._shared[offset]
            assert users == 1 or self._bytes(start, size) == text, "shared memory was written"
            self._shared[offset] = text, users - 1
            if users == 2:  # the last one may write again
                del self._shared[offset]
        _map(self._base + start, size, _EMPTY | _FIXED)

    def storage(self, start):
        buffer = (ctypes.c_char * (self._size - start)).from_address(self._base + start)
        buffer.pages = self  # keeps the addresses
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def _map_piece(self, start, size, offset):
        assert start not in self._offsets
        _map(self._base + start, size, mmap.MAP_SHARED | _FIXED, self._file, offset)
        self._offsets[start] = offset

    def _bytes(self, start, size):
        return ctypes.string_at(self._base + start, size)


def use_aliasing_pages(monkeypatch):
    """Let rows on a CPU share memory; returns the class."""
    kind = type("Pages", (AliasingPages,), {"num_aliased": 0})
    monkeypatch.setattr("hf_specdec.memory.virtual_pages.HostPages", kind)
    return kind
