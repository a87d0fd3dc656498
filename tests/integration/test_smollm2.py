"""The shipped drafters on the real model: SmolLM2-135M-Instruct."""

import functools
from collections import Counter

import pytest
import torch
from case_counts import cases, num_cases
from shipped_drafters import DRAFTERS, chat_batches
from training.card import write_custom_generate
from transformers import dynamic_module_utils

from hf_specdec import AutoDrafter

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def smollm2():
    import gguf
    from smollm2 import load_smollm2

    with pytest.MonkeyPatch.context() as patch:
        # Else the file is parsed four times, and the table of names is made for every module.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return load_smollm2()


@pytest.fixture(scope="module", params=[(2, 24), pytest.param((40, 128), marks=pytest.mark.slow)], ids=str)
def plain_outputs(smollm2, request):
    """Plain greedy outputs of chat prompts: `(inputs, [prompts, P + new])`."""
    model, tokenizer = smollm2
    num_prompts, num_new = request.param
    (inputs,) = chat_batches(tokenizer, num_prompts, batch_size=num_prompts)
    return inputs, model.generate(**inputs, do_sample=False, max_new_tokens=num_new)


@pytest.mark.parametrize("folder", DRAFTERS, ids=lambda path: path.name)
def test_chat_outputs_are_identical_and_drafts_are_accepted(smollm2, plain_outputs, folder):
    model, _ = smollm2
    inputs, plain = plain_outputs
    drafter = AutoDrafter.from_pretrained(folder, target=model, num_assistant_tokens=5)
    num_new = plain.shape[1] - inputs["input_ids"].shape[1]
    out = model.generate(**inputs, do_sample=False, max_new_tokens=num_new, assistant_model=drafter)
    assert torch.equal(out, plain[:, : out.shape[1]])
    assert (plain[:, out.shape[1] :] == model.generation_config.pad_token_id).all()
    assert drafter.stats.committed / drafter.stats.rounds > 2.0


def test_sampled_tokens_follow_the_target(smollm2):
    # The first two tokens, three candidates each: nine outcomes whose probabilities the target gives exactly.
    model, tokenizer = smollm2
    drafter = AutoDrafter.from_pretrained(DRAFTERS[0], target=model, num_assistant_tokens=1, draft_probs=True)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    draws, top_k, temperature = num_cases(128, 96), 3, 1.5
    torch.manual_seed(20)
    out = model.generate(
        **inputs,
        do_sample=True,
        top_k=top_k,
        temperature=temperature,
        max_new_tokens=2,
        num_return_sequences=draws,
        assistant_model=drafter,
    )
    counts = Counter(map(tuple, out[:, -2:].tolist()))
    assert drafter.stats.draft_probs
    expected = first_two_tokens_law(model, inputs["input_ids"], top_k, temperature)
    assert set(counts) <= set(expected)
    statistic = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in expected.items())
    assert statistic < 26.1  # the 99.9 % quantile of chi-square with 8 degrees of freedom


@torch.no_grad()
def first_two_tokens_law(model, input_ids, top_k, temperature) -> dict[tuple[int, int], float]:
    def law(ids):
        values, tokens = (model(ids).logits[0, -1].double() / temperature).topk(top_k)
        return zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True)

    return {
        (first, second): p_first * p_second
        for first, p_first in law(input_ids)
        for second, p_second in law(torch.cat([input_ids, torch.tensor([[first]])], dim=1))
    }


# The cards differ by a name, and every drafter has been loaded above.
@pytest.mark.parametrize("folder", cases(DRAFTERS, DRAFTERS[:1]), ids=lambda path: path.name)
def test_custom_generate_of_the_card(smollm2, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    write_custom_generate(tmp_path, folder.name)
    model, tokenizer = smollm2
    inputs = tokenizer("The three primary colours are", return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": num_cases(12, 6)}
    out = model.generate(
        **inputs, **options, custom_generate=str(tmp_path), trust_remote_code=True, drafter=str(folder)
    )
    assert torch.equal(out, model.generate(**inputs, **options))
