"""Log-probabilities of new tokens: those of `output_scores` and `output_logits`, whatever was drafted."""

import copy
from itertools import product

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from oracle import RANDOM_DRAFTERS, copy_of
from targets import PAD, padded_prompts, tiny_target
from transformers import ContinuousBatchingConfig

from hf_specdec import NoDrafter
from hf_specdec.engine import rounds

OPTIONS = {
    "greedy": {"do_sample": False},
    "ends": {"do_sample": False, "eos_token_id": [7, 11, 13, 20, 31], "pad_token_id": PAD},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 12, "seeds": [3, 4, 5]},
    "penalty": {"do_sample": False, "repetition_penalty": 1.4, "stop_strings": None},
    "ngrams": {"do_sample": False, "no_repeat_ngram_size": 1},
}


def of_tokens(steps, tokens):
    """`[B, new]`: log-probabilities of `tokens` `[B, new]` under scores `[B, V]` of each step."""
    rows = [one.float().log_softmax(-1).gather(-1, tokens[:, step, None]) for step, one in enumerate(steps)]
    return torch.cat(rows, dim=1)


@pytest.mark.core_for(kind=["eagle3"], option=["ends"])
@pytest.mark.parametrize(
    ("option", "kind"),
    # Without `--slow` those whose branches no other of them runs.
    cases(
        [
            *product(["ends", "sampled"], ["eagle3", "copy"]),
            *product(["greedy", "penalty", "ngrams"], ["p-eagle", "none"]),
        ],
        [*product(["sampled"], ["eagle3", "copy"]), ("ends", "eagle3"), ("ngrams", "p-eagle"), ("penalty", "none")],
    ),
)
def test_those_of_generate(monkeypatch, option, kind):
    """The bits of `output_scores` in a call that returns these, and the same in captured rounds, as are the scores."""
    target = tiny_target("llama", num_layers=4)  # whose texts have no padding tokens of their own
    makers = {**RANDOM_DRAFTERS, "none": NoDrafter, "copy": lambda target: copy_of(target, noise=0.03)}
    inputs, options = padded_prompts([6, 2, 4]), {**OPTIONS[option], "max_new_tokens": 14}
    options |= {"return_dict_in_generate": True, "return_logprobs": "both", "num_assistant_tokens": 3}
    drafter = makers[kind](target)
    out = target.generate(**inputs, assistant_model=drafter, output_scores=True, output_logits=True, **options)
    tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
    assert out.logprobs.shape == out.raw_logprobs.shape == tokens.shape and out.logprobs.dtype == torch.float32
    ended = (tokens == PAD).cummax(dim=1).values if option == "ends" else torch.zeros_like(tokens, dtype=torch.bool)
    for found, steps in ((out.logprobs, out.scores), (out.raw_logprobs, out.logits)):
        assert torch.equal(found, of_tokens(steps, tokens).masked_fill(ended, 0.0))
    assert option != "ends" or ended.any()
    assert torch.equal(out.logprobs, out.raw_logprobs) == (option in ("greedy", "ends"))
    replay_on_cpu(monkeypatch)
    for _ in range(2):
        again = target.generate(**inputs, assistant_model=drafter, **options)
        assert drafter.stats.execution.startswith("captured")
        assert torch.equal(again.sequences, out.sequences)
        torch.testing.assert_close(again.logprobs, out.logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again.raw_logprobs, out.raw_logprobs, rtol=1e-5, atol=1e-5)
    kept = [
        target.generate(**inputs, assistant_model=drafter, output_scores=True, output_logits=True, **options)
        for _ in range(2)
    ]
    assert drafter.stats.execution.startswith("captured") and drafter.stats.captures == 0
    for one in kept:
        for found, right in ((one.scores, out.scores), (one.logits, out.logits)):
            torch.testing.assert_close(torch.stack(found), torch.stack(right), rtol=1e-5, atol=1e-5)
    one = target.generate(**inputs, assistant_model=drafter, **{**options, "return_logprobs": "raw"})
    assert one.logprobs is None and torch.equal(one.raw_logprobs, again.raw_logprobs)
    assert target.generate(**inputs, assistant_model=drafter, **{**options, "return_logprobs": None}).logprobs is None


