"""Drafters whose logits are no numbers change nothing; targets whose scores are none are an error of their own row."""

import copy
import itertools

import pytest
import torch
from case_counts import cases
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import STOCK_FAMILY, padded_prompts, tiny_target
from transformers import ContinuousBatchingConfig, LogitsProcessor, LogitsProcessorList

from hf_specdec import NoDrafter

NAN, INF = float("nan"), float("inf")
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 12, "eos_token_id": None}


def with_weights(drafter, value):
    """`drafter` with a row of its head of `value`, or, of a finite one, its last norm, so that logits are infinite."""
    weights = dict(drafter.named_parameters())
    with torch.no_grad():
        if value < INF:
            weights["norm.weight"].fill_(value)
        else:
            weights["lm_head.weight"][3] = value
    return drafter


@pytest.mark.core_for(kind=["eagle3"], value=[INF], verification=["block"])
@pytest.mark.parametrize(
    ("kind", "value", "verification"),
    cases(
        every := list(itertools.product(["eagle3", "p-eagle"], [NAN, INF, 3e38], ["token", "block"])),
        [one for one in every if (one[0] == "eagle3") == (one[2] == "block")],
    ),
)
def test_drafters_without_numbers_change_no_draw(kind, value, verification):
    """Sampled rows with seeds say what they say without a drafter."""
    target, inputs = tiny_target("llama"), padded_prompts([5, 9, 3])
    options = {**SAMPLED, "seeds": [5, 6, 7]}
    expected = target.generate(**inputs, assistant_model=NoDrafter(target), **options)
    drafter = with_weights(RANDOM_DRAFTERS[kind](target), value)
    drafter.verification, drafter.draft_probs = verification, True
    found = target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=3, **options)
    assert torch.equal(found, expected) and drafter.stats.drafted > 0
    assert drafter.stats.accepted == 0 or value == value
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    greedy = target.generate(**inputs, assistant_model=drafter, **options)
    assert torch.equal(greedy, target.generate(**inputs, **options))


def test_drafters_without_numbers_on_the_stock_engine():
    target, inputs = tiny_target(STOCK_FAMILY), padded_prompts([6])
    drafter = with_weights(random_eagle3(target), NAN)
    drafter.draft_probs = True
    options = {**SAMPLED, "top_k": 1}
    expected = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **options), expected)
    assert drafter.stats.engine == "stock"


def test_requests_of_a_manager_do_not_depend_on_a_drafter_without_numbers():
    target = tiny_target("llama")
    config = ContinuousBatchingConfig(max_requests_per_batch=4, per_request_processors=True)
    prompts, texts = [[5, 6, 7], [9] * 8, [4]], []
    for drafter in (NoDrafter(target), with_weights(random_eagle3(target), NAN)):
        with target.continuous_batching_context_manager(
            continuous_batching_config=config, assistant_model=drafter, max_new_tokens=10, eos_token_id=-1
        ) as manager:
            names = [manager.add_request(one, do_sample=False) for one in prompts]
            names += [manager.add_request(one, do_sample=True, temperature=1.0, top_k=0, seed=1) for one in prompts]
            texts.append([manager.get_result(name, timeout=60).generated_tokens for name in names])
    assert texts[0] == texts[1]
    greedy = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
    assert texts[1][:3] == [target.generate(torch.tensor([one]), **greedy)[0, len(one) :].tolist() for one in prompts]


class DeadEnd(LogitsProcessor):
    """Rules out every token, or makes all scores `value`, from so many tokens on."""

    def __init__(self, length, value=-INF):
        self.length, self.value = length, value

    def __call__(self, input_ids, scores):
        return scores.fill_(self.value) if input_ids.shape[1] >= self.length else scores


@pytest.mark.core_for(value=[-INF], at=[4])
@pytest.mark.parametrize("value", [-INF, NAN])
@pytest.mark.parametrize("at", [0, 4])
def test_dead_ends_raise(at, value):
    """As in plain `generate()`; decoding greedily it says what that says."""
    target, inputs = tiny_target("llama"), padded_prompts([5, 9])
    processors = LogitsProcessorList([DeadEnd(9 + at, value)])
    drafter = random_eagle3(target)
    with pytest.raises(RuntimeError):
        target.generate(**inputs, logits_processor=processors, **SAMPLED)
    with pytest.raises(RuntimeError, match=f"Row 0 of the batch has no token {at} after its prompt: .* -inf for all"):
        target.generate(**inputs, logits_processor=processors, assistant_model=drafter, seeds=[1, 2], **SAMPLED)
    if at:  # a text that ends before is whole
        options = {**SAMPLED, "max_new_tokens": at}
        target.generate(**inputs, logits_processor=processors, assistant_model=drafter, **options)
    greedy = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "logits_processor": processors}
    expected = target.generate(**inputs, **greedy)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **greedy), expected)


def with_nan_token(target, token):
    """A copy of `target` whose text is NaN from `token` on."""
    target = copy.deepcopy(target)
    with torch.no_grad():
        target.get_input_embeddings().weight[token] = NAN
    return target


@pytest.mark.parametrize("per_request", [False, True])
def test_a_request_without_a_distribution_fails_alone(per_request):
    """Those beside it, and those that get its row later, say what they say alone."""
    target = with_nan_token(tiny_target("llama"), 90)
    drafter, prompts = NoDrafter(target), [[5, 6, 7], [5, 90, 7], [9] * 8, [4], [90], [6, 6]]
    config = ContinuousBatchingConfig(max_requests_per_batch=2, per_request_processors=per_request)
    suppressed = {"suppress_tokens": [90]}
    with target.continuous_batching_context_manager(
        continuous_batching_config=config, assistant_model=drafter, **{**SAMPLED, "eos_token_id": -1}, **suppressed
    ) as manager:
        names = [manager.add_request(one, seed=7) for one in prompts]
        results = [manager.get_result(name, timeout=60) for name in names]
        if per_request:
            greedy = manager.get_result(manager.add_request([5, 90, 7], do_sample=False), timeout=60)
            options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, **suppressed}
            plain = target.generate(torch.tensor([[5, 90, 7]]), **options)
            assert greedy.error is None and greedy.generated_tokens == plain[0, 3:].tolist()
    for prompt, result in zip(prompts, results, strict=True):
        if 90 in prompt:
            assert "The request has no token 0 after its prompt" in result.error and result.generated_tokens == []
            continue
        alone = target.generate(torch.tensor([prompt]), assistant_model=drafter, seeds=[7], **SAMPLED, **suppressed)
        assert result.error is None and result.generated_tokens == alone[0, len(prompt) :].tolist()
