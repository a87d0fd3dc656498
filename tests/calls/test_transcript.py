"""Arguments of stopping criteria, at a cost per token that does not grow with the text."""

import time

import pytest
import torch
from lossless import PROMPTS, check_greedy, continuations
from oracle import OracleDrafter
from targets import PAD, padded_prompts, tiny_target
from torch.overrides import TorchFunctionMode
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import MaxTimeCriteria
from word_tokenizer import word_tokenizer

from hf_specdec.calls.request import Request
from hf_specdec.calls.transcript import Transcript


class Copies(TorchFunctionMode):
    """Context that counts the elements of tensors which somebody copies, moves or joins."""

    COPYING = (
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.clone,
        torch.Tensor.contiguous,
        torch.Tensor.copy_,
        torch.Tensor.__setitem__,
        torch.cat,
        torch.stack,
        torch.nn.functional.pad,
    )

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.COPYING:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[-1]]
            tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            self.count += sum(tensor.numel() for tensor in tensors or args[:1])
        return function(*args, **(kwargs or {}))


class Looks(StoppingCriteria):
    """Remembers what it is shown, and stops nothing."""

    def __init__(self, keeps=True):
        self.keeps, self.shown = keeps, []

    def __call__(self, input_ids, scores, **kwargs):
        if self.keeps:
            self.shown.append((input_ids.clone(), input_ids.device, None if scores is None else len(scores)))
        return torch.zeros(len(input_ids), dtype=torch.bool)


RULES = {
    "max_time": lambda: MaxTimeCriteria(1e6),
    "stop_strings": lambda: StopStringCriteria(word_tokenizer(), ["nowhere to be found"]),
    "custom": lambda: Looks(keeps=False),
}


def copied(rule, length, **options):
    """Elements copied while a transcript of `length` steps is written, eight tokens at a time."""
    prompts = torch.randint(2, 90, (2, 5))
    transcript = Transcript(prompts, StoppingCriteriaList([rule]), None, length, **options)
    tokens = torch.randint(2, 90, (2, 8)).tolist()
    scores = torch.zeros(2, 8, 3)
    with Copies() as copies:
        for _ in range(length // 8):
            transcript.add(tokens, [8, 8], scores=scores)
    assert transcript.steps == length
    return copies.count


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kept", [(), ("scores",)])
def test_criteria_inputs_are_copied_once(name, kept):
    few, many = (copied(RULES[name](), length, kept=kept) for length in (256, 2048))
    assert many <= 8.02 * few, f"{few} elements for 256 tokens, {many} for 2048"


def test_tokens_on_another_device_are_copied_column_by_column():
    """As on a GPU, played by a transcript whose memory for criteria is not the host's."""
    rule = Looks()
    transcript = Transcript(torch.tensor([[5, 6], [7, 8]]), StoppingCriteriaList([rule]), None, 4)
    transcript._shown = transcript._shown.clone()
    transcript.add([[11, 12, 13], [21, 22, 23]], [3, 1])
    transcript.add([[14, 15, 16], [22, 23, 24]], [1, 3])
    expected = torch.tensor([[5, 6, 11, 12, 13, 14], [7, 8, 21, 22, 23, 24]])
    assert torch.equal(transcript.sequences, expected)
    assert len(rule.shown) == 4
    assert all(torch.equal(text, expected[:, : 3 + step]) for step, (text, *_) in enumerate(rule.shown))


@pytest.mark.core_for(with_scores=[True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_scores", [False, True])
def test_criteria_get_the_arguments_of_plain_generate(batch, with_scores):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[batch], seed=batch)
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": with_scores}

    def shown(**more):
        rule = Looks()
        out = target.generate(**inputs, **options, **more, stopping_criteria=StoppingCriteriaList([rule]))
        return rule.shown, out.sequences

    plain, text = shown()
    drafter = OracleDrafter(target, continuations(inputs, text), PROMPTS[batch], accuracy=0.6)
    for engine in ("static", "stock") if batch > 1 else ("static",):
        ours, _ = shown(assistant_model=drafter.configure(engine=engine), num_assistant_tokens=4)
        assert len(ours) == len(plain) == 12
        for (one, *about), (other, *about_other) in zip(ours, plain, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype and about == about_other


class SaysColumn(StoppingCriteria):
    """Says it in a column, the form that transformers documents."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1:] == self.token


@pytest.mark.core
def test_criterion_results_in_a_column():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[1], seed=1)
    free = target.generate(**inputs, do_sample=False, max_new_tokens=16)
    stops = {"stopping_criteria": StoppingCriteriaList([SaysColumn(int(free[0, -5]))]), "pad_token_id": PAD}
    generated = check_greedy(target, inputs, dict, lambda: stops)
    assert inputs["input_ids"].shape[1] + 1 < generated.shape[1] < free.shape[1]


def test_time_is_linear_in_the_length():
    """Eight times as many tokens take about eight times as long, with all kinds of criteria at once."""
    rules = StoppingCriteriaList(make() for make in RULES.values())
    seconds = {}
    for length in (500, 4000):
        transcript = Transcript(torch.randint(2, 90, (4, 9)), rules, None, length)
        tokens = torch.randint(2, 90, (4, 10)).tolist()
        start = time.perf_counter()
        for _ in range(length // 10):
            transcript.add(tokens, [10] * 4)
        seconds[length] = time.perf_counter() - start
    assert seconds[4000] < 16 * seconds[500], seconds


def test_criteria_of_a_request_get_its_text_at_the_same_cost_for_every_token():
    """The text is written token by token to memory that has room for all of it."""
    texts, places = [], set()

    def rule(input_ids, scores):
        texts.append(input_ids.tolist())
        places.add(input_ids.data_ptr())
        return torch.tensor([input_ids.shape[1] == 6])

    request = Request(0, torch.tensor([7, 8]), remaining=9, criteria=StoppingCriteriaList([rule]))
    assert not request.add([1, 2], now=0.0) and request.add([3, 4, 5], now=0.0)
    assert texts == [[[7, 8, 1]], [[7, 8, 1, 2]], [[7, 8, 1, 2, 3]], [[7, 8, 1, 2, 3, 4]]]
    assert len(places) == 1 and request.tokens == [1, 2, 3, 4]
