"""Minimum lengths, penalties and n-grams, whole blocks at once: bits, texts, and graphs that calls share."""

import pytest
import torch
from graph_stand_ins import replay_on_cpu, tape_on_cpu
from lossless import PROMPTS
from oracle import copy_of, random_eagle3
from rule_blocks import (
    ENDS,
    IGNORES_PADDING,
    LISTS,
    PAD,
    PADDING,
    VOCAB,
    WIDTH,
    RuleBlock,
    Silent,
    check_bits,
    min_length,
    min_new,
    of_new,
    penalty,
    same_bits,
)
from targets import padded_prompts, tiny_target
from transformers import (
    ContinuousBatchingConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from hf_specdec import DrafterConfig
from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.kernels.types import RowRules
from hf_specdec.sampling.logits import PenaltyLogitsProcessor
from hf_specdec.sampling.processors import BlockProcessor
from hf_specdec.state import Shape


@pytest.mark.core_for(name=["all", "penalty"])
@pytest.mark.parametrize("name", LISTS)
def test_scores_are_those_of_transformers_bit_for_bit(name):
    check_bits(name)


def test_rows_have_rules_of_their_own():
    """Rows that have none keep their bits."""
    block = RuleBlock()
    processors = [penalty(1.3), min_length(14)]
    expected, others = block.expected(processors), block.expected([penalty(0.6), min_length(12)])
    of_rows = BlockProcessor(LogitsProcessorList(processors), block.prompts, PADDING, ends=ENDS).row_rules
    rules = [of_rows[0], RowRules(), RowRules(12 - PADDING[2], PAD, 0.6), RowRules()]
    found = block.found(processors, rules)
    assert same_bits(found[0], expected[0]) and same_bits(found[2], others[2])
    assert same_bits(found[[1, 3]], block.logits[[1, 3]])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_repeated_ngrams_are_ruled_out_as_by_transformers(size):
    """In rows of several lengths, the first of them shorter than an n-gram; drafts are part of n-grams."""
    generator = torch.Generator().manual_seed(size)
    texts = [torch.randint(4, 7, (count,), generator=generator) for count in (1, 4, 9, 40)]
    drafts, logits = torch.randint(4, 7, (4, 6), generator=generator), torch.randn(4, 7, VOCAB, generator=generator)
    drafter, processor = Silent(DrafterConfig(vocab_size=VOCAB)), NoRepeatNGramLogitsProcessor(size)
    state = drafter.new_state(Shape(4, 64, 6, False, False, 0), layers=attention_layers(1), device=torch.device("cpu"))
    state.tokens.random_(4, 7)  # as earlier texts of the rows leave them
    state.admit(range(4), texts, [20] * 4, [0] * 4)
    process = BlockProcessor(LogitsProcessorList([processor]), torch.zeros(4, 1, dtype=torch.int64), [0] * 4)
    assert process.key is not None
    found, num_ruled_out = process(logits, state.block(drafts)[0], state), 0
    for row, text in enumerate(texts):
        for step in range(7):
            before = torch.cat([text, drafts[row, :step]])[None]
            expected = processor(before, logits[row, step, None].clone())[0]
            assert torch.equal(found[row, step], expected)
            num_ruled_out += int(expected.isneginf().sum())
    assert num_ruled_out > 5


class Penalty(RepetitionPenaltyLogitsProcessor):
    """Of a class that is not transformers', so that the host calls it, one position after the other."""


@pytest.mark.parametrize(
    ("processors", "padding"),
    [
        ([NoRepeatNGramLogitsProcessor(2), penalty()], PADDING),
        ([penalty(), penalty()], PADDING),
        ([penalty(ignored=4)], PADDING),
        *([([penalty(ignored=torch.tensor([0, 2, 4, 0]))], PADDING)] if IGNORES_PADDING else []),
        ([penalty()], [0, 3, 5, 0]),  # of several tokens
        ([penalty()], [0, 2, 5, -1]),
        ([min_length(12)], [0, 2, 5, -1]),
        ([min_length(12), min_new(3, ends=[5])], PADDING),
        ([min_length(12, ends=ENDS[1:])], PADDING),
        ([of_new(1.0), of_new(0.0, 1.0)], PADDING),
        ([PenaltyLogitsProcessor(WIDTH - 1, 1.0)], PADDING),
        ([min_length(12), penalty(), min_new(3)], PADDING),
        ([Penalty(1.8)], PADDING),
    ],
)
def test_what_needs_more_than_rules_is_left_to_the_host(processors, padding):
    process = BlockProcessor(LogitsProcessorList(processors), RuleBlock().prompts, padding, ends=ENDS)
    assert process.key is None and process.reads_text and process.row_rules == []


def test_keys_have_kinds_only():
    def key(*processors, ends=ENDS):
        return BlockProcessor(LogitsProcessorList(processors), RuleBlock().prompts, PADDING, ends=ends).key

    assert (
        key(penalty(), min_length(12), min_new(3))
        == key(penalty(0.7), min_length(13), min_new(1, skipped=2))
        is not None
    )
    assert key(min_length(12)) == key(min_length(12, ends=[5]), ends=[5]) != key(penalty()) != key()
    assert key(of_new(1.2)) == key(of_new(0.3, 0.9)) is not None
    assert not BlockProcessor(LogitsProcessorList([TopKLogitsWarper(3)]), RuleBlock().prompts, PADDING).reads_text


CALL = {"max_new_tokens": 14, "eos_token_id": list(range(3, 96, 8)), "pad_token_id": 0}
SETTINGS = [
    {"repetition_penalty": 1.4, "min_new_tokens": 9},
    {"repetition_penalty": 0.8, "min_new_tokens": 4},
    {"repetition_penalty": 1.1, "min_length": 17},
]


@pytest.mark.parametrize("stand_in", [replay_on_cpu, tape_on_cpu])
def test_calls_with_any_rules_share_a_captured_round(monkeypatch, stand_in):
    """In a batch that is filled up with an inert row."""
    capture, target, inputs = stand_in(monkeypatch), tiny_target("llama"), padded_prompts(PROMPTS[3])
    drafter, plain = copy_of(target, noise=0.02), target.generate(**inputs, do_sample=False, **CALL)
    for options in SETTINGS:
        options = CALL | options | {"do_sample": False}
        expected = target.generate(**inputs, **options)
        found = target.generate(**inputs, **options, assistant_model=drafter)
        assert torch.equal(found, expected) and not torch.equal(expected, plain)
        assert drafter.stats.execution.startswith("captured in one graph")
        assert capture.count == 2 and len(drafter.sessions) == 1  # a prefill and a round


def test_prompts_that_a_cache_holds_in_part(monkeypatch):
    replay_on_cpu(monkeypatch)
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    options, drafter = CALL | SETTINGS[0] | {"do_sample": False, "return_dict_in_generate": True}, random_eagle3(target)
    first = [target.generate(**inputs, **options, **who) for who in ({}, {"assistant_model": drafter})]
    width = first[0].sequences.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, width), value=1)
    turn = options | {"input_ids": first[0].sequences, "attention_mask": mask}
    plain, found = (
        target.generate(**turn, **{OUTPUT_NAME: one[OUTPUT_NAME]}, **who).sequences
        for one, who in zip(first, ({}, {"assistant_model": drafter}), strict=True)
    )
    assert torch.equal(found, plain) and drafter.stats.execution.startswith("captured in one graph")


