"""Reductions of rows with one order of summation: against float64, and the same bits for any number of rows.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import itertools

import pytest
import torch
from case_counts import cases

from hf_specdec.kernels import row_reductions, row_reductions_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * (DEVICE == "cuda")
SIZES = [1, 5, 128, 4096, 9001]
FUNCTIONS = {
    "sum": lambda module, rows: module.row_sum(rows[..., None], torch.float32),
    "softmax": lambda module, rows: module.row_softmax(rows, torch.float32, False),
    "log_softmax": lambda module, rows: module.row_softmax(rows, torch.float32, True),
    "cumsum": lambda module, rows: module.row_cumsum(rows, torch.float32),
}


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    cases(
        every := list(itertools.product(FUNCTIONS, SIZES, DTYPES)),
        [one for one in every if one[1] in ((5, 9001) if one[0] == "softmax" else (1, 128, 4096))],
    ),
)
def test_equals_float64_for_any_number_of_rows(name, size, dtype):
    generator = torch.Generator().manual_seed(size)
    rows = (3 * torch.randn(7, size, generator=generator)).to(DEVICE, dtype)
    function = FUNCTIONS[name]
    found = function(row_reductions, rows)
    scale = size**0.5 if name in ("sum", "cumsum") else 1.0
    expected = function(row_reductions_reference, rows.double())
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5 * scale)
    assert torch.equal(function(row_reductions, rows[4:5]), found[4:5])
    assert torch.equal(function(row_reductions, rows.repeat(3, 1))[7:14], found)


@pytest.mark.parametrize(("outer", "size", "inner"), [(1, 1, 3), (4, 8, 130), (3, 2, 64)])
def test_sums_over_a_middle_dimension(outer, size, inner):
    values = torch.randn(outer, size, inner, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = row_reductions.row_sum(values, torch.float32)
    torch.testing.assert_close(found, values.sum(1))
    assert torch.equal(row_reductions.row_sum(values[-1:], torch.float32), found[-1:])


def test_softmax_of_nothing_is_nan_as_in_torch():
    rows = torch.full((2, 40), float("-inf"), device=DEVICE)
    rows[1, 7] = 1.0
    found = row_reductions.row_softmax(rows, torch.float32, False)
    assert found[0].isnan().all() and found[1, 7] == 1.0 and found[1].sum() == 1.0
