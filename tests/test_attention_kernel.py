"""The Triton attention against its reference; on a machine without a GPU in Triton's interpreter."""

import pytest
import torch

from hf_specdec.kernels import reference
from hf_specdec.kernels.attention import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("num_queries", [1, 4, 9])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (9, 3, 64), (4, 1, 24), (2, 1, 192)])
@pytest.mark.parametrize("option", ["plain", "window", "sinks", "softcap"])
def test_equals_reference(dtype, num_queries, heads, kv_heads, dim, option):
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
    options = {
        "plain": {},
        "window": {"window": 7},
        "sinks": {"sinks": torch.randn(heads, device=DEVICE)},
        "softcap": {"softcap": 5.0},
    }[option]
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
