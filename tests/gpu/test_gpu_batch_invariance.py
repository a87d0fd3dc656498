"""On a GPU, with `batch_invariant`: one text a prompt and the same logits, bit for bit, however it is generated."""

import pytest
import torch
from oracle import RANDOM_DRAFTERS, SELDOM, copy_of
from targets import STATIC_FAMILIES, on_gpu, padded_prompts, set_policy

from hf_specdec import NoDrafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS, NEW_TOKENS = [9, 1, 40, 17, 3], 24
FAMILIES = [family for family in STATIC_FAMILIES if family != "qwen3-next"]


def prompts(rows):
    """The rows of a batch of several lengths, padded as is usual."""
    given = padded_prompts(LENGTHS)
    width = max(LENGTHS[row] for row in rows)
    return {name: tensor[rows, -width:].to("cuda") for name, tensor in given.items()}


def generate(target, drafter, rows, **options):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS} | options
    return target.generate(**prompts(rows), assistant_model=drafter, **options)


def texts(target, drafter, rows, **options):
    return [row[-NEW_TOKENS:].tolist() for row in generate(target, drafter, rows, **options)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_text_a_prompt(family, dtype):
    target = on_gpu(family).to(dtype)
    alone = NoDrafter(target, batch_invariant=True)
    expected = [texts(target, alone, [row])[0] for row in range(len(LENGTHS))]
    assert "not compiled, batch-invariant" in alone.stats.execution and alone.stats.batch_invariant
    every = list(range(len(LENGTHS)))
    assert texts(target, alone, every) == expected
    drafter = copy_of(target, noise=0.05).to(dtype).configure(batch_invariant=True)
    for num_drafts in (1, 3, 7):
        assert texts(target, drafter, every, num_assistant_tokens=num_drafts) == expected, num_drafts
    assert drafter.stats.accepted > 0


@pytest.mark.parametrize("kind", [kind for kind in RANDOM_DRAFTERS if kind not in SELDOM])
def test_one_text_a_prompt_with_every_drafter(kind):
    target = on_gpu("llama").bfloat16()
    every = list(range(len(LENGTHS)))
    expected = [texts(target, NoDrafter(target, batch_invariant=True), [row])[0] for row in every]
    drafter = RANDOM_DRAFTERS[kind](target).bfloat16().configure(batch_invariant=True)
    assert texts(target, drafter, every) == expected
    # Drawn texts also depend on the drafts, so on the drafter and on K, but not on the batch.
    draws = {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.95}
    together = texts(target, drafter, every, seeds=every, **draws)
    assert together == [texts(target, drafter, [row], seeds=[row], **draws)[0] for row in every]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "deepseek-v3"])
def test_one_text_a_prompt_with_trees(family):
    """Greedy, and drawn with a seed: trees are verified by what the target draws."""
    target, every = on_gpu(family).bfloat16(), list(range(len(LENGTHS)))
    alone = NoDrafter(target, batch_invariant=True)
    drafter = copy_of(target, noise=0.05).bfloat16().configure(5, batch_invariant=True)
    for draws in ({}, {"do_sample": True, "temperature": 1.2, "top_k": 30}):
        options = [draws | ({"seeds": [row]} if draws else {}) for row in every]
        expected = [texts(target, alone, [row], **options[row])[0] for row in every]
        for tree in (6, 24, 80):
            found = texts(target, drafter, every, tree=tree, **draws | ({"seeds": every} if draws else {}))
            assert found == expected and drafter.stats.tree == tree
    assert drafter.stats.acceptance_length > 1.5 and drafter.stats.batch_invariant


def test_calls_of_both_kinds_have_sessions_of_their_own():
    target, every = on_gpu("llama").bfloat16(), list(range(len(LENGTHS)))
    drafter = copy_of(target, noise=0.05).bfloat16().configure(compile_rounds=False)
    expected = "captured in one graph, not compiled"
    for is_invariant in (True, False, True, False):
        texts(target, drafter.configure(batch_invariant=is_invariant), every)
        assert drafter.stats.execution == expected + ", batch-invariant" * is_invariant
    assert len(drafter.sessions) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("captures", [False, True])
def test_the_same_logits(monkeypatch, family, captures):
    """Of eager and of captured rounds, and of a prompt that is one pass and of the same tokens generated in rounds."""
    set_policy(monkeypatch, "cuda", cuda_graphs=captures)
    target = on_gpu(family).bfloat16()
    kept = {"return_dict_in_generate": True, "output_logits": True}
    alone, drafter = NoDrafter(target, batch_invariant=True), copy_of(target, noise=0.05).bfloat16()
    drafter.configure(3, batch_invariant=True)
    every = list(range(len(LENGTHS)))
    together = torch.stack(generate(target, drafter, every, **kept).logits)
    for row in every:
        found = torch.stack(generate(target, alone, [row], **kept).logits)
        assert torch.equal(found[:, 0], together[:, row])
    out = generate(target, alone, [2], **kept)
    text = out.sequences[:, :-1]
    options = {"attention_mask": torch.ones_like(text), "do_sample": False, "max_new_tokens": 1}
    again = target.generate(text, assistant_model=alone, **options, **kept)
    assert torch.equal(again.logits[0], out.logits[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_texts_are_the_bits_that_calls_return(family):
    """Of texts that were drafted, in rounds and prefills of any batch, and passes over many columns."""
    target = on_gpu(family).bfloat16()
    drafter = copy_of(target, noise=0.05).bfloat16().configure(batch_invariant=True)
    every = list(range(len(LENGTHS)))
    options = {"return_dict_in_generate": True, "return_logprobs": "raw", "num_assistant_tokens": 3}
    out = generate(target, drafter, every, **options)
    mask = torch.nn.functional.pad(prompts(every)["attention_mask"], (0, NEW_TOKENS), value=1)
    found = drafter.score(target, out.sequences, mask)
    assert torch.equal(found[:, -NEW_TOKENS:], out.raw_logprobs)
