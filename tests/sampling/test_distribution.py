"""Sampling with a drafter has exactly the target's distribution.

The first part enumerates: random numbers are replaced by chosen ones, so that every outcome of a round and its
probability come out of `verify_sampling` itself, and nothing is drawn. The second part draws, through the whole engine.
"""

import itertools
import math

import pytest
import torch
from assistants import assistant_drafter, gemma4_target, new_assistant
from case_counts import cases, num_cases
from chi_square import Cells, p_value
from oracle import RANDOM_DRAFTERS, random_draft_model
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, set_seed
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_specdec import Drafter, DrafterConfig, ops
from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.kernels import random_reference
from hf_specdec.kernels.types import RandomStream
from hf_specdec.ops import draw_draft, verify_block, verify_sampling
from hf_specdec.sampling.logits import RowTemperature
from hf_specdec.sampling.processors import BlockProcessor
from hf_specdec.state import Shape

SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-24


class ChosenNumbers:
    """Replaces the references of `uniform`, by given numbers, and `exponential_sample`, whose weights it keeps."""

    def __init__(self, monkeypatch):
        self.numbers = torch.empty(0)
        self.weights = torch.empty(0)
        monkeypatch.setattr(random_reference, "uniform", self.uniform)
        monkeypatch.setattr(random_reference, "exponential_sample", self.exponential_sample)

    def uniform(self, seeds, positions, tokens, stream, steps):
        assert stream == RandomStream.ACCEPT
        shape = torch.broadcast_shapes(seeds.shape, positions.shape, tokens.shape, steps.shape)
        assert shape == self.numbers.shape
        self.accept_positions, self.accept_steps = positions.expand(shape), steps.expand(shape)
        return self.numbers

    def exponential_sample(self, weights, seeds, positions, stream, steps=0):
        assert stream == RandomStream.TARGET and steps == 0
        assert weights.isfinite().all() and (weights >= 0).all() and (weights.sum(dim=1) > 0).all()
        self.weights, self.sample_positions = weights, positions
        return weights.argmax(dim=1)


def judge(chosen, numbers, scores, drafts, draft_probs, draft_ids=None, verification="token"):
    """`[N]`: how many of the drafts `[N, K]` are accepted with the random numbers `[N, K]`."""
    num, width = drafts.shape
    seeds, lengths = torch.zeros(num, dtype=torch.int64), torch.full((num,), 7)
    chosen.numbers = numbers
    arguments = scores, drafts, draft_probs, draft_ids, seeds, lengths
    if verification == "block":
        result = verify_block(*arguments, torch.full((num,), width + 1))
    else:
        result = verify_sampling(*arguments)
    assert torch.equal(result.committed, result.accepted + 1)
    # Every number belongs to its round and its draft, so none is used twice.
    assert torch.equal(chosen.accept_positions, lengths[:, None].expand(num, width))
    assert torch.equal(chosen.accept_steps, torch.arange(width).expand(num, -1))
    assert torch.equal(chosen.sample_positions, lengths + result.accepted)
    kept = torch.arange(width) < result.accepted[:, None]
    assert torch.equal(result.tokens[:, :width][kept], drafts[kept])
    return result.accepted


