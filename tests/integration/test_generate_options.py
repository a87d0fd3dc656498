"""Options of `generate()` behave with a drafter as without, also inside a block of accepted tokens."""

import copy
import threading
from itertools import product

import pytest
import torch
from case_counts import cases
from lossless import MAX_NEW_TOKENS, PROMPTS, check_greedy, oracle, unshaped_output
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import PAD, STOCK_FAMILY, VOCAB, padded_prompts, tiny_target
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from word_tokenizer import word_tokenizer

batches = pytest.mark.parametrize("batch", [1, 3])
KINDS = ["eagle3", "p-eagle", "dspark", "pard", "draft-model", "mtp", "mtp-by-target"]
# Every family reports the distribution of its drafts; without it they are all judged alike.
sampling_kinds = pytest.mark.parametrize(
    ("draft_probs", "kind"),
    cases(
        every := list(product([False, True], KINDS)),
        [one for one in every if one == (False, "eagle3") or (one[0] and one[1] != "mtp-by-target")],
    ),
)


def target_and_inputs(batch):
    return tiny_target("llama"), padded_prompts(PROMPTS[batch], seed=batch)


def free_run(batch):
    """Target, prompts and the greedy text `[B, P + T]` that nothing shapes or stops."""
    target, inputs = target_and_inputs(batch)
    return target, inputs, unshaped_output(target, inputs)


def new_tokens(inputs, sequences, row=0):
    return sequences[row, inputs["input_ids"].shape[1] :].tolist()


# ---- logits processors


