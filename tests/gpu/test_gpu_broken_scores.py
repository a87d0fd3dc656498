"""On a GPU: drafters whose logits are no numbers change nothing; targets whose scores are none are errors of rows.

`tests/kernels_/test_verify_kernel.py` compares the Triton kernels with their references, on a GPU where there is one.
"""

import copy

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from targets import on_gpu, padded_prompts
from transformers import ContinuousBatchingConfig

from hf_specdec import NoDrafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAN = float("nan")
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 24, "eos_token_id": None}


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle"])
def test_drafters_without_numbers_change_nothing(kind, verification):
    target = on_gpu("llama")
    inputs = {name: tensor.to("cuda") for name, tensor in padded_prompts([5, 9, 3]).items()}
    options = {**SAMPLED, "seeds": [5, 6, 7]}
    without = NoDrafter(target).configure(compile_rounds=False)
    expected = target.generate(**inputs, assistant_model=without, **options)
    drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=False)
    drafter.verification, drafter.draft_probs = verification, True
    with torch.no_grad():
        drafter.lm_head.weight[3] = NAN
    found = target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=3, **options)
    assert drafter.stats.drafted > 0 == drafter.stats.accepted
    assert torch.equal(found, expected)


@pytest.mark.parametrize("per_request", [False, True])
def test_a_request_without_a_distribution_fails_alone(per_request):
    target = copy.deepcopy(on_gpu("llama"))
    with torch.no_grad():
        target.get_input_embeddings().weight[90] = NAN
    drafter, prompts = NoDrafter(target), [[5, 6, 7], [5, 90, 7], [9] * 8, [4], [90], [6, 6]]
    drafter.configure(compile_rounds=False)
    config = ContinuousBatchingConfig(max_requests_per_batch=2, per_request_processors=per_request)
    settings = {**SAMPLED, "suppress_tokens": [90]}
    with target.continuous_batching_context_manager(
        continuous_batching_config=config, assistant_model=drafter, **{**settings, "eos_token_id": -1}
    ) as manager:
        results = [manager.get_result(manager.add_request(one, seed=7), timeout=120) for one in prompts]
    for prompt, result in zip(prompts, results, strict=True):
        if 90 in prompt:
            assert "The request has no token 0 after its prompt" in result.error and result.generated_tokens == []
            continue
        inputs = torch.tensor([prompt], device="cuda")
        alone = target.generate(inputs, assistant_model=drafter, seeds=[7], **settings)
        assert result.error is None and result.generated_tokens == alone[0, len(prompt) :].tolist()
    inputs = torch.tensor([[5, 90, 7]], device="cuda")
    with pytest.raises(RuntimeError, match="Row 0 of the batch has no token 0 after its prompt"):
        target.generate(inputs, assistant_model=drafter, seeds=[7], **settings)