def bisect(num, is_below):
    """`[num]`: up to where `is_below` holds of numbers in (0, 1)."""
    low, high = torch.zeros(num), torch.ones(num)
    for _ in range(26):
        middle = ((low + high) / 2).clamp(SMALLEST, LARGEST)
        holds = is_below(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return (low + high) / 2


def outcomes(chosen, scores, drafts, draft_probs, draft_ids=None):
    """All outcomes of a round for `[N, K]` drafts, from the code under test, integrated over the random numbers.

    Returns:
        accept: `[N, K]` probability that draft i is accepted if those before it were: the length of the interval of
            numbers for which it is, found by bisection.
        following: `[N, K + 1, V]` law of the token after i accepted drafts; zeros where that cannot happen.
    """
    num, width = drafts.shape

    def accepted(numbers):
        return judge(chosen, numbers, scores, drafts, draft_probs, draft_ids)

    def numbers_at(position, number):
        numbers = torch.full((num, width), SMALLEST)
        numbers[:, position] = number
        return numbers

    accept = torch.zeros(num, width, dtype=torch.float64)
    following = torch.zeros(num, width + 1, scores.shape[-1], dtype=torch.float64)
    reached = torch.ones(num, dtype=torch.bool)
    for position in range(width):
        at = bisect(num, lambda number, position=position: accepted(numbers_at(position, number)) > position)
        accept[:, position] = torch.where(reached, at.double(), 0.0)
        rejects = accepted(numbers_at(position, LARGEST)) == position
        law = chosen.weights.double()
        following[rejects & reached, position] = (law / law.sum(dim=1, keepdim=True))[rejects & reached]
        reached &= accepted(torch.full((num, width), SMALLEST)) > position
    all_accepted = accepted(torch.full((num, width), SMALLEST)) == width
    law = chosen.weights.double()
    following[all_accepted, width] = (law / law.sum(dim=1, keepdim=True))[all_accepted]
    return accept, following


def block_outcomes(chosen, scores, drafts, draft_probs, draft_ids=None):
    """As `outcomes`, of block verification, where the largest number of drafts that holds is accepted."""
    num, width = drafts.shape
    following = torch.zeros(num, width + 1, scores.shape[-1], dtype=torch.float64)
    shares, left = torch.zeros(num, width + 1, dtype=torch.float64), torch.ones(num, dtype=torch.float64)

    def accepted(held, number):
        numbers = torch.full((num, width), LARGEST)
        if held:
            numbers[:, held - 1] = number
        return judge(chosen, numbers, scores, drafts, draft_probs, draft_ids, "block")

    for held in range(width, -1, -1):
        at = bisect(num, lambda number, held=held: accepted(held, number) >= held) if held else torch.ones(num)
        # What bisection cannot tell from 0 or 1 is that.
        at = at.double().where(at > 1e-7, 0.0).where(at < 1 - 1e-6, 1.0)
        shares[:, held], left = left * at, left * (1 - at)
        happens = accepted(held, SMALLEST) == held
        law = chosen.weights.double()
        following[happens, held] = (law / law.sum(dim=1, keepdim=True))[happens]
        assert (happens | (shares[:, held] == 0)).all()
    reaching = shares.flip(1).cumsum(1).flip(1)
    accept = torch.where(reaching[:, :-1] > 0, reaching[:, 1:] / reaching[:, :-1], 0.0)
    return accept, following


class Silent(Drafter):
    """Keeps no state and proposes nothing."""


class Text:
    """Random logits for every text of up to `width + 1` tokens after a prompt, and what processors make of them."""

    def __init__(self, vocabulary, width, processors, seed):
        self.vocabulary, self.width = vocabulary, width
        self.processors = LogitsProcessorList(processors)
        self.prompt = torch.tensor([[1, 0, 1]])
        generator = torch.Generator().manual_seed(seed)
        self._logits = {
            text: 2 * torch.randn(vocabulary, generator=generator)
            for length in range(width + 1)
            for text in itertools.product(range(vocabulary), repeat=length)
        }
        self._laws = {}

    def law(self, text):
        """What plain sampling draws the next token from."""
        if text not in self._laws:
            shown = torch.cat([self.prompt, torch.tensor([text], dtype=torch.int64)], dim=1)
            scores = self.processors(shown, self._logits[text][None].clone())
            self._laws[text] = scores.double().softmax(dim=-1)[0].tolist()
        return self._laws[text]

    def scores(self, drafts):
        """`[N, K + 1, V]` float32: what the engine's own processing gives for blocks with these drafts `[N, K]`."""
        num, width = drafts.shape
        shape = Shape(num, width + 5, num_draft_tokens=width, is_sampling=True, draft_probs=False, num_ends=0)
        drafter = Silent(DrafterConfig(vocab_size=self.vocabulary))
        state = drafter.new_state(shape, layers=attention_layers(1), device=torch.device("cpu"))
        shared = [one.temperature for one in self.processors if isinstance(one, TemperatureLogitsWarper)]
        temperature = shared[0] if shared else 1.0
        factors = [one.temperatures for one in self.processors if isinstance(one, RowTemperature)]
        factors = factors[0].expand(num) if factors else None
        state.set_temperature(temperature)
        state.admit(range(num), [self.prompt[0]] * num, [width + 1] * num, [0] * num)
        if factors is not None:
            state.row_temperatures.copy_(factors)
        block, _ = state.block(drafts)
        logits = torch.stack(
            [torch.stack([self._logits[tuple(row[:step])] for step in range(width + 1)]) for row in drafts.tolist()]
        )
        process = BlockProcessor(self.processors, self.prompt.expand(num, -1), [0] * num, temperature)
        if process.row_rules:
            state.set_row_rules(range(num), process.row_rules)
        if process.row_sampling is not None:
            state.set_row_sampling(range(num), [process.row_sampling] * num)
        return process(logits, block, state)

    def law_of_continuations(self):
        """`[V] * (K + 1)` float64: the target's law of the first K + 1 tokens."""
        return self.continue_with({(): 1.0})

    def continue_with(self, prefixes):
        """The law of K + 1 tokens that begin as `prefixes`, texts with probabilities, and go on as the target does."""
        law = torch.zeros([self.vocabulary] * (self.width + 1), dtype=torch.float64)
        for text, probability in prefixes.items():
            for rest in itertools.product(range(self.vocabulary), repeat=self.width + 1 - len(text)):
                whole = text + rest
                going_on = [self.law(whole[:step])[whole[step]] for step in range(len(text), self.width + 1)]
                law[whole] += probability * math.prod(going_on)
        return law


def committed_law(drafts, draft_law, accept, following):
    """Law of the committed texts: a dict, given drafts `[N, K]` with probabilities `[N]` and `outcomes`."""
    prefixes = {}
    for row, text in enumerate(map(tuple, drafts.tolist())):
        reaching = draft_law[row]
        for step in range(len(text) + 1):
            stays = accept[row, step] if step < len(text) else 0.0
            for token, share in enumerate(following[row, step].tolist()):
                if share > 0:
                    whole = text[:step] + (token,)
                    prefixes[whole] = prefixes.get(whole, 0.0) + float(reaching * (1 - stays) * share)
            reaching = reaching * stays
    return prefixes


PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "hot_top_k": [TemperatureLogitsWarper(1.5), TopKLogitsWarper(2)],
    "top_p": [TopPLogitsWarper(0.7)],
    "min_p": [MinPLogitsWarper(0.2)],
    "typical": [TypicalLogitsWarper(0.6)],
    "suppress": [SuppressTokensLogitsProcessor([1])],
    "repetition_penalty": [RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(1.2)],
    "no_repeat_ngram": [NoRepeatNGramLogitsProcessor(3)],
    "rows": [RowTemperature([1.4]), MinPLogitsWarper(0.1)],
}