def shaping_options(name, generated):
    """Arguments of `generate()` that change the text `generated`, a list of tokens."""
    return {
        "repetition_penalty": {"repetition_penalty": 1.8},
        "no_repeat_ngram": {"no_repeat_ngram_size": 1},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
        "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
        "bad_words": {"bad_words_ids": [generated[2:4], generated[5:7], [generated[8]]]},
        "sequence_bias": {
            "sequence_bias": {tuple(generated[1:3]): -30.0, (generated[0], 11): 25.0, (11, 12): 25.0, (13,): 1.0}
        },
        "suppress_tokens": {"suppress_tokens": [generated[0], generated[6]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [generated[0]]},
        "min_length": {"min_length": 20, "eos_token_id": [generated[1], generated[4]], "pad_token_id": PAD},
        "min_new_tokens": {
            "min_new_tokens": 6,
            "eos_token_id": [generated[1], generated[4], generated[9]],
            "pad_token_id": PAD,
        },
        "forced_eos": {"forced_eos_token_id": 7, "eos_token_id": 7, "pad_token_id": PAD},
        "forced_bos": {"forced_bos_token_id": 5},
        "exponential_decay": {
            "exponential_decay_length_penalty": (3, 3.0),
            "eos_token_id": 7,
            "pad_token_id": PAD,
            "renormalize_logits": True,
        },
        "remove_invalid_values": {"remove_invalid_values": True, "suppress_tokens": [generated[3]]},
        "several_at_once": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
    }[name]


SHAPING = [
    *("repetition_penalty", "no_repeat_ngram", "encoder_repetition_penalty", "encoder_no_repeat_ngram", "bad_words"),
    *("sequence_bias", "suppress_tokens", "begin_suppress_tokens", "min_length", "min_new_tokens", "forced_eos"),
    *("forced_bos", "exponential_decay", "remove_invalid_values", "several_at_once"),
]


@pytest.mark.core_for(batch=[3], name=["encoder_repetition_penalty", "bad_words", "forced_eos", "several_at_once"])
@pytest.mark.parametrize(
    ("name", "batch"),
    cases(
        every := list(product(SHAPING, [1, 3])),
        [one for one in every if one[1] == (1, 3)[SHAPING.index(one[0]) % 2 == 0] or one[0] == "forced_eos"],
    ),
)
def test_processors_of_generate(name, batch):
    target, inputs = target_and_inputs(batch)
    if name == "forced_bos":  # takes effect after a prompt of one token
        inputs = {key: value[:, -1:] for key, value in inputs.items()}
    if name.startswith("encoder"):  # the "encoder" of a decoder is its prompt, which must have something to repeat
        inputs = padded_prompts([40, 25, 33][:batch])
    free = unshaped_output(target, inputs)
    options = shaping_options(name, new_tokens(inputs, free))
    shaped = check_greedy(target, inputs, lambda: options)
    assert not torch.equal(shaped, free), "the option changed nothing, so the comparison showed nothing"


class DependsOnText(LogitsProcessor):
    """Favours a token that depends on the last two tokens and on how long the text is."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids[:, -1] * 5 + input_ids[:, -2:].sum(dim=1) + input_ids.shape[1]) % VOCAB
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 6.0))


class DependsOnRow(LogitsProcessor):
    """Favours another token in every row of the batch, and every third position; writes in place."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3 == 0:
            scores[torch.arange(len(scores)), 20 + torch.arange(len(scores))] += 40.0
        return scores


class ReadsWholeText(LogitsProcessor):
    """Favours a token that depends on everything that is shown, padding included."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids * torch.arange(1, input_ids.shape[1] + 1)).sum(dim=1) % VOCAB
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 6.0))


@batches
@pytest.mark.parametrize("processor", [DependsOnText, DependsOnRow, ReadsWholeText])
def test_processor_of_the_user(processor, batch):
    target, inputs, free = free_run(batch)
    inputs = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 7)}
    shaped = check_greedy(target, inputs, lambda: {"logits_processor": LogitsProcessorList([processor()])})
    assert not torch.equal(shaped, free)


@pytest.mark.core_for(batch=[3], with_end=[True])
@batches
@pytest.mark.parametrize("with_end", [False, True])
def test_prefix_constraint_is_asked_about_texts_that_it_allows_only(batch, with_end):
    """A constraint that knows a set of texts has no answer for others, and transformers raises where it gives none."""
    target, inputs, free = free_run(batch)
    width = inputs["input_ids"].shape[1]
    end = 60

    def allowed(row, tokens):
        allowed_before = set(range(2, VOCAB))
        for token in tokens[width:].tolist():
            if token == PAD and with_end:
                return [PAD]
            if token not in allowed_before:
                return []
            allowed_before = {(token * 7 + row + step) % (VOCAB - 2) + 2 for step in range(1, 12)}
            if with_end and token == end:
                allowed_before = {PAD}
        return sorted(allowed_before)

    stops = {"eos_token_id": end, "pad_token_id": PAD} if with_end else {}
    shaped = check_greedy(target, inputs, lambda: {"prefix_allowed_tokens_fn": allowed, **stops})
    assert not torch.equal(shaped, free)


@pytest.mark.core_for(batch=[1])
@batches
def test_prefix_constraint_that_knows_one_text(batch):
    """Nothing is allowed but one text, and nothing is known of what follows its end, as in a trie."""
    target, inputs, _ = free_run(batch)
    width, text = inputs["input_ids"].shape[1], [30, 31, 32, 33, 34, 7]

    def allowed(row, tokens):
        generated = tokens[width:].tolist()
        if len(generated) > len(text) and batch > 1:
            return [PAD]  # plain generate() asks about rows that have finished while others go on
        assert generated == text[: len(generated)] and len(generated) < len(text) + (batch > 1), (
            f"asked about {generated}"
        )
        return [text[len(generated)]] if len(generated) < len(text) else [PAD]

    shaped = check_greedy(
        target, inputs, lambda: {"prefix_allowed_tokens_fn": allowed, "eos_token_id": 7, "pad_token_id": PAD}
    )
    assert new_tokens(inputs, shaped) == text


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_prefix_constraint_of_each_prompt(engine):
    """A constraint is told the number of the prompt, not that of one of its sequences."""
    target, inputs = target_and_inputs(3)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 6}
    options["prefix_allowed_tokens_fn"] = lambda number, tokens: [10 + 3 * number, 11 + 3 * number]
    plain, drafter = target.generate(**inputs, **options), random_eagle3(target).configure(engine=engine)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    if engine == "static":
        rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        found = target.generate_batch([row[mask.bool()] for row, mask in rows], assistant_model=drafter, **options)
        assert [one.generated_tokens for one in found.values()] == plain[:, inputs["input_ids"].shape[1] :].tolist()


@batches
def test_sampling_with_one_candidate_is_greedy(batch):
    """With top_k = 1 sampling has one outcome, which goes through the warpers and rejection sampling."""
    target, inputs, free = free_run(batch)
    few = ["eagle3", "p-eagle", "dspark", "draft-model", "mtp"]  # of each way to draw drafts one
    drafters = [RANDOM_DRAFTERS[kind](target) for kind in cases(list(RANDOM_DRAFTERS), few if batch == 3 else few[:1])]
    for draft_probs, num_draft_tokens in cases(((False, 4), (True, 1), (True, 4)), ((False, 4), (True, 4))):
        certain = [*cases(drafters, drafters[:1]), oracle(target, inputs, free, 0.6)]
        for drafter in drafters if draft_probs else certain:
            out = target.generate(
                **inputs,
                do_sample=True,
                temperature=1.7,
                top_k=1,
                max_new_tokens=MAX_NEW_TOKENS,
                assistant_model=drafter.configure(draft_probs=draft_probs),
                num_assistant_tokens=num_draft_tokens,
            )
            assert torch.equal(out, free)


# ---- ends


@pytest.mark.core_for(batch=[3], num_ends=[3])
@batches
@pytest.mark.parametrize("num_ends", [1, 3])
def test_end_of_sequence_tokens(batch, num_ends):
    target, inputs, free = free_run(batch)
    generated = [new_tokens(inputs, free, row) for row in range(batch)]
    for position in cases((0, 2, 5, 9), (0, 5)):
        ends = [generated[row % batch][position + 2 * row] for row in range(num_ends)]
        plain = check_greedy(target, inputs, dict, lambda ends=ends: {"eos_token_id": ends, "pad_token_id": 3})
        assert batch > 1 or plain.shape[1] < free.shape[1]


@pytest.mark.core_for(batch=[1])
@batches
def test_end_without_a_padding_token(batch):
    target, inputs, free = free_run(batch)
    end = new_tokens(inputs, free)[4]
    config = GenerationConfig(eos_token_id=end, max_new_tokens=MAX_NEW_TOKENS)
    before, target.generation_config.pad_token_id = target.generation_config.pad_token_id, None
    try:
        check_greedy(target, inputs, dict, lambda: {"generation_config": config})
    finally:
        target.generation_config.pad_token_id = before


@pytest.mark.core_for(batch=[1], with_end=[True])
@batches
@pytest.mark.parametrize("with_end", [False, True])
def test_stop_strings(batch, with_end):
    target, inputs, free = free_run(batch)
    tokenizer = word_tokenizer()
    words = tokenizer.convert_ids_to_tokens(new_tokens(inputs, free, batch - 1))
    ends = {"eos_token_id": new_tokens(inputs, free)[8], "pad_token_id": PAD} if with_end else {}
    for position in cases((1, 4, 7), (4, 7)):
        stop = words[position][-1] + words[position + 1] + words[position + 2][0]  # begins and ends inside a word
        plain = check_greedy(
            target,
            inputs,
            dict,
            lambda stop=stop: {"stop_strings": ["nowhere", stop], "tokenizer": tokenizer, **ends},
        )
        assert batch > 1 or plain.shape[1] < free.shape[1]


@pytest.mark.core_for(batch=[1])
@batches
def test_length_limits(batch):
    target, inputs, _ = free_run(batch)
    width = inputs["input_ids"].shape[1]
    for new in cases((1, 2, 3, 7), (1, 3)):
        assert check_greedy(target, inputs, dict, lambda new=new: {"max_new_tokens": new}).shape[1] == width + new
        limit = {"max_new_tokens": None, "max_length": width + new}
        assert check_greedy(target, inputs, dict, lambda limit=limit: limit).shape[1] == width + new


@pytest.mark.core_for(batch=[1])
@batches
def test_criterion_in_place_of_the_length_limit(batch):
    """It may state more tokens than the settings, or fewer than the prompt, after which there is one token."""
    target, inputs, _ = free_run(batch)
    width = inputs["input_ids"].shape[1]
    for length, expected in ((width + MAX_NEW_TOKENS + 5, width + MAX_NEW_TOKENS + 5), (width - 3, width + 1)):
        plain = check_greedy(
            target,
            inputs,
            lambda length=length: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)])},
        )
        assert plain.shape[1] == expected


@pytest.mark.core_for(batch=[1])
@batches
def test_more_drafts_than_max_new_tokens(batch):
    target, inputs, _ = free_run(batch)
    for new in cases((1, 2, 5), (1, 5)):
        check_greedy(target, inputs, dict, lambda new=new: {"max_new_tokens": new}, num_draft_tokens=(8, 12))


@pytest.mark.core_for(batch=[3])
@batches
def test_prompt_and_max_new_tokens_fill_the_positions(batch):
    target, _ = target_and_inputs(batch)
    longest = target.config.max_position_embeddings - MAX_NEW_TOKENS
    inputs = padded_prompts([longest, 3, longest - 5][:batch], seed=5)
    plain = check_greedy(target, inputs, dict, num_draft_tokens=(4, 7))
    assert plain.shape[1] == target.config.max_position_embeddings


@pytest.mark.core_for(batch=[3])
@batches
def test_prompts_of_one_token(batch):
    target = tiny_target("llama")
    check_greedy(target, padded_prompts([1] * batch, seed=7), dict)


@pytest.mark.core_for(batch=[3])
@batches
def test_time_limit(batch):
    target, inputs, free = free_run(batch)
    assert check_greedy(target, inputs, dict, lambda: {"max_time": 1e-9}).shape[1] == inputs["input_ids"].shape[1] + 1
    assert torch.equal(check_greedy(target, inputs, dict, lambda: {"max_time": 1e6}), free)


class RowEnds(StoppingCriteria):
    """A row ends after a token that its text picks."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] + 3 * input_ids[:, -2:].sum(dim=1)) % 7 < 2


class BatchEnds(StoppingCriteria):
    """The batch ends at a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class BoolEnds(BatchEnds):
    """The same, as one bool instead of one a row."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.length


class KnowsEnd(RowEnds):
    """Plain `generate()` pads stopped rows where a criterion has this attribute."""

    eos_token_id = 5


RULES = [RowEnds, BatchEnds, BoolEnds, KnowsEnd, EosTokenCriteria, MaxLengthCriteria]


@pytest.mark.parametrize(
    ("rule", "with_end", "batch"),
    cases(
        every := list(product(RULES, [False, True], [1, 3])),
        [one for one in every if one[1] == (one[2] == 3) or one[0] is RowEnds],
    ),
)
def test_custom_criteria(rule, with_end, batch):
    """Without an end-of-sequence token plain `generate()` does not pad rows that stopped before the others."""
    target, inputs, free = free_run(batch)
    width, generated = inputs["input_ids"].shape[1], new_tokens(inputs, free)
    argument = {
        BatchEnds: [width + 6],
        BoolEnds: [width + 6],
        MaxLengthCriteria: [width + 6],
        EosTokenCriteria: [torch.tensor([generated[3], generated[6]])],
    }
    ends = {"eos_token_id": generated[9], "pad_token_id": PAD} if with_end else {}
    plain = check_greedy(
        target,
        inputs,
        dict,
        lambda: {"stopping_criteria": StoppingCriteriaList([rule(*argument.get(rule, []))]), **ends},
    )
    assert not torch.equal(plain, free)


@pytest.mark.core_for(batch=[3])
@batches
def test_criterion_in_place_of_the_end_of_sequence_token(batch):
    """A criterion of the caller takes the place of the one that `generate()` makes of `eos_token_id`."""
    target, inputs, free = free_run(batch)
    generated = new_tokens(inputs, free)
    end, later = generated[2], next(token for token in generated[4:] if token not in generated[:4])

    def stops():
        rules = StoppingCriteriaList([EosTokenCriteria(torch.tensor([later]))])
        return {"stopping_criteria": rules, "eos_token_id": end, "pad_token_id": PAD}

    plain = check_greedy(target, inputs, dict, stops)
    assert {end, later} <= set(new_tokens(inputs, plain))


class UnsureEnds(StoppingCriteria):
    """Reads the scores: a row ends when its last token was not much better than the next."""

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) > 0
        best = scores[-1].topk(2, dim=-1).values
        return best[:, 0] - best[:, 1] < 0.3


