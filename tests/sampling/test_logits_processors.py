"""Logits processors, the package's own and all of transformers': the same scores with drafters as without."""

from itertools import product

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import MAX_NEW_TOKENS, PROMPTS, continuations
from oracle import OracleDrafter, random_eagle3
from targets import STOCK_FAMILY, VOCAB, padded_prompts, tiny_target
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from hf_specdec import ops
from hf_specdec.kernels.types import NO_TOP_K, SamplingSettings
from hf_specdec.sampling.logits import (
    DraftVocabularyLogitsProcessor,
    MaskTokenLogitsProcessor,
    RowSampling,
    RowTemperature,
)
from hf_specdec.sampling.processors import POINTWISE_PROCESSORS, STATEFUL_PROCESSORS

# Made for decoders of audio, or for batches of pairs of rows; a text decoder's generate() makes none of them.
OF_OTHER_MODELS = {
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
}


def standard_processors(input_ids, generated):
    """Makers of transformers' processors for prompts `[B, P]` that are continued by `generated`, a list of tokens."""
    width = input_ids.shape[1]
    made = {
        "MinLengthLogitsProcessor": (width + 6, generated[1:4]),
        "MinNewTokensLengthLogitsProcessor": (width, 6, generated[1:4]),
        "TemperatureLogitsWarper": (1.7,),
        "RepetitionPenaltyLogitsProcessor": (1.8,),
        "EncoderRepetitionPenaltyLogitsProcessor": (3.0, input_ids),
        "TopPLogitsWarper": (0.4,),
        "TopKLogitsWarper": (5,),
        "TopHLogitsWarper": (0.4,),
        "MinPLogitsWarper": (0.3,),
        "TypicalLogitsWarper": (0.3,),
        "EpsilonLogitsWarper": (0.01,),
        "EtaLogitsWarper": (0.02,),
        "NoRepeatNGramLogitsProcessor": (1,),
        "EncoderNoRepeatNGramLogitsProcessor": (1, input_ids),
        "SequenceBiasLogitsProcessor": ([[generated[1:3], -30.0], [[generated[0], 11], 25.0], [[13], 1.0]],),
        "NoBadWordsLogitsProcessor": ([generated[2:4], generated[5:7], [generated[8]]],),
        "PrefixConstrainedLogitsProcessor": (
            lambda row, tokens: [int(tokens.sum() + row + step) % VOCAB for step in range(9)],
            1,
        ),
        "ForcedBOSTokenLogitsProcessor": (5,),
        "ForcedEOSTokenLogitsProcessor": (width + MAX_NEW_TOKENS, 7),
        "InfNanRemoveLogitsProcessor": (),
        "ExponentialDecayLengthPenalty": ((3, 1.5), [7], width),
        "LogitNormalization": (),
        "SuppressTokensAtBeginLogitsProcessor": (generated[:1], width),
        "SuppressTokensLogitsProcessor": (generated[:1],),
        "WatermarkLogitsProcessor": (VOCAB, "cpu", 0.25, 8.0),
    }
    return {name: (getattr(logits_process, name), arguments) for name, arguments in made.items()}


def own_processors(input_ids, generated):
    return {
        "MaskTokenLogitsProcessor": (MaskTokenLogitsProcessor, (generated[0],)),
        "RowTemperature": (RowTemperature, ([0.5 + row for row in range(len(input_ids))],)),
    }


NAMES = sorted([*standard_processors(torch.zeros(1, 1).long(), list(range(16))), *own_processors([0], [0])])
# Those that are tried on the oldest transformers, too: of the text, of its length, of scores, with tables of their own.
FEW = [
    *("EncoderRepetitionPenaltyLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TopHLogitsWarper"),
    *("SequenceBiasLogitsProcessor", "PrefixConstrainedLogitsProcessor", "WatermarkLogitsProcessor"),
]