def test_drawn_texts_are_those_of_processors_that_the_host_calls():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    drafter, texts = random_eagle3(target), []
    for kind in (RepetitionPenaltyLogitsProcessor, Penalty):
        processors = LogitsProcessorList([kind(1.5)])
        options = {"do_sample": True, "temperature": 1.2, "seeds": [1, 2, 3], "logits_processor": processors}
        for draft_probs in (True, False):
            texts.append(
                target.generate(
                    **inputs, **CALL, **options, assistant_model=drafter.configure(4, draft_probs=draft_probs)
                )
            )
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])


@pytest.mark.skipif(not IGNORES_PADDING, reason="transformers' penalty counts padding in any case")
def test_padding_counts_as_seen_where_the_processor_says_so():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    options = {"do_sample": False, "max_new_tokens": 14}
    mask = inputs["attention_mask"]
    row = int(mask.sum(dim=1).argmin())
    told, padding = target.generate(**inputs, **options)[row, mask.shape[1] :], mask.shape[1] - mask.sum(dim=1)
    inputs["input_ids"] = torch.where(mask == 0, told[0], inputs["input_ids"])
    texts = []
    for processor in (penalty(3.0), penalty(3.0, padding)):
        options["logits_processor"] = LogitsProcessorList([processor])
        texts.append(target.generate(**inputs, **options))
        drafter = random_eagle3(target)
        assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), texts[-1])
    assert not torch.equal(*texts)


# ---- rows that come and go


BULK = [[5, 6, 7], [9] * 8, [4], [33, 34, 33, 34, 33], list(range(40, 60)), [88, 5]]


def in_rows(target, drafter, rows=2, **options):
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    out = target.generate_batch(BULK, None, config, assistant_model=drafter, do_sample=False, **CALL | options)
    return [one.generated_tokens for one in out.values()]