@pytest.mark.core_for(batch=[3])
@batches
def test_criterion_that_reads_scores(batch):
    target, inputs, free = free_run(batch)

    def generate(**options):
        return target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            stopping_criteria=StoppingCriteriaList([UnsureEnds()]),
            eos_token_id=95,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )

    plain = generate()
    assert not torch.equal(plain.sequences, free)
    for accuracy in (0.6, 1.0):
        for num_draft_tokens in (1, 4):
            drafter = oracle(target, inputs, free, accuracy)
            out = generate(assistant_model=drafter, num_assistant_tokens=num_draft_tokens)
            assert torch.equal(out.sequences, plain.sequences)
            assert len(out.scores) == len(plain.scores)


# ---- streamers


class Puts(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        assert not self.ended
        self.puts.append(value.clone())

    def end(self):
        self.ended = True


@batches
@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_streamer_gets_the_same_puts(batch, accuracy):
    target, inputs, free = free_run(batch)
    stops = {"eos_token_id": [new_tokens(inputs, free, row)[5 + row] for row in range(batch)], "pad_token_id": PAD}

    def puts(**options):
        streamer = Puts()
        target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, streamer=streamer, **stops, **options)
        assert streamer.ended
        return [(put.dtype, put.device.type, put.tolist()) for put in streamer.puts]

    plain = puts()
    for num_draft_tokens in (1, 4):
        drafter = oracle(target, inputs, free, accuracy)
        assert puts(assistant_model=drafter, num_assistant_tokens=num_draft_tokens) == plain
    if batch > 1:
        assert puts(assistant_model=drafter.configure(engine="stock")) == plain


