"""The few instructions of PTX that inline assembly in the kernels uses, computed on the host."""

from __future__ import annotations

import re

import torch

_ALL = 0xFFFFFFFF


def run_ptx(code: str, registers: dict[str, int]) -> dict[str, int]:
    """The registers after `code`, a block of 32-bit and 16-bit instructions; `registers` are those before it."""
    values = dict(registers)

    def read(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in code.strip("{}\n ").split(";"):
        name, _, rest = line.strip().partition(" ")
        out, *args = re.split(r",\s*(?![^{]*})", rest.strip())
        if name and name != ".reg":
            found = _INSTRUCTIONS[name](*map(read, args))
            halves = out.strip("{}").split(",")
            values |= {half.strip(): found >> 16 * index & 0xFFFF for index, half in enumerate(halves)}
            if len(halves) == 1:
                values[out] = found
    return values


def _prmt(first: int, second: int, selectors: int) -> int:
    source, out = first | second << 32, 0
    for place in range(4):
        selector = selectors >> 4 * place & 15
        byte = source >> 8 * (selector & 7) & 255
        if selector & 8:
            byte = 255 * (byte >> 7)
        out |= byte << 8 * place
    return out


def _lop3(first: int, second: int, third: int, table: int) -> int:
    places = ((first >> bit & 1) * 4 + (second >> bit & 1) * 2 + (third >> bit & 1) for bit in range(32))
    return sum((table >> place & 1) << bit for bit, place in enumerate(places))


def _fma_bf16x2(*words: int) -> int:
    halves = torch.tensor([[word & 0xFFFF, word >> 16] for word in words], dtype=torch.int32).to(torch.int16)
    first, second, third = halves.view(torch.bfloat16).double()
    low, high = (first * second + third).bfloat16().view(torch.int16).tolist()
    return low & 0xFFFF | (high & 0xFFFF) << 16


_INSTRUCTIONS = {
    "mov.b32": lambda value: value,
    "cvt.u32.u16": lambda value: value & 0xFFFF,
    "and.b32": lambda first, second: first & second,
    "or.b32": lambda first, second: first | second,
    "shl.b32": lambda value, count: value << count & _ALL,
    "shr.u32": lambda value, count: value >> count,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16x2,
}