def test_temperature_of_the_state_equals_the_warpers_bit_for_bit():
    drafts = torch.zeros(1, 3, dtype=torch.int64)
    for temperature in torch.linspace(0.05, 2.5, 50).tolist():
        warper = TemperatureLogitsWarper(temperature)
        text, plain = (Text(4, 3, processors, seed=0) for processors in ([warper], []))
        assert torch.equal(text.scores(drafts), warper(None, plain.scores(drafts).float()))


@pytest.mark.parametrize(
    ("vocabulary", "width", "processors"),
    cases(
        every := [(*sizes, name) for sizes in ((3, 1), (3, 3), (5, 2)) for name in PROCESSORS],
        [one for one in every if one[1] == 3 or one[2] in ("none", "hot_top_k", "repetition_penalty")],
    ),
)
def test_distribution_with_point_mass_drafts(vocabulary, width, processors, monkeypatch):
    """For every deterministic draft of K tokens."""
    text = Text(vocabulary, width, PROCESSORS[processors], seed=width)
    drafts = torch.tensor(list(itertools.product(range(vocabulary), repeat=width)))
    accept, following = outcomes(ChosenNumbers(monkeypatch), text.scores(drafts), drafts, None)
    expected = text.law_of_continuations()
    assert torch.allclose(expected.sum(), torch.ones((), dtype=torch.float64))
    for row in range(len(drafts)):
        prefixes = committed_law(drafts[row : row + 1], torch.ones(1), accept[row : row + 1], following[row : row + 1])
        torch.testing.assert_close(text.continue_with(prefixes), expected, rtol=0, atol=1e-6)


def draft_laws(kind, text, drafts, seed=0):
    """`[N, K, V]` float32: the law q of each draft given those before it; of `parallel` ones given their number."""
    generator = torch.Generator().manual_seed(seed)
    tables = {}

    def law(prefix):
        if kind == "parallel":
            prefix = len(prefix)
        if prefix in tables:
            return tables[prefix]
        if kind == "same":
            table = text.scores(torch.tensor([prefix + (0,) * (text.width - len(prefix))])).softmax(dim=-1)
            table = table[0, len(prefix)]
        else:
            logits = 2 * torch.randn(text.vocabulary, generator=generator)
            if kind in ("narrow", "padded"):  # a draft vocabulary without the first token, or without the last
                logits[0 if kind == "narrow" else -1] = float("-inf")
            if kind == "certain":
                logits = logits.log_softmax(-1).where(logits == logits.max(), torch.tensor(float("-inf")))
            table = logits.softmax(dim=-1)
        tables[prefix] = table
        return table

    return torch.stack(
        [torch.stack([law(tuple(row[:step])) for step in range(drafts.shape[1])]) for row in drafts.tolist()]
    )


KINDS = ["random", "same", "narrow", "padded", "certain", "parallel"]
MODES = {"token": outcomes, "block": block_outcomes}


def in_draft_vocabulary(kind, laws):
    """`[N, K, V_d]` and where tokens are in the draft vocabulary, of laws `[N, K, V]` that leave some tokens out."""
    if kind == "narrow":
        return laws[..., 1:], torch.arange(laws.shape[-1]) - 1
    if kind == "padded":
        return laws[..., :-1], None
    return laws, None


# Rules see scores and laws only: every processor is tried with drafts of one kind, every kind with one processor.
SOFT_DRAFTS = cases(
    every := list(itertools.product([(3, 3), (5, 1)], MODES, KINDS, PROCESSORS)),
    [
        (sizes, mode, kind, name)
        for sizes, mode, kind, name in every
        if (sizes == (3, 3) and (name == "no_repeat_ngram" or kind == "random"))
        or (name == "hot_top_k" and kind in ("random", "narrow"))
    ],
)


