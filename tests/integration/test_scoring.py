"""Log-probabilities of given texts are those of a plain forward pass, and those that calls return."""

import numpy as np
import pytest
import torch
from oracle import random_eagle3
from targets import FAMILIES, STOCK_FAMILY, new_target, tiny_target
from transformers import GenerationConfig

from hf_specdec import NoDrafter
from hf_specdec.integration import scoring

TEXTS = [[5, 6, 7, 9, 11, 3], [9, 4], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]


def padded(texts, before):
    width = max(map(len, texts))

    def with_padding(one):
        padding = [0] * (width - len(one))
        return padding + one if before else one + padding

    return torch.tensor([with_padding(one) for one in texts]), torch.tensor(
        [with_padding([1] * len(one)) for one in texts]
    )


def expected(target, temperature=1.0):
    rows = []
    for text in TEXTS:
        logits = target(torch.tensor([text]), use_cache=False).logits[0, :-1] / temperature
        rows.append(logits.log_softmax(-1).gather(-1, torch.tensor(text[1:], dtype=torch.int64)[:, None])[:, 0])
    return rows


@pytest.mark.core_for(family=["llama", "gpt-oss", "qwen3-next"])
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != STOCK_FAMILY])
@torch.no_grad()
def test_texts_score_as_in_plain_passes(monkeypatch, family):
    """Padded on either side, in one pass and in several of a few rows and columns each."""
    target = tiny_target(family)
    drafter = NoDrafter(target)
    for before, tokens, temperature in ((True, 2048, 0.7), (False, 2048, np.float32(0.7)), (True, 12, 0.7)):
        monkeypatch.setattr(scoring, "TOKENS_OF_PASS", tokens)
        ids, mask = padded(TEXTS, before)
        found = drafter.score(target, ids, mask, temperature=temperature)
        assert found.shape == ids.shape and found.dtype == torch.float32
        for row, want in enumerate(expected(target, 0.7)):
            text = found[row][mask[row].bool()]
            torch.testing.assert_close(text[1:], want, rtol=1e-4, atol=2e-5)
            assert text[0] == 0.0 and not found[row][~mask[row].bool()].any()


@pytest.mark.core
def test_texts_of_calls_score_as_the_calls_say():
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    ids, mask = padded(TEXTS, True)
    out = target.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        max_new_tokens=9,
        assistant_model=drafter,
        return_dict_in_generate=True,
        return_logprobs="raw",
    )
    mask = torch.nn.functional.pad(mask, (0, 9), value=1)
    before = {name: vars(module).get("forward") for name, module in target.named_modules()}
    found = drafter.score(target, out.sequences, mask)
    torch.testing.assert_close(found[:, ids.shape[1] :], out.raw_logprobs, rtol=2e-5, atol=2e-5)
    assert before == {name: vars(module).get("forward") for name, module in target.named_modules()}
    assert torch.equal(drafter.score(target, torch.tensor([[4]])), torch.zeros(1, 1))


def test_settings_of_the_models_generation_are_none_of_scores():
    target = new_target("llama")
    drafter, (ids, mask) = NoDrafter(target), padded(TEXTS, True)
    before = drafter.score(target, ids, mask)
    settings = {
        "num_return_sequences": 2,
        "stop_strings": ["a"],
        "num_beams": 3,
        "guidance_scale": 2.0,
        "prompt_lookup_num_tokens": 3,
        "dola_layers": "high",
    }
    for name, value in settings.items():
        target.generation_config = GenerationConfig(do_sample=True, **{name: value})
        assert torch.equal(drafter.score(target, ids, mask), before), name
        assert getattr(target.generation_config, name) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([1, 2]),), r"input_ids has shape \[2\]; expected \[batch, length\]"),
        ((torch.tensor([[1.0, 2.0]]),), "input_ids is torch.float32; expected token ids"),
        ((torch.tensor([[1, 2]]), torch.tensor([[1]])), r"attention_mask has shape \[1, 1\] .*; expected the same"),
        ((torch.tensor([[1, 2]]), torch.tensor([[1, -1]])), "attention_mask holds -1; expected 0 for padding and 1"),
        ((torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]])), "a gap in row 0"),
        (([[1, 2]],), r"input_ids is \[\[1, 2\]\]; expected Tensor"),
        ((torch.tensor([[1, 2]]), [[1, 1]]), r"attention_mask is \[\[1, 1\]\]; expected Tensor \| None"),
        ((torch.tensor([[1, 2]]), None, 0.0), "temperature is 0.0; expected a finite number above 0"),
        ((torch.tensor([[1, 2]]), None, True), "temperature is True"),
        ((torch.tensor([[1, 10**6]]),), "1000000"),
    ],
)
def test_wrong_texts(arguments, message):
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=message):
        NoDrafter(target).score(target, *arguments)


def test_a_target_of_the_stock_engine_is_refused():
    target = tiny_target(STOCK_FAMILY)
    found = r"score\(\) runs on the static engine, but PhimoeForCausalLM .* runs on the stock engine: the target's RoPE"
    with pytest.raises(ValueError, match=found):
        NoDrafter(target).score(target, torch.tensor([[1, 2, 3]]))
