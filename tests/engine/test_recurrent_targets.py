"""Targets and draft models with recurrent layers: linear attention, state-space models, short convolutions."""

import re
import sys
from functools import cache, partial
from pathlib import Path

import lossless
import pytest
import torch
import transformers
from bulk import all_alone, in_rows, prompts_of, without_padding
from case_counts import cases, num_cases, tries_all
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, continuations
from model_state import traces
from oracle import RANDOM_DRAFTERS, SELDOM, OracleDrafter, copy_of, random_draft_model, random_eagle3, random_mtp
from targets import (
    HYBRIDS,
    PAD,
    WITHOUT_ATTENTION,
    build_target,
    new_target,
    padded_prompts,
    set_policy,
    tiny_target,
)
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from zoo_models import generate, instantiate, prompts, rows_of

from hf_specdec import NoDrafter
from hf_specdec.cache import recurrent_layers
from hf_specdec.cache.layer_kinds import LayerKinds
from hf_specdec.cache.ragged_cache import RaggedCache
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.patching import recurrent_functions
from hf_specdec.patching.recurrent_functions import Recurrent
from hf_specdec.patching.support import cache_name

MAX_NEW_TOKENS = num_cases(16, 12)
greedy = partial(lossless.greedy, max_new_tokens=MAX_NEW_TOKENS)


@cache
def plain_output(family, lengths, seed=0):
    return greedy(tiny_target(family), padded_prompts(list(lengths), seed=seed))


def prompts_and_plain(family, lengths, seed=0):
    return tiny_target(family), padded_prompts(list(lengths), seed=seed), plain_output(family, tuple(lengths), seed)


def check(family, lengths, drafts, **options):
    """Compare with plain `generate()` for (K, share of right drafts) in `drafts`."""
    target, inputs, plain = prompts_and_plain(family, lengths)
    answers = continuations(inputs, plain)
    for num_draft_tokens, accuracy in drafts:
        drafter = OracleDrafter(target, answers, list(lengths), accuracy, seed=num_draft_tokens)
        found = greedy(target, inputs, drafter, num_draft_tokens, **options)
        assert torch.equal(found, plain), (num_draft_tokens, accuracy)
        assert drafter.stats.engine == "static"


@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_is_identical_for_drafters_of_any_accuracy(family):
    assert len(plain_output(family, tuple(PROMPTS[3])).unique()) > 8, "texts tell states apart"
    # Drafts that are all right are those of the copy below.
    check(family, PROMPTS[3], cases([(4, 1.0), (3, 0.0), (8, 0.6)], [(3, 0.0), (8, 0.6)]))
    for batch, num_draft_tokens in cases(((1, 1), (8, 3)), ()):
        check(family, PROMPTS[batch], [(num_draft_tokens, 0.6)])


@pytest.mark.core
@pytest.mark.parametrize("family", HYBRIDS)
def test_long_prompts_run_through_the_models_own_functions(family, monkeypatch):
    monkeypatch.setattr(recurrent_layers, "MOST_STEPS", 8)
    calls = []
    run = recurrent_layers.RecurrentState.run
    monkeypatch.setattr(recurrent_layers.RecurrentState, "run", lambda *args, **kw: calls.append(1) or run(*args, **kw))
    check(family, (30, 2, 21), [(3, 0.6)])
    check(family, (30, 2, 21), [(3, 0.6)], prefill_chunk_size=12)
    assert calls or family == "lfm2"


@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["qwen3-next"]))
def test_prompts_of_hundreds_of_tokens(family):
    target = build_target(**{**HYBRIDS[family], "max_position_embeddings": 512, "num_hidden_layers": 3})
    inputs = padded_prompts([300, 20, 270])
    plain = greedy(target, inputs, max_new_tokens=6)
    for options in ({}, {"prefill_chunk_size": 70}):
        drafter = OracleDrafter(target, continuations(inputs, plain), [300, 20, 270], 0.6)
        assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=6, **options), plain)
        assert drafter.stats.engine == "static"