@pytest.mark.parametrize(("sizes", "mode", "kind", "processors"), SOFT_DRAFTS)
def test_distribution_with_soft_drafts(sizes, mode, kind, processors, monkeypatch):
    vocabulary, width = sizes
    text = Text(vocabulary, width, PROCESSORS[processors], seed=width)
    drafts = torch.tensor(list(itertools.product(range(vocabulary), repeat=width)))
    laws = draft_laws(kind, text, drafts)
    draft_law = laws.double().gather(2, drafts[:, :, None]).squeeze(2).prod(dim=1)
    assert torch.allclose(draft_law.sum(), torch.ones((), dtype=torch.float64))
    arguments = text.scores(drafts), drafts, *in_draft_vocabulary(kind, laws)
    accept, following = MODES[mode](ChosenNumbers(monkeypatch), *arguments)
    if kind == "same":
        assert (accept[draft_law > 0] > 1 - 1e-6).all()
    prefixes = committed_law(drafts, draft_law, accept, following)
    torch.testing.assert_close(text.continue_with(prefixes), text.law_of_continuations(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("processors", cases(list(PROCESSORS), ["hot_top_k", "no_repeat_ngram"]))
def test_block_verification_never_accepts_fewer(processors, monkeypatch):
    """In expectation over the drafts; and more, where drafts of several tokens differ from the target's."""
    chosen, gains = ChosenNumbers(monkeypatch), {}
    drafts = torch.tensor(list(itertools.product(range(3), repeat=3)))
    for kind in KINDS:
        text = Text(3, 3, PROCESSORS[processors], seed=5)
        laws = draft_laws(kind, text, drafts, seed=1)
        draft_law = laws.double().gather(2, drafts[:, :, None]).squeeze(2).prod(dim=1)
        arguments = text.scores(drafts), drafts, *in_draft_vocabulary(kind, laws)
        token, block = (
            float((draft_law * rule(chosen, *arguments)[0].cumprod(dim=1).sum(dim=1)).sum()) for rule in MODES.values()
        )
        gains[kind] = block - token
    assert min(gains.values()) > -1e-5
    assert max(gains.values()) > 1e-3, "both rules are the same here, so nothing was shown"


def test_enumeration_detects_a_wrong_acceptance_rule(monkeypatch):
    """Argmax drafts judged by soft draft probabilities give another law; so the tests above can fail."""
    text = Text(3, 2, [], seed=0)
    drafts = torch.tensor(list(itertools.product(range(3), repeat=2)))
    laws = draft_laws("random", text, drafts)
    first = laws[0, 0].argmax().item()
    row = next(
        index for index, (one, two) in enumerate(drafts.tolist()) if one == first and two == laws[index, 1].argmax()
    )
    rows = slice(row, row + 1)
    accept, following = outcomes(ChosenNumbers(monkeypatch), text.scores(drafts[rows]), drafts[rows], laws[rows])
    law = text.continue_with(committed_law(drafts[rows], torch.ones(1), accept, following))
    assert (law - text.law_of_continuations()).abs().max() > 1e-2


@pytest.mark.parametrize("is_soft", [False, True])
def test_impossible_token_is_never_accepted(is_soft, monkeypatch):
    chosen = ChosenNumbers(monkeypatch)
    scores = torch.tensor([[[0.3, float("-inf"), 0.1], [0.0, 1.0, 2.0]]])
    probs = torch.tensor([[[0.0, 1.0, 0.0]]]) if is_soft else None
    for number in (0.0, SMALLEST, LARGEST):
        chosen.numbers = torch.full((1, 1), number)
        result = verify_sampling(scores, torch.tensor([[1]]), probs, None, torch.zeros(1).long(), torch.ones(1).long())
        assert result.accepted.item() == 0 and result.committed.item() == 1
        assert chosen.weights[0, 1] == 0
        torch.testing.assert_close(chosen.weights, scores[:, 0].softmax(-1))


def test_empty_residual_falls_back_to_the_target(monkeypatch):
    """Where p and q are equal max(p - q, 0) sums to 0; rounding may still have rejected the draft."""
    chosen = ChosenNumbers(monkeypatch)
    scores = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0))
    probs = scores[:, :1].softmax(dim=-1)
    chosen.numbers = torch.ones(1, 1)
    result = verify_sampling(scores, torch.tensor([[2]]), probs, None, torch.zeros(1).long(), torch.ones(1).long())
    assert result.accepted.item() == 0
    assert torch.equal(chosen.weights, probs[:, 0])


