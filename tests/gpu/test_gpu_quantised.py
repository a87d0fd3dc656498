"""On a GPU, weights that are stored in 8 or 4 bits: one text a prompt, in captured rounds."""

import pytest
import torch
from float8_blocks import load_float8, save_float8, without_kernels_of_the_hub
from oracle import random_eagle3
from stored_weights import KINDS, stored_weight
from targets import build_target, padded_prompts
from torch import nn
from torch.nn import functional as F

from hf_specdec import NoDrafter
from hf_specdec.kernels.stored_weight_reference import dequantise
from hf_specdec.kernels.types import StoredWeight
from hf_specdec.modules.weights import _readers as readers
from hf_specdec.modules.weights import register_weight_kind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS, NEW_TOKENS = [9, 1, 40, 17, 3, 150, 11, 64] * 6, 24
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


class StoredLinear(nn.Linear):
    """A linear layer that dequantises its weight in every pass."""

    stored: StoredWeight

    def forward(self, inputs):
        return F.linear(inputs, dequantise(self.stored, inputs.dtype), self.bias)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr("hf_specdec.modules.weights._readers", dict(readers))
    register_weight_kind(f"{__name__.partition('.')[0]}.StoredLinear")(lambda module: module.stored)


def quantised(kind):
    target = build_target("llama", **SIZES).bfloat16().to("cuda")
    linears = [one for one in target.model.layers.modules() if type(one) is nn.Linear]
    for seed, layer in enumerate(linears):
        layer.__class__, layer.stored = StoredLinear, stored_weight(kind, *layer.weight.shape, seed)
        layer.weight = nn.Parameter(layer.stored.values.view(torch.uint8), requires_grad=False)
    return target


def texts(target, drafter, rows, **options):
    given, width = padded_prompts(LENGTHS), max(LENGTHS[row] for row in rows)
    inputs = {name: tensor[rows, -width:].to("cuda") for name, tensor in given.items()}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS} | options
    return [row[-NEW_TOKENS:].tolist() for row in target.generate(**inputs, assistant_model=drafter, **options)]


def check_texts(target):
    """Batch-invariant texts are those of each prompt alone, without a drafter and with one; returns the latter."""
    every = list(range(len(LENGTHS)))
    alone = NoDrafter(target, batch_invariant=True)
    expected = [text for row in every for text in texts(target, alone, [row])]
    drafter = random_eagle3(target).bfloat16().configure(batch_invariant=True)
    for size, num_drafts in ((1, 3), (8, 7), (32, 1), (32, 3)):
        batches = [every[first : first + size] for first in range(0, len(every), size)]
        for one in (alone, drafter):
            found = [texts(target, one, batch, num_assistant_tokens=num_drafts) for batch in batches]
            assert [text for batch in found for text in batch] == expected, (size, num_drafts, type(one))
    assert drafter.stats.execution.startswith("captured")
    assert len({tuple(text) for text in expected}) > len(expected) // 2
    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_one_text_a_prompt(kind):
    assert "StoredLinear" not in check_texts(quantised(kind)).stats.reason


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_one_text_a_prompt_of_experts_in_float8(family, tmp_path, monkeypatch):
    without_kernels_of_the_hub(monkeypatch)
    save_float8(family, tmp_path)
    target = load_float8(tmp_path, torch.bfloat16).to("cuda")
    # As large as layers' outputs. Else rounding decides which experts tokens get, and the equivalence check refuses.
    target.get_input_embeddings().weight.data.mul_(30)
    check_texts(target)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_run_the_kernels(kind):
    """What plain generate() says, but for ties: its weights are rounded to bfloat16."""
    target, few = quantised(kind), list(range(6))
    plain = texts(target, None, few)
    found = texts(target, random_eagle3(target).bfloat16(), few, num_assistant_tokens=3)
    assert sum(one[0] == other[0] for one, other in zip(plain, found, strict=True)) >= len(few) - 1
