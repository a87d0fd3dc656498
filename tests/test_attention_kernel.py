"""The Triton attention against its reference; on a machine without a GPU in Triton's interpreter."""

import pytest
import torch

from hf_specdec.kernels import reference
from hf_specdec.kernels.attention import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + [torch.bfloat16] * (DEVICE == "cuda")


def check_against_reference(dtype, num_queries, heads, kv_heads, dim, options):
    torch.manual_seed(0)
    batch, slots = 3, 150
    query = torch.randn(batch, heads, num_queries, dim, dtype=dtype, device=DEVICE)
    # As the cache hands them over: [B, slots, heads, dim], seen as [B, heads, slots, dim].
    key, value = (
        torch.randn(batch, slots, kv_heads, dim, dtype=dtype, device=DEVICE).transpose(1, 2) for _ in range(2)
    )
    last = torch.tensor([num_queries - 1, 77, slots - 2], device=DEVICE)
    positions = last[:, None] - num_queries + 1 + torch.arange(num_queries, device=DEVICE)
    positions[1, 0] = slots - 1  # scrap
    expected = reference.attention(
        query.double(), key.double(), value.double(), positions, scaling=dim**-0.5, **options
    )
    for row in range(batch):  # what no live query may see is poison
        if row != 1:
            key[row, :, int(last[row]) + 1 :] = float("nan")
            value[row, :, int(last[row]) + 1 :] = float("nan")
    got = attention(query, key, value, positions, scaling=dim**-0.5, **options)
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 4, 9])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (9, 3, 64), (4, 1, 24), (2, 1, 192)])
@pytest.mark.parametrize("option", ["plain", "window", "sinks", "softcap"])
def test_equals_reference(dtype, num_queries, heads, kv_heads, dim, option):
    options = {
        "plain": {},
        "window": {"window": 7},
        "sinks": {"sinks": torch.linspace(-1.0, 1.0, heads, device=DEVICE)},
        "softcap": {"softcap": 5.0},
    }[option]
    check_against_reference(dtype, num_queries, heads, kv_heads, dim, options)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_queries", "heads", "kv_heads", "dim"), [(64, 8, 1, 16), (7, 24, 2, 16), (5, 17, 1, 200)])
@pytest.mark.parametrize("options", [{}, {"window": 7}], ids=["plain", "window"])
def test_more_rows_of_a_key_head_than_one_program_takes(dtype, num_queries, heads, kv_heads, dim, options):
    check_against_reference(dtype, num_queries, heads, kv_heads, dim, options)


@pytest.mark.core
def test_a_program_reads_up_to_its_own_last_query():
    num_queries, groups, slots, dim = 64, 8, 130, 16
    query = torch.ones(1, groups, num_queries, dim, device=DEVICE)
    key, value = torch.ones(2, 1, 1, slots, dim, device=DEVICE)
    value[:, :, num_queries // 2 :] = float("nan")  # Even a weight of 0 would let it through.
    got = attention(query, key, value, torch.arange(num_queries, device=DEVICE)[None], scaling=dim**-0.5)
    assert (got[:, : num_queries // 2] == 1.0).all()