def test_draft_is_drawn_from_the_reported_distribution(monkeypatch):
    shown = {}

    def exponential_sample(weights, seeds, positions, stream, steps):
        shown.update(weights=weights, positions=positions, stream=stream, steps=steps)
        return weights.argmax(dim=2)

    monkeypatch.setattr(random_reference, "exponential_sample", exponential_sample)
    logits = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(0))
    temperatures, lengths = torch.tensor([0.7, 1.0, 1.9]), torch.tensor([4, 5, 6])
    index, probs = draw_draft(logits, temperatures, torch.arange(3), lengths, 1)
    torch.testing.assert_close(probs, (logits / temperatures[:, None, None]).softmax(dim=-1))
    assert torch.equal(shown["weights"], probs) and shown["stream"] == RandomStream.DRAFT
    assert torch.equal(shown["positions"], lengths[:, None]) and shown["steps"].tolist() == [1, 2]
    assert torch.equal(index, probs.argmax(dim=2))


# ---- draws


def test_exponential_sampling_has_the_distribution_of_its_weights():
    weights = torch.tensor([0.5, 0.0, 3.0, 1.5, 1e-3])
    draws = ops.exponential_sample(
        weights.expand(40000, -1), torch.arange(40000) * 977, torch.full((40000,), 3), RandomStream.TARGET
    )
    assert p_value(draws.bincount(minlength=5), weights / weights.sum()) > 1e-4
    assert torch.equal(
        ops.exponential_sample(torch.zeros(2, 5), torch.arange(2), torch.arange(2), 0), torch.zeros(2).long()
    )


VOCABULARY, LENGTH, DRAWS = 5, 4, 12000


def tiny_target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    target.generation_config.pad_token_id = 0
    return target


@torch.no_grad()
def exact_law(target, prompt, processors):
    """`[V ** LENGTH]` float64: the law of the continuations of `prompt`, from one pass over all texts."""
    texts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    whole = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
    logits = target(whole).logits
    law = torch.ones(len(texts), dtype=torch.float64)
    for step in range(LENGTH):
        at = prompt.shape[1] + step
        scores = processors(whole[:, :at], logits[:, at - 1].clone())
        law *= scores.double().softmax(dim=-1).gather(1, texts[:, step, None]).squeeze(1)
    return law