@pytest.mark.parametrize("family", HYBRIDS)
def test_copy_of_the_target_is_accepted_completely(family):
    """A draft model whose states were wrong would draft other tokens than the target."""
    for batch, num_draft_tokens in cases(((1, 1), (3, 7)), ((1, 1),) * (family == "qwen3-next") + ((3, 7),)):
        lengths = PROMPTS[batch]
        target, inputs, plain = prompts_and_plain(family, lengths)
        drafter = copy_of(target)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens), plain)
        assert drafter.stats.accepted == drafter.stats.drafted > 0


@pytest.mark.parametrize(
    "kind", [*(kind for kind in RANDOM_DRAFTERS if "mtp" not in kind and kind not in SELDOM), "noisy-copy", "none"]
)
def test_every_family_of_drafters(kind):
    makers = {**RANDOM_DRAFTERS, "noisy-copy": partial(copy_of, noise=0.05), "none": NoDrafter}
    for family in cases(list(HYBRIDS), ["falcon-h1"]):
        target, inputs, plain = prompts_and_plain(family, PROMPTS[3])
        drafter = makers[kind](target)
        assert torch.equal(greedy(target, inputs, drafter, 5), plain)
        assert drafter.stats.engine == "static"
        assert kind != "noisy-copy" or 0 < drafter.stats.accepted < drafter.stats.drafted


def test_draft_model_with_recurrent_layers_for_another_target():
    target, inputs, plain = prompts_and_plain("llama", PROMPTS[3])
    for family in cases(list(HYBRIDS), ["qwen3-next"]):
        drafter = copy_of(tiny_target(family))
        drafter.bind(target)
        for engine in ("static", "stock"):
            drafter.configure(engine=engine)
            row = inputs if engine == "static" else {name: tensor[1:2] for name, tensor in inputs.items()}
            expected = plain if engine == "static" else plain[1:2]
            assert torch.equal(greedy(target, row, drafter, 4), expected)
            assert drafter.stats.engine == engine


@pytest.mark.parametrize(("family", "is_whole"), [("llama", False), ("gemma3", True)])
def test_draft_model_with_recurrent_layers_continues_a_text(family, is_whole):
    """It reads what the target has in its cache, or begins where the tokens are known."""
    target, inputs = tiny_target(family), padded_prompts([12])
    options = {"return_dict_in_generate": True, "max_new_tokens": 8}
    first = greedy(target, inputs, **options)
    text = torch.cat([first.sequences, torch.tensor([[5, 9, 11]])], dim=1)
    expected = greedy(target, {"input_ids": text})
    for hybrid in cases(list(HYBRIDS), ["falcon-h1"]):
        drafter = copy_of(tiny_target(hybrid))
        drafter.bind(target)
        cache = DynamicCache(config=target.config)
        again = greedy(target, inputs, **options, **{OUTPUT_NAME: cache})
        given = {"input_ids": text if is_whole else text[:, cache.get_seq_length() :]}
        if not is_whole:
            given["attention_mask"] = torch.ones_like(text)
        found = greedy(target, given, drafter, 3, **{OUTPUT_NAME: cache})
        assert torch.equal(again.sequences, first.sequences)
        assert torch.equal(found[:, -MAX_NEW_TOKENS:], expected[:, -MAX_NEW_TOKENS:])


def test_drafts_of_a_copy_that_continues_a_text():
    """Acceptance tells whether the draft model's states have the cached text in them."""
    target, inputs = tiny_target("llama"), padded_prompts([12])
    drafter = copy_of(tiny_target("qwen3-next"))
    drafter.bind(target)
    first = greedy(target, inputs, return_dict_in_generate=True, max_new_tokens=8)
    text = torch.cat([first.sequences, torch.tensor([[5, 9, 11]])], dim=1)
    options = {"max_new_tokens": 6}
    greedy(target, {"input_ids": text}, drafter, 3, **options)
    accepted = drafter.stats.accepted_per_position
    greedy(target, {"input_ids": text}, drafter, 3, **{OUTPUT_NAME: first[OUTPUT_NAME]}, **options)
    assert drafter.stats.accepted_per_position == accepted