@pytest.mark.core
def test_every_processor_of_transformers_is_classified():
    found = {
        name
        for name, one in vars(logits_process).items()
        if isinstance(one, type) and issubclass(one, LogitsProcessor) and one is not LogitsProcessor
    }
    tested = set(standard_processors(torch.zeros(1, 1).long(), list(range(16))))
    refused = {one.__name__ for one in STATEFUL_PROCESSORS}
    assert found == tested | refused | OF_OTHER_MODELS
    assert {one.__name__ for one in POINTWISE_PROCESSORS} - {"RowSampling"} <= set(NAMES)


@pytest.mark.core
def test_rows_with_settings_of_their_own():
    """`RowSampling` gives each row the scores of transformers' warpers, bit for bit; greedy ones their best token."""
    settings = [
        SamplingSettings(),
        SamplingSettings(0.7),
        SamplingSettings(1.0, 5),
        SamplingSettings(1.0, 200),
        SamplingSettings(1.0, NO_TOP_K, 0.6),
        SamplingSettings(1.7, 20, 0.9),
        SamplingSettings(1e-4, 0),
        SamplingSettings(1.3, 1, 0.1),
    ]
    scores = 3 * torch.randn(len(settings), 4, VOCAB, generator=torch.Generator().manual_seed(0))
    scores[6, 1, [7, 50]] = scores.max() + 1  # a tie: the first is taken, as by argmax
    temperatures, top_k = (
        torch.tensor([one.temperature for one in settings]),
        torch.tensor([one.top_k for one in settings]),
    )
    tail = torch.tensor([1 - one.top_p for one in settings])
    blank = torch.zeros(4, 1, dtype=torch.int64)
    found = ops.apply_top_k_top_p(scores, temperatures, top_k, tail)
    for row, one in enumerate(settings):
        expected = scores[row] / one.temperature
        if one.top_k == 0:
            assert found[row].isfinite().sum(-1).tolist() == [1] * 4
            assert torch.equal(found[row].argmax(-1), scores[row].argmax(-1)) and found[row, 1, 50].isneginf()
            continue
        if one.top_k < NO_TOP_K:
            expected = logits_process.TopKLogitsWarper(one.top_k)(blank, expected)
        if one.top_p < 1:
            expected = logits_process.TopPLogitsWarper(one.top_p)(blank, expected)
        assert torch.equal(found[row], expected), one
    with pytest.raises(RuntimeError, match="RowSampling reads the rows of a continuous batch"):
        RowSampling()(blank, scores[0])


