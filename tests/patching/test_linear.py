"""Matmuls read a weight once, however many rows a batch has."""

from __future__ import annotations

import copy

import pytest
import torch
from lossless import PROMPTS, greedy
from oracle import RANDOM_DRAFTERS, SELDOM
from targets import padded_prompts, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.modules.patch import engine
from hf_specdec.patching.linear import MAX_TRANSPOSED_ROWS, MIN_TRANSPOSED_WEIGHT, linear, patched_linear


class WatchProducts(TorchDispatchMode):
    """Records matmuls of a batch by one matrix that is broadcast over it, `[B, n, in]` by `[B, in, out]`."""

    def __init__(self):
        super().__init__()
        self.broadcast: list[list[tuple[int, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            left, right = args[-2:]
            if len(right) > 1 and right.stride(0) == 0:
                self.broadcast.append([tuple(left.shape), tuple(right.shape)])
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_torch_linear_with_a_frozen_weight_is_one_matmul_a_row():
    """What the tests below are about: PyTorch multiplies a slice of columns so, before 2.14 also of one column."""
    with WatchProducts() as watch:
        torch.nn.functional.linear(torch.ones(3, 4, 8)[:, -2:], torch.ones(16, 8))
    assert watch.broadcast == [[(3, 2, 8), (3, 8, 16)]]


@pytest.mark.core
def test_products_of_no_rows():
    """As of adapters that are active for some tokens only."""
    layer = torch.nn.Linear(4, 3)
    for shape in ((0, 4), (2, 0, 4)):
        assert linear(torch.ones(shape), layer.weight, layer.bias).shape == (*shape[:-1], 3)


@pytest.mark.core
@pytest.mark.parametrize("rows", [1, 2, 3, MAX_TRANSPOSED_ROWS, MAX_TRANSPOSED_ROWS + 1])
@pytest.mark.parametrize("width", [32, 96])
def test_products_of_small_and_large_weights(rows, width):
    """A few rows by a large weight are computed transposed; a single row is computed twice."""
    outputs = 3 * 96
    assert (outputs * width < MIN_TRANSPOSED_WEIGHT) == (width == 32)
    layer = torch.nn.Linear(width, outputs)
    inputs = torch.randn(1, rows, width)
    found = linear(inputs, layer.weight, layer.bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), layer.double()(inputs.double()), rtol=1e-5, atol=1e-5)


# float64 takes the way that a GPU takes: a few float32 rows on a CPU are computed otherwise, see `ops.linear`.
@pytest.mark.parametrize("kind", [kind for kind in RANDOM_DRAFTERS if kind not in SELDOM])
def test_weights_are_read_once_a_batch(kind):
    target = copy.deepcopy(tiny_target("llama")).double().requires_grad_(False)
    drafter = RANDOM_DRAFTERS[kind](target).double().requires_grad_(False)
    assert why_not_equivalent(target, "static") is None  # so that its runs are not watched
    with WatchProducts() as watch:
        greedy(target, padded_prompts(PROMPTS[3]), drafter, 3)
    assert drafter.stats.engine == "static"
    assert not watch.broadcast


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pard", "draft-model"])
def test_heads_on_another_device_read_their_weight_once(kind):
    target = tiny_target("llama")
    drafter = RANDOM_DRAFTERS[kind](target).requires_grad_(False).to("meta")
    head = drafter.model.get_output_embeddings()
    with patched_linear(target, drafter), engine(), WatchProducts() as watch:
        logits = head(torch.empty(3, 4, head.in_features, device="meta")[:, -2:])
    assert logits.shape == (3, 2, head.out_features)
    assert not watch.broadcast
    assert "forward" not in vars(head)
