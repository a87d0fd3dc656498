"""Batches on the stock engine: rows one after the other, put together as plain `generate()` returns them."""

import time

import pytest
import torch
from lossless import PROMPTS, continuations, greedy
from oracle import OracleDrafter, copy_of, random_eagle3
from targets import PAD, STOCK_FAMILY, VOCAB, build_target, padded_prompts, tiny_target
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation.utils import GenerationMixin

from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.modules import signature
from hf_specdec.sampling.logits import RowTemperature
from hf_specdec.stock.separate_rows import _input_of_row

LENGTHS = PROMPTS[3]
DICT = {"return_dict_in_generate": True}
SAMPLING = {"do_sample": True, "max_new_tokens": 8}


def row_of(inputs, row):
    """A row of `padded_prompts(LENGTHS)` without its padding."""
    return {name: tensor[row : row + 1, -LENGTHS[row] :] for name, tensor in inputs.items()}


def stock(drafter):
    return drafter.configure(engine="stock", num_assistant_tokens=3)


@pytest.mark.core_for(family=["bloom"])
@pytest.mark.parametrize("family", [STOCK_FAMILY, "qwen3-next", "gemma3", "bloom"])
def test_greedy_is_identical(family):
    """Of a target that needs the stock engine, one with recurrent layers, one with windows, one of eager attention."""
    target = build_target("bloom") if family == "bloom" else tiny_target(family)
    inputs = padded_prompts(LENGTHS)
    plain = greedy(target, inputs)
    new = plain[:, inputs["input_ids"].shape[1] :]
    ends = {"eos_token_id": [int(new[0, 2]), int(new[2, 9])], "pad_token_id": PAD}
    for options in ({}, {"max_new_tokens": 1}, ends):
        expected = greedy(target, inputs, **options)
        for drafter in (OracleDrafter(target, continuations(inputs, plain), LENGTHS, 0.6), random_eagle3(target)):
            assert torch.equal(greedy(target, inputs, stock(drafter), 3, **options), expected)
            assert drafter.stats.engine == "stock"


def test_statistics_are_those_of_the_rows():
    target, inputs = tiny_target("llama"), padded_prompts(LENGTHS)
    drafter = stock(copy_of(target, noise=0.08))
    alone = []
    for row in range(3):
        greedy(target, row_of(inputs, row), drafter)
        alone += drafter.stats.rows
    out = greedy(target, inputs, drafter, **DICT)
    assert drafter.stats.rows == alone and out.speculation is drafter.stats
    assert drafter.stats.num_rounds == drafter.stats.rounds == sum(row.rounds for row in alone)
    assert drafter.stats.accepted > 0 and drafter.stats.seconds > 0 and drafter.stats.num_assistant_tokens == 3


@pytest.mark.core_for(draft_probs=[True])
@pytest.mark.parametrize("draft_probs", [False, True])
def test_a_row_with_a_seed_says_what_it_says_alone(draft_probs):
    target, inputs = tiny_target(STOCK_FAMILY), padded_prompts(LENGTHS)
    drafter = stock(random_eagle3(target)).configure(draft_probs=draft_probs)
    call = {**SAMPLING, "assistant_model": drafter}
    temperatures = [0.3, 1.0, 1.8]

    def rows(values):
        return LogitsProcessorList([RowTemperature(values)])

    state = torch.get_rng_state()
    together = target.generate(**inputs, **call, seeds=[5, 6, 7], logits_processor=rows(temperatures))
    for row in range(3):
        own = rows(temperatures[row : row + 1])
        out = target.generate(**row_of(inputs, row), **call, seeds=[5 + row], logits_processor=own)
        assert torch.equal(out[0, LENGTHS[row] :], together[row, max(LENGTHS) :])
    assert torch.equal(torch.get_rng_state(), state)
    twice = target.generate(**inputs, **call, seeds=[4] * 6, num_return_sequences=2)
    assert torch.equal(twice[::2], twice[1::2]) and len(drafter.stats.rows) == 6
    assert torch.equal(twice[:, : max(LENGTHS)], inputs["input_ids"].repeat_interleave(2, dim=0))
    texts = []
    for _ in range(2):
        set_seed(3)
        texts.append(target.generate(**inputs, **call, num_return_sequences=2))
        generator = torch.Generator().manual_seed(3)
        texts.append(target.generate(**inputs, **call, num_return_sequences=2, generator=generator))
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])
    assert len({tuple(row) for row in texts[0].tolist()}) == 6


