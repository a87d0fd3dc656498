"""Calls that continue caches with recurrent states, and what calls leave in them, against plain `generate()`."""

import copy
from functools import partial

import pytest
import torch
from case_counts import cases, tries_all
from graph_stand_ins import replay_on_cpu
from oracle import copy_of, random_eagle3
from targets import PAD, VOCAB, padded_prompts, tiny_target
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache, StoppingCriteria

from hf_specdec.cache.layer_kinds import LayerKinds
from hf_specdec.cache.ragged_cache import RaggedCache
from hf_specdec.cache.recurrent_layers import RecurrentLayer
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.patching.recurrent_functions import Recurrent

NEW = 8
OPTIONS = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
# The delta rule with decays of heads and of channels, Mamba-2 with bounded steps and beside attention, convolutions.
FAMILIES = ["qwen3-next", "kimi-linear", "nemotron-h", "falcon-h1", "lfm2"]
LENGTHS = [9, 1, 5]


def who(target, num=3):
    return {"assistant_model": copy_of(target, noise=0.02), "num_assistant_tokens": num}


def new_cache(target):
    return DynamicCache(config=target.config)


def next_turn(inputs, sequences, count):
    """The whole text so far and `count` tokens more of a user, as inputs of the next call."""
    more = torch.randint(2, VOCAB, (len(sequences), count), generator=torch.Generator().manual_seed(count))
    ids, mask = torch.cat([sequences, more], dim=1), inputs["attention_mask"]
    return {
        "input_ids": ids,
        "attention_mask": torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1),
    }


def states(layer):
    return {
        (name, index): state
        for name in ("recurrent_states", "conv_states")
        for index, state in getattr(layer, name, {}).items()
        if state is not None
    }


def check_same(found, expected, mask):
    """Assert that two caches hold the same, keys and values of padding (0 in `mask` `[B, P]`) aside."""
    assert found.get_seq_length() == expected.get_seq_length()
    held = torch.nn.functional.pad(mask, (0, expected.get_seq_length() - mask.shape[1]), value=1)[:, None, :, None]
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert states(ours).keys() == states(theirs).keys()
        assert getattr(ours, "has_previous_state", None) == getattr(theirs, "has_previous_state", None)
        for name, state in states(theirs).items():
            torch.testing.assert_close(states(ours)[name], state, atol=2e-4, rtol=2e-4)
        for name in ("keys", "values"):
            theirs_held = getattr(theirs, name, None)
            if theirs_held is not None:
                length = held.shape[2]
                part = getattr(ours, name)[:, :, :length] * held
                torch.testing.assert_close(part, theirs_held[:, :, :length] * held, atol=2e-4, rtol=2e-4)


def check_turns(target, inputs, drafter, order, counts, make=None, **options):
    """Generate turn after turn on one cache, with a drafter where `order` says so, and on another one without."""
    make = partial(new_cache, target) if make is None else make
    given, mask, cache, expected = inputs, inputs["attention_mask"], make(), make()
    for number, (is_drafted, count) in enumerate(zip(order, counts, strict=True)):
        held = expected.get_seq_length()
        only_new = given | {"input_ids": given["input_ids"][:, held:]} if number % 2 else given
        plain = target.generate(**given, **OPTIONS | options, **{OUTPUT_NAME: expected}).sequences
        out = target.generate(
            **only_new, **OPTIONS | options, **{OUTPUT_NAME: cache}, **(drafter if is_drafted else {})
        )
        assert torch.equal(out.sequences[:, -NEW:], plain[:, -NEW:]) and out[OUTPUT_NAME] is cache
        assert not is_drafted or drafter["assistant_model"].stats.engine == "static"
        check_same(cache, expected, mask)
        given = next_turn(given, plain, count)


@pytest.mark.core_for(family=["nemotron-h"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_a_chat(family):
    """With and without a drafter, each after each, the whole text or new tokens only; one new token is a step."""
    target, inputs = tiny_target(family), padded_prompts(LENGTHS)
    check_turns(target, inputs, who(target), (1, 1, 0, 1), [0, 4, 1, 1])
    if tries_all or family == "qwen3-next":
        check_turns(target, padded_prompts([30]), {"assistant_model": random_eagle3(target)}, (0, 1), [7, 1])


def test_a_state_of_another_token_is_noticed():
    target, inputs = tiny_target("qwen3-next"), padded_prompts(LENGTHS)
    cache = new_cache(target)
    sequences = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache}).sequences
    for shift in (-1, 1):
        other = new_cache(target)
        target.generate(**inputs, **OPTIONS | {"max_new_tokens": NEW + shift}, **{OUTPUT_NAME: other})
        wrong = copy.deepcopy(cache)
        for layer, late in zip(wrong.layers, other.layers, strict=True):
            for (name, index), state in states(late).items():
                getattr(layer, name)[index].copy_(state)
        with pytest.raises(AssertionError):
            check_same(wrong, cache, inputs["attention_mask"])
        turn = next_turn(inputs, sequences, 4)
        expected = target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: copy.deepcopy(cache)}).sequences
        assert not torch.equal(
            target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: wrong}, **who(target)).sequences, expected
        )