@pytest.mark.core_for(skip_prompt=[True])
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamers(skip_prompt, capsys):
    target, inputs, free = free_run(1)
    tokenizer = word_tokenizer()

    def printed(**options):
        streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
        target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, streamer=streamer, **options)
        return capsys.readouterr().out

    def iterated(**options):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=60)
        arguments = dict(inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, streamer=streamer, **options)
        thread = threading.Thread(target=target.generate, kwargs=arguments)
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    drafter = oracle(target, inputs, free, 0.6)
    for run in (printed, iterated):
        plain = run()
        assert tokenizer.decode(new_tokens(inputs, free)) in plain
        assert run(assistant_model=drafter, num_assistant_tokens=3) == plain


# ---- what is returned


@pytest.mark.core_for(family=["gemma3"], batch=[1], engine=["static"])
@pytest.mark.parametrize(
    ("family", "engine", "batch"),
    cases(
        every := list(product(["llama", "gemma3", "gpt-oss"], ["static", "stock"], [1, 3])),
        [one for one in every if one[0] == "gemma3" or one[1:] == ("static", 3)],
    ),
)
def test_returned_scores_logits_and_hidden_states(family, batch, engine):
    target, inputs = tiny_target(family), padded_prompts(PROMPTS[batch], seed=batch)
    free = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    ends = [new_tokens(inputs, free, row)[7 + 2 * row] for row in range(batch)]

    def generate(**options):
        return target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            repetition_penalty=1.01,
            eos_token_id=ends,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
            **options,
        )

    plain = generate()
    width, steps = inputs["input_ids"].shape[1], len(plain.scores)
    new = plain.sequences[:, width:]
    # A row takes part in a step if none of its tokens before was an end.
    alive = (torch.isin(new, torch.tensor(ends)).cumsum(dim=1) - torch.isin(new, torch.tensor(ends)).long()) == 0
    for drafter in (oracle(target, inputs, plain.sequences, 0.6), random_eagle3(target)):
        drafter.configure(engine=engine, num_assistant_tokens=4)
        out = generate(assistant_model=drafter)
        assert isinstance(out, GenerateDecoderOnlyOutput)
        assert out.speculation is drafter.stats and out.speculation.engine == engine
        assert torch.equal(out.sequences, plain.sequences)
        for name in ("scores", "logits"):
            ours, theirs = out[name], plain[name]
            assert isinstance(ours, tuple) and len(ours) == steps
            for step in range(steps):
                assert ours[step].shape == theirs[step].shape and ours[step].dtype == theirs[step].dtype
                rows = alive[:, step]
                torch.testing.assert_close(ours[step][rows], theirs[step][rows], rtol=1e-3, atol=1e-3)
        if engine == "stock" and batch == 1:
            continue  # transformers' assisted loop returns hidden states block by block
        assert len(out.hidden_states) == steps
        is_token = inputs["attention_mask"].bool()
        for step in range(steps):
            assert len(out.hidden_states[step]) == len(plain.hidden_states[step])
            for ours, theirs in zip(out.hidden_states[step], plain.hidden_states[step], strict=True):
                assert ours.shape == theirs.shape
                rows = is_token if step == 0 else alive[:, step]
                torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-3, atol=1e-3)
                if engine == "static":
                    assert not ours[~rows].any(), "padding has nothing of drafts that were dropped"