@pytest.mark.parametrize("family", HYBRIDS)
def test_continuous_batching(family):
    target, lengths = tiny_target(family), (5, 1, 9, 20, 3, 30, 2)[: num_cases(7, 5)]
    prompts, ends = prompts_of(lengths), list(range(3, 96, 8))
    expected = all_alone(family, prompts, 10, ends)
    for make in (copy_of, random_eagle3) if tries_all or family == "falcon-h1" else (copy_of,):
        drafter = copy_of(target, noise=0.02) if make is copy_of else make(target)
        assert in_rows(target, drafter, prompts, 3, max_new_tokens=10, eos_token_id=ends) == expected


def test_heads_that_run_one_by_one(monkeypatch):
    """Each has a state of its own, which is copied from row to row and cleared with the others."""
    lengths = (70, 3, 66)
    check("zamba", lengths, [(3, 0.6)])
    target, inputs, plain = prompts_and_plain("zamba", lengths)
    drafter = copy_of(target)
    replay_on_cpu(monkeypatch)
    found = in_rows(target, drafter, without_padding(inputs), 2, max_new_tokens=MAX_NEW_TOKENS)
    assert found == plain[:, -MAX_NEW_TOKENS:].tolist()
    for seed in (0, 1):
        inputs = padded_prompts([9, 4], seed=seed)
        expected = greedy(target, inputs)
        assert torch.equal(greedy(target, inputs, drafter, 3), expected)
        assert drafter.stats.accepted == drafter.stats.drafted > 0


@pytest.mark.parametrize("family", cases(["qwen3-next", "jamba", "lfm2"], ["jamba"]))
def test_prompts_of_embeddings(family):
    """The target itself runs them, with padding in front."""
    target, inputs = tiny_target(family), padded_prompts([9, 4])
    inputs["inputs_embeds"] = target.get_input_embeddings()(inputs["input_ids"]).detach() + 0.3
    drafter = random_eagle3(target)
    expected = greedy(target, inputs, return_dict_in_generate=True)
    found = greedy(target, inputs, drafter, 3, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected.sequences) and drafter.stats.engine == "static"
    same_states(found[OUTPUT_NAME], expected[OUTPUT_NAME])
    of_tokens = greedy(target, padded_prompts([9, 4]))
    assert not torch.equal(expected.sequences, of_tokens[:, -expected.sequences.shape[1] :])


@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["qwen3-next", "falcon-h1"]))
def test_sessions_are_used_again(family, monkeypatch):
    """Buffers of earlier calls hold states and inputs of other texts."""
    replay_on_cpu(monkeypatch)
    target = tiny_target(family)
    drafter = copy_of(target, noise=0.02)
    for seed in range(2):
        inputs = padded_prompts([7, 12, 3], seed=seed)
        found = greedy(target, inputs, drafter, 3)
        assert "captured" in drafter.stats.execution or "graph" in drafter.stats.execution
        assert torch.equal(found, plain_output(family, (7, 12, 3), seed))


@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["nemotron-h"]))
def test_ends_and_limits_anywhere_in_a_block(family):
    target, inputs, free = prompts_and_plain(family, PROMPTS[3])
    answers, width = continuations(inputs, free), inputs["input_ids"].shape[1]
    for position in range(0, 12, 3):
        ends = {"eos_token_id": free[:, width + position].unique().tolist(), "pad_token_id": PAD}
        plain = greedy(target, inputs, **ends)
        for accuracy in (0.5, 1.0):
            drafter = OracleDrafter(target, answers, PROMPTS[3], accuracy)
            assert torch.equal(greedy(target, inputs, drafter, 4, **ends), plain), position
            out = greedy(target, inputs, drafter, 4, max_new_tokens=position + 1)
            assert torch.equal(out, free[:, : width + position + 1]), position


def states(cache):
    return [
        state
        for layer in cache.layers
        for group in ("recurrent_states", "conv_states")
        for state in getattr(layer, group, {}).values()
        if state is not None
    ]


