"""Trees of drafts on a GPU: captured rounds, in `generate()` and on rows that grow."""

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from targets import on_gpu, padded_prompts, tiny_target
from transformers import ContinuousBatchingConfig
from varying_drafts import vary_drafts

from hf_specdec import NoDrafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAKERS = ["p-eagle", "pard", "pard2", "dflash", "dspark", "dflash2", "domino", "dspine", "eagle3", "draft-model", "mtp"]
FAMILIES = ["llama", "gemma3", "gpt-oss", "deepseek-v3"]


def prompts(lengths):
    return {name: tensor.to("cuda") for name, tensor in padded_prompts(lengths).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_is_identical_in_float32(family, kind):
    target = on_gpu(family)
    drafter = RANDOM_DRAFTERS[kind](target)
    for lengths in ([9], [1, 12, 5]):
        inputs, options = prompts(lengths), {"do_sample": False, "max_new_tokens": 40}
        plain = target.generate(**inputs, **options)
        for num_drafts, tree in ((4, 12), (6, 63), (3, 100)):
            options |= {"num_assistant_tokens": num_drafts, "tree": tree}
            assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
            assert drafter.stats.execution == "captured in one graph, not compiled" and drafter.stats.tree == tree


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("verification", ["tree", "match"])
def test_a_seed_gives_the_text_that_it_gives_without_drafts(kind, verification):
    target, inputs = on_gpu("llama"), prompts([6] * 50)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 30, "max_new_tokens": 20, "seeds": [*range(50)]}
    expected = target.generate(**inputs, **options, assistant_model=NoDrafter(target))
    drafter = RANDOM_DRAFTERS[kind](target)
    drafter.configure(4, **({"tree": 20} if verification == "tree" else {"verification": "match"}))
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)


@pytest.mark.parametrize("kind", MAKERS)
def test_captured_chains_and_trees_follow_each_other(kind, monkeypatch):
    target, inputs, options = on_gpu("llama"), prompts([1, 12, 5]), {"do_sample": False, "max_new_tokens": 60}
    plain = target.generate(**inputs, **options)
    drafter = RANDOM_DRAFTERS[kind](target)
    for _ in range(2):
        found = target.generate(**inputs, **options, assistant_model=drafter, num_assistant_tokens="auto")
        assert torch.equal(found, plain)
    vary_drafts(monkeypatch, [(4, 12), 2, (4, 30), 0, (4, 12), (2, 12), 4])
    drafter.configure(4, tree=30)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert {*drafter.stats.rounds_by_tree} == {12, 30} and {*drafter.stats.rounds_by_k} == {0, 2, 4}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_bulk_texts_are_those_of_generate_without_drafts(kv_cache_dtype):
    generator, options = torch.Generator().manual_seed(0), {"max_new_tokens": 80, "do_sample": False}
    texts = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in (5, 1, 9, 20, 3, 3, 7, 60)]
    target = on_gpu("llama")
    config = ContinuousBatchingConfig(max_requests_per_batch=3)
    drafters = [NoDrafter(target, kv_cache_dtype=kv_cache_dtype)]
    drafters += [RANDOM_DRAFTERS[kind](target).configure(4, tree=40, kv_cache_dtype=kv_cache_dtype) for kind in MAKERS]
    found = []
    for drafter in drafters:
        out = target.generate_batch(texts, None, config, assistant_model=drafter, **options)
        found.append([one.generated_tokens for one in out.values()])
        assert drafter.stats.execution.startswith("captured")
    assert all(one == found[0] for one in found)
    if kv_cache_dtype == "auto":
        plain = [tiny_target("llama").generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in texts]
        assert found[0] == plain