@pytest.mark.core
def test_only_requested_outputs_are_returned():
    target, inputs, free = free_run(3)
    drafter = oracle(target, inputs, free, 1.0)
    out = target.generate(
        **inputs, do_sample=False, max_new_tokens=4, return_dict_in_generate=True, assistant_model=drafter
    )
    assert out.scores is None and out.logits is None and out.hidden_states is None and out.attentions is None
    out = target.generate(**inputs, do_sample=False, max_new_tokens=4, output_scores=True, assistant_model=drafter)
    assert isinstance(out, torch.Tensor)


def shapes(attentions):
    return [[tuple(weights.shape) for weights in step] for step in attentions]


@pytest.mark.core
@pytest.mark.parametrize(("family", "batch"), [("llama", 1), ("deepseek-v3", 1), ("qwen3-next", 1), ("qwen3-next", 3)])
def test_attention_weights_come_from_the_stock_engine(family, batch):
    target = copy.deepcopy(tiny_target(family))
    target.set_attn_implementation("eager")
    inputs = padded_prompts(PROMPTS[batch])
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(**inputs, **options)
    out = target.generate(**inputs, **options, assistant_model=oracle(target, inputs, plain.sequences, 0.6))
    assert out.speculation.engine == "stock" and torch.equal(out.sequences, plain.sequences)
    assert shapes(out.attentions) == shapes(plain.attentions) and len(out.attentions[0]) > 0
    for step, expected in zip(out.attentions, plain.attentions, strict=True):
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.core_for(family=["gemma3"])
@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt-oss"])
def test_attention_weights_behind_a_window(family):
    target = copy.deepcopy(tiny_target(family))
    target.set_attn_implementation("eager")
    options = {"do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    drafter, inputs = random_eagle3(target), padded_prompts([3])
    with pytest.raises(ValueError, match="a sequence of 9 tokens outgrows the window of 7 of"):
        target.generate(**inputs, **options, max_new_tokens=6, assistant_model=drafter)
    plain = target.generate(**inputs, **options, max_new_tokens=4)
    out = target.generate(**inputs, **options, max_new_tokens=4, assistant_model=drafter)
    assert torch.equal(out.sequences, plain.sequences) and shapes(out.attentions) == shapes(plain.attentions)
    for step, expected in zip(out.attentions, plain.attentions, strict=True):
        torch.testing.assert_close(step, expected)


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "engine", "batch"),
    [("llama", "static", 1), ("llama", "static", 3), ("llama", "stock", 1), (STOCK_FAMILY, "stock", 1)],
)
def test_no_attention_weights_where_none_are_computed(family, engine, batch):
    target, inputs = tiny_target(family), padded_prompts(PROMPTS[batch])
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(**inputs, **options)
    drafter = random_eagle3(target).configure(engine="stock" if engine == "stock" else "auto")
    out = target.generate(**inputs, **options, assistant_model=drafter)
    assert out.speculation.engine == engine and torch.equal(out.sequences, plain.sequences)
    assert out.attentions == plain.attentions == ((),) * 6
    assert "attentions" in out
    del options["output_attentions"]
    assert target.generate(**inputs, **options, assistant_model=drafter).attentions is None


