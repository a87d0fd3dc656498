"""On a GPU, weights that are stored in 8 or 4 bits: one text a prompt, in captured rounds."""

import pytest
import torch
from float8_blocks import load_float8, save_float8, without_kernels_of_the_hub
from oracle import random_eagle3
from targets import on_gpu, padded_prompts
from torch import nn
from torch.nn import functional as F

from hf_specdec import NoDrafter
from hf_specdec.kernels.stored_weight_reference import dequantise
from hf_specdec.kernels.types import StoredWeight
from hf_specdec.modules.weights import _readers as readers
from hf_specdec.modules.weights import register_weight_kind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS, NEW_TOKENS = [9, 1, 40, 17, 3, 150], 24
# Dtype of the numbers, inputs of a group (None: all of them), and whether there are zero points.
KINDS = {
    "float8 rows": (torch.float8_e4m3fn, None, False),
    "int8 rows": (torch.int8, None, False),
    "int8 groups": (torch.int8, 32, False),
    "int4 groups": (torch.uint8, 32, False),
    "int4 zero points": (torch.uint8, 32, True),
}


class StoredLinear(nn.Linear):
    """A linear layer that dequantises its weight in every pass."""

    stored: StoredWeight

    def forward(self, inputs):
        return F.linear(inputs, dequantise(self.stored, inputs.dtype), self.bias)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr("hf_specdec.modules.weights._readers", dict(readers))
    register_weight_kind(f"{__name__.partition('.')[0]}.StoredLinear")(lambda module: module.stored)


def stored(weight, dtype, group, has_zeros):
    """`weight` rounded to nearest."""
    groups = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    largest = {torch.float8_e4m3fn: 448, torch.int8: 127, torch.uint8: 7}[dtype]
    scales = groups.abs().amax(-1) / largest
    values = groups / scales[..., None]
    zeros = None
    if dtype == torch.uint8:
        if has_zeros:
            zeros = torch.randint(7, 10, scales.shape, device=weight.device).to(dtype)
        values = (values.round() + (8 if zeros is None else zeros[..., None])).clamp(0, 15).to(dtype).flatten(1)
        values = values[:, ::2] | values[:, 1::2] << 4
    else:
        values = (values if dtype.is_floating_point else values.round()).to(dtype).flatten(1)
    return StoredWeight(values.contiguous(), scales, zeros, 1, group or weight.shape[1])


def quantised(kind):
    target = on_gpu("llama").bfloat16()
    for layer in [one for one in target.model.layers.modules() if type(one) is nn.Linear]:
        layer.__class__, layer.stored = StoredLinear, stored(layer.weight.detach(), *KINDS[kind])
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
    drafter = NoDrafter(target, batch_invariant=True)
    expected = [texts(target, drafter, [row])[0] for row in every]
    assert texts(target, drafter, every) == expected
    drafter = random_eagle3(target).bfloat16().configure(batch_invariant=True)
    for num_drafts in (1, 3, 7):
        assert texts(target, drafter, every, num_assistant_tokens=num_drafts) == expected, num_drafts
    assert drafter.stats.execution.startswith("captured")
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
    target, every = quantised(kind), list(range(len(LENGTHS)))
    plain = texts(target, None, every)
    found = texts(target, random_eagle3(target).bfloat16(), every, num_assistant_tokens=3)
    assert sum(one[0] == other[0] for one, other in zip(plain, found, strict=True)) >= len(LENGTHS) - 1
