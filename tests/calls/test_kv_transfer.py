"""Calls that continue a filled key/value cache, and what calls leave in caches, against plain `generate()`."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from model_state import unchecked
from oracle import RANDOM_DRAFTERS, SELDOM, OracleDrafter, copy_of, random_eagle3
from targets import PAD, VOCAB, new_target, padded_prompts, tiny_target
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from hf_specdec.calls.kv_transfer import DeferredCache, FinishedCall
from hf_specdec.engine.static_engine import REREAD_PER_NEW_TOKEN
from hf_specdec.host.caches import OUTPUT_NAME

NEW = 12
OPTIONS = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}


def next_turn(inputs, sequences, count=5, seed=1):
    """The whole text so far and `count` tokens more of a user, as inputs of the next call."""
    generator = torch.Generator().manual_seed(seed)
    more = torch.randint(2, VOCAB, (len(sequences), count), generator=generator)
    ids = torch.cat([sequences, more], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask}


def rest(inputs, held):
    """`inputs` without the tokens that a cache of `held` columns has; the mask stays whole."""
    return inputs | {"input_ids": inputs["input_ids"][:, held:]}


class Counted:
    """Context that counts the columns which the decoder layers of `model` run."""

    def __init__(self, model):
        self._layer, self.columns = model.get_decoder().layers[0], 0

    def __enter__(self):
        self._handle = self._layer.register_forward_hook(self._count)
        return self

    def __exit__(self, *exception):
        self._handle.remove()

    @unchecked
    def _count(self, module, args, output):
        self.columns += (output[0] if isinstance(output, tuple) else output).shape[1]


@pytest.mark.parametrize(
    ("family", "kind", "lengths"),
    [
        *(("gemma3", kind, [9, 1, 5]) for kind in cases(list(RANDOM_DRAFTERS), ["p-eagle", "pard", "mtp"])),
        *((family, kind, [9]) for family in ("gemma3", "llama") for kind in ("eagle3", "draft-model")),
    ],
    ids=str,
)
def test_turns_of_a_chat(family, kind, lengths):
    """Two calls, each with and without a drafter, whole text or new tokens only: the second generates the same."""
    target, inputs = tiny_target(family), padded_prompts(lengths)
    drafter = {"assistant_model": RANDOM_DRAFTERS[kind](target), "num_assistant_tokens": 3}
    plain = target.generate(**inputs, **OPTIONS)
    ours = target.generate(**inputs, **OPTIONS, **drafter)
    assert torch.equal(ours.sequences, plain.sequences)
    held = ours[OUTPUT_NAME].get_seq_length()
    assert held == plain[OUTPUT_NAME].get_seq_length() == plain.sequences.shape[1] - 1
    turn = next_turn(inputs, plain.sequences)
    expected = target.generate(**turn, **OPTIONS).sequences
    for cache in (plain[OUTPUT_NAME], ours[OUTPUT_NAME]):
        for who in ({}, drafter):
            for given in (turn, rest(turn, held)):
                mine = copy.deepcopy(cache)
                out = target.generate(**given, **{OUTPUT_NAME: mine}, **OPTIONS, **who)
                assert torch.equal(out.sequences, expected[:, -out.sequences.shape[1] :])
                assert out[OUTPUT_NAME] is mine and mine.get_seq_length() == expected.shape[1] - 1
    assert drafter["assistant_model"].stats.engine == "static"


def test_a_cache_of_a_call_under_autocast():
    """Its values are bfloat16 beside keys in float32; a call in float32 reads them into buffers of its own dtype."""
    target, inputs = tiny_target("llama"), padded_prompts([9, 1, 5])
    drafter = {"assistant_model": random_eagle3(target)}
    with torch.autocast("cpu", torch.bfloat16):
        first = target.generate(**inputs, **OPTIONS)
    assert first[OUTPUT_NAME].layers[0].values.dtype == torch.bfloat16
    turn, texts = next_turn(inputs, first.sequences), []
    for who in ({}, drafter):
        cache = copy.deepcopy(first[OUTPUT_NAME])
        texts.append(target.generate(**turn, **OPTIONS, **who, **{OUTPUT_NAME: cache}).sequences)
        assert cache.layers[0].values.dtype == torch.float32
    assert torch.equal(*texts) and drafter["assistant_model"].stats.engine == "static"


@pytest.mark.core
@pytest.mark.parametrize("make", [DynamicCache, lambda: DynamicCache(config=tiny_target("gemma3").config)])
def test_cached_tokens_are_not_computed_again(make):
    target, inputs = tiny_target("gemma3"), padded_prompts([30])
    drafter = OracleDrafter(target, torch.zeros(1, 40, dtype=torch.int64), [30], accuracy=0.0)
    cache = make()
    with Counted(target) as first:
        out = target.generate(**inputs, **{OUTPUT_NAME: cache}, assistant_model=drafter, max_new_tokens=1)
    assert cache.get_seq_length() == 30 and first.columns >= 30
    turn = next_turn(inputs, out)
    with Counted(target) as second:
        target.generate(**turn, **{OUTPUT_NAME: cache}, assistant_model=drafter, max_new_tokens=1)
    # Prefill runs what is new but the last token, the round that and the drafts; then what the drafts were not.
    assert cache.get_seq_length() == 36
    assert second.columns <= 6 + drafter.num_assistant_tokens


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_ended_early(family):
    """A cache holds what plain `generate()` runs of finished rows, too: padding tokens."""
    target, inputs = tiny_target(family), padded_prompts([9, 1, 5])
    free = target.generate(**inputs, **OPTIONS).sequences[:, -NEW:]
    ends = {"eos_token_id": [int(free[0, 2]), int(free[1, 7])], "pad_token_id": PAD}
    drafter = copy_of(target, noise=0.02)
    plain, ours = DynamicCache(config=target.config), DynamicCache(config=target.config)
    expected = target.generate(**inputs, **OPTIONS, **ends, **{OUTPUT_NAME: plain}).sequences
    assert (expected[:, -1] == PAD).any(), "no row ended before another, so nothing is shown"
    out = target.generate(**inputs, **OPTIONS, **ends, **{OUTPUT_NAME: ours}, assistant_model=drafter)
    left = target.generate(**inputs, **OPTIONS, **ends, assistant_model=drafter)
    assert torch.equal(out.sequences, expected) and torch.equal(left.sequences, expected)
    tokens = inputs["attention_mask"].bool()
    for cache in (ours, left[OUTPUT_NAME]):
        for layer, reference in zip(cache.layers, plain.layers, strict=True):
            assert layer.get_seq_length() == reference.get_seq_length()
            held = torch.cat([tokens, torch.ones(3, expected.shape[1] - tokens.shape[1] - 1).bool()], dim=1)
            held = held[:, -layer.keys.shape[2] :, None]
            for name in ("keys", "values"):
                found, wanted = (getattr(one, name).transpose(1, 2).flatten(2) for one in (layer, reference))
                torch.testing.assert_close(found * held, wanted * held, atol=1e-4, rtol=1e-4)


@pytest.mark.core
def test_draft_models_read_cached_tokens():
    """A copy of the target drafts from the whole text: all of its drafts are accepted."""
    target, inputs = tiny_target("llama"), padded_prompts([30, 12])
    drafter = copy_of(target)
    out = target.generate(**inputs, **OPTIONS)
    turn = next_turn(inputs, out.sequences)
    target.generate(
        **turn,
        **{OUTPUT_NAME: out[OUTPUT_NAME]},
        assistant_model=drafter,
        num_assistant_tokens=3,
        do_sample=False,
        max_new_tokens=NEW,
    )
    assert drafter.stats.accepted == drafter.stats.drafted > 0


def proposals_of(drafter, call):
    """The draft tokens of every round of `call()`, and what it returns."""
    seen, propose = [], drafter.propose
    drafter.propose = lambda *args: seen.append(propose(*args)) or seen[-1]
    try:
        out = call()
    finally:
        del drafter.propose
    return [one.tokens for one in seen], out


READERS = ["eagle3", "p-eagle", "dflash", "dspark", "dflash2", "domino", "pard2", "mtp", "mtp-by-target"]


@pytest.mark.parametrize(
    ("kind", "lengths"),
    cases(
        every := [(kind, lengths) for kind in READERS for lengths in ((30,), (30, 12))],
        [one for one in every if one[0] not in SELDOM and (len(one[1]) == 1) == (one[0] in ("mtp", "pard2"))],
    ),
    ids=str,
)
def test_drafts_are_those_of_the_whole_text(kind, lengths):
    """The hidden states of tokens in a cache are not in it: the target runs them again, and leaves the cache alone."""
    target, inputs = tiny_target("llama"), padded_prompts(lengths)
    first = target.generate(**inputs, **OPTIONS)
    turn, drafter = next_turn(inputs, first.sequences), RANDOM_DRAFTERS[kind](target)
    options = OPTIONS | {"assistant_model": drafter, "num_assistant_tokens": 3}
    expected, whole = proposals_of(drafter, lambda: target.generate(**turn, **options))
    assert drafter.stats.unread_tokens == 0
    cache = copy.deepcopy(first[OUTPUT_NAME])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    found, out = proposals_of(drafter, lambda: target.generate(**turn, **{OUTPUT_NAME: cache}, **options))
    assert torch.equal(out.sequences, whole.sequences) and drafter.stats.unread_tokens == 0
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, : keys.shape[2]], keys)
        assert torch.equal(layer.values[:, :, : values.shape[2]], values)


def test_keys_that_are_not_those_of_the_tokens_stay():
    """A cache may hold more than its tokens say, such as images: what is run again does not take its place."""
    target, inputs = tiny_target("llama"), padded_prompts([30])
    cache = target.generate(**inputs, **OPTIONS)[OUTPUT_NAME]
    turn = next_turn(inputs, target.generate(**inputs, **OPTIONS).sequences)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys + 0.5, layer.values.flip(2)
    plain = target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: copy.deepcopy(cache)})
    assert not torch.equal(plain.sequences, target.generate(**turn, **OPTIONS).sequences)
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    text = target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: copy.deepcopy(cache)}, assistant_model=drafter)
    assert torch.equal(text.sequences, plain.sequences) and drafter.stats.unread_tokens == 0


@pytest.mark.core_for(case=["stock"])
@pytest.mark.parametrize("case", ["window", "rest", "few new tokens", "stock"])
def test_tokens_that_a_drafter_has_not_read_are_counted(case):
    """A cache without the keys of all tokens, a text that is not given, a short answer, the stock engine."""
    target, inputs = tiny_target("gemma3" if case == "window" else "llama"), padded_prompts([30])
    cache, drafter = DynamicCache(config=target.config), RANDOM_DRAFTERS["dflash"](target)
    out = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache})
    held, turn = cache.get_seq_length(), next_turn(inputs, out.sequences)
    expected = target.generate(**turn, **OPTIONS).sequences
    given, options, unread = turn, dict(OPTIONS), held
    if case == "rest":
        given = rest(turn, held)
    if case == "few new tokens":
        options["max_new_tokens"], unread = 2, held - 2 * REREAD_PER_NEW_TOKEN
    if case == "stock":
        drafter.configure(engine="stock")
    text = target.generate(**given, **options, **{OUTPUT_NAME: cache}, assistant_model=drafter).sequences
    new = options["max_new_tokens"]
    assert torch.equal(text[:, -new:], expected[:, turn["input_ids"].shape[1] :][:, :new])
    assert drafter.stats.unread_tokens == drafter.stats.rows[0].unread_tokens == unread


@pytest.mark.parametrize("kind", cases(["eagle3", "p-eagle", "dflash", "mtp", "mtp-by-target"], ["dflash", "mtp"]))
def test_drafts_do_not_depend_on_earlier_calls_of_a_session(monkeypatch, kind):
    """Slots of cached positions, whose hidden states nobody has, hold what another call left there."""
    replay_on_cpu(monkeypatch)
    target = tiny_target("llama")
    inputs = padded_prompts([30, 12])
    cache = target.generate(**inputs, **OPTIONS)[OUTPUT_NAME]
    turn = next_turn(inputs, target.generate(**inputs, **OPTIONS).sequences)
    drafted = []
    for before in (None, 1, 2):
        drafter = RANDOM_DRAFTERS[kind](target)
        seen = []
        propose = drafter.propose
        drafter.propose = lambda *args, propose=propose, seen=seen: seen.append(propose(*args)) or seen[-1]
        if before is not None:
            target.generate(**padded_prompts([45, 44], seed=before), assistant_model=drafter, max_new_tokens=NEW)
        seen.clear()
        target.generate(**turn, **{OUTPUT_NAME: copy.deepcopy(cache)}, assistant_model=drafter, max_new_tokens=NEW)
        drafted.append(drafter.stats.rows)
    assert drafted[1] == drafted[2] == drafted[0]


def test_captured_calls(monkeypatch):
    """One session serves calls with and without a cache, and its cache is copied before another call needs it."""
    replay = replay_on_cpu(monkeypatch)
    target, inputs = tiny_target("gemma3"), padded_prompts([9, 1, 5])
    drafter = random_eagle3(target)
    plain = target.generate(**inputs, **OPTIONS)
    turn = next_turn(inputs, plain.sequences)
    expected = target.generate(**turn, **OPTIONS).sequences
    first = target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    second = target.generate(
        **turn, **OPTIONS, **{OUTPUT_NAME: copy.deepcopy(plain[OUTPUT_NAME])}, assistant_model=drafter
    )
    captures = replay.count
    other = target.generate(**padded_prompts([8, 2, 4], seed=5), **OPTIONS, assistant_model=drafter)
    assert len(drafter.sessions) == 1 and torch.equal(second.sequences, expected)
    third = target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: first[OUTPUT_NAME]}, assistant_model=drafter)
    assert torch.equal(third.sequences, expected) and third[OUTPUT_NAME] is first[OUTPUT_NAME]
    assert replay.count == captures, "a call that continues a cache was captured anew"
    again = next_turn(padded_prompts([8, 2, 4], seed=5), other.sequences)
    assert torch.equal(
        target.generate(**again, **OPTIONS, **{OUTPUT_NAME: other[OUTPUT_NAME]}).sequences,
        target.generate(**again, **OPTIONS).sequences,
    )


def test_unused_caches_are_not_copied(monkeypatch):
    replay_on_cpu(monkeypatch)
    target, inputs = tiny_target("llama"), padded_prompts([9, 1, 5])
    drafter = random_eagle3(target)
    copied = []
    take_over = DeferredCache.take_over
    monkeypatch.setattr(DeferredCache, "take_over", lambda self: copied.append(1) or take_over(self))
    out = target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    gone = weakref.ref(out[OUTPUT_NAME])
    del out
    gc.collect()
    assert gone() is None
    out = target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert not copied
    target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert copied == [1] and out[OUTPUT_NAME].get_seq_length() == 9 + NEW - 1


def uneven_caches(target, drafter):
    """What plain `generate()` returns as cache and what it returns with a drafter, where rows end at different tokens,
    and which of its columns are tokens."""
    inputs = padded_prompts([9, 4])
    first = target.generate(**inputs, **OPTIONS).sequences[0, 12]
    options = OPTIONS | {"eos_token_id": int(first)}
    out, plain = (target.generate(**inputs, **options, **one) for one in ({"assistant_model": drafter}, {}))
    assert torch.equal(out.sequences, plain.sequences)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, plain.sequences.shape[1] - 10), value=1)
    return out[OUTPUT_NAME], plain[OUTPUT_NAME], mask[:, None, :, None]


def check_same_keys(cache, plain, mask):
    for (keys, values, _), (wanted_keys, wanted_values, _) in zip(cache, plain, strict=True):
        torch.testing.assert_close(keys * mask, wanted_keys * mask)
        torch.testing.assert_close(values * mask, wanted_values * mask)


@pytest.mark.parametrize("later", ["training", "autocast"])
def test_a_cache_is_completed_as_in_the_call(later):
    target = new_target("llama")
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
    caches = uneven_caches(target, random_eagle3(target))
    target.train(later == "training")
    with torch.autocast("cpu", torch.bfloat16, enabled=later == "autocast"):
        assert len(caches[0].layers) == 2
    assert target.training == (later == "training")
    check_same_keys(*caches)


def optimizer_step(target):
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    target(**padded_prompts([4]), labels=padded_prompts([4])["input_ids"]).loss.backward()
    optimizer.step()


@pytest.mark.core
@pytest.mark.parametrize(
    "change",
    [
        optimizer_step,
        lambda target: target.load_state_dict(tiny_target("llama", seed=1).state_dict()),
        lambda target: target.to(torch.bfloat16),
    ],
    ids=["step", "load", "cast"],
)
def test_a_cache_is_not_completed_with_other_weights(change):
    target = new_target("llama")
    drafter = random_eagle3(target)
    read, *expected = uneven_caches(target, drafter)
    assert len(read.layers) == 2
    unread, *_ = uneven_caches(target, drafter)
    change(target)
    check_same_keys(read, *expected)
    for _ in range(2):  # also after an error, no half of it
        with pytest.raises(RuntimeError, match="LlamaForCausalLM, of which weights or adapters have changed"):
            len(unread.layers)
    complete = target.generate(**padded_prompts([9]), **OPTIONS, assistant_model=drafter)[OUTPUT_NAME]
    change(target)
    assert complete.get_seq_length() == 9 + NEW - 1, "nothing of it is computed"


def test_a_cache_that_a_thread_reads_is_not_written_over(monkeypatch):
    """A call of another thread uses the same buffers, and modules in evaluation mode."""
    replay_on_cpu(monkeypatch)
    target, begun, ended = new_target("llama"), threading.Event(), threading.Event()
    drafter = random_eagle3(target)
    cache, *expected = uneven_caches(target, drafter)
    write = FinishedCall.write_to

    def slowly(self, cache):
        begun.set()
        ended.wait(timeout=1)
        write(self, cache)

    monkeypatch.setattr(FinishedCall, "write_to", slowly)
    reader = threading.Thread(target=lambda: len(cache.layers))
    reader.start()
    begun.wait()
    target.generate(**padded_prompts([9, 4], seed=1), **OPTIONS, eos_token_id=5, assistant_model=drafter)
    ended.set()
    reader.join()
    check_same_keys(cache, *expected)


def test_threads_read_a_whole_cache(monkeypatch):
    target, begun = new_target("llama"), threading.Event()
    cache, *expected = uneven_caches(target, random_eagle3(target))
    complete = FinishedCall.complete

    def slowly(self, cache):
        begun.set()
        time.sleep(0.3)
        complete(self, cache)

    monkeypatch.setattr(FinishedCall, "complete", slowly)
    reader = threading.Thread(target=lambda: cache.layers)
    reader.start()
    begun.wait()
    seen = cache.get_seq_length()
    reader.join()
    assert seen == cache.get_seq_length()
    check_same_keys(cache, *expected)


@pytest.mark.core
def test_returned_cache_is_an_ordinary_dynamic_cache():
    target, inputs = tiny_target("gemma3"), padded_prompts([9, 4])
    drafter = random_eagle3(target)
    expected = target.generate(**inputs, **OPTIONS)[OUTPUT_NAME]
    for like in (lambda cache: cache, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        cache = like(target.generate(**inputs, **OPTIONS, assistant_model=drafter)[OUTPUT_NAME])
        assert isinstance(cache, DynamicCache) and len(cache) == len(expected)
        assert [type(layer) for layer in cache.layers] == [type(layer) for layer in expected.layers]
        for (keys, values, _), (wanted_keys, wanted_values, _) in zip(cache, expected, strict=True):
            torch.testing.assert_close(keys[0], wanted_keys[0])
            torch.testing.assert_close(values[0], wanted_values[0])
        cache.batch_select_indices(torch.tensor([1]))
        assert cache.layers[0].keys.shape[0] == 1


@pytest.mark.core_for(length=[30], family=["llama"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [4, 30])
def test_static_caches(family, length):
    target, inputs = tiny_target(family), padded_prompts([length, 3])
    drafter = {"assistant_model": random_eagle3(target)}
    caches = [StaticCache(config=target.config, max_cache_len=64) for _ in range(2)]
    first = [
        target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache}, **who).sequences
        for cache, who in zip(caches, ({}, drafter), strict=True)
    ]
    assert torch.equal(*first)
    turn = next_turn(inputs, first[0])
    second = [
        target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: cache}, **who).sequences
        for cache, who in zip(caches, (drafter, {}), strict=True)
    ]
    assert torch.equal(*second) and torch.equal(second[0], target.generate(**turn, **OPTIONS).sequences)


@pytest.mark.core_for(given=["rest"])
@pytest.mark.parametrize("given", ["whole", "rest"])
def test_processors_and_hidden_states(given):
    """Processors are shown what plain `generate()` shows them, and hidden states are those of what was run."""
    target, inputs = tiny_target("llama"), padded_prompts([9, 1, 5])
    options = OPTIONS | {"repetition_penalty": 1.5, "output_hidden_states": True, "output_scores": True}
    out = target.generate(**inputs, **options)
    turn = next_turn(inputs, out.sequences)
    turn = turn if given == "whole" else rest(turn, out[OUTPUT_NAME].get_seq_length())
    expected, found = (
        target.generate(**turn, **options, **{OUTPUT_NAME: copy.deepcopy(out[OUTPUT_NAME])}, **who)
        for who in ({}, {"assistant_model": copy_of(target, noise=0.02)})
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.hidden_states) == len(expected.hidden_states)
    for theirs, ours in zip(expected.hidden_states, found.hidden_states, strict=True):
        for reference, layer in zip(theirs, ours, strict=True):
            torch.testing.assert_close(layer, reference, atol=1e-4, rtol=1e-4)


class Closed(BaseStreamer):
    """As one whose consumer has gone away."""

    def put(self, value):
        pass

    def end(self):
        raise BrokenPipeError


def test_a_cache_is_as_it_was_after_an_error_of_the_streamer():
    """It is filled when nothing can fail any more; else the caller could not go on with the text that it has."""
    target, inputs = tiny_target("qwen3-next"), padded_prompts([9, 1, 5])
    drafter, cache = copy_of(target, noise=0.02), DynamicCache(config=target.config)
    first = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache})
    turn, held = next_turn(inputs, first.sequences), cache.get_seq_length()
    expected = target.generate(**turn, **OPTIONS).sequences
    given = turn | OPTIONS | {OUTPUT_NAME: cache, "assistant_model": drafter}
    with pytest.raises(BrokenPipeError):
        target.generate(**given, streamer=Closed())
    assert cache.get_seq_length() == held
    assert torch.equal(target.generate(**given).sequences, expected)


@pytest.mark.core_for(family=["gemma3"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
def test_stock_engine(family):
    target, inputs = tiny_target(family), padded_prompts([9])
    drafter = copy_of(tiny_target("llama"), noise=0.02) if family == "qwen3-next" else copy_of(target, noise=0.02)
    drafter.bind(target)
    drafter.configure(engine="stock")
    who = {"assistant_model": drafter}
    cache = DynamicCache(config=target.config)
    plain = target.generate(**inputs, **OPTIONS)
    out = target.generate(**inputs, **OPTIONS, **who, **{OUTPUT_NAME: cache})
    assert torch.equal(out.sequences, plain.sequences) and out[OUTPUT_NAME] is cache
    assert cache.get_seq_length() == plain[OUTPUT_NAME].get_seq_length()
    turn = next_turn(inputs, plain.sequences)
    expected = target.generate(**turn, **OPTIONS).sequences
    for filled in (plain[OUTPUT_NAME], cache):
        for who_next in (who, {}):
            out = target.generate(**turn, **OPTIONS, **who_next, **{OUTPUT_NAME: copy.deepcopy(filled)})
            assert torch.equal(out.sequences, expected)
            assert out[OUTPUT_NAME].get_seq_length() == expected.shape[1] - 1
    assert drafter.stats.engine == "stock"
    assert "prepare_inputs_for_generation" not in vars(target)
    with pytest.raises(
        ValueError, match=f"runs on the stock engine .* the first 20 tokens are in `{OUTPUT_NAME}` only"
    ):
        target.generate(**rest(turn, 20), **OPTIONS, **who, **{OUTPUT_NAME: cache})
    if family == "gemma3":
        with pytest.raises(ValueError, match=r"windows that the sequence may outgrow, .* cannot use a StaticCache"):
            target.generate(**inputs, **OPTIONS, **who, cache_implementation="static")


def test_mismatched_caches_are_refused():
    target, inputs = tiny_target("llama"), padded_prompts([9, 4])
    options = OPTIONS | {"assistant_model": random_eagle3(target)}
    out = target.generate(**inputs, **options)
    cache = out[OUTPUT_NAME]
    with pytest.raises(ValueError, match="holds 20 tokens a row, but the prompts have 9; expected at least one token"):
        target.generate(**inputs, **options, **{OUTPUT_NAME: cache})
    with pytest.raises(ValueError, match=r"remove the cache's last n tokens with crop\(-n\)"):
        target.generate(**inputs, **options, **{OUTPUT_NAME: cache})
    shorter = copy.deepcopy(cache)
    shorter.crop(8 - shorter.get_seq_length())  # the prompts have 9 tokens
    again = target.generate(**inputs, **options, **{OUTPUT_NAME: shorter})
    assert torch.equal(again.sequences, out.sequences)
    with pytest.raises(ValueError, match="holds 2 rows, but the call has 1"):
        one = {"input_ids": out.sequences[:1], "attention_mask": torch.ones_like(out.sequences[:1])}
        target.generate(**one, **options, **{OUTPUT_NAME: cache})
    turn = next_turn(inputs, out.sequences)
    with pytest.raises(ValueError, match="attention_mask has 26 columns, but input_ids has 4 and the cache holds 20"):
        target.generate(**rest(turn, 22), **options, **{OUTPUT_NAME: cache})
    assert cache.get_seq_length() == 20