# ---- ways to call


@pytest.mark.core
def test_three_places_for_num_assistant_tokens():
    target, inputs, free = free_run(3)
    drafter = oracle(target, inputs, free, 1.0)
    drafter.configure(num_assistant_tokens=2)
    call = {**inputs, "do_sample": False, "max_new_tokens": 12, "assistant_model": drafter}

    def drafts_a_round(**options):
        target.generate(**call, **options)
        assert drafter.stats.num_rounds == -(-11 // (drafter.stats.num_assistant_tokens + 1))
        return drafter.stats.num_assistant_tokens

    assert drafts_a_round() == 2
    assert drafts_a_round(num_assistant_tokens=3) == 3
    config = GenerationConfig(num_assistant_tokens=5, max_new_tokens=12, pad_token_id=PAD)
    assert drafts_a_round(generation_config=config) == 5
    assert drafts_a_round(generation_config=config, num_assistant_tokens=1) == 1
    assert drafts_a_round() == 2


@pytest.mark.core
def test_generation_config_object():
    target, inputs, free = free_run(3)
    config = GenerationConfig(
        max_new_tokens=9, repetition_penalty=1.5, eos_token_id=new_tokens(inputs, free)[2], pad_token_id=PAD
    )
    before = config.to_dict()
    plain = target.generate(**inputs, generation_config=config)
    out = target.generate(**inputs, generation_config=config, assistant_model=oracle(target, inputs, free, 0.6))
    assert torch.equal(out, plain)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("batch", "chunk_size", "kind"),
    cases(
        every := list(product([1, 3], [1, 3, 100], KINDS)),
        [one for one in every if one[:2] == (3, 3) or one in ((1, 1, "mtp"), (3, 100, "eagle3"))],
    ),
)
def test_prompt_in_chunks(batch, chunk_size, kind, monkeypatch):
    target, inputs, free = free_run(batch)
    drafter = RANDOM_DRAFTERS[kind](target).configure(num_assistant_tokens=3)
    propose, drafted = drafter.propose, []
    monkeypatch.setattr(drafter, "propose", lambda *args: (drafted.append(propose(*args)), drafted[-1])[1])
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    whole = target.generate(**inputs, **options)
    chunked = target.generate(**inputs, **options, prefill_chunk_size=chunk_size)
    assert torch.equal(whole, free[:, : whole.shape[1]]) and torch.equal(chunked, whole)
    half = len(drafted) // 2
    rows = inputs["attention_mask"].sum(dim=1) > 1  # EAGLE drafts anything after a prompt of one token
    for before, after in zip(drafted[: half - 1], drafted[half:-1], strict=True):
        assert torch.equal(before.tokens[rows, 0], after.tokens[rows, 0]), "the drafter saw another prompt"


