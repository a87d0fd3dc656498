"""On a GPU, keys and values as float8: one text a prompt, rounds that are captured, and half the memory of rows."""

import gc

import pytest
import torch
from oracle import RANDOM_DRAFTERS, SELDOM, copy_of
from targets import build_target, on_gpu, padded_prompts
from transformers import ContinuousBatchingConfig

from hf_specdec import NoDrafter
from hf_specdec.memory.virtual_memory import committed_bytes, has_virtual_memory

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
    ),
]
LENGTHS, NEW_TOKENS = [9, 1, 40, 17, 3], 24


def texts(target, drafter, rows, **options):
    given, width = padded_prompts(LENGTHS), max(LENGTHS[row] for row in rows)
    inputs = {name: tensor[rows, -width:].to("cuda") for name, tensor in given.items()}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS} | options
    return [row[-NEW_TOKENS:].tolist() for row in target.generate(**inputs, assistant_model=drafter, **options)]


def alone(target):
    """The text of each prompt by itself, without drafts."""
    drafter = NoDrafter(target, batch_invariant=True, kv_cache_dtype="fp8")
    found = [texts(target, drafter, [row])[0] for row in range(len(LENGTHS))]
    assert "not compiled, batch-invariant, keys and values as float8" in drafter.stats.execution
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "deepseek-v3"])
def test_one_text_a_prompt(family, dtype):
    target = on_gpu(family).to(dtype)
    expected, every = alone(target), list(range(len(LENGTHS)))
    drafter = copy_of(target, noise=0.05).to(dtype).configure(batch_invariant=True, kv_cache_dtype="fp8")
    for num_drafts in (1, 3, 7):
        assert texts(target, drafter, every, num_assistant_tokens=num_drafts) == expected, num_drafts
    assert drafter.stats.accepted > 0
    # Other kernels, of which ties may be decided otherwise.
    plain = texts(target, NoDrafter(target, kv_cache_dtype="fp8"), every)
    assert sum(one[0] == other[0] for one, other in zip(plain, expected, strict=True)) >= len(LENGTHS) - 1


@pytest.mark.parametrize("kind", [kind for kind in RANDOM_DRAFTERS if kind not in SELDOM])
def test_every_drafter_in_bulk(kind):
    """With packed prompts and beginnings that are reused."""
    target = on_gpu("llama").bfloat16()
    beginning = list(range(10, 60))
    prompts = [beginning + [seed] * seed for seed in (3, 5, 4, 7)] + [[5, 6, 7]]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    found = []
    for drafter in (NoDrafter(target), RANDOM_DRAFTERS[kind](target).bfloat16()):
        drafter.configure(batch_invariant=True, kv_cache_dtype="fp8")
        config = ContinuousBatchingConfig(max_requests_per_batch=2)
        results = target.generate_batch(prompts, None, config, assistant_model=drafter, **options)
        assert [one.error for one in results.values()] == [None] * len(prompts)
        found.append([one.generated_tokens for one in results.values()])
    assert found[0] == found[1]


@pytest.mark.skipif(
    not torch.cuda.is_available() or not has_virtual_memory(DEVICE), reason="needs cuda.bindings of the driver"
)
def test_memory_of_rows():
    target, sizes = build_target("llama", head_dim=128, num_hidden_layers=16).to("cuda", torch.bfloat16), {}
    # So long that the pages of a row, of 2 MB, are filled, and so deep that a slot has a multiple of 512 bytes.
    prompts = [[seed + 3] * 32_000 for seed in range(2)]
    target.config.max_position_embeddings = 65_536
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for dtype in ("auto", "fp8"):
        gc.collect()
        before, drafter = committed_bytes(DEVICE), NoDrafter(target, kv_cache_dtype=dtype)
        config = ContinuousBatchingConfig(max_requests_per_batch=8)
        target.generate_batch(prompts, None, config, assistant_model=drafter, **options)
        sizes[dtype] = committed_bytes(DEVICE) - before
        drafter.release()
    assert 0 < sizes["fp8"] < 0.55 * sizes["auto"]