@pytest.mark.core_for(batch=[3], name=FEW)
@pytest.mark.parametrize(
    ("batch", "name"),
    cases(
        every := list(product([1, 3], NAMES)),
        [one for one in every if one[0] == 3 or one[1] in ("PrefixConstrainedLogitsProcessor", "RowTemperature")],
    ),
)
def test_scores_are_those_of_plain_generate(name, batch):
    """Greedy texts and the processed scores of every token, over drafters that are right and wrong."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[batch], seed=batch)
    if name == "ForcedBOSTokenLogitsProcessor":  # takes effect after a prompt of one token
        inputs = {key: value[:, -1:] for key, value in inputs.items()}
    width = inputs["input_ids"].shape[1]
    call = {
        "do_sample": False,
        "max_new_tokens": MAX_NEW_TOKENS,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    free = target.generate(**inputs, **call)
    generated = free.sequences[0, width:].tolist()
    makers = standard_processors(inputs["input_ids"], generated) | own_processors(inputs["input_ids"], generated)
    make, arguments = makers[name]

    def generate(**options):
        return target.generate(**inputs, **call, logits_processor=LogitsProcessorList([make(*arguments)]), **options)

    plain = generate()
    if name != "InfNanRemoveLogitsProcessor":
        assert any(not torch.equal(*pair) for pair in zip(plain.scores, free.scores, strict=True)), (
            "nothing was changed"
        )
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    answers = continuations(inputs, plain.sequences)
    for engine, accuracy in zip(("static", "stock"), (1.0, 0.6)[:: (-1) ** NAMES.index(name)], strict=True):
        drafter = OracleDrafter(target, answers, lengths, accuracy).configure(engine=engine)
        out = generate(assistant_model=drafter, num_assistant_tokens=4)
        assert torch.equal(out.sequences, plain.sequences)
        for one, other in zip(out.scores, plain.scores, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


# ---- ours, in plain generate()


@pytest.mark.core
def test_draft_vocabulary_in_plain_generate():
    """A model with scores for a third of its vocabulary generates what the whole model does of those tokens."""
    target, inputs = tiny_target("llama"), padded_prompts([9, 4])
    target_ids = torch.arange(1, VOCAB, 3)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, target_ids, False).nonzero()[:, 0].tolist()
    call = {"do_sample": False, "max_new_tokens": 8}
    expected = target.generate(**inputs, **call, suppress_tokens=others)
    head = target.lm_head.register_forward_hook(lambda module, args, output: output[..., target_ids])
    try:
        processors = LogitsProcessorList([DraftVocabularyLogitsProcessor(target_ids, VOCAB)])
        out = target.generate(**inputs, **call, logits_processor=processors)
    finally:
        head.remove()
    assert torch.equal(out, expected)
    assert not torch.equal(out, target.generate(**inputs, **call))


@pytest.mark.core
def test_mask_token_is_not_generated():
    target, inputs = tiny_target("llama"), padded_prompts([9])
    call = {"do_sample": False, "max_new_tokens": 8}
    generated = target.generate(**inputs, **call)[0, 9:].tolist()
    processors = LogitsProcessorList([MaskTokenLogitsProcessor(generated[3])])
    out = target.generate(**inputs, **call, logits_processor=processors)[0, 9:].tolist()
    assert out[:3] == generated[:3] and generated[3] not in out


def test_row_temperature_is_a_temperature():
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    out = RowTemperature([0.5, 1.0, 2.0])(None, scores)
    for row, temperature in enumerate([0.5, 1.0, 2.0]):
        torch.testing.assert_close(out[row], scores[row] / temperature)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RowTemperature([0.5, 0.0]), "expected a number above 0 for each row"),
        (lambda: RowTemperature([[0.5]]), "expected a number above 0 for each row"),
        (lambda: RowTemperature([float("nan")]), "expected a number above 0 for each row"),
        (lambda: RowTemperature([1.0])(None, torch.zeros(2, 3)), "1 temperatures, but the call has 2 rows"),
        (lambda: MaskTokenLogitsProcessor(-1), "mask_token_id is -1; expected a token"),
        (lambda: DraftVocabularyLogitsProcessor(torch.tensor([0, 5]), 5), "not all tokens of a vocabulary of 5"),
        (lambda: DraftVocabularyLogitsProcessor(torch.tensor([2, 2]), 5), "name a token twice"),
        (lambda: DraftVocabularyLogitsProcessor(torch.tensor([0.5]), 5), r"expected int64 of shape \[V_d\]"),
        (
            lambda: DraftVocabularyLogitsProcessor(torch.tensor([0, 3]), 5)(None, torch.zeros(1, 5)),
            "scores are of 5 tokens, but the draft vocabulary has 2",
        ),
    ],
)
def test_bad_arguments_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.core
@pytest.mark.parametrize("temperatures", [[[0.5, 1.0]], [[0.5, 1.0, 2.0], [1.0, 1.0, 1.0]]])
def test_row_temperatures_that_do_not_fit_the_call(temperatures):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    processors = LogitsProcessorList(RowTemperature(one) for one in temperatures)
    config = GenerationConfig(do_sample=True, max_new_tokens=4, pad_token_id=0)
    match = "2 temperatures, but the call has 3 rows" if len(temperatures) == 1 else "2 RowTemperature processors"
    with pytest.raises(ValueError, match=match):
        target.generate(
            **inputs, generation_config=config, logits_processor=processors, assistant_model=random_eagle3(target)
        )


class Doubles(LogitsProcessor):
    """Returns float64."""

    def __call__(self, input_ids, scores):
        return scores.double() * (1.0 + (input_ids[:, -1:] % 3).double())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", STOCK_FAMILY])
def test_scores_in_float64(family, batch):
    target, inputs = tiny_target(family), padded_prompts(PROMPTS[batch])
    options = {"do_sample": False, "max_new_tokens": 8, "logits_processor": LogitsProcessorList([Doubles()])}
    expected = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, assistant_model=random_eagle3(target), **options), expected)


class Mixed(LogitsProcessor):
    """Mixes the scores, or the texts, of all rows."""

    def __init__(self, mixes_scores):
        self.mixes_scores = mixes_scores

    def __call__(self, input_ids, scores):
        if self.mixes_scores:
            return scores - 0.5 * scores.mean(dim=0, keepdim=True)
        return scores.index_fill(1, input_ids[:, -1], float("-inf"))


class PerRow(LogitsProcessor):
    """Has something of its own for each row, which is not mixing; fails on the text of another row."""

    def __init__(self, texts):
        self.texts = texts

    def __call__(self, input_ids, scores):
        assert torch.equal(input_ids[:, : self.texts.shape[1]], self.texts)
        return scores + torch.arange(len(scores))[:, None] * torch.arange(scores.shape[1]) / 90


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", STOCK_FAMILY])
def test_processors_that_mix_rows_are_refused(family):
    target, inputs = tiny_target(family), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target)
    options = {"do_sample": False, "max_new_tokens": 8}
    for mixes_scores in (True, False):
        processors = LogitsProcessorList([Mixed(mixes_scores)])
        with pytest.raises(ValueError, match=r"Mixed gives row \d of the batch scores that depend on other rows"):
            target.generate(**inputs, assistant_model=drafter, logits_processor=processors, **options)
        one = {name: tensor[:1] for name, tensor in inputs.items()}
        expected = target.generate(**one, logits_processor=processors, **options)
        found = target.generate(**one, assistant_model=drafter, logits_processor=processors, **options)
        assert torch.equal(found, expected)
    if family == "llama":
        processors = LogitsProcessorList([PerRow(inputs["input_ids"])])
        expected = target.generate(**inputs, logits_processor=processors, **options)
        found = target.generate(**inputs, assistant_model=drafter, logits_processor=processors, **options)
        assert torch.equal(found, expected)


class HostTemperature(logits_process.TemperatureLogitsWarper):
    pass


class HostTopK(logits_process.TopKLogitsWarper):
    pass


class HostTopP(logits_process.TopPLogitsWarper):
    pass


@pytest.mark.parametrize("is_bulk", [False, True])
def test_values_of_top_k_and_top_p_share_a_captured_round(monkeypatch, is_bulk):
    """Texts are those of processors that the host calls, since subclasses may read the text."""
    capture, target, inputs = replay_on_cpu(monkeypatch), tiny_target("llama"), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target).configure(4, draft_probs=False)
    options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "pad_token_id": 0, "seeds": [1, 2, 3]}
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
    host = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "assistant_model": drafter}

    def call(temperature, top_k, top_p):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "assistant_model": drafter}
        if not is_bulk:
            return target.generate(**inputs, **options, **settings)[:, -12:].tolist()
        out = target.generate_batch(prompts, **options, **settings)
        return [one.generated_tokens for one in out.values()]

    found = {one: call(*one) for one in ((0.7, 9, 0.8), (1.4, 30, 0.5), (2.0, 3, 0.95))}
    assert drafter.stats.execution.startswith("captured in one graph")
    count = capture.count
    assert call(0.9, 4, 0.7) and capture.count == count
    for (temperature, top_k, top_p), texts in found.items():
        processors = [HostTemperature(temperature), HostTopK(top_k), HostTopP(top_p)]
        expected = target.generate(**inputs, **options, **host, logits_processor=LogitsProcessorList(processors))
        assert texts == expected[:, -12:].tolist()
    assert len({str(texts) for texts in found.values()}) == 3
