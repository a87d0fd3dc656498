"""Calls where new tensors are on another device than the host unless one is named (`torch.set_default_device`)."""

import pytest
import torch
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import padded_prompts, tiny_target
from transformers import StoppingCriteria

from hf_specdec import AutoDrafter
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.modules import signature

# From tensors on it nothing can be read, and they cannot be used beside others.
DEFAULT = torch.device("meta")
GREEDY = {"max_new_tokens": 6, "do_sample": False}


class NotesDevice(StoppingCriteria):
    def __init__(self):
        self.found = set()

    def __call__(self, input_ids, scores, **kwargs):
        self.found.add(torch.empty(1).device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.core
def test_a_default_device_is_the_callers(monkeypatch):
    """Engines use the host where they name no device; the caller's criteria find the default that is set."""
    target, inputs, criterion = tiny_target("llama"), padded_prompts([5, 9]), NotesDevice()
    drafter, prompts = random_eagle3(target), [[3, 4, 5], [7, 8]]
    expected = target.generate(**inputs, **GREEDY)
    texts = [target.generate(torch.tensor([one]), **GREEDY)[0, len(one) :].tolist() for one in prompts]
    monkeypatch.setattr(signature, "_facts", {})
    with DEFAULT:
        for options in (GREEDY, {**GREEDY, "do_sample": True, "top_k": 1}):
            assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)
        out = target.generate(
            **inputs, **GREEDY, assistant_model=drafter, stopping_criteria=[criterion], return_dict_in_generate=True
        )
        assert out[OUTPUT_NAME].layers[0].keys.device == target.device
        bulk = target.generate_batch(prompts, assistant_model=drafter, **GREEDY).values()
        with target.continuous_batching_context_manager(assistant_model=drafter, **GREEDY) as manager:
            names = manager.add_requests(prompts) + [manager.add_request(prompts[0], seed=3)]
            managed = [manager.get_result(name, timeout=60).generated_tokens for name in names]
        assert torch.get_default_device() == DEFAULT
    assert torch.equal(out.sequences, expected) and criterion.found == {DEFAULT}
    assert [one.generated_tokens for one in bulk] == texts and managed == [*texts, texts[0]]


@pytest.mark.core
@pytest.mark.parametrize("kind", ["eagle3", "draft-model", "mtp"])
def test_loading_under_a_default_device(kind, tmp_path):
    """The drafter is where its target is."""
    target, inputs = tiny_target("llama"), padded_prompts([5, 9])
    RANDOM_DRAFTERS[kind](target).save_pretrained(tmp_path)
    with DEFAULT:
        drafter = AutoDrafter.from_pretrained(tmp_path, target=target)
        assert torch.get_default_device() == DEFAULT
    assert {one.device for one in drafter.state_dict().values()} == {target.device}
    expected = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=drafter), expected)