@pytest.mark.core_for(family=["qwen3-next"])
@pytest.mark.parametrize("family", [STOCK_FAMILY, "gemma3", "qwen3-next"])
def test_cache_is_filled_as_by_plain_generate(family):
    """Of the caller, or returned: with rows that end before others."""
    target, inputs = tiny_target(family), padded_prompts(LENGTHS)
    new = greedy(target, inputs)[:, inputs["input_ids"].shape[1] :]
    ends = {"eos_token_id": [int(new[0, 2])], "pad_token_id": PAD}
    caches = []
    for options in ({}, {"assistant_model": stock(random_eagle3(target))}):
        cache = DynamicCache(config=target.config)
        text = greedy(target, inputs, **ends, **options, **{OUTPUT_NAME: cache})
        out = greedy(target, inputs, **ends, **options, **DICT)
        assert torch.equal(out.sequences, text) and out.hidden_states is None and out.scores is None
        caches += [cache, out[OUTPUT_NAME]]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, text.shape[1] - max(LENGTHS)), value=1)
    longer = {"input_ids": text, "attention_mask": mask}
    expected = target.generate(**longer, max_new_tokens=5, do_sample=False)
    for cache in caches:
        assert cache.get_seq_length() == text.shape[1] - 1
        assert torch.equal(
            target.generate(**longer, max_new_tokens=5, do_sample=False, **{OUTPUT_NAME: cache}), expected
        )
    for kept, cache in zip(caches[:2], caches[2:], strict=True):
        for ours, theirs in zip(cache.layers, kept.layers, strict=True):
            assert type(ours) is type(theirs)
            if hasattr(ours, "keys"):
                torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=1e-4)


class BatchSays(StoppingCriteria):
    """Ends all rows when each has said its token: has memory, of every row of the batch."""

    def __init__(self, tokens):
        self.tokens, self.said = tokens, torch.zeros(len(tokens), dtype=torch.bool)

    def __call__(self, input_ids, scores, **kwargs):
        self.said |= input_ids[:, -1] == self.tokens
        return self.said.all().expand(len(input_ids))


def test_criteria_see_the_whole_batch():
    target, inputs = tiny_target(STOCK_FAMILY), padded_prompts(LENGTHS)
    free = greedy(target, inputs)
    tokens = free[torch.arange(3), max(LENGTHS) + torch.tensor([2, 9, 5])]
    drafter = stock(random_eagle3(target))

    def text(**who):
        return greedy(target, inputs, **who, stopping_criteria=StoppingCriteriaList([BatchSays(tokens)]))

    plain = text()
    assert max(LENGTHS) + 1 < plain.shape[1] < free.shape[1]
    assert torch.equal(text(assistant_model=drafter), plain)


@pytest.mark.core
@pytest.mark.parametrize("pads", [False, True])
def test_a_time_limit_is_shared_by_the_rows(pads, monkeypatch):
    """On a clock that each look at moves by a second, so that a row is alive for as many seconds as it has tokens."""
    target, inputs = tiny_target(STOCK_FAMILY), padded_prompts(LENGTHS)
    free = greedy(target, inputs, max_new_tokens=40)
    unsaid = next(token for token in range(2, VOCAB) if token not in free)
    now = iter(range(1000, 10**6))
    monkeypatch.setattr(time, "time", lambda: next(now))
    ends = {"eos_token_id": unsaid, "pad_token_id": PAD} if pads else {}
    limit = StoppingCriteriaList([MaxTimeCriteria(30.0)])
    drafter = stock(random_eagle3(target)).configure(num_assistant_tokens=1)
    text = greedy(target, inputs, drafter, **ends, stopping_criteria=limit, max_new_tokens=40)
    new, width = text[:, max(LENGTHS) :], max(LENGTHS)
    lengths = [len(row) if PAD not in row else row.index(PAD) for row in new.tolist()]
    assert min(lengths) > 3 and max(lengths) < 16
    for row, length in enumerate(lengths):
        assert torch.equal(new[row, :length], free[row, width : width + length])
        assert new[row, length:].eq(PAD).all()
    if not pads:
        assert len(set(lengths)) == 1


