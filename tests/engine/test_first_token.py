"""The first new token comes from the pass over the prompt: it is there before any round, and of none."""

import itertools

import pytest
import torch
from bulk import check_rows
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, continuations, greedy
from oracle import RANDOM_DRAFTERS, OracleDrafter, copy_of, random_eagle3
from targets import PAD, padded_prompts, tiny_target
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_specdec.drafters.none import NoDrafter
from hf_specdec.engine import lease, session_prefill
from hf_specdec.engine.target import Target
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_equivalent

K = 3


@pytest.fixture
def passes(monkeypatch):
    """Columns of the target's forward passes so far; what checks the class of targets has run before."""
    assert why_not_equivalent(tiny_target("llama"), "static") is None
    seen, forward = [], Target.__call__

    def noting(self, state, tokens, *args):
        seen.append(tokens.shape[1])
        return forward(self, state, tokens, *args)

    monkeypatch.setattr(Target, "__call__", noting)
    return seen


def oracle(target, inputs, plain, lengths):
    return OracleDrafter(target, continuations(inputs, plain), lengths, accuracy=1.0)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_pass_over_the_prompts_and_as_few_rounds_as_there_can_be(passes, batch, packs, monkeypatch):
    target, lengths = tiny_target("llama"), PROMPTS[batch]
    inputs = padded_prompts(lengths, seed=batch)
    monkeypatch.setattr(OracleDrafter, "packs_prompts", packs)
    for count in (1, 2, K + 2, K + 3):
        plain = greedy(target, inputs, max_new_tokens=count)
        passes.clear()
        drafter = oracle(target, inputs, plain, lengths)
        assert torch.equal(greedy(target, inputs, drafter, K, max_new_tokens=count), plain)
        num_rounds = -(-(count - 1) // (K + 1))
        prompts = sum(lengths) if packs and batch > 1 else max(lengths)
        assert passes == [prompts] + [min(K, count) + 1] * num_rounds
        assert drafter.stats.num_rounds == num_rounds and drafter.stats.committed == batch * (count - 1)


def test_a_call_of_one_token_captures_its_prefill_and_runs_no_round(monkeypatch):
    capture, target = replay_on_cpu(monkeypatch), tiny_target("llama")
    inputs, drafter = padded_prompts([5, 9]), random_eagle3(target)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True}
    plain, out = greedy(target, inputs, **options), greedy(target, inputs, drafter, K, **options)
    ((_, session),) = drafter.sessions._idle
    assert torch.equal(out.sequences, plain.sequences)
    assert capture.count == 1 and len(session.rounds) == 0
    assert out.speculation.num_rounds == 0 and out.speculation.execution == "no rounds" and str(out.speculation)
    assert out[OUTPUT_NAME].get_seq_length() == plain[OUTPUT_NAME].get_seq_length()


class Stream(BaseStreamer):
    """Notes how many passes the target has run when a token comes."""

    def __init__(self, passes):
        self.passes, self.at = passes, []

    def put(self, value):
        self.at.append(len(self.passes))

    def end(self):
        pass


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_streamer_has_the_first_token_before_the_first_round(passes, is_captured, monkeypatch):
    target, inputs = tiny_target("llama"), padded_prompts([6])
    drafter = copy_of(target)
    if is_captured:
        replay_on_cpu(monkeypatch)
        greedy(target, inputs, drafter, K)
        run_round = lease.CapturedRound.__call__
        monkeypatch.setattr(lease.CapturedRound, "__call__", lambda *args: passes.append("replay") or run_round(*args))
        passes.clear()
    stream = Stream(passes)
    greedy(target, inputs, drafter, K, streamer=stream)
    prompt, first, second, *_ = stream.at
    rounds_before = passes[:first].count("replay") if is_captured else first - 1
    assert prompt == 0 and rounds_before == 0 and second > first