def same_states(found, expected, has_length=True):
    assert not has_length or found.get_seq_length() == expected.get_seq_length()
    assert len(states(found)) == len(states(expected)) > 0
    for state, wanted in zip(states(found), states(expected), strict=True):
        torch.testing.assert_close(state, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.core_for(family=["qwen3-next"])
@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["qwen3-next", "falcon-h1"]))
def test_caches_after_a_call_are_plain_generates(family):
    target, inputs = tiny_target(family), padded_prompts([9, 4])
    drafter = random_eagle3(target)
    plain = greedy(target, inputs, return_dict_in_generate=True)[OUTPUT_NAME]
    given = DynamicCache(config=target.config)
    out = greedy(target, inputs, drafter, 3, return_dict_in_generate=True, **{OUTPUT_NAME: given})
    assert out[OUTPUT_NAME] is given and drafter.stats.engine == "static"
    deferred = greedy(target, inputs, drafter, 3, return_dict_in_generate=True)[OUTPUT_NAME]
    for found in (given, deferred):
        same_states(found, plain)


class CallsTarget(LogitsProcessor):
    """Runs the target on its own, in the middle of a round."""

    def __init__(self, target):
        self.target, self.logits = target, []

    def __call__(self, input_ids, scores):
        tokens = torch.arange(5, 15)[None]
        out = self.target(tokens[:, :7], use_cache=True)
        for column in range(7, 10):
            out = self.target(tokens[:, column : column + 1], **{OUTPUT_NAME: out[OUTPUT_NAME]}, use_cache=True)
        self.logits.append(out.logits[0, -1])
        return scores


@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["kimi-linear", "falcon-h1", "jamba", "lfm2"]))
def test_other_calls_of_the_model_are_not_affected(family):
    target, inputs, plain = prompts_and_plain(family, PROMPTS[1])
    with torch.no_grad():
        expected = CallsTarget(target)
        expected(None, None)
        processor = CallsTarget(target)
        drafter = random_eagle3(target)
        out = greedy(target, inputs, drafter, 3, logits_processor=LogitsProcessorList([processor]), max_new_tokens=4)
    assert torch.equal(out, plain[:, : out.shape[1]])
    for logits in processor.logits:
        torch.testing.assert_close(logits, expected.logits[0], atol=1e-5, rtol=1e-5)


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["kimi-linear", "nemotron-h", "jamba", "lfm2"]))
def test_modeling_files_are_restored(family):
    target, inputs = tiny_target(family), padded_prompts(PROMPTS[3])
    files = {sys.modules[type(module).__module__] for module in target.modules()}
    before = [dict(vars(file)) for file in files]
    drafter = random_eagle3(target)
    of_model = traces(target)
    greedy(target, inputs, drafter, 3)
    with pytest.raises(RuntimeError, match="on purpose"):
        greedy(target, inputs, drafter, 3, logits_processor=LogitsProcessorList([Fails()]))
    for file, names in zip(files, before, strict=True):
        assert all(vars(file)[name] is value for name, value in names.items())
    assert traces(target) == of_model


# Functions of recurrences that no replacement is made for, since models do not call them while an engine runs.
NOT_REPLACED = {
    "mamba2_split_conv1d_scan_combined",  # training
    "mamba_inner_fn",  # training
}


@pytest.mark.core
def test_every_recurrence_of_transformers_is_known():
    pattern = re.compile(r"use_kernel_func_from_hub_with_fallback\(.*?\)\s*def (\w+)", re.DOTALL)
    names = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        names.update(pattern.findall(file.read_text()))
    assert names, "transformers marks such functions in another way"
    assert names <= set(recurrent_functions._REPLACEMENTS) | NOT_REPLACED


