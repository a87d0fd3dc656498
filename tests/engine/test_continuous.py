"""Continuous batching: what every request says does not depend on the rows, nor on the requests around it."""

import copy
import functools
import itertools
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from bulk import all_alone, continued, in_rows, prompts_of
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from model_state import traces
from oracle import RANDOM_DRAFTERS, OracleDrafter, copy_of, random_eagle3
from sampled_calls import MODES, drafter_of
from targets import STATIC_FAMILIES, STOCK_FAMILY, build_target, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.logits_process import TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

from hf_specdec import NoDrafter, SuffixDrafter
from hf_specdec.cache.layer_kinds import LayerKinds
from hf_specdec.calls.request import Arrived, ContinuousBatching, Request
from hf_specdec.engine import groups, run
from hf_specdec.engine.continuous import ContinuousRunner
from hf_specdec.engine.runner import Runner
from hf_specdec.graphs import buckets
from hf_specdec.integration import continuous as bulk
from hf_specdec.kernels.types import NO_TOKEN
from hf_specdec.modules.adapters import Adapters
from hf_specdec.state import DecodeState, RoundShape, Shape
from hf_specdec.stats import Counters

LENGTHS = (5, 1, 9, 20, 3, 3, 7, 30, 2, 1, 4, 13)
END, NEW = list(range(3, 96, 8)), 12
KINDS = {
    **RANDOM_DRAFTERS,
    "noisy-copy": functools.partial(copy_of, noise=0.01),
    "none": NoDrafter,
    "suffix": SuffixDrafter,
}


def alone(family, lengths):
    """What `generate()` without a drafter says to each prompt."""
    return all_alone(family, prompts_of(lengths), NEW, END)


def generate_batch(target, drafter, lengths, rows, **options):
    """The texts of all requests, and the statistics of each."""
    options = {"max_new_tokens": NEW, "eos_token_id": END, **options}
    return in_rows(target, drafter, prompts_of(lengths), rows, **options), drafter.stats.rows


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("eagle3", 1), ("mtp", 4), ("dspark", 4), ("noisy-copy", 4), ("none", 1), ("suffix", 4)],
)
def test_greedy_is_identical_to_generation_alone(kind, rows):
    target = tiny_target("llama")
    drafter = KINDS[kind](target)
    lengths = LENGTHS if rows > 1 else LENGTHS[:4]
    texts, counts = generate_batch(target, drafter, lengths, rows)
    assert texts == alone("llama", lengths)
    assert {len(text) for text in texts} > {NEW}, "rows ended at different times"
    assert [count.committed for count in counts] == [len(text) - 1 for text in texts]  # the first is of no round


@pytest.mark.parametrize("family", STATIC_FAMILIES)
def test_every_family_of_targets(family):
    target, lengths = tiny_target(family), LENGTHS[: num_cases(12, 5)]
    for kind in cases(["eagle3", "mtp", "draft-model", "none"], ["eagle3"]):
        texts, _ = generate_batch(target, KINDS[kind](target), lengths, 3)
        assert texts == alone(family, lengths)


@pytest.mark.parametrize(
    ("kind", "mode"),
    cases(
        every := list(itertools.product(["eagle3", "dspark", "pard", "mtp", "noisy-copy"], MODES)),
        [one for one in every if one[0] == "noisy-copy" or one in zip(["eagle3", "dspark", "mtp"], MODES, strict=True)],
    ),
)
def test_a_request_with_a_seed_says_and_accepts_what_it_does_alone(kind, mode):
    """Equal counts of accepted drafts mean that drafters, too, continue where they were prefilled."""
    target, lengths = tiny_target("llama", num_layers=4), LENGTHS[: num_cases(7, 5)]
    if kind == "noisy-copy":
        draft_probs, verification = MODES[mode]
        drafter = KINDS[kind](target).configure(3, draft_probs=draft_probs, verification=verification)
    else:
        drafter = drafter_of(target, kind, mode)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 40}
    texts, counts = generate_batch(target, drafter, lengths, 2, seeds=list(range(len(lengths))), **options)
    options |= {"max_new_tokens": NEW, "eos_token_id": END, "return_dict_in_generate": True}
    for seed, (prompt, text, count) in enumerate(zip(prompts_of(lengths), texts, counts, strict=True)):
        out = target.generate(torch.tensor([prompt]), assistant_model=drafter, seeds=[seed], **options)
        assert out.sequences[0, len(prompt) :].tolist() == text
        assert out.speculation.rows[0] == count
    if kind == "noisy-copy":
        assert sum(count.accepted for count in counts) > 2