@pytest.mark.parametrize("kind", cases([*RANDOM_DRAFTERS, "none"], ["eagle3", "mtp", "none"]))
def test_an_end_of_sequence_or_a_criterion_after_the_first_token(passes, kind):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    first = greedy(target, inputs, max_new_tokens=1)[:, -1].tolist()
    drafter = RANDOM_DRAFTERS.get(kind, NoDrafter)(target)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    for ends in (first, first[:1]):
        wanted = {**options, "eos_token_id": ends, "pad_token_id": PAD, "max_new_tokens": 6}
        plain = greedy(target, inputs, **wanted)
        passes.clear()
        out = greedy(target, inputs, drafter, K, **wanted)
        assert torch.equal(out.sequences, plain.sequences)
        for ours, theirs in zip(out.scores, plain.scores, strict=True):
            running = theirs.isfinite().all(dim=1) & ours.any(dim=1)
            torch.testing.assert_close(ours[running], theirs[running], rtol=1e-4, atol=1e-4)
        assert len(out.hidden_states) == len(plain.hidden_states)
        assert (len(passes) == 1) == (ends is first)
        assert drafter.stats.rows[0].rounds == 0


def test_a_cache_that_lacks_the_last_token_only(passes, monkeypatch):
    kept, finish = [], session_prefill.finish_prefill

    def noting(state, prompts, rows):
        kept.append(prompts.hidden_states)
        finish(state, prompts, rows)

    monkeypatch.setattr(session_prefill, "finish_prefill", noting)
    target, inputs = tiny_target("llama"), padded_prompts([7, 7])
    plain = greedy(target, inputs, max_new_tokens=5)
    for kind in ("eagle3", "draft-model", "mtp", "pard2"):
        cache, drafter = DynamicCache(config=target.config), RANDOM_DRAFTERS[kind](target)
        target(input_ids=inputs["input_ids"][:, :-1], **{OUTPUT_NAME: cache})
        passes.clear()
        out = greedy(target, inputs, drafter, K, max_new_tokens=5, **{OUTPUT_NAME: cache})
        # Drafters that read hidden states get those of the cached tokens, too: the target runs these once more.
        is_run_again = kind != "draft-model"
        assert torch.equal(out, plain) and len(passes) == is_run_again + 1 + drafter.stats.num_rounds
        assert passes[is_run_again] <= 2
        if kept[-1] is not None:
            assert kept[-1].any(dim=-1).all()


def test_the_first_token_drawn_with_a_seed_does_not_depend_on_drafts():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 1, "seeds": [3, 4, 5]}
    drawn = [
        target.generate(**inputs, **options, assistant_model=drafter, num_assistant_tokens=count).tolist()
        for drafter, count in itertools.product((random_eagle3(target), copy_of(target)), (1, 4))
    ]
    assert drawn == [target.generate(**inputs, **options, assistant_model=NoDrafter(target)).tolist()] * 4
    others = target.generate(**inputs, **{**options, "seeds": [6, 7, 8]}, assistant_model=NoDrafter(target))
    assert others.tolist() != drawn[0]


def test_targets_that_compute_all_logits(monkeypatch):
    """Classes whose `forward` has no `logits_to_keep` ignore it, and prompts are packed all the same."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    plain, forward = greedy(target, inputs), target.forward
    drafter = copy_of(target)
    monkeypatch.setattr(
        target, "forward", lambda logits_to_keep_=None, **kwargs: forward(**{**kwargs, "logits_to_keep": 0})
    )
    assert not target._supports_logits_to_keep()
    assert torch.equal(greedy(target, inputs, drafter, K), plain)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_requests_of_one_token(kind):
    """In continuous batching, too, prompts packed and in groups; requests enter rows that others have left."""
    target = tiny_target("llama")
    prompts = [row[row != PAD].tolist() for row in padded_prompts([4, 9, 2, 7, 5, 3], seed=2)["input_ids"]]
    for count in (1, 2):
        drafter = RANDOM_DRAFTERS[kind](target)
        check_rows(target, drafter, prompts, new=count)
        assert [row.committed for row in drafter.stats.rows] == [count - 1] * len(prompts)