@pytest.mark.core_for(family=["mamba"])
@pytest.mark.parametrize("family", WITHOUT_ATTENTION)
def test_models_without_attention(family):
    """There is no position that has a slot, and transformers gives them their cache by another name."""
    lengths = (70, 3, 66)
    check(family, lengths, [(3, 0.0), (7, 0.8)])
    target, inputs, plain = prompts_and_plain(family, lengths)
    drafter = copy_of(target)
    found = in_rows(target, drafter, without_padding(inputs), 2, max_new_tokens=MAX_NEW_TOKENS)
    assert found == plain[:, -MAX_NEW_TOKENS:].tolist()
    short = padded_prompts([9, 4])
    embeddings = target.get_input_embeddings()(short["input_ids"]).detach() + 0.3
    for given in (short, {**short, "inputs_embeds": embeddings}):
        expected = greedy(target, given, return_dict_in_generate=True)
        found = greedy(target, given, drafter, 3, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected.sequences) and drafter.stats.engine == "static"
        same_states(found[OUTPUT_NAME], expected[OUTPUT_NAME], has_length=False)
    assert drafter.stats.accepted < drafter.stats.drafted, "a draft model reads tokens, not embeddings"
    with pytest.raises(ValueError, match="a cache of recurrent states only, which does not know how many"):
        greedy(target, short, drafter, 3, **{cache_name(target): expected[OUTPUT_NAME]})


def test_states_that_a_model_has_computed_by_itself_are_refused():
    layer = RaggedCache(LayerKinds((Recurrent(),)), 8, torch.ones(1, dtype=torch.int64)).layers[0]
    with pytest.raises(TypeError, match=r"has computed a state by itself \(Tensor\); expected it to call one of"):
        layer.update_recurrent_state(torch.zeros(1))


def test_steps_of_training_with_recurrent_layers_are_refused():
    drafter, tokens = copy_of(tiny_target("mamba")), torch.arange(4, 12)[None]
    assert drafter.unroll(tokens, None, 1)[0].shape == (1, 8, 32)
    with pytest.raises(ValueError, match="MambaForCausalLM cannot be trained in 2 steps: it has recurrent layers"):
        drafter.unroll(tokens, None, 2)


def test_modules_of_recurrent_layers_are_refused():
    with pytest.raises(ValueError, match="'falcon_h1' cannot be those of MTP modules: they have recurrent states"):
        random_mtp(tiny_target("falcon-h1"))


@pytest.mark.parametrize(
    ("family", "num_layers"),
    cases([("falcon-h1", 1), ("qwen3-next", 3), ("lfm2", 3), ("jamba", 2), ("mamba", 2)], [("lfm2", 3)]),
)
def test_round_with_the_gpu_policy(family, num_layers, monkeypatch):
    """Kernels (in the interpreter), fused linears, one compiled graph, replayed: what a GPU runs."""
    target, inputs = new_target(family, num_layers=num_layers), padded_prompts([5, 1])
    plain = greedy(target, inputs, max_new_tokens=3)
    set_policy(monkeypatch, "cpu", triton=True)
    set_policy(monkeypatch, "cpu", transposed_linear=False)
    set_policy(monkeypatch, "cpu", fused_linear=True)
    replay_on_cpu(monkeypatch)
    set_policy(monkeypatch, "cpu", compiler="aot_eager")
    drafter = OracleDrafter(target, continuations(inputs, plain), [5, 1], 0.6).configure(compile_rounds=True)
    assert torch.equal(greedy(target, inputs, drafter, 2, max_new_tokens=3), plain)
    assert drafter.stats.execution == "captured in one graph, compiled"


@pytest.mark.parametrize("class_name", ["Zamba2ForCausalLM", "NemotronHForCausalLM"])
def test_bounds_of_time_steps_are_refused_on_the_stock_engine(class_name):
    """They hold for several tokens at once, such as a block of drafts, not for single ones; a short text may not show
    them, as here."""
    target = instantiate(class_name, 0.2, False)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-6.5)
    inputs = rows_of(prompts(target))[0]
    drafter = random_draft_model(target)
    text = generate(target, inputs, assistant_model=drafter)
    assert torch.equal(text, generate(target, inputs)) and drafter.stats.engine == "static"
    with pytest.raises(ValueError, match=r"bound the time steps of several tokens at once|differ there from plain"):
        generate(target, inputs, assistant_model=drafter.configure(engine="stock"))