@settings(deadline=None, max_examples=num_cases(25, 6))
@given(st.data())
def test_random_workloads(data):
    """Rows and requests of any number, groups of any size, ends at any time."""
    lengths = tuple(data.draw(st.lists(st.sampled_from([1, 2, 5, 17, 30]), min_size=1, max_size=12)))
    rows, end = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([END, 7, None]))
    target = tiny_target("llama", num_layers=2)
    drafter = copy_of(target, noise=0.08)
    ends = [end] if isinstance(end, int) else end or ()
    expected = [continued(target, prompt, 6, ends) for prompt in prompts_of(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "GROUP_SIZES", data.draw(st.sampled_from([(1,), (1, 3), (2, 8)])))
        patch.setattr(groups, "MOST_GROUP_TOKENS", data.draw(st.sampled_from([4, 64, 4096])))
        patch.setattr(run, "SHARE_TO_ADMIT", data.draw(st.sampled_from([0.1, 1.0])))
        texts, _ = generate_batch(target, drafter, lengths, rows, max_new_tokens=6, eos_token_id=end)
    assert texts == expected


def test_rows_are_taken_as_others_end(monkeypatch):
    """With 12 requests on 4 rows there are fewer rounds than in three padded batches of 4."""
    target = tiny_target("llama")
    drafter = NoDrafter(target)
    monkeypatch.setattr(run, "SHARE_TO_ADMIT", 0)
    texts, _ = generate_batch(target, drafter, LENGTHS, 4)
    by_length = sorted(zip(LENGTHS, texts, strict=True), key=lambda pair: -pair[0])
    batches = [[len(text) for _, text in by_length[first : first + 4]] for first in (0, 4, 8)]
    assert -(-sum(len(text) - 1 for text in texts) // 4) <= drafter.stats.num_rounds < sum(map(max, batches))


@pytest.mark.core_for(kind=["mtp"])
@pytest.mark.parametrize(
    ("kind", "columns"),
    cases(
        list(itertools.product(["eagle3", "mtp", "none"], [(128, 32), (8, 4)])),
        [("eagle3", (128, 32)), ("mtp", (8, 4)), ("none", (8, 4))],
    ),
    ids=str,
)
def test_sessions_and_graphs_are_kept_for_the_next_call(monkeypatch, kind, columns):
    """A graph of the round, and one of every kind of chunk that prompts are cut into, for each size of groups."""
    capture = replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "GROUP_COLUMNS", columns)
    monkeypatch.setattr(buckets, "PACKED_TOKENS", (*columns, 2))
    target = tiny_target("llama")
    drafter = KINDS[kind](target)
    counts = []
    for _ in range(num_cases(3, 2)):
        texts, _ = generate_batch(target, drafter, LENGTHS, 4, num_assistant_tokens=5)
        assert texts == alone("llama", LENGTHS)
        counts.append(capture.count)
        assert drafter.stats.execution.startswith("captured in one graph")
    assert counts[0] == counts[-1] >= (2 if columns == (128, 32) else 4)


def test_chunks_of_groups(monkeypatch):
    monkeypatch.setattr(buckets, "GROUP_COLUMNS", (8, 4))
    assert [buckets.group_chunks(columns) for columns in (0, 1, 4, 5, 8, 9, 28)] == [
        [4],
        [4],
        [4],
        [4, 4],
        [8],
        [8, 4],
        [8, 8, 8, 4],
    ]


def test_chunks_of_packed_prompts(monkeypatch):
    monkeypatch.setattr(buckets, "PACKED_TOKENS", (64, 16, 4))
    assert {tokens: buckets.packed_chunks(tokens, 150) for tokens in (0, 3, 4, 5, 12, 13, 40, 48, 64, 100, 150)} == {
        0: [4],
        3: [4],
        4: [4],
        5: [4, 4],
        12: [16],
        13: [16],
        40: [16, 16, 4, 4],
        48: [64],
        64: [64],
        100: [64, 16, 16, 4],
        150: [64, 64, 16, 4, 4],
    }
    monkeypatch.setattr(buckets, "LONG_TEXT", 149)
    monkeypatch.setattr(buckets, "MOST_LONG_TOKENS", 16)
    assert buckets.packed_chunks(50, 150) == [16, 16, 16, 4] and buckets.packed_chunks(50, 149) == [64]


class NoNumbersIntoRows(TorchDispatchMode):
    """Context in which no rows, of several, are set to a number that is copied to the device: the host would wait."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten.index_put_.default or args[2].dim() > 0, "a number is copied"
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["eagle3", "none"])
def test_an_admission_does_not_wait_for_the_device(monkeypatch, kind):
    admitted = []

    def watch(run):
        def watched(*args):
            with NoNumbersIntoRows():
                admitted.append(run(*args))
            return admitted[-1]

        return watched

    for name in ("prefill", "prefill_next"):
        monkeypatch.setattr(ContinuousRunner, name, watch(getattr(ContinuousRunner, name)))
    target = tiny_target("llama")
    generate_batch(target, KINDS[kind](target), (9, 4, 6), rows=4)
    assert len(admitted) > 0
    with pytest.raises(AssertionError, match="a number is copied"), NoNumbersIntoRows():
        torch.arange(3)[torch.tensor([1])] = 0


@pytest.mark.core
def test_results_are_those_of_transformers(capsys):
    """Keys, order and fields are as of `generate_batch()` without a drafter."""
    target, prompts = tiny_target("llama"), prompts_of((5, 3, 8))
    config = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=1, eos_token_id=END, num_return_sequences=2)
    out = target.generate_batch(
        prompts, config, assistant_model=random_eagle3(target), record_timestamps=True, progress_bar=True
    )
    assert list(out) == [name for index in range(3) for name in (f"req_{index}__child#0", f"req_{index}")]
    assert [result.prompt_ids for result in out.values()] == [prompt for prompt in prompts for _ in range(2)]
    texts = [text[:6] for text in alone("llama", (5, 3, 8))]
    assert [result.generated_tokens for result in out.values()] == [text for text in texts for _ in range(2)]
    for name, result in out.items():
        assert result.request_id == name and result.is_finished() and result.logprobs == []
        assert len(result.timestamps) == len(result.generated_tokens)
        assert 0 < result.created_time <= result.timestamps[0] <= result.timestamps[-1] == result.lifespan[1]
    assert "6/6 [" in capsys.readouterr().err
    assert target.generate_batch([], assistant_model=random_eagle3(target)) == {}


class Silent(BaseStreamer):
    def put(self, value):
        pass

    end = put


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stopping_criteria": StoppingCriteriaList([Never()])}, "the call has Never; expected no other stopping"),
        (
            {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
            "the call has MaxLengthCriteria; expected",
        ),
        ({"guidance_scale": 1.3}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
        ({"streamer": Silent()}, "does not support streamer. Drop that option"),
        ({"return_dict_in_generate": True, "output_scores": True}, "does not support output_scores"),
        ({"num_beams": 2}, "works with greedy search and sampling"),
        ({"num_return_sequences": -1}, "num_return_sequences is -1; expected an int of at least 1"),
        ({"nonsense": 3}, "nonsense"),
        ({"min_new_tokens": "x"}, r"min_new_tokens is 'x'; expected Real \| None"),
        ({"min_p": "x"}, "min_p is 'x'; expected Real"),
        ({"temperature": "x"}, "temperature is 'x'; expected Real"),
        ({"generation_config": "x"}, r"generation_config is 'x'; expected GenerationConfig \| None"),
        ({"generation_config": {"max_new_tokens": 3}}, "generation_config is {'max_new_tokens': 3}; expected Gen"),
        ({"continuous_batching_config": "x"}, "continuous_batching_config is 'x'; expected ContinuousBatchingConfig"),
        ({"continuous_batching_config": {"seed": 3}}, "continuous_batching_config is {'seed': 3}; expected Con"),
        ({"adapter_names": 5}, r"adapter_names is 5; expected list\[str\] \| None"),
        ({"adapter_names": "a"}, "adapter_names is 'a'; expected list"),
        ({"max_new_tokens": None, "max_length": 9}, "max_length is 9, which counts .* expected max_new_tokens"),
        (
            {"continuous_batching_config": ContinuousBatchingConfig(max_requests_per_batch=0)},
            "max_requests_per_batch is 0; expected an int of at least 1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused(options, words):
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    with pytest.raises(ValueError, match=words):
        target.generate_batch([[5, 6]], **{"assistant_model": drafter, "max_new_tokens": 4, **options})
    usual = target.generate(torch.tensor([[5, 6]]), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert isinstance(usual, torch.Tensor), "a refused call leaves nothing behind"


def test_pointwise_processors_of_the_caller():
    target = tiny_target("llama")
    texts, _ = generate_batch(
        target, copy_of(target), LENGTHS, 4, do_sample=True, logits_processor=[TopKLogitsWarper(1)], seeds=1
    )
    assert texts == alone("llama", LENGTHS)


@pytest.mark.parametrize(
    ("options", "is_own"),
    [
        ({"do_sample": True, "top_k": 1}, False),
        ({"repetition_penalty": 1.5, "min_new_tokens": 3, "eos_token_id": [*END]}, False),
        ({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}, False),
        ({"bad_words_ids": [[5, 6]]}, True),
        ({"repetition_penalty": 1.5, "bad_words_ids": [[5, 6]]}, True),
    ],
)
def test_processors_are_made_once_where_they_are_those_of_all_rows(options, is_own, monkeypatch):
    """For each prompt they would copy its tokens to the device, before anything runs there."""
    calls, make = [], bulk.processors_of_prompt
    monkeypatch.setattr(bulk, "processors_of_prompt", lambda *args: calls.append(args) or make(*args))
    target = tiny_target("llama")
    options = {"assistant_model": copy_of(target), "max_new_tokens": 4, "do_sample": False, **options}
    for count in (1, 5):
        calls.clear()
        target.generate_batch(prompts_of(LENGTHS[:count]), **options)
        assert len(calls) == 1 + (count if is_own else 1), "one for the call"


def test_use_cache_is_ignored():
    """Trainers and servers set it for transformers' own continuous batching, which has a cache in any case."""
    target = tiny_target("llama")
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=END, use_cache=False)
    out = target.generate_batch(prompts_of(LENGTHS[:3]), config, assistant_model=NoDrafter(target))
    assert [one.generated_tokens for one in out.values()] == alone("llama", LENGTHS)[:3] and not config.use_cache


