"""Targets that attend to compressed windows of tokens (DeepSeek-V4), beside a sliding window of single ones."""

from functools import cache, partial

import pytest
import torch
from bulk import check_rows, prompts_of
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import GreedyTexts, oracle
from oracle import copy_of, random_draft_model
from targets import build_target, padded_prompts
from transformers import DynamicCache

from hf_specdec.cache import compressed_layers
from hf_specdec.engine import prefix_cache
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_equivalent

SETTINGS = {
    "num_hidden_layers": 4,
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": 7,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    # With few heads many scores are zero, and which of equals are chosen is open.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
}
NAME = "deepseek_v4"
# Beyond the window and many compressed ones; shorter than any; a chunk and more.
ROW, EQUAL, LONG = [30], [3, 3, 3], [150]


@cache
def target_of(name, **options):
    target = build_target(name, **SETTINGS | options)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("position_bias", "embed_tokens.weight")):
                parameter.normal_(std=0.5)
        for name, buffer in target.named_buffers():
            if name.endswith("tid2eid"):  # experts by the number of the token
                buffer.random_(0, 4)
    return target


TEXTS = GreedyTexts(target_of, max_new_tokens=30)


@pytest.mark.core_for(lengths=[LONG])
@pytest.mark.parametrize("lengths", [pytest.param(ROW, marks=pytest.mark.slow), EQUAL, LONG], ids=str)
def test_greedy_is_identical(lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7), (0.0, 3), (0.6, 7)], [(0.0, 1), (0.6, 3), (1.0, 7)]):
        TEXTS.check(NAME, lengths, partial(oracle, accuracy=accuracy), num)
    TEXTS.check(NAME, lengths, oracle, prefill_chunk_size=13)
    assert len(TEXTS.plain(NAME, lengths).unique()) > 4


@pytest.mark.parametrize("change", ["early", "late", "stale"])
def test_texts_tell_when_entries_are_seen(monkeypatch, change):
    """Entries that are seen a token early or late, and such of rejected drafts that stay, would show."""
    windows = compressed_layers.CompressedWindows
    shown, store = windows.shown, windows.store

    def shown_at_others(self):
        entries, _ = shown(self)
        known = (self._cache.positions + (2 if change == "early" else 0)) // self.rate
        return entries, torch.arange(entries.shape[1]) < known[..., None]

    def store_once(self, entries, numbers):
        before = None if self.entries is None else self.entries.clone()
        store(self, entries, numbers)
        if before is not None:
            self.entries.copy_(torch.where(before != 0, before, self.entries))

    TEXTS.check(NAME, ROW, oracle)
    if change == "stale":
        monkeypatch.setattr(windows, "store", store_once)
    else:
        monkeypatch.setattr(windows, "shown", shown_at_others)
    with pytest.raises(AssertionError):
        TEXTS.check(NAME, ROW, oracle)


def test_texts_depend_on_the_choice_of_entries():
    """What would go unnoticed otherwise: that a query sees all windows."""
    every = target_of(NAME, index_topk=200)
    assert not torch.equal(TEXTS.greedy(every, padded_prompts(ROW)), TEXTS.plain(NAME, ROW))


def test_padding_that_changes_plain_texts_is_refused():
    """transformers compresses padding with the tokens of a row, so that its text depends on the rows beside it."""
    target, inputs = target_of(NAME), padded_prompts([30, 12])
    alone = {name: tensor[1:, -12:] for name, tensor in inputs.items()}
    plain = TEXTS.greedy(target, inputs)
    assert not torch.equal(plain[1:, 30:], TEXTS.greedy(target, alone)[:, 12:])
    drafter = oracle(target, inputs, plain)
    with pytest.raises(ValueError, match=r"the padding of a row changes its logits .* expected prompts of the same"):
        TEXTS.greedy(target, inputs, drafter, 3)


def test_calls_that_are_not_of_tokens_only_are_refused():
    target, inputs = target_of(NAME), padded_prompts(ROW)
    drafter = oracle(target, inputs, TEXTS.plain(NAME, ROW))
    for positions in (torch.arange(30)[None] + 3, torch.arange(30)[None] * 2):
        with pytest.raises(ValueError, match="which are made of tokens only, at positions that are counted from 0"):
            TEXTS.greedy(target, {**inputs, "position_ids": positions}, drafter, 3)
    filled = TEXTS.greedy(target, inputs, return_dict_in_generate=True)
    longer = {"input_ids": torch.cat([filled.sequences, filled.sequences[:, :3]], dim=1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    with pytest.raises(ValueError, match="continues a cache with layers of type DeepseekV4CSACache"):
        TEXTS.greedy(target, longer, drafter, 3, **{OUTPUT_NAME: filled[OUTPUT_NAME]})


@pytest.mark.parametrize("kind", [copy_of, random_draft_model])
def test_draft_models(kind):
    TEXTS.check_draft_model(NAME, EQUAL, kind)


def test_replayed_graphs(monkeypatch):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed(NAME, random_draft_model(target_of(NAME)), [EQUAL, [5, 5, 5]])


def test_equal_prompts_are_prefilled_once(monkeypatch):
    monkeypatch.setattr(prefix_cache, "FEWEST_SAVED", 8)
    target = target_of(NAME)
    inputs = {name: tensor.expand(3, -1) for name, tensor in padded_prompts(ROW).items()}
    drafter = random_draft_model(target)
    found = TEXTS.greedy(target, inputs, drafter, 3)
    assert torch.equal(found, TEXTS.plain(NAME, ROW).expand(3, -1)) and drafter.stats.cached_tokens > 0


@pytest.mark.core
def test_rows_that_come_and_go():
    """Without padding each row says what it says alone."""
    target = target_of(NAME)
    check_rows(target, copy_of(target, noise=0.02), prompts_of((5, 22, 3, 9, 70)), new=20)


def test_caches_are_left_as_plain_generation_leaves_them():
    target, first, caches = target_of(NAME), padded_prompts([20]), []
    for assistant in (None, random_draft_model(target)):
        caches.append(cache := DynamicCache(config=target.config))
        TEXTS.greedy(target, first, assistant, 3, max_new_tokens=9, **{OUTPUT_NAME: cache})
    for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.allclose(plain.keys, ours.keys, atol=1e-4)
        for name, entries in getattr(plain, "compressed_kv", {}).items():
            assert torch.allclose(entries, ours.compressed_kv[name], atol=1e-4)


def test_hidden_states_of_several_streams():
    target, inputs = target_of(NAME), padded_prompts([20])
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 6}
    plain = TEXTS.greedy(target, inputs, **options).hidden_states
    found = TEXTS.greedy(target, inputs, random_draft_model(target), 3, **options).hidden_states
    for ours, theirs in zip(found, plain, strict=True):
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(ours, theirs, strict=True))


def test_padding_shows_in_windows_that_are_longer_than_a_few_tokens():
    """The equivalence check runs prompts that fill a window."""
    rates = {"compressed_sparse_attention": 40, "heavily_compressed_attention": 40}
    target = target_of.__wrapped__(
        NAME, num_hidden_layers=1, layer_types=["heavily_compressed_attention"], compress_rates=rates
    )
    assert "the padding of a row changes its logits" in why_not_equivalent(target, "static")
    assert why_not_equivalent(target, "static", is_padded=False) is None
