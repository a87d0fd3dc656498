"""Drafts without a model: what followed the last tokens before, in the text and in earlier outputs."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from chi_square import Cells, p_value
from graph_stand_ins import replay_on_cpu
from targets import STOCK_FAMILY, padded_prompts, tiny_target
from transformers import ContinuousBatchingConfig

from hf_specdec import AutoDrafter, NoDrafter, SuffixDrafter
from hf_specdec.cli import main
from hf_specdec.config import SuffixConfig
from hf_specdec.kernels.types import LONGEST_MATCH, NO_TOKEN

NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}


def prompt_of(*tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def kept(drafter: SuffixDrafter) -> list[int]:
    """What of the history is in use."""
    history = drafter._history.tolist()
    return history[next((at for at, token in enumerate(history) if token != NO_TOKEN), len(history)) :]


@pytest.mark.core
def test_a_text_that_was_generated_before_is_accepted_whole():
    """Also by the end of its prompt alone, which another prompt shares; and K may differ from round to round."""
    target = tiny_target("llama")
    drafter = SuffixDrafter(target)
    inputs = padded_prompts([20, 31, 17])
    plain = target.generate(**inputs, **GREEDY)
    for call in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=drafter, num_assistant_tokens=7), plain)
        assert drafter.stats.engine == "static"
        assert (drafter.stats.num_rounds == 3) == (call == 1)  # a token and 3 rounds of up to 8
    bulk = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    out = target.generate_batch(bulk, assistant_model=drafter, num_assistant_tokens="auto", **GREEDY)
    texts = [one.generated_tokens for one in out.values()]
    assert texts == plain[:, -NEW:].tolist() and drafter.stats.accepted == drafter.stats.drafted > 0


def test_history_is_what_was_generated():
    """With the end of its prompt, by rows and bulk calls, the latest texts up to its size."""
    target = tiny_target("llama")
    drafter = SuffixDrafter(target, history_size=100)
    prompt = list(range(3, 23))
    (text,) = target.generate(**prompt_of(*prompt), **GREEDY, assistant_model=drafter).tolist()
    expected = [*prompt[-LONGEST_MATCH:], *text[len(prompt) :], NO_TOKEN]
    assert kept(drafter) == expected
    config = ContinuousBatchingConfig(max_requests_per_batch=1)
    out = target.generate_batch([[5, 6], [7]], None, config, assistant_model=drafter, **GREEDY)
    for start, one in zip(([5, 6], [7]), out.values(), strict=True):
        expected += [*start, *one.generated_tokens, NO_TOKEN]
    assert kept(drafter) == expected[-100:] and len(expected) > 90
    target.generate(**prompt_of(*prompt), **GREEDY, assistant_model=drafter)
    assert len(kept(drafter)) == 100 and kept(drafter)[3 - len(text) :] == [*text[4:], NO_TOKEN]
    long = {**GREEDY, "max_new_tokens": 120}
    (text,) = target.generate(**prompt_of(5), **long, assistant_model=drafter).tolist()
    assert kept(drafter) == [*text[-99:], NO_TOKEN]


def test_without_history():
    target = tiny_target("llama")
    drafter = SuffixDrafter(target, history_size=0)
    prompt = prompt_of(*[4, 5, 6, 7] * 3)
    plain = target.generate(**prompt, **GREEDY)
    rounds = []
    for _ in range(2):
        assert torch.equal(target.generate(**prompt, **GREEDY, assistant_model=drafter), plain)
        rounds.append(drafter.stats.num_rounds)
    assert rounds[0] == rounds[1] and drafter._history.numel() == 0


def test_drafts_are_of_the_row(monkeypatch):
    """Of its own text and the history, whatever other rows hold; a captured round reads the history as it is then."""
    target = tiny_target("llama")
    capture = replay_on_cpu(monkeypatch)
    drafter = SuffixDrafter(target).configure(4)
    inputs, plain = padded_prompts([12, 5]), []
    for call in range(3):
        out = target.generate(**inputs, **GREEDY, assistant_model=drafter)
        assert drafter.stats.execution.startswith("captured in")
        plain.append(out.tolist())
        if call == 0:
            count = capture.count
    assert plain[0] == plain[1] == plain[2] == target.generate(**inputs, **GREEDY).tolist()
    assert drafter.stats.accepted == drafter.stats.drafted > 0 and capture.count == count


def test_sampled_texts_have_the_targets_law():
    """Of texts that the history is full of, so that drafts are accepted and rejected."""
    target, prompt, draws = tiny_target("llama"), torch.tensor([[5, 9, 7]]), 1500
    drafter = SuffixDrafter(target, history_size=2000).configure(3)
    options = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": 3, "eos_token_id": None}
    for seed in (1, 2):
        texts = target.generate(prompt, num_return_sequences=draws, assistant_model=drafter, seeds=seed, **options)[
            :, 3:
        ]
    assert 0.02 < drafter.stats.accepted / drafter.stats.drafted < 0.98
    cells = Cells(target, prompt, 3, least=20 / draws)
    assert p_value(cells.count(texts), cells.law) > 1e-3


def test_stock_engine():
    target = tiny_target(STOCK_FAMILY)
    drafter = SuffixDrafter(target)
    inputs = padded_prompts([9, 4])
    plain = target.generate(**inputs, **GREEDY)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **GREEDY, assistant_model=drafter), plain)
    assert drafter.stats.engine == "stock" and drafter.stats.acceptance_length > 4
    assert kept(drafter)[-NEW - 5 :] == [*plain[1, 5:].tolist(), NO_TOKEN]  # of the second row, without its padding


def test_stock_engine_makes_no_list_of_a_text(monkeypatch):
    """That would be one number after the other from the device, for drafters that do not read it."""
    read = []
    monkeypatch.setattr(NoDrafter, "observe", lambda self, *text: read.append(text))
    target, inputs = tiny_target(STOCK_FAMILY), padded_prompts([9, 4])
    target.generate(**inputs, **GREEDY, assistant_model=NoDrafter(target).configure(engine="stock"))
    assert [(len(prompt), len(tokens)) for prompt, tokens in read] == [(9, NEW), (4, NEW)]
    assert all(isinstance(one, torch.Tensor) for text in read for one in text)


def test_saved_and_loaded(tmp_path, capsys):
    """As a folder with a configuration and no weights, which the command line takes."""
    target = tiny_target("llama")
    SuffixDrafter(target, history_size=50, num_assistant_tokens=6).save_pretrained(tmp_path)
    drafter = AutoDrafter.from_pretrained(tmp_path, target)
    assert type(drafter) is SuffixDrafter and drafter.num_assistant_tokens == 6 and len(drafter._history) == 50
    inputs = padded_prompts([9, 4])
    assert torch.equal(
        target.generate(**inputs, **GREEDY, assistant_model=drafter), target.generate(**inputs, **GREEDY)
    )
    main(["inspect", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "suffix" and found["history_size"] == 50
    for wrong in (-1, 2**62):
        with pytest.raises(ValueError, match=f"history_size is {wrong}; expected at least 0, and less than"):
            SuffixDrafter(target, history_size=wrong)


def test_no_drafter_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match="nothing to save"):
        NoDrafter(tiny_target("llama")).save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_bound_to_another_target_it_forgets():
    """Whose vocabulary may be another; one that was changed in place keeps it."""
    first = tiny_target("llama")
    drafter = SuffixDrafter(first)
    first.generate(**prompt_of(4, 5), **GREEDY, assistant_model=drafter)
    before = kept(drafter)
    second = copy.deepcopy(first)
    with pytest.raises(ValueError, match="bound to another target"):
        second.generate(**prompt_of(4, 5), **GREEDY, assistant_model=drafter)
    assert kept(drafter) == before
    drafter.bind(first)
    assert kept(drafter) == before
    twin = copy.deepcopy(drafter)
    assert not twin.is_bound and kept(twin) == before
    twin.bind(first)
    assert kept(twin) == []
    second.resize_token_embeddings(first.config.vocab_size + 8)
    drafter.bind(second)
    assert kept(drafter) == [] and drafter.config.vocab_size == first.config.vocab_size + 8
    plain = second.generate(**prompt_of(4, 5), **GREEDY)
    assert torch.equal(second.generate(**prompt_of(4, 5), **GREEDY, assistant_model=drafter), plain)
    unbound = SuffixDrafter(SuffixConfig())
    with pytest.raises(ValueError, match="is not bound to a target"):
        first.generate(**prompt_of(4, 5), **GREEDY, assistant_model=unbound)


def test_bound_to_the_same_target_it_remembers():
    """On its new device, too; with another vocabulary its tokens may be others."""
    target = copy.deepcopy(tiny_target("llama"))
    drafter = SuffixDrafter(target)
    target.generate(**prompt_of(4, 5), **GREEDY, assistant_model=drafter)
    before = kept(drafter)
    target.to(torch.bfloat16).to(torch.float32)
    with torch.inference_mode():
        drafter.bind(target)
    drafter.load_state_dict(drafter.state_dict())
    assert kept(drafter) == before != []
    target.generate(**prompt_of(4, 5), **GREEDY, assistant_model=drafter)
    assert kept(drafter) == before * 2 and not drafter._history.is_inference()
    drafter.bind(target.to("meta"))
    assert drafter._history.device.type == "meta"
    drafter = SuffixDrafter(target := copy.deepcopy(tiny_target("llama")))
    target.generate(**prompt_of(4, 5), **GREEDY, assistant_model=drafter)
    target.resize_token_embeddings(target.config.vocab_size - 8)
    drafter.sync_with(target)
    assert kept(drafter) == []


def test_no_other_settings():
    """Such as a misspelt one: outputs would be kept."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'histroy_size'"):
        SuffixDrafter(tiny_target("llama"), histroy_size=0)


def test_no_window():
    with pytest.raises(ValueError, match="has no key/value cache of its own"):
        SuffixDrafter(tiny_target("llama")).configure(draft_window_size=64)
    assert NoDrafter(tiny_target("llama")).num_draft_tokens("auto") == 0
