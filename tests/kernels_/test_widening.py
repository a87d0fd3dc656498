"""The inline assembly that widens stored weights, for every byte; the interpreter of kernels does not run it."""

import pytest
import torch
from ptx import run_ptx

from hf_specdec.kernels import stored_weight
from hf_specdec.kernels.stored_weight_reference import CODES

BYTES = torch.arange(256, dtype=torch.uint8)
ALL = {"e4m3": BYTES.view(torch.float8_e4m3fn).double(), "int8": BYTES.view(torch.int8).double()}
ALL["e4m3"][127::128] = torch.tensor([480.0, -480.0])


def words(count):
    """All bytes, each with others, `count` to a word."""
    groups = torch.stack([(BYTES.long() * factor + 3 * factor) % 256 for factor in range(1, 2 * count, 2)], 1)
    return groups, (groups << 8 * torch.arange(count)).sum(1).tolist()


def halves(values, dtype):
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(dtype).double()


def outputs(code, count, inputs):
    """The 16-bit halves of the first `count` registers."""
    found = run_ptx(code, dict.fromkeys([f"${index}" for index in range(count)], 0) | inputs)
    return [half for index in range(count) for half in (found[f"${index}"] & 0xFFFF, found[f"${index}"] >> 16)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("count", [2, 4])
def test_bytes(name, count):
    code = getattr(stored_weight, f"_{name.upper()}_{count}").value
    groups, packed = words(count)
    for group, word in zip(groups, packed, strict=True):
        found = outputs(code, count // 2, {f"${count // 2}": word})
        assert torch.equal(halves(found, torch.bfloat16), ALL[name][group])


def test_halves_of_a_byte():
    for byte in range(256):
        found = run_ptx(stored_weight._INT4_1.value, {"$2": byte})
        assert halves([found["$0"], found["$1"]], torch.bfloat16).tolist() == [128 + byte % 16, 128 + byte // 16]


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_halves_of_four_bytes(zero):
    groups, packed = words(4)
    bias = torch.tensor([128.0 + zero]).bfloat16().view(torch.int16).item() * 0x10001
    for group, word in zip(groups, packed, strict=True):
        found = outputs(stored_weight._INT4_4.value, 4, {"$4": word, "$5": bias, "$6": bias})
        assert halves(found, torch.bfloat16).tolist() == [*(group % 16 - zero), *(group // 16 - zero)]


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes(name, dtype):
    code, values = stored_weight.look_up(CODES[name], dtype), torch.tensor(CODES[name]).to(dtype).double()
    groups, packed = words(4)
    for group, word in zip(groups, packed, strict=True):
        found = outputs(code, 4, {"$4": word})
        assert torch.equal(halves(found, dtype), values[torch.cat([group % 16, group // 16])])