CALLS = {
    "plain_law": ({"top_k": 0}, []),
    "cold": ({"top_k": 0, "temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
    "hot": ({"top_k": 0, "temperature": 1.6}, [TemperatureLogitsWarper(1.6)]),
    "top_k": ({"top_k": 3, "temperature": 0.8}, [TemperatureLogitsWarper(0.8), TopKLogitsWarper(3)]),
    "repetition_penalty": ({"top_k": 0, "repetition_penalty": 1.6}, [RepetitionPenaltyLogitsProcessor(1.6)]),
}


def tiny_drafter(kind, target, num_draft_tokens, draft_probs):
    """A random drafter of a family for the tiny target; the EAGLE ones do not know one of its tokens."""
    options = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if kind == "dflash2":
        options |= {"aux_hidden_state_layer_ids": [1, 2, 3], "selector_top_k": 3}
    if kind in ("eagle3", "p-eagle", "dflash", "dspark", "domino"):
        options |= {"draft_vocab_size": 4, "aux_hidden_state_layer_ids": [1, 2, 3]}
    drafter = RANDOM_DRAFTERS[kind](target, seed=3, **options)
    return drafter.configure(num_assistant_tokens=num_draft_tokens, draft_probs=draft_probs)


class ModelText(Text):
    """The texts of a model: its logits at every text of up to `width + 1` tokens after a prompt."""

    @torch.no_grad()
    def __init__(self, model, width, processors):
        super().__init__(model.config.vocab_size, width, processors, seed=0)
        for length in range(width + 1):
            texts = [text for text in self._logits if len(text) == length]
            whole = torch.cat([self.prompt.expand(len(texts), -1), torch.tensor(texts).long()], dim=1)
            self._logits.update(zip(texts, model(whole).logits[:, -1], strict=True))


class Proposed(Exception):
    """Ends a call after its first proposal."""


def first_proposals(monkeypatch, target, drafter, prompt, rows):
    """The first proposal of the engine for `rows` copies of a prompt, with seeds of their own.

    The prefill gives a token before it: the last one of the prompt, which is the only one that is allowed there.
    """
    seen, propose = [], drafter.propose
    prompt, last = prompt[:, :-1], int(prompt[0, -1])
    others = [token for token in range(VOCABULARY) if token != last]

    def propose_once(*args):
        seen.append(propose(*args))
        raise Proposed

    with monkeypatch.context() as patch, pytest.raises(Proposed):
        patch.setattr(drafter, "propose", propose_once)
        set_seed(0)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": 5, "num_return_sequences": rows}
        options["begin_suppress_tokens"] = others
        target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **options)
    return seen[0]


@pytest.mark.parametrize(("kind", "width"), [("p-eagle", 2), ("pard", 3)])
def test_distribution_with_the_drafts_of_a_parallel_drafter(kind, width, monkeypatch):
    """Later drafts do not depend on earlier ones, so a block's distribution is the product of the reported ones."""
    target = tiny_target()
    text = ModelText(target, width, [])
    drafter = tiny_drafter(kind, target, width, draft_probs=True)
    proposal = first_proposals(monkeypatch, target, drafter, text.prompt, rows=4000)
    probs = ops.over_vocabulary(proposal.probs, proposal.draft_ids, VOCABULARY)
    laws = probs[0]
    assert torch.allclose(probs, laws, rtol=0, atol=1e-6), "a law depends on what was drawn"
    assert proposal.probs.shape[2] == drafter.config.draft_vocab_size, "more is kept of q than there is"
    drafts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=width)))
    draft_law = laws.double()[torch.arange(width), drafts].prod(dim=1)
    cells = (proposal.tokens * VOCABULARY ** torch.arange(width - 1, -1, -1)).sum(dim=1)
    assert p_value(cells.bincount(minlength=len(drafts)), draft_law / draft_law.sum()) > 1e-4

    possible = draft_law > 0
    drafts, draft_law = drafts[possible], draft_law[possible]
    shared = laws.expand(len(drafts), -1, -1)
    accept, following = outcomes(ChosenNumbers(monkeypatch), text.scores(drafts), drafts, shared)
    found = text.continue_with(committed_law(drafts, draft_law, accept, following))
    torch.testing.assert_close(found, text.law_of_continuations(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "width"),
    [("dflash", 2), ("dspark", 3), ("dflash2", 2), ("domino", 2)],
)
def test_distribution_with_the_drafts_of_a_drafter_of_blocks(kind, width, monkeypatch):
    """The laws of all drafts are found by forcing each in a row of its own; what is drawn has their product as law, and
    the law that is reported beside it, but for DFlash's given the drafts before it."""
    target = tiny_target()
    text = ModelText(target, width, [])
    drafter = tiny_drafter(kind, target, width, draft_probs=True)
    drafts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=width)))
    draw = drafter.draw

    def force(state, logits, first):
        drawn = draw(state, logits, first)
        return drawn._replace(tokens=drafts[:, first : first + drawn.tokens.shape[1]])

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "draw", force)
        forced = first_proposals(monkeypatch, target, drafter, text.prompt, rows=len(drafts))
    laws = ops.over_vocabulary(forced.probs, forced.draft_ids, VOCABULARY)
    depends = not torch.allclose(laws, laws[:1], rtol=0, atol=1e-3)
    assert depends == (kind != "dflash")

    proposal = first_proposals(monkeypatch, target, drafter, text.prompt, rows=4000)
    cells = (proposal.tokens * VOCABULARY ** torch.arange(width - 1, -1, -1)).sum(dim=1)
    reported = ops.over_vocabulary(proposal.probs, proposal.draft_ids, VOCABULARY)
    torch.testing.assert_close(reported, laws[cells], rtol=0, atol=1e-5)
    draft_law = laws.double().gather(2, drafts[..., None]).squeeze(2).prod(dim=1)
    assert p_value(cells.bincount(minlength=len(drafts)), draft_law / draft_law.sum()) > 1e-4

    possible = draft_law > 0
    drafts, draft_law, laws = drafts[possible], draft_law[possible], laws[possible]
    accept, following = outcomes(ChosenNumbers(monkeypatch), text.scores(drafts), drafts, laws)
    found = text.continue_with(committed_law(drafts, draft_law, accept, following))
    torch.testing.assert_close(found, text.law_of_continuations(), rtol=0, atol=1e-5)


PROMPT = torch.tensor([[1, 3, 2]])


def draw(target, num_rows, seed, **options):
    """`[num_rows]`: which of the texts of `LENGTH` tokens each row continues the prompt with."""
    set_seed(seed)
    options = {"do_sample": True, "max_new_tokens": LENGTH, "num_return_sequences": num_rows, **options}
    out = target.generate(PROMPT, **options)[:, PROMPT.shape[1] :]
    return (out * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)