class StopsAt(StoppingCriteria):
    """Stops at a length, which the host sees only after a round."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("family", cases(FAMILIES, ["nemotron-h"]))
def test_texts_that_end_before_their_states(family):
    """Rows that end before others go on with padding; what the host ends may have later tokens in its states."""
    target, inputs = tiny_target(family), padded_prompts(LENGTHS)
    drafter, mask, width = who(target, num=5), inputs["attention_mask"], inputs["input_ids"].shape[1]
    free = target.generate(**inputs, **OPTIONS).sequences[:, -NEW:]
    ends = {"eos_token_id": [int(free[0, 2]), int(free[1, 6])], "pad_token_id": PAD}
    first = new_cache(target)
    target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: first})
    turn = next_turn(inputs, target.generate(**inputs, **OPTIONS).sequences, 3)
    longer = turn["input_ids"].shape[1]
    for given, cache in ((inputs, new_cache(target)), (turn, first)):
        begin = width if given is inputs else longer
        for options in (ends, {"stopping_criteria": [StopsAt(begin + 4)]}, {"stopping_criteria": [StopsAt(begin + 1)]}):
            expected, found = copy.deepcopy(cache), copy.deepcopy(cache)
            plain = target.generate(**given, **OPTIONS, **options, **{OUTPUT_NAME: expected})
            out = target.generate(**given, **OPTIONS, **options, **{OUTPUT_NAME: found}, **drafter)
            assert torch.equal(out.sequences, plain.sequences)
            check_same(found, expected, mask)
            if given is inputs:
                left = target.generate(**given, **OPTIONS, **options, **drafter)[OUTPUT_NAME]
                check_same(left, expected, mask)


@pytest.mark.parametrize("family", ["jamba", "zamba"])
def test_layers_that_forget_continue_with_one_token(family):
    """Mamba-1 of transformers begins anew in passes over several tokens."""
    target, inputs = tiny_target(family), padded_prompts(LENGTHS)
    drafter = who(target)
    check_turns(target, inputs, drafter, (1, 1), [0, 1])
    cache = new_cache(target)
    out = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache}, **drafter)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="a cache with 4 tokens at once, for which layers of "):
        target.generate(**next_turn(inputs, out.sequences, 3), **OPTIONS, **{OUTPUT_NAME: cache}, **drafter)
    check_same(cache, before, inputs["attention_mask"])


@pytest.mark.core_for(family=["falcon-h1"])
@pytest.mark.parametrize("family", cases(FAMILIES, ["falcon-h1"]))
def test_captured_calls(family, monkeypatch):
    """A session serves calls with and without a cache; a new one may begin with a cache."""
    replay = replay_on_cpu(monkeypatch)
    target, inputs = tiny_target(family), padded_prompts(LENGTHS)
    plain = target.generate(**inputs, **OPTIONS)
    turn = next_turn(inputs, plain.sequences, 4)
    expected = target.generate(**turn, **OPTIONS).sequences
    drafter = who(target)
    for _ in range(2):
        filled = copy.deepcopy(plain[OUTPUT_NAME])
        assert torch.equal(target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: filled}, **drafter).sequences, expected)
    captures = replay.count
    left = target.generate(**inputs, **OPTIONS, **drafter)[OUTPUT_NAME]
    target.generate(**padded_prompts([8, 2, 4], seed=5), **OPTIONS, **drafter)
    check_same(left, plain[OUTPUT_NAME], inputs["attention_mask"])
    assert torch.equal(target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: left}, **drafter).sequences, expected)
    assert "captured" in drafter["assistant_model"].stats.execution and replay.count - captures <= 2


def test_static_caches_and_chunks():
    target, inputs = tiny_target("falcon-h1"), padded_prompts([30, 2, 21])
    check_turns(target, inputs, who(target), (1, 1), [14, 1], prefill_chunk_size=12)
    make = partial(StaticCache, config=target.config, max_cache_len=80)
    check_turns(target, inputs, who(target), (1, 1), [4, 1], make)


@pytest.mark.parametrize("lengths", [[9], [9, 5]])
def test_static_caches_on_the_stock_engine(lengths):
    """They cannot be taken back to before a pass: tokens that stay would be written after those that were rejected."""
    target, inputs = tiny_target("falcon-h1"), padded_prompts(lengths)
    drafter = {"assistant_model": random_eagle3(target).configure(engine="stock")}
    cache = StaticCache(config=target.config, max_cache_len=80)
    for given in ({OUTPUT_NAME: cache}, {"cache_implementation": "static"}):
        with pytest.raises(
            ValueError,
            match=r"recurrent layers, and on the stock engine \(forced by engine='stock'\) cannot use a StaticCache",
        ):
            target.generate(**inputs, **OPTIONS, **given, **drafter)
    found = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache}).sequences
    assert torch.equal(found, target.generate(**inputs, **OPTIONS, **drafter).sequences)


class Fails(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls > 3:
            raise RuntimeError("on purpose")
        return scores


@pytest.mark.core
def test_caches_are_as_they_were_after_an_error(monkeypatch):
    target, inputs = tiny_target("falcon-h1"), padded_prompts(LENGTHS)
    drafter, filled = who(target), new_cache(target)
    sequences = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: filled}).sequences
    turn = next_turn(inputs, sequences, 4)
    expected = target.generate(**turn, **OPTIONS).sequences

    def fail(*args):
        raise RuntimeError("on purpose")

    layers = []
    written = RecurrentLayer.write_states
    monkeypatch.setattr(
        RecurrentLayer,
        "write_states",
        lambda self, *given: fail() if layers else layers.append(self) or written(self, *given),
    )
    for options in ({"logits_processor": LogitsProcessorList([Fails()])}, {}):
        for given, cache in ((turn, copy.deepcopy(filled)), (inputs, new_cache(target))):
            before = copy.deepcopy(cache)
            layers.clear()
            with pytest.raises(RuntimeError, match="on purpose"):
                target.generate(**given, **OPTIONS, **options, **{OUTPUT_NAME: cache}, **drafter)
            check_same(cache, before, inputs["attention_mask"][:, : before.get_seq_length()])
    monkeypatch.undo()
    assert torch.equal(target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: filled}, **drafter).sequences, expected)


@pytest.mark.core
def test_states_of_other_models_are_refused():
    target, inputs = tiny_target("qwen3-next"), padded_prompts([9])
    cache = new_cache(target)
    turn = next_turn(inputs, target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache}).sequences, 3)
    layer = cache.layers[0]
    layer.recurrent_states[0] = layer.recurrent_states[0][:, :2]
    with pytest.raises(ValueError, match=r"holds recurrent states of shape \[2, 8, 8\] a row; expected \[4, 8, 8\]"):
        target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: cache}, **who(target))
    layer.recurrent_states[0] = None
    with pytest.raises(ValueError, match=rf"LinearAttentionLayer of {OUTPUT_NAME} has no recurrent_states\[0\]"):
        target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: cache}, **who(target))


@pytest.mark.core
def test_accepted_drafts_in_rings_become_part_of_states():
    lengths, generator = torch.tensor([6, 9, 4]), torch.Generator().manual_seed(0)
    cache = RaggedCache(LayerKinds((Recurrent(),)), 32, lengths, None, 3)
    cache.restart()
    layer = cache.layers[0]
    state = layer.recurrent_states[0]
    tokens = [torch.randn(3, 12, heads, 8, generator=generator) for heads in (2, 2, 4)]
    decay, beta = -torch.rand(3, 12, 4, generator=generator), torch.rand(3, 12, 4, generator=generator)

    def run(positions):
        cache.advance(positions, 32)
        rows, columns = torch.arange(3)[:, None], positions.clamp(max=11)
        inputs = [part[rows, columns] for part in (*tokens, decay, beta)]
        state.run(*inputs, delta=True, normalize=True, scale=1.0)

    prompt = torch.arange(9).expand(3, -1)
    run(torch.where(prompt < lengths[:, None], prompt, cache.dummy_slot))
    run(lengths[:, None] + torch.arange(3))
    ends = lengths + torch.tensor([0, 2, 3])
    cache.replay(ends)
    found = state.state.clone()
    cache.restart()
    lengths.copy_(ends)
    prompt = torch.arange(12).expand(3, -1)
    run(torch.where(prompt < ends[:, None], prompt, cache.dummy_slot))
    torch.testing.assert_close(found, state.state)
    assert layer.can_replay