@pytest.mark.parametrize("limit", [4.0, 3.5, torch.tensor(4)], ids=str)
def test_limits_that_are_no_ints(limit):
    """As in `generate()`, where a text ends once it has as many tokens."""
    target = tiny_target("llama")
    options = {"max_new_tokens": limit, "do_sample": False}
    out = target.generate_batch([[5, 6]], assistant_model=random_eagle3(target), **options)
    assert out["req_0"].generated_tokens == target.generate(torch.tensor([[5, 6]]), **options)[0, 2:].tolist()


def test_a_configuration_alone_is_not_warned_about(caplog):
    """transformers warns of settings that are passed beside a configuration."""
    target = tiny_target("llama")
    config = GenerationConfig(max_new_tokens=2, do_sample=False)
    logger = logging.getLogger("transformers")
    logging.getLogger("transformers.generation.utils").warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    try:
        target.generate_batch([[5, 6]], config, assistant_model=NoDrafter(target))
    finally:
        logger.removeHandler(caplog.handler)
    assert not [one.getMessage() for one in caplog.records if "is deprecated" in one.getMessage()]


def test_prompts_are_lists_or_tensors():
    target = tiny_target("llama")
    options = {"assistant_model": random_eagle3(target), "max_new_tokens": 4, "do_sample": False}
    texts = [
        [result.generated_tokens for result in target.generate_batch(inputs, **options).values()]
        for inputs in ([[5, 6], [7, 8]], torch.tensor([[5, 6], [7, 8]]), [torch.tensor([5, 6]).int(), (7, 8)])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_drafters_that_cannot_copy_rows_are_refused():
    class Own(OracleDrafter):
        def new_memory(self, state):
            return [0]

    target = tiny_target("llama")
    drafter = Own(target, torch.ones(1, 4, dtype=torch.int64), [2])
    with pytest.raises(ValueError, match=r"Own has memory of a generation .* that implements copy_rows\(\)"):
        target.generate_batch([[5, 6]], assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("drafter_of", [random_eagle3, NoDrafter])  # the latter has engine="static"
def test_targets_of_the_stock_engine_are_refused(drafter_of):
    target = tiny_target(STOCK_FAMILY)
    with pytest.raises(ValueError, match=r"runs on the static engine, but PhimoeForCausalLM .* runs on the stock"):
        target.generate_batch([[5, 6]], assistant_model=drafter_of(target), max_new_tokens=4)


def test_wrong_prompts():
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    for inputs in (None, 5):
        with pytest.raises(ValueError, match=f"inputs is {inputs}; expected Collection"):
            target.generate_batch(inputs, assistant_model=drafter)
    wrong = {
        "inputs[1] has shape [0] and dtype torch.float32; expected token ids": [[5], []],
        "inputs[0] has shape [] and dtype torch.int64; expected token ids in one dimension": [5, 6],
        "inputs[0] has shape [1, 2]": [[[5, 6]]],
        "inputs[1] has shape [1] and dtype torch.float32": [[5], [6.5]],
        "inputs[0] is 'text'; expected a list of token ids": ["text"],
    }
    for words, inputs in wrong.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            target.generate_batch(inputs, assistant_model=drafter)
    with pytest.raises(ValueError, match="holds the token 96, but LlamaForCausalLM has tokens 0 to 95"):
        target.generate_batch([[5], [96]], assistant_model=drafter)


def test_requests_without_positions_fail_alone():
    """The target has positions for 32 tokens: the second prompt has more, and the third no room for what it may say."""
    target = build_target("opt", max_position_embeddings=32, ffn_dim=48, word_embed_proj_dim=32)
    lengths = (5, 40, 28, 3)
    config = ContinuousBatchingConfig(max_requests_per_batch=2)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    out = target.generate_batch(prompts_of(lengths), None, config, assistant_model=NoDrafter(target), **options)
    statuses = [result.status for result in out.values()]
    assert statuses == [getattr(RequestStatus, name) for name in ("FINISHED", "FAILED", "FAILED", "FINISHED")]
    first, second, third, last = out.values()
    assert re.match("A prompt has 40 tokens, but OPTForCausalLM has 32 positions", second.error)
    assert re.match("The request has 28 tokens and has not ended after 5 new ones, .*max_new_tokens", third.error)
    assert second.generated_tokens == [] and len(third.generated_tokens) == 5
    for result in (first, last):
        expected = target.generate(torch.tensor([result.prompt_ids]), **options)[0, len(result.prompt_ids) :]
        assert result.generated_tokens == expected.tolist()


def test_an_interrupted_call_leaves_nothing_behind(monkeypatch):
    replay_on_cpu(monkeypatch)
    target = copy.deepcopy(tiny_target("llama"))
    drafter = random_eagle3(target)
    generate_batch(target, drafter, LENGTHS, 4)  # which installs what stays, such as fused linears
    before = traces(target)

    def interrupt(self, count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hf_specdec.integration.continuous.tqdm.update", interrupt)
        generate_batch(target, drafter, LENGTHS, 4)
    assert traces(target) == before
    assert generate_batch(target, drafter, LENGTHS, 4)[0] == alone("llama", LENGTHS)


def test_what_is_withdrawn_or_has_no_adapter_ends():
    """By one way, whether it waits when the run begins or arrives later."""
    ended, arriving = [], []

    class Rows(Runner):
        num_rows, capacity, memory, state = 1, 100, None, SimpleNamespace(tokens=torch.zeros(1))
        target = SimpleNamespace(is_captured=False, adapters=Adapters((), frozenset(), None, {}), unpatch=lambda: None)

        def __init__(self):
            pass

    def requests(*adapters):
        return [Request(index, torch.zeros(3), 4, adapter=name) for index, name in enumerate(adapters)]

    first, later = requests("gone", None, None), requests(None, "gone")
    settings = ContinuousBatching(arrivals=lambda *_: arriving.pop(), on_finished=ended.append)
    rows = run.Run(Rows(), Arrived(first, [(first[1], "withdrawn")]), Counters(3, 1), settings)
    arriving.append(Arrived(later, is_open=False))
    assert list(rows._waiting) == [first[2]] and rows._tokens_waiting == 4
    rows._receive(settings.arrivals)
    assert list(rows._waiting) == [first[2], later[0]] and rows._tokens_waiting == 8
    assert ended == [first[1], first[0], later[1]] and first[1].error == "withdrawn"
    assert all(re.match("There is no LoRA adapter 'gone'", one.error) for one in (first[0], later[1]))


def test_rows_are_admitted_beside_others():
    """They are those of no text before; whoever wants no others clears the state."""
    state = DecodeState(Shape(3, 16, 2, False, False, 2), LayerKinds(), torch.device("cpu"))
    state.admit([2], [torch.tensor([5, 6, 7])], [4], [9], ends=[[3]], cached=[2])
    before = {name: getattr(state, name)[2].clone() for name in ("tokens", "numbers", "finished", "eos")}
    state.admit(range(2), [torch.tensor([8]), torch.tensor([1, 2])], [1, 1], [0, 0])
    assert all(torch.equal(getattr(state, name)[2], one) for name, one in before.items() if name != "numbers")
    assert state.lengths.tolist() == [1, 2, 3] and state.cached.tolist() == [0, 0, 2] and state.live == 16
    state.clear()
    assert state.lengths.tolist() == [1, 1, 1] and state.finished.all() and state.live == 1
    assert (state.eos == NO_TOKEN).all() and state.cached.tolist() == [0, 0, 0]


def test_admission():
    """All rows at first; then only when enough are free; the longest group is bounded in rows and in tokens."""
    entered, limits = [], groups.Groups(None, SimpleNamespace(is_captured=True), is_continuous=True)

    class Rows(Runner):
        num_rows, capacity, state = 4, 100, SimpleNamespace(tokens=torch.zeros(4), logprobs=())
        memory, target = None, SimpleNamespace(is_captured=False)

        def __init__(self):
            pass

        def fits_group(self, count, longest):
            return limits.fits(count, longest)

        def prefill(self, prefixes, group, running):
            entered.append(([one.row for one in prefixes], group))

        def observe(self, row, request):
            pass

        def prefill_next(self):
            report = SimpleNamespace(read=lambda: ([[0]] * 4, [0] * 4, [0] * 4, None), logprobs={})
            return (len(entered[-1][1]), report) if entered else None

    lengths = (9, 8, 7, 3, 2, 2, 2, 1)
    requests = [Request(index, torch.zeros(length), 4, ends=set(END)) for index, length in enumerate(lengths)]
    rows = run.Run(Rows(), Arrived(requests, is_open=False), Counters(8, 1), ContinuousBatching())

    def finish(*which):
        committed = [1 if row in which else 0 for row in range(4)]
        report = SimpleNamespace(read=lambda: ([[END[0], 0]] * 4, [0] * 4, committed, None), logprobs={})
        occupants = {row: one for row, one in rows._occupants.items() if row in which}
        rows._take(run._Launched(occupants, report, drafted=RoundShape(1), start=0.0, end=0.0))
        rows.admit()
        return [[one.index for one in group] for _, group in entered]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "GROUP_SIZES", (1, 3))
        patch.setattr(groups, "MOST_GROUP_TOKENS", 24)
        patch.setattr(run, "SHARE_TO_ADMIT", 0.5)
        rows.admit()
        assert [[one.index for one in group] for _, group in entered] == [[0], [1, 2, 3]]
        assert finish(2) == [[0], [1, 2, 3]], "one free row is not enough"
        assert finish(0) == [[0], [1, 2, 3], [4, 5]]
        assert sorted(entered[-1][0]) == [0, 2]
        assert finish(0, 1, 2) == [[0], [1, 2, 3], [4, 5], [6, 7]], "fewer than there is room for wait"
        finish(3)
        assert not rows.is_complete
        for row in range(4):
            finish(row)
        assert rows.is_complete and all(one.is_over for one in requests)


@pytest.mark.core
def test_memory_is_linear_in_the_tokens(monkeypatch):
    """Many short prompts beside a long one are not padded to its length."""
    target, given, run_all = tiny_target("llama"), [], bulk.generate_continuously

    def noted(request, *args):
        given.append(request.prompts.input_ids.numel())
        return run_all(request, *args)

    monkeypatch.setattr(bulk, "generate_continuously", noted)
    prompts = prompts_of((4,) * 60 + (200,))
    out = target.generate_batch(
        prompts, assistant_model=NoDrafter(target), max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    assert given == [2 * 200]
    monkeypatch.undo()
    for prompt, result in zip(prompts[-2:], list(out.values())[-2:], strict=True):
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        expected = target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert result.generated_tokens == expected
    with pytest.raises(ValueError, match="input_ids holds the token 96, but LlamaForCausalLM has tokens 0 to 95"):
        target.generate_batch([*prompts, [96]], assistant_model=NoDrafter(target), max_new_tokens=4)