def processed(target, prompt, new, temperature):
    logits = target(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0].tolist()


@pytest.mark.core
@pytest.mark.parametrize("drafts", [0, 3])
@torch.no_grad()
def test_those_of_requests(drafts):
    """Of bulk generation and of a manager, on fewer rows than requests; none where they are not asked for."""
    target = copy.deepcopy(tiny_target("llama")).double()
    drafter = copy_of(target, noise=0.03) if drafts else NoDrafter(target)
    prompts = [[5, 6, 7], [9] * 5, [4], [6, 6], [5, 6, 8, 9, 1]]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 9, "eos_token_id": -1}
    config = ContinuousBatchingConfig(max_requests_per_batch=2, return_logprobs=True)
    found = target.generate_batch(
        prompts, assistant_model=drafter, continuous_batching_config=config, num_assistant_tokens=drafts, **options
    )
    for prompt, one in zip(prompts, found.values(), strict=True):
        expected = processed(target, prompt, one.generated_tokens, 0.8)
        assert len(one.generated_tokens) == 9 and one.logprobs == pytest.approx(expected, abs=2e-5)
    with target.continuous_batching_context_manager(
        continuous_batching_config=config, assistant_model=drafter, **options
    ) as manager:
        results = [manager.get_result(manager.add_request(one, seed=7), timeout=120) for one in prompts]
    for prompt, one in zip(prompts, results, strict=True):
        assert one.logprobs == pytest.approx(processed(target, prompt, one.generated_tokens, 0.8), abs=2e-5)
    plain = target.generate_batch(prompts[:1], assistant_model=drafter, **options)["req_0"]
    assert plain.logprobs == [] and plain.generated_tokens


@torch.no_grad()
def test_rounds_compute_them_for_requests_that_ask(monkeypatch):
    """Beside requests that do not; a manager's requests ask one by one, for either kind."""
    computed = []
    count = rounds.token_logprobs
    monkeypatch.setattr(rounds, "token_logprobs", lambda *args: computed.append(1) or count(*args))
    target, prompt = tiny_target("llama"), [5, 6, 7]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 5, "eos_token_id": -1}
    with target.continuous_batching_context_manager(
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=4),
        assistant_model=NoDrafter(target),
        **options,
    ) as manager:
        assert manager.get_result(manager.add_request(prompt, seed=1), timeout=120).logprobs == [] == computed
        with manager.pause():
            names = {one: manager.add_request(prompt, seed=2, return_logprobs=one) for one in (None, "raw", True)}
        found = {one: manager.get_result(name, timeout=120) for one, name in names.items()}
        assert len(computed) == 2 * 5
        with pytest.raises(ValueError, match="return_logprobs is 'all'; expected True"):
            manager.add_request(prompt, return_logprobs="all")
        assert manager.get_result(manager.add_request(prompt, seed=1), timeout=120).logprobs == []
        one = manager.get_result(manager.add_request(prompt, seed=2, return_logprobs=1), timeout=120)
        assert one.error is None and one.logprobs == pytest.approx(found[True].logprobs, abs=2e-5)
    assert len(computed) == 3 * 5 and found[None].logprobs == []
    for kind, temperature in (("raw", 1.0), (True, 0.8)):
        expected = processed(target, prompt, found[kind].generated_tokens, temperature)
        assert found[kind].logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_logprobs": "all", "return_dict_in_generate": True}, '"processed", "raw", "both" or None'),
        ({"return_logprobs": ["raw"], "return_dict_in_generate": True}, '"processed", "raw", "both" or None'),
        ({"return_logprobs": "raw"}, "expected return_dict_in_generate=True"),
    ],
)
def test_wrong_requests(options, message):
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=message):
        target.generate(**padded_prompts([3]), max_new_tokens=3, assistant_model=NoDrafter(target), **options)
    drafter = NoDrafter(target).configure(engine="stock")
    with pytest.raises(ValueError, match=r"runs on the stock engine: .* output_scores=True"):
        target.generate(
            **padded_prompts([3]),
            max_new_tokens=3,
            assistant_model=drafter,
            return_logprobs="raw",
            return_dict_in_generate=True,
        )