def check_draws(drafter, target, call):
    """Assert that what is drawn, with a drafter or without, has the exact law."""
    options, processors = CALLS[call]
    law = exact_law(target, PROMPT, LogitsProcessorList(processors))
    if drafter is not None:
        options = {**options, "assistant_model": drafter}
    cells = torch.cat([draw(target, DRAWS // 4, seed, **options) for seed in range(num_cases(4, 1))])
    assert p_value(cells.bincount(minlength=len(law)), law) > 1e-4
    if drafter is not None:
        assert drafter.stats.draft_probs == (drafter.draft_probs and not drafter.tree)
        assert drafter.stats.acceptance_per_position[0] > 0.1, "hardly anything was accepted, so little was shown"


# All calls with laws of drafts; the others with the calls whose processors cut the law and read the text.
HOWS_AND_CALLS = cases(
    every := list(itertools.product(["without", "point_mass", "soft", "block"], CALLS)),
    [
        (how, call)
        for how, call in every
        if (how == "soft" and call in ("plain_law", "top_k")) or call == "repetition_penalty"
    ],
)


@pytest.mark.parametrize(
    ("kind", "call"),
    [("mtp-target", "cold"), ("mtp-modules", "plain_law"), ("assistant", "plain_law"), ("dspine", "cold")],
)
def test_samples_with_trees(kind, call):
    """Of up to 3 of 8 drafts in a row: by passes of several modules, of one that has no cache, and of pairs."""
    target = gemma4_target(vocab_size=VOCABULARY) if kind == "assistant" else tiny_target()
    if kind == "assistant":
        drafter = assistant_drafter(new_assistant(vocab_size=VOCABULARY), target)
    elif kind == "dspine":
        drafter = RANDOM_DRAFTERS[kind](target, seed=3, aux_hidden_state_layer_ids=[1, 2, 3], selector_top_k=3)
    else:
        drafter = RANDOM_DRAFTERS["mtp"](target, seed=3, num_modules=3, chaining=kind.partition("-")[2])
    check_draws(drafter.configure(num_assistant_tokens=3, tree=8), target, call)


@pytest.mark.parametrize(("how", "call"), HOWS_AND_CALLS)
def test_samples_of_the_engine(how, call):
    target = tiny_target()
    drafter = None
    if how != "without":
        drafter = tiny_drafter("eagle3", target, 2, draft_probs=how != "point_mass")
        drafter.configure(verification="block" if how == "block" else "token")
    check_draws(drafter, target, call)


def test_samples_detect_random_numbers_shared_by_two_rounds(monkeypatch):
    """Block verification looks at all drafts of a round; drawing the next round's by the same numbers bends the law."""
    target, philox = tiny_target(), random_reference._philox
    options, processors = CALLS["top_k"]
    law = exact_law(target, PROMPT, LogitsProcessorList(processors))
    drafter = tiny_drafter("eagle3", target, 3, draft_probs=True).configure(verification="block")
    monkeypatch.setattr(
        random_reference,
        "_philox",
        lambda seeds, positions, numbers, stream, steps: philox(seeds, positions + steps, numbers, stream, 0),
    )
    cells = draw(target, DRAWS // 4, 0, assistant_model=drafter, **options)
    assert p_value(cells.bincount(minlength=len(law)), law) < 1e-6


@pytest.mark.parametrize(
    ("kind", "verification", "call", "num_draft_tokens"),
    cases(
        every := [
            (kind, *rule)
            for kind in ("p-eagle", "dflash", "dspark", "dflash2", "domino", "pard", "pard2", "draft-model", "mtp")
            for rule in (("token", "hot", 2), ("token", "top_k", 3), ("block", "top_k", 3))
        ],
        # What is done with drafts and their laws is the same for all, and `test_samples_of_the_engine` has all of it.
        [
            one
            for one in every
            if (one[1] == "block") == (one[0] in ("dflash", "domino", "pard2", "draft-model"))
            and (one[2] == "hot") == (one[0] in ("p-eagle", "dspark", "mtp"))
        ],
    ),
)
def test_samples_with_every_family_of_drafters(kind, verification, call, num_draft_tokens):
    target = tiny_target()
    drafter = tiny_drafter(kind, target, num_draft_tokens, draft_probs=True).configure(verification=verification)
    check_draws(drafter, target, call)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_samples_with_an_assistant_that_reads_the_cache(verification):
    """Of ordered embeddings, so that some tokens have no probability of being drafted."""
    target = gemma4_target(vocab_size=VOCABULARY)
    clusters = {"use_ordered_embeddings": True, "num_centroids": VOCABULARY, "centroid_intermediate_top_k": 3}
    drafter = assistant_drafter(new_assistant(vocab_size=VOCABULARY, **clusters), target)
    drafter.configure(num_assistant_tokens=2, draft_probs=True, verification=verification)
    check_draws(drafter, target, "hot" if verification == "token" else "top_k")


@pytest.mark.parametrize(
    ("parallel", "vocab_size", "verification"), [(False, 4, "token"), (True, 7, "token"), (False, 4, "block")]
)
def test_samples_with_a_draft_model_of_another_vocabulary(parallel, vocab_size, verification):
    target = tiny_target()
    drafter = random_draft_model(target, parallel, vocab_size, seed=3).configure(3, draft_probs=True)
    check_draws(drafter.configure(verification=verification), target, "plain_law")


@pytest.mark.parametrize("how", ["point_mass", "block"])
def test_samples_of_rows_with_different_temperatures(how):
    """Every other row is colder; each half has its own exact law, and the drafts are drawn at the row's temperature."""
    target, temperatures = tiny_target(), torch.tensor([0.5, 1.6])
    options = {"temperature": 0.9, "top_k": 4}
    if how != "without":
        drafter = tiny_drafter("eagle3", target, 2, draft_probs=how != "point_mass")
        options["assistant_model"] = drafter.configure(verification="block" if how == "block" else "token")
    num_rows = DRAWS // 4
    processors = [RowTemperature(temperatures.repeat(num_rows // 2))]
    cells = [
        draw(target, num_rows, seed, logits_processor=LogitsProcessorList(processors), **options)
        for seed in range(num_cases(4, 2))
    ]
    for half, temperature in enumerate(temperatures.tolist()):
        law = exact_law(
            target, PROMPT, LogitsProcessorList([TemperatureLogitsWarper(0.9 * temperature), TopKLogitsWarper(4)])
        )
        counts = torch.cat([cell[half::2] for cell in cells]).bincount(minlength=len(law))
        assert p_value(counts, law) > 1e-4


def test_cells_have_the_distribution_of_texts():
    target = tiny_target()
    exact = exact_law(target, PROMPT, LogitsProcessorList())
    texts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    for least in (0.0, 0.005, 0.05, 2.0):
        cells = Cells(target, PROMPT, LENGTH, least)
        members = torch.stack([cells.count(text[None]) for text in texts]).double()
        torch.testing.assert_close(exact @ members, cells.law, rtol=0, atol=1e-6)
        assert len(cells.law) > 1 or least > 1


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("is_right", [True, False])
def test_cells_detect_a_wrong_acceptance_rule(is_right, verification, monkeypatch):
    """Most likely drafts, judged as if they had been drawn from the law that is reported of them."""
    if not is_right:
        monkeypatch.setattr(
            "hf_specdec.drafters.cached.draw_draft",
            lambda logits, *law: (logits.argmax(dim=-1), draw_draft(logits, *law)[1]),
        )
    target, draws = tiny_target(), 4000
    drafter = tiny_drafter("eagle3", target, 3, draft_probs=True).configure(verification=verification)
    texts = target.generate(
        PROMPT,
        do_sample=True,
        top_k=0,
        max_new_tokens=3,
        num_return_sequences=draws,
        assistant_model=drafter,
        seeds=1,
    )[:, PROMPT.shape[1] :]
    cells = Cells(target, PROMPT, 3, least=20 / draws)
    found = p_value(cells.count(texts), cells.law)
    assert found > 1e-3 if is_right else found < 1e-6


# ---- random numbers

_WORD = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 as its authors write it (Salmon et al., SC 2011), on Python integers."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        products = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (products[1] >> 32) ^ counter[1] ^ key[0],
            products[1] & _WORD,
            (products[0] >> 32) ^ counter[3] ^ key[1],
            products[0] & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return counter


def test_uniform_is_philox():
    """The recomputation passes Random123's known answers, and `uniform` is its first word."""
    answers = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([_WORD] * 4, [_WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in answers:
        assert philox(counter, key) == expected

    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, 2**63 - 1, (50,), generator=generator)
    seeds[:3] = torch.tensor([0, 1, 2**63 - 1])
    positions = torch.randint(0, 2**20, (50,), generator=generator)
    tokens = torch.randint(0, 2**18, (50,), generator=generator)
    steps = torch.randint(0, 17, (50,), generator=generator)
    positions[0] = tokens[0] = steps[0] = 0
    for stream in RandomStream:
        numbers = ops.uniform(seeds, positions, tokens, stream, steps)
        assert numbers.dtype == torch.float32
        for number, seed, position, token, step in zip(
            *(values.tolist() for values in (numbers, seeds, positions, tokens, steps)), strict=True
        ):
            word = philox([token, position, int(stream), step], [seed & _WORD, seed >> 32])[0]
            assert abs(number - (word + 0.5) / 2**32) < 2**-24
            assert 0.0 < number < 1.0
    assert abs(ops.uniform(*torch.zeros(3, 1).long(), 0).item() - 0x6627E8D5 / 2**32) < 2**-24


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens", "steps"])
def test_uniform_is_uniform_and_independent_along_every_axis(axis):
    count = 40000
    arguments = {name: torch.full((count,), 5) for name in ("seeds", "positions", "tokens", "steps")}
    arguments[axis] = torch.arange(count)
    streams = [ops.uniform(**arguments, stream=stream) for stream in RandomStream]
    bins = torch.full((20,), 1 / 20)
    pairs = [(numbers[:-1], numbers[1:]) for numbers in streams] + list(itertools.combinations(streams, 2))
    for numbers in streams:
        assert p_value((numbers * 20).long().bincount(minlength=20), bins) > 1e-4
    for one, other in pairs:
        cells = (one * 10).long() * 10 + (other * 10).long()
        assert p_value(cells.bincount(minlength=100), torch.full((100,), 1 / 100)) > 1e-4