def test_hidden_states_of_a_prompt_in_chunks_are_those_of_the_whole():
    target, inputs, _ = free_run(3)
    options = {"do_sample": False, "max_new_tokens": 2, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = target.generate(**inputs, **options)
    out = target.generate(**inputs, **options, assistant_model=random_eagle3(target), prefill_chunk_size=5)
    is_text = inputs["attention_mask"].bool()
    for ours, theirs in zip(out.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(ours[is_text], theirs[is_text], rtol=1e-3, atol=1e-3)


@pytest.mark.core
def test_input_without_attention_mask():
    target, inputs, _ = free_run(3)
    ids = inputs["input_ids"]  # holds padding, which generate() recognises
    plain = target.generate(ids, do_sample=False, max_new_tokens=8)
    drafter = random_eagle3(target)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=8, assistant_model=drafter), plain)
    assert drafter.stats.engine == "static"


@pytest.mark.core_for(draft_probs=[True])
@pytest.mark.parametrize("draft_probs", [False, True])
def test_several_sequences_a_prompt(draft_probs):
    target, inputs = target_and_inputs(3)
    drafter = random_eagle3(target).configure(draft_probs=draft_probs)
    set_seed(0)
    out = target.generate(**inputs, do_sample=True, max_new_tokens=8, num_return_sequences=4, assistant_model=drafter)
    width = inputs["input_ids"].shape[1]
    assert out.shape == (12, width + 8) and len(drafter.stats.rows) == 12
    assert torch.equal(out[:, :width], inputs["input_ids"].repeat_interleave(4, dim=0))
    assert len({tuple(row) for row in out.tolist()}) == 12