def test_position_ids_of_the_caller():
    """Inputs with a column for each token keep those of the padding."""
    target, inputs = tiny_target("llama"), padded_prompts(LENGTHS)
    counted = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    own = inputs | {"position_ids": counted * 2}
    plain = greedy(target, own)
    assert not torch.equal(plain, greedy(target, inputs))
    drafter = stock(random_eagle3(target))
    assert torch.equal(greedy(target, own, drafter, 3), plain) and drafter.stats.engine == "stock"


class Tinted(LlamaForCausalLM):
    """Adds a further input, `[B, V]`, to the logits of each row."""

    def forward(self, input_ids=None, tint=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if tint is not None:
            output.logits = output.logits + (tint[:, None] if isinstance(tint, torch.Tensor) else tint[0])
        return output


@pytest.fixture
def tinted():
    target = Tinted(tiny_target("llama").config).eval()
    target.load_state_dict(tiny_target("llama").state_dict())
    target.generation_config.pad_token_id = PAD
    return target


@pytest.mark.core
def test_inputs_with_an_entry_for_each_row(tinted):
    inputs = padded_prompts(LENGTHS) | {"tint": torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 3}
    plain = greedy(tinted, inputs)
    assert not torch.equal(greedy(tinted, inputs | {"tint": inputs["tint"].flip(0)}), plain)
    drafter = OracleDrafter(tinted, continuations(inputs, plain), LENGTHS, 0.6)
    # What is given first changes nothing, which is not taken for all that may be given.
    greedy(tinted, inputs | {"tint": torch.zeros(3, VOCAB)}, drafter, 3)
    assert torch.equal(greedy(tinted, inputs, drafter, 3), plain)
    reason = "model inputs besides tokens: tint, of which tint are read with every token"
    assert drafter.stats.engine == "stock" and reason in drafter.stats.reason


@pytest.mark.core
@pytest.mark.parametrize(
    ("tint", "message"),
    [
        (torch.zeros(7, VOCAB), r"tint has shape \[7, 96\], .* which of 3 rows; expected an entry for each row"),
        ([torch.zeros(VOCAB)] * 3, "tint is a list, .* which of 3 rows; expected a tensor"),
        ({"image": torch.zeros(3)}, "tint is a dict of image, .* which of 3 rows; expected a tensor"),
    ],
    ids=["seven", "list", "dict"],
)
def test_inputs_that_do_not_say_what_belongs_to_which_row(tinted, tint, message):
    drafter = random_eagle3(tinted)
    with pytest.raises(ValueError, match=message) as error:
        greedy(tinted, padded_prompts(LENGTHS) | {"tint": tint}, drafter)
    assert "model inputs besides tokens: tint" in str(error.value) and "without assistant_model" in str(error.value)
    assert drafter.stats is None


@pytest.mark.core
def test_padding_that_changes_the_text(monkeypatch, caplog):
    """Of a class that counts columns of padding as positions."""

    class Columns(type(tiny_target("llama"))):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            inputs = GenerationMixin.prepare_inputs_for_generation(self, input_ids, **kwargs)
            inputs["position_ids"] = torch.arange(input_ids.shape[1])[None, -inputs["input_ids"].shape[1] :] ** 2
            return inputs

    monkeypatch.setattr(signature, "_facts", {})
    torch.manual_seed(0)
    target = Columns(tiny_target("llama").config).eval()
    target.load_state_dict(tiny_target("llama").state_dict())
    target.generation_config.pad_token_id = PAD
    inputs, drafter = padded_prompts(LENGTHS), random_eagle3(target)
    plain = greedy(target, inputs)
    alone = [greedy(target, row_of(inputs, row))[0, LENGTHS[row] :] for row in range(3)]
    assert not torch.equal(torch.stack(alone), plain[:, max(LENGTHS) :])
    assert torch.equal(greedy(target, inputs, drafter, 3), plain) and drafter.stats.engine == "stock"
    warning = "texts of rows with seeds depend on their padding: the padding of a row changes its logits in plain"
    assert warning not in caplog.text
    target.generate(**inputs, **SAMPLING, assistant_model=drafter, seeds=[5, 6, 7])
    assert warning in caplog.text


def test_rows_have_offloaded_caches_of_their_own():
    cache = DynamicCache(config=tiny_target("llama").config, offloading=True)
    copied = _input_of_row(OUTPUT_NAME, cache, 0)
    assert copied is not cache and copied.layers is not cache.layers and copied.offloading
