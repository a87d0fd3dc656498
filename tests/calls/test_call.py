"""A call as the engines get it, and the steps of a run on the static engine, one by one."""

import dataclasses

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from targets import PAD, padded_prompts, tiny_target
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_specdec.calls.call import DRAFT_PROBS_TEMPERATURE, Call
from hf_specdec.calls.prompts import read_prompts
from hf_specdec.engine.hosted_target import HostedTarget
from hf_specdec.engine.static_engine import Lockstep, decode
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.modules.patch import engine
from hf_specdec.sampling.logits import RowTemperature
from hf_specdec.sampling.randomness import Randomness

pytestmark = pytest.mark.core


def make_call(drafter_kind="eagle3", lengths=(5, 3), max_new_tokens=6, processors=(), eos=None, **settings):
    """What `generate()` prepares for a call with a drafter of `tiny_target("llama")`."""
    target = tiny_target("llama")
    inputs = padded_prompts(list(lengths))
    width = inputs["input_ids"].shape[1]
    config = GenerationConfig(max_length=width + max_new_tokens, **settings)
    config._pad_token_tensor = torch.tensor(PAD)
    config._eos_token_tensor = None if eos is None else torch.tensor([eos])
    criteria = [MaxLengthCriteria(width + max_new_tokens)]
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    return Call(
        model=target,
        drafter=RANDOM_DRAFTERS[drafter_kind](target),
        prompts=read_prompts(inputs["input_ids"], inputs["attention_mask"], None, None),
        processors=LogitsProcessorList(processors),
        criteria=StoppingCriteriaList(criteria),
        config=config,
        num_draft_tokens=3,
        randomness=Randomness(),
    )


def test_greedy_decoding_draws_nothing():
    call, before = make_call(), torch.get_rng_state()
    assert call.temperature is None and not call.draft_probs
    assert torch.equal(call.seeds, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_draws_one_number_a_call():
    call = make_call(do_sample=True, temperature=0.8)
    torch.manual_seed(4)
    seeds, state = call.seeds, torch.get_rng_state()
    assert len(seeds.unique()) == 2
    assert torch.equal(call.seeds, seeds) and torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    torch.randint(0, 2**63 - 1, (1,))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [DRAFT_PROBS_TEMPERATURE / 2, DRAFT_PROBS_TEMPERATURE])
def test_draft_probs_by_temperature(temperature):
    call = make_call(do_sample=True, temperature=temperature)
    assert call.draft_probs is (temperature >= DRAFT_PROBS_TEMPERATURE)
    assert make_call(do_sample=True, temperature=temperature, processors=[RowTemperature([1.0, 2.0])]).draft_probs
    for wanted in (True, False):
        call.drafter.configure(draft_probs=wanted)
        assert call.draft_probs is wanted


def test_rows_continue_with_padding_only_after_a_token_that_ends_them():
    assert make_call().pad_token_id is None
    assert make_call(eos=7).pad_token_id == PAD


def test_records_are_kept_for_returned_dictionaries_only():
    assert not make_call(output_scores=True).keeps("scores")
    call = make_call(output_scores=True, return_dict_in_generate=True)
    assert call.keeps("scores") and not call.keeps("logits")


@torch.no_grad()
def test_steps_of_a_run():
    """`open` prefills the prompts and commits a token after each, `run_rounds` generates, `complete` hands over."""
    call = make_call(return_dict_in_generate=True)
    plain = call.model.generate(**padded_prompts([5, 3]), max_new_tokens=6, do_sample=False)
    with engine(), HostedTarget(call.model, call.drafter) as target:
        rows = Lockstep(call, target)
        run, state = rows.open(), rows.state
        assert state.lengths.tolist() == [6, 4] and not state.finished.any()
        assert state.aux_hidden_states.shape[:2] == (2, 4)
        assert state.prompt_logits.argmax(-1).tolist() == plain[:, 5].tolist()
        rows.run_rounds(run)
        assert state.lengths.tolist() == [11, 9] and state.finished.all()
    out = rows.complete(run)
    assert torch.equal(out.sequences, plain)
    assert call.drafter.stats is out.speculation and out.speculation.committed == 10
    assert isinstance(out[OUTPUT_NAME], DynamicCache) and out[OUTPUT_NAME].get_seq_length() == 10


@torch.no_grad()
def test_a_cache_of_the_user_is_filled():
    cache = DynamicCache()
    call = dataclasses.replace(make_call(lengths=(5,), return_dict_in_generate=True), cache=cache)
    with engine():
        out = decode(call)
    assert out[OUTPUT_NAME] is cache and cache.get_seq_length() == out.sequences.shape[1] - 1


def test_a_cache_of_two_caches_has_as_many_rows_as_the_prompts():
    """That of classes whose layers read another sequence, too; whether a call may continue it is asked later."""
    own = DynamicCache()
    own.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    prompts = read_prompts(torch.ones(2, 5, dtype=torch.int64), None, None, EncoderDecoderCache(own, DynamicCache()))
    assert prompts.cached == 3 and prompts.lengths == [5, 5]