def alone(target, prompt, **options):
    return target.generate(torch.tensor([prompt]), do_sample=False, **CALL | options)[0, len(prompt) :].tolist()


def test_calls_without_repeated_ngrams_are_captured_whole(monkeypatch):
    """Where prompts have no padding: it would be part of n-grams."""
    replay_on_cpu(monkeypatch)
    target, options = tiny_target("llama"), {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7}
    drafter, inputs = copy_of(target, noise=0.02), padded_prompts([6, 6])
    expected = target.generate(**inputs, **CALL, **options, do_sample=False)
    assert not torch.equal(expected, target.generate(**inputs, **CALL, repetition_penalty=0.7, do_sample=False))
    assert torch.equal(target.generate(**inputs, **CALL, **options, do_sample=False, assistant_model=drafter), expected)
    assert drafter.stats.execution.startswith("captured in one graph")
    assert in_rows(target, drafter, **options) == [alone(target, prompt, **options) for prompt in BULK]
    assert drafter.stats.execution.startswith("captured in one graph")


@pytest.mark.core
def test_bulk_calls_with_any_rules_share_a_captured_round(monkeypatch):
    capture, target, counts = replay_on_cpu(monkeypatch), tiny_target("llama"), []
    drafter = copy_of(target, noise=0.02)
    for options in ({"repetition_penalty": 1.4, "min_new_tokens": 9}, {"repetition_penalty": 0.8, "min_new_tokens": 4}):
        assert in_rows(target, drafter, **options) == [alone(target, prompt, **options) for prompt in BULK]
        assert drafter.stats.execution.startswith("captured in one graph")
        counts.append(capture.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "processors",
    [
        [min_new(7, skipped=4, ends=CALL["eos_token_id"])],
        [min_length(12, ends=[3, 11]), penalty(1.4)],
        [penalty(1.4, ignored=1)],
        [penalty(1.4), NoRepeatNGramLogitsProcessor(2)],
    ],
)
def test_processors_of_the_caller_in_bulk_calls(processors):
    """A minimum of new tokens counts from where the caller says, not from the end of each prompt."""
    target, options = tiny_target("llama"), {"logits_processor": LogitsProcessorList(processors)}
    expected = [alone(target, prompt, **options) for prompt in BULK]
    assert expected != [alone(target, prompt) for prompt in BULK]
    assert in_rows(target, random_eagle3(target), **options) == expected


@pytest.mark.core
def test_requests_of_managers_with_end_tokens_and_processors_of_their_own():
    """Beside others, whose end tokens the manager's minimum length is about."""
    target, rules = tiny_target("llama"), {"min_new_tokens": 9, "repetition_penalty": 1.3}
    settings = ContinuousBatchingConfig(max_requests_per_batch=3, per_request_processors=True)
    usual = alone(target, BULK[0], **rules)
    own = [
        {},
        {"eos_token_id": usual[2]},
        {"eos_token_id": -1},
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(1), penalty(0.3)])},
        {"logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor(usual[:1])])},
    ]
    expected = [
        alone(target, BULK[0], **rules | one | ({"eos_token_id": None} if one.get("eos_token_id") == -1 else {}))
        for one in own
    ]
    assert len({tuple(one) for one in expected}) == len(own)
    with target.continuous_batching_context_manager(
        continuous_batching_config=settings, assistant_model=random_eagle3(target), do_sample=False, **CALL | rules
    ) as manager:
        names = [manager.add_request(BULK[0], **one) for one in own]
        assert [manager.get_result(name, timeout=60).generated_tokens for name in names] == expected


def test_tensors_of_processors_are_read_once(monkeypatch):
    """On a GPU each read waits for the rounds before; a tensor that was written is read again."""
    suppressed = SuppressTokensLogitsProcessor([3, 5])
    process = BlockProcessor(LogitsProcessorList([suppressed]), torch.ones(1, 2, dtype=torch.int64), [0])
    first, read, original = process.key, [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda one: read.append(one) or original(one))
    assert process.key == first and not read
    suppressed.suppress_tokens[0] = 4
    assert process.key != first and len(read) == 1


def test_end_tokens_are_read_once(monkeypatch):
    """Also where two minimum lengths share them, as those of settings do."""
    ends, read, original = torch.tensor([3, 7]), [], torch.Tensor.tolist
    processors = LogitsProcessorList([min_length(9, ends=ends), min_new(4, ends=ends)])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda one: read.append(one) or original(one))
    process = BlockProcessor(processors, torch.ones(1, 6, dtype=torch.int64), [0], ends={7, 3})
    assert process.row_rules == [RowRules(min_length=13)] and process.key is not None and len(read) == 1
