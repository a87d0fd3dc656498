"""Results read some rounds late by the host: outputs and statistics are the same."""

from itertools import product

import pytest
import torch
from case_counts import cases
from lossless import MAX_NEW_TOKENS, PROMPTS, continuations
from oracle import OracleDrafter, random_eagle3
from targets import PAD, padded_prompts, set_policy, tiny_target
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.engine.rounds import RoundOutput, RoundReport
from hf_specdec.kernels.types import VerificationResult


class StopsAfterToken(StoppingCriteria):
    """Stops a row once it generates `token`."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Recorder(BaseStreamer):
    def __init__(self):
        self.steps, self.ended = [], False

    def put(self, value):
        self.steps.append(value.tolist())

    def end(self):
        self.ended = True


def calls(target, drafter, batch, free, **options):
    """What one call gives to whoever looks: output, statistics, and what was streamed."""
    streamer = Recorder() if batch == 1 else None
    out = target.generate(
        **padded_prompts(PROMPTS[batch]),
        **{"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, **options},
        assistant_model=drafter,
        num_assistant_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        streamer=streamer,
    )
    return out.sequences, out.scores, drafter.stats.rows, streamer and (streamer.steps, streamer.ended)


@pytest.mark.parametrize(
    ("lag", "accuracy", "batch"),
    cases(
        every := list(product([1, 3], [0.6, 1.0, None], [1, 3])),
        [one for one in every if (one[0] == one[2]) == (one[1] == 1.0)],
    ),
)
def test_same_output_and_statistics(monkeypatch, batch, accuracy, lag):
    target = tiny_target("llama")
    inputs = padded_prompts(PROMPTS[batch])
    free = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    width = inputs["input_ids"].shape[1]
    generated = free[:, width + 6].tolist()
    ways = {
        "limit": {},
        "end of sequence": {"eos_token_id": generated, "pad_token_id": PAD},
        "criterion": {"stopping_criteria": StoppingCriteriaList([StopsAfterToken(generated[0])])},
        "both": {
            "eos_token_id": generated[-1:],
            "pad_token_id": PAD,
            "stopping_criteria": StoppingCriteriaList([StopsAfterToken(generated[0])]),
        },
        "sampling": {"do_sample": True, "temperature": 1.2},
    }
    for name, options in ways.items():
        results = []
        for rounds_behind in (0, lag):
            set_policy(monkeypatch, "cpu", rounds_ahead=rounds_behind)
            if accuracy is None:
                drafter = random_eagle3(target)
            else:
                drafter = OracleDrafter(target, continuations(inputs, free), PROMPTS[batch], accuracy)
            torch.manual_seed(5)
            results.append(calls(target, drafter, batch, free, **options))
        (now, now_scores, now_rows, now_streamed), (late, late_scores, late_rows, late_streamed) = results
        assert torch.equal(now, late), name
        # A device that is ahead attends over a longer slice of the cache, which changes roundings.
        torch.testing.assert_close(late_scores, now_scores, rtol=1e-4, atol=1e-3)
        assert now_rows == late_rows, name
        assert now_streamed == late_streamed, name


@pytest.mark.parametrize("is_tree", [False, True])
def test_reports_copy_what_is_kept_once(is_tree):
    """Of the rows of the call only, and one tensor for scores and logits that no processor has changed."""
    tokens, counts = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    logits, scores = torch.randn(4, 6, 7), torch.randn(4, 6, 7)
    path = torch.tensor([[0, 2, 5]] * 4)
    walk = (path, torch.zeros(4, 6, dtype=torch.int64)) if is_tree else None
    result, both = VerificationResult(tokens, counts, counts), ("scores", "logits")
    found = RoundReport(RoundOutput(result, (), walk, logits, logits).along_path(), (), both, 3).records
    assert found["scores"] is found["logits"]
    places = path[0] if is_tree else slice(None)
    assert torch.equal(found["logits"], logits[:3, places]) and found["logits"].untyped_storage().nbytes() == (
        4 * found["logits"].numel()
    )
    for kept in (both, both[:1]):
        found = RoundReport(RoundOutput(result, (), walk, scores, logits).along_path(), (), kept, 3).records
        assert tuple(found) == kept and torch.equal(found["scores"], scores[:3, places])
        scores.zero_()  # the next round overwrites it
        assert found["scores"].any()
        scores.normal_()