# ---- randomness


def sample(target, inputs, drafter, seed=0, **options):
    set_seed(seed)
    options = {"max_new_tokens": 12, "num_assistant_tokens": 3, "do_sample": True, **options}
    return target.generate(**inputs, assistant_model=drafter, **options)


@pytest.mark.parametrize(
    ("draft_probs", "engine", "kind"),
    cases(
        every := list(product([False, True], ["static", "stock"], ["eagle3", "pard"])),
        [one for one in every if one[0] == (one[2] == "eagle3")],
    ),
)
def test_seed_reproduces_a_run(draft_probs, engine, kind):
    """The seed of `set_seed`; `test_seeds_of_rows` has every family."""
    target, inputs = target_and_inputs(3 if engine == "static" else 1)
    drafter = RANDOM_DRAFTERS[kind](target).configure(draft_probs=draft_probs, engine=engine)
    first = sample(target, inputs, drafter)
    assert torch.equal(sample(target, inputs, drafter), first)
    assert not torch.equal(sample(target, inputs, drafter, seed=1), first)


@sampling_kinds
def test_seeds_of_rows(draft_probs, kind):
    """A row's sample is a function of its seed and its prompt, whatever the global generator and the batch are."""
    target, inputs = target_and_inputs(3)
    drafter = RANDOM_DRAFTERS[kind](target).configure(draft_probs=draft_probs)
    together, width = sample(target, inputs, drafter, seeds=[11, -5, 2**62]), inputs["input_ids"].shape[1]
    turned = {name: rows.flip(0) for name, rows in inputs.items()}
    assert torch.equal(sample(target, turned, drafter, seed=9, seeds=torch.tensor([2**62, -5, 11])).flip(0), together)
    for row in cases((0, 1, 2), (2,)):
        length = PROMPTS[3][row]
        alone = {name: values[row : row + 1, width - length :] for name, values in inputs.items()}
        out = sample(target, alone, drafter, seeds=[[11, -5, 2**62][row]])
        assert torch.equal(out[0, length:], together[row, width:])
    if kind == "eagle3":
        assert not torch.equal(sample(target, inputs, drafter, seeds=[11, -5, 3])[2], together[2])
        twice = sample(target, inputs, drafter, seeds=[4] * 6, num_return_sequences=2)
        assert torch.equal(twice[::2], twice[1::2])


def test_seeds_of_rows_on_the_stock_engine():
    """Where samples are the global generator's, which is left alone."""
    target, inputs = target_and_inputs(1)
    drafter = random_eagle3(target).configure(engine="stock")
    first = sample(target, inputs, drafter, seeds=[5])
    assert torch.equal(sample(target, inputs, drafter, seed=1, seeds=[5]), first)
    after = torch.get_rng_state()
    set_seed(1)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(sample(target, inputs, drafter, seeds=[6]), first)


@pytest.mark.core
def test_random_state_after_a_call():
    target, inputs = target_and_inputs(3)
    drafter = random_eagle3(target)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    target.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_model=drafter)
    assert torch.equal(torch.get_rng_state(), before), "greedy decoding drew random numbers"

    states = []
    for options in ({}, {"max_new_tokens": 3}, {"num_assistant_tokens": 1}, {"temperature": 0.2, "top_k": 3}):
        sample(target, inputs, drafter, seed=3, **options)
        states.append(torch.get_rng_state())
    assert not torch.equal(states[0], before)
    assert all(torch.equal(state, states[0]) for state in states), "the draws depend on how the call went"
