"""Prompts with images, sounds or embeddings: texts, caches and what drafters read, against plain `generate()`."""

import copy
import functools

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from images import IMAGE, KINDS, VIDEOS, image_model, image_prompts
from lossless import oracle
from model_state import unchecked
from oracle import RANDOM_DRAFTERS, random_draft_model, random_eagle3, random_mtp
from targets import padded_prompts
from transformers import DynamicCache

from hf_specdec.calls import first_pass
from hf_specdec.engine import static_engine
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.modules import signature
from hf_specdec.modules.module_hooks import has_hooks

NEW = 12
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}
# A batch with one image, none and two.
ROWS = [[4, IMAGE, 5], [3], [2, IMAGE, 3, IMAGE, 6]]
# Several positions a token, recurrent layers, images that are bidirectional, prompts that are.
QWEN, HYBRID, GEMMA, PALIGEMMA = (
    f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3_5", "Gemma3", "PaliGemma")
)
LLAVA = "LlavaForConditionalGeneration"
# Keys and position ids of an indexer, n-gram embeddings.
INDEXED = "Qwen4ExpForConditionalGeneration"

model_of = functools.cache(image_model)


@functools.cache
def prompts_of(name, seed=1):
    return image_prompts(model_of(name), ROWS, seed)


@functools.cache
def plain(name):
    """What plain `generate()` generates after `prompts_of`, `[B, P + NEW]`."""
    return model_of(name).generate(**prompts_of(name), **OPTIONS)


ALL = [(name, k, accuracy) for name in KINDS for k in (1, 3, 7) for accuracy in (0.0, 0.6, 1.0)]
FEW = [(name, 3, 0.6) for name in (QWEN, HYBRID, INDEXED, GEMMA, PALIGEMMA, "Idefics3ForConditionalGeneration")]


@pytest.mark.core
@pytest.mark.parametrize(("name", "num_drafts", "accuracy"), cases(ALL, FEW), ids=str)
def test_texts(name, num_drafts, accuracy):
    """Batches of prompts with and without images, left-padded; then a prompt by itself."""
    target = model_of(name)
    for inputs in (prompts_of(name), image_prompts(target, ROWS[2:])):
        expected = target.generate(**inputs, **OPTIONS)
        drafter = oracle(target, inputs, expected, accuracy)
        out = target.generate(**inputs, **OPTIONS, assistant_model=drafter, num_assistant_tokens=num_drafts)
        assert torch.equal(out, expected)
        assert (drafter.stats.engine, drafter.stats.reason) == ("static", "the target and the call fit")
        # The first new token is the prompt's pass's.
        assert drafter.stats.committed == len(expected) * (NEW - 1)
        assert (accuracy < 1.0) or drafter.stats.accepted == drafter.stats.drafted > 0


def test_videos():
    target = model_of(QWEN)
    inputs = image_prompts(target, ROWS[:2], kind=VIDEOS)
    expected = target.generate(**inputs, **OPTIONS)
    changed = inputs | {"pixel_values_videos": inputs["pixel_values_videos"].flip(0)}
    assert not torch.equal(target.generate(**changed, **OPTIONS), expected)
    drafter = random_eagle3(target)
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)
    assert drafter.stats.engine == "static"


@pytest.mark.parametrize("name", cases(list(KINDS), [QWEN, GEMMA]))
def test_images_are_read(name):
    """What would make the tests above empty: texts that do not depend on the images."""
    target, inputs = model_of(name), prompts_of(name)
    kinds = ("pixel_values", "input_features")
    others = {key: value.flip(-1) if key in kinds else value for key, value in inputs.items()}
    assert not torch.equal(target.generate(**others, **OPTIONS), plain(name))


@pytest.mark.parametrize(
    ("name", "kind"),
    cases(
        [(name, kind) for name in (QWEN, HYBRID, GEMMA) for kind in RANDOM_DRAFTERS],
        [(QWEN, "eagle3"), (QWEN, "draft-model"), (QWEN, "pard2"), (HYBRID, "mtp")],
    ),
)
def test_drafters(name, kind):
    target, drafter = model_of(name), RANDOM_DRAFTERS[kind](model_of(name))
    out = target.generate(**prompts_of(name), **OPTIONS, assistant_model=drafter, num_assistant_tokens=3)
    assert torch.equal(out, plain(name)) and drafter.stats.engine == "static"


def recorded_prefills(monkeypatch, drafter):
    """What `drafter` is given to prefill, each time: slots, hidden states, position ids, of all sections too."""
    seen, prefill = [], drafter.prefill

    def record(state, hidden, slots):
        positions = state.position_ids(slots), state.position_ids(slots, sections=True)
        seen.append((slots, hidden, *positions, state.records.embeddings(slots)))
        prefill(state, hidden, slots)

    monkeypatch.setattr(drafter, "prefill", record)
    return seen


@pytest.mark.core
def test_drafters_read_hidden_states_of_images(monkeypatch):
    """As in vLLM: hidden states at all positions, and of several positions of a token the first section's."""
    target, inputs = model_of(QWEN), prompts_of(QWEN)
    drafter = random_eagle3(target)
    seen = recorded_prefills(monkeypatch, drafter)
    target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    slots, hidden, positions, sections, embeddings = seen[-1]
    expected_positions, _ = target.model.get_rope_index(**{k: v for k, v in inputs.items() if k != "pixel_values"})
    assert (expected_positions[0] != expected_positions[1]).any()
    layers = target(**inputs, position_ids=expected_positions, output_hidden_states=True).hidden_states
    # The last id is the stream before the final norm, which transformers does not return.
    wanted = torch.cat([layers[index] for index in drafter.aux_hidden_state_layer_ids[:-1]], dim=-1)
    width = target.config.get_text_config().hidden_size
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        count = int(mask.sum()) - 1  # the last token is read with the first new one
        at = slots[row] < count  # columns before the prompt, and that of its last token, are padding
        assert slots[row, at].tolist() == list(range(count))
        torch.testing.assert_close(hidden[row, at, : 2 * width], wanted[row, mask][:count], atol=1e-4, rtol=1e-4)
        assert torch.equal(positions[row, at], expected_positions[0, row, mask][:count])
        assert torch.equal(sections[:, row, at], expected_positions[:, row, mask][:, :count])
    assert embeddings is None  # it reads the token that stands for an image


@pytest.mark.parametrize(
    ("name", "kind"),
    cases(
        every := [
            (f"{name}ForConditionalGeneration", kind)
            for name in ("Gemma4", "Gemma4Unified")
            for kind in ("eagle3", "dflash")
        ],
        [every[0], every[3]],
    ),
)
def test_hidden_states_of_layers_that_share_keys(monkeypatch, name, kind):
    """They run over the last token of the prompt only, unless something is asked for of all."""
    target, inputs = model_of(name), prompts_of(name)
    drafter = RANDOM_DRAFTERS[kind](target)
    seen = recorded_prefills(monkeypatch, drafter)
    text = target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert torch.equal(text, plain(name)) and drafter.stats.engine == "static"
    slots, hidden, *_ = seen[-1]
    ids = [one for one in drafter.aux_hidden_state_layer_ids if one < 4]
    assert max(ids) > 2  # those of the layers in question
    layers = target(**inputs, output_hidden_states=True).hidden_states
    wanted = torch.cat([layers[index] for index in ids], dim=-1)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        count = int(mask.sum()) - 1
        found = hidden[row, slots[row] < count, : wanted.shape[-1]]
        torch.testing.assert_close(found, wanted[row, mask][:count], atol=1e-4, rtol=1e-4)


@pytest.mark.core
def test_mtp_modules_read_embeddings_of_images(monkeypatch):
    """As in vLLM: the embedding of an image's part in the place of that of its token, one position ahead."""
    target, inputs = model_of(HYBRID), prompts_of(HYBRID)
    drafter, given = random_mtp(target), []
    run = drafter._run_module
    monkeypatch.setattr(
        drafter, "_run_module", lambda *args, **kwargs: given.append((args[0], args[2])) or run(*args, **kwargs)
    )
    merged = []
    handle = target.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: merged.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    target(**inputs)
    handle.remove()
    tokens = target.get_input_embeddings()(inputs["input_ids"])
    assert not torch.equal(merged[0], tokens)
    target.generate(**inputs, **OPTIONS, assistant_model=drafter, num_assistant_tokens=2)
    prefilled = [(index, embeds) for index, embeds in given if embeds is not None]
    assert len(prefilled) == 2 and len(given) > 2
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        for index, embeds in prefilled:
            wanted, first = merged[0][row, mask][1 + index :], embeds.shape[1] - int(mask.sum())
            torch.testing.assert_close(embeds[row, first : first + len(wanted)], wanted)


@pytest.mark.parametrize("name", cases(list(KINDS), [HYBRID, GEMMA]))
def test_records_and_cache(name):
    target, inputs = model_of(name), prompts_of(name)
    kept = {f"output_{what}": True for what in ("scores", "logits", "hidden_states")}
    options = {**OPTIONS, **kept, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **options)
    out = target.generate(**inputs, **options, assistant_model=random_draft_model(target), num_assistant_tokens=3)
    assert torch.equal(out.sequences, expected.sequences)
    tolerance = {"atol": 2e-3, "rtol": 1e-3}
    for found, wanted in ((out.scores, expected.scores), (out.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), **tolerance)
    is_token = inputs["attention_mask"].bool()
    for step, (found, wanted) in enumerate(zip(out.hidden_states, expected.hidden_states, strict=True)):
        for ours, theirs in zip(found, wanted, strict=True):
            ours, theirs = (ours[is_token], theirs[is_token]) if step == 0 else (ours, theirs)
            torch.testing.assert_close(ours, theirs, **tolerance)
    is_held = torch.nn.functional.pad(is_token, (0, NEW - 1), value=True)
    for ours, theirs in zip(out[OUTPUT_NAME].layers, expected[OUTPUT_NAME].layers, strict=True):
        if hasattr(theirs, "keys") and theirs.keys is None:  # the layer reads those of another
            assert ours.keys is None
        elif hasattr(theirs, "keys"):
            held = is_held[:, -theirs.keys.shape[2] :, None, None]
            for found, wanted in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(*(part.transpose(1, 2) * held for part in (found, wanted)), **tolerance)
        else:
            for index, states in theirs.recurrent_states.items():
                torch.testing.assert_close(ours.recurrent_states[index], states, **tolerance)


def longer(inputs, sequences, more):
    """Inputs of the next turn: the whole text so far, and `more` `[B, n]`."""
    ids = torch.cat([sequences, more], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - inputs["input_ids"].shape[1]), value=1)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.core
@pytest.mark.parametrize("name", cases([QWEN, GEMMA, PALIGEMMA, LLAVA], [QWEN, PALIGEMMA]))
def test_a_turn_of_text_after_images(name):
    """The cache of a call with images, of plain `generate()` and ours, is continued by both."""
    target, inputs = model_of(name), prompts_of(name)
    drafter = random_eagle3(target)
    more = torch.randint(5, 90, (3, 4), generator=torch.Generator().manual_seed(0))
    texts = []
    for first in (None, drafter):
        for second in (None, drafter):
            out = target.generate(**inputs, **OPTIONS, return_dict_in_generate=True, assistant_model=first)
            turn = longer(inputs, out.sequences, more)
            if target.config.model_type == "paligemma":
                turn["token_type_ids"] = torch.nn.functional.pad(inputs["token_type_ids"], (0, NEW + 4))
            cache = out[OUTPUT_NAME]
            texts.append(target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: cache}, assistant_model=second))
            assert cache.get_seq_length() == texts[0].shape[1] - 1
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert drafter.stats.engine == "static"


@pytest.mark.core
@pytest.mark.parametrize("name", cases([LLAVA, "InternVLForConditionalGeneration"], [LLAVA]))
def test_a_turn_with_another_image(name):
    target = model_of(name)
    first, drafter = image_prompts(target, [[4, IMAGE, 5]]), random_eagle3(target)
    second, texts = image_prompts(target, [[3, IMAGE, 2]], seed=2), []
    for assistant in (None, drafter):
        cache = DynamicCache()
        out = target.generate(**first, **OPTIONS, **{OUTPUT_NAME: cache}, assistant_model=assistant)
        turn = longer(first, out, second["input_ids"]) | {"pixel_values": second["pixel_values"]}
        texts.append(target.generate(**turn, **OPTIONS, **{OUTPUT_NAME: cache}, assistant_model=assistant))
        assert cache.get_seq_length() == texts[-1].shape[1] - 1
    assert torch.equal(*texts) and drafter.stats.engine == "static"


def test_positions_of_earlier_images_are_not_used(monkeypatch):
    """`rope_deltas` of the model are those that plain `generate()` leaves, also where a call is compared first."""
    target, inputs = model_of(QWEN), prompts_of(QWEN)
    text = padded_prompts([7, 5])
    expected = target.generate(**text, **OPTIONS)
    drafter = random_draft_model(target)
    target.generate(**inputs, **OPTIONS)
    deltas = target.model.rope_deltas.clone()
    assert deltas.any()
    for known in (True, False):
        if not known:
            monkeypatch.setattr(signature, "_facts", {})
        target.generate(**inputs, **OPTIONS, assistant_model=drafter)
        assert torch.equal(target.model.rope_deltas, deltas)
    assert torch.equal(target.generate(**text, **OPTIONS, assistant_model=drafter), expected)
    assert not target.model.rope_deltas.any()


@pytest.mark.core
def test_sampling_and_several_sequences():
    target, inputs = model_of(QWEN), prompts_of(QWEN)
    drafter = random_eagle3(target)
    sampled = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
    # Of one token there is one text.
    greedy = target.generate(**inputs, **sampled, top_k=1, assistant_model=drafter)
    assert torch.equal(greedy, plain(QWEN).repeat_interleave(2, dim=0))
    seeds = torch.arange(6)
    first = target.generate(**inputs, **sampled, seeds=seeds, assistant_model=drafter, num_assistant_tokens=3)
    again = target.generate(**inputs, **sampled, seeds=seeds, assistant_model=drafter, num_assistant_tokens=3)
    assert torch.equal(first, again) and not torch.equal(first[::2], first[1::2])
    # A row's text does not depend on its company.
    one = image_prompts(target, ROWS[:1])
    alone = {"do_sample": True, "seeds": seeds[:1], "assistant_model": drafter, "num_assistant_tokens": 3}
    text = target.generate(**one, **alone, max_new_tokens=NEW)
    assert torch.equal(text[0, -NEW:], first[0, -NEW:]) and drafter.stats.engine == "static"


class Steps:
    """A streamer that counts the passes of `modules` before each token."""

    def __init__(self, *modules):
        self.passes, self.steps = [0] * len(modules), []
        self._handles = [
            module.register_forward_hook(unchecked(lambda *_, at=at: self._count(at)))
            for at, module in enumerate(modules)
        ]

    def _count(self, at):
        self.passes[at] += 1

    def put(self, tokens):
        self.steps.append((tokens.flatten().tolist(), tuple(self.passes)))

    def end(self):
        for handle in self._handles:
            handle.remove()


def test_first_token_takes_one_pass():
    target = model_of(QWEN)
    inputs = image_prompts(target, ROWS[:1])
    drafter = random_eagle3(target)
    target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    seen = []
    for assistant in (None, drafter):
        streamer = Steps(target, target.model.visual)
        target.generate(**inputs, **OPTIONS, assistant_model=assistant, streamer=streamer)
        seen.append(streamer.steps)
    assert [tokens for tokens, _ in seen[0]] == [tokens for tokens, _ in seen[1]]
    # After the prompt, which the streamer gets first.
    assert seen[0][1][1] == seen[1][1][1] == (1, 1)
    assert seen[1][-1][1][1] == 1, "images are encoded once"


@pytest.mark.parametrize("name", cases([QWEN, HYBRID], [QWEN]))
def test_ends(name):
    """Texts that end with the token of the prompt's pass, or right after it."""
    target, inputs, drafter = model_of(name), prompts_of(name), random_eagle3(model_of(name))
    new = plain(name)[:, -NEW:]
    ends = {"eos_token_id": [int(new[0, 0]), int(new[2, 4])], "pad_token_id": 0}
    processed = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": 2}, ends, processed, {"num_assistant_tokens": "auto"}):
        given = {key: value for key, value in options.items() if key != "num_assistant_tokens"}
        expected = target.generate(**inputs, **OPTIONS | given)
        assert torch.equal(target.generate(**inputs, **OPTIONS | options, assistant_model=drafter), expected)
        assert drafter.stats.engine == "static"


@pytest.mark.parametrize("name", cases([QWEN, HYBRID, GEMMA, PALIGEMMA], [HYBRID]))
def test_captured_calls(monkeypatch, name):
    """One session serves prompts of text and with images; nothing is captured for their prefill."""
    replay = replay_on_cpu(monkeypatch)
    target, drafter = model_of(name), random_eagle3(model_of(name))
    images = prompts_of(name)
    width = images["input_ids"].shape[1]
    text = padded_prompts([width, 5, 3])
    for inputs in (images, text, images, prompts_of(name, seed=2), text):
        out = target.generate(**inputs, **OPTIONS, assistant_model=drafter, num_assistant_tokens=3)
        assert torch.equal(out, target.generate(**inputs, **OPTIONS))
        if inputs is text:
            captures = replay.count
    assert len(drafter.sessions) == 1
    assert replay.count == captures <= 2


@pytest.mark.core
def test_inputs_embeds_and_own_positions():
    """Embeddings of the caller, with the tokens that processors and drafters read; positions that leave some out."""
    target, drafter = model_of(LLAVA), random_draft_model(model_of(LLAVA))
    text = padded_prompts([9, 4])
    embeddings = target.get_input_embeddings()(text["input_ids"]) + 0.1
    positions = (text["attention_mask"].cumsum(1) - 1).clamp(min=0)
    apart = torch.where(positions > 2, positions + 7, positions)
    for given in ({"inputs_embeds": embeddings}, {"position_ids": apart}):
        expected = target.generate(**text, **given, **OPTIONS)
        assert not torch.equal(expected, target.generate(**text, **OPTIONS)[:, -expected.shape[1] :])
        out = target.generate(**text, **given, **OPTIONS, assistant_model=drafter)
        assert torch.equal(out, expected) and drafter.stats.engine == "static"


@pytest.mark.core
def test_prompts_that_end_with_an_image():
    inputs = image_prompts(model_of(LLAVA), [[4, IMAGE], [2]])
    drafter = random_draft_model(model_of(LLAVA))
    out = model_of(LLAVA).generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert torch.equal(out, model_of(LLAVA).generate(**inputs, **OPTIONS)) and drafter.stats.engine == "static"

    # With several positions the sections continue at different numbers in plain `generate()`.
    inputs = image_prompts(model_of(QWEN), [[4, IMAGE]], seed=3)
    inputs |= {name: inputs[name][:, :-1] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    drafter = random_draft_model(model_of(QWEN))
    out = model_of(QWEN).generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert torch.equal(out, model_of(QWEN).generate(**inputs, **OPTIONS))
    assert drafter.stats.engine == "stock" and "several position ids" in drafter.stats.reason


def test_classes_that_differ_run_on_the_stock_engine(monkeypatch):
    """The comparison of the first call finds positions that are wrong."""
    target, drafter = model_of(QWEN), random_draft_model(model_of(QWEN))
    inputs = image_prompts(target, ROWS[:1])
    expected = target.generate(**inputs, **OPTIONS)
    right = first_pass.position_offsets
    monkeypatch.setattr(signature, "_facts", {})
    monkeypatch.setattr(first_pass, "position_offsets", lambda *args: [one + 1 for one in right(*args)])
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter), expected)
    assert drafter.stats.engine == "stock" and "logits differ there from plain generate()'s" in drafter.stats.reason


def test_wrong_inputs_are_not_remembered(monkeypatch):
    monkeypatch.setattr(signature, "_facts", {})
    target, drafter = model_of(LLAVA), random_draft_model(model_of(LLAVA))
    inputs = image_prompts(target, ROWS[:1])
    with pytest.raises(ValueError, match="do not match"):
        wrong = inputs | {"pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)}
        target.generate(**wrong, **OPTIONS, assistant_model=drafter)
    target.generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert drafter.stats.engine == "static"


def test_long_prompts():
    """Longer than the blocks that recurrent layers run column by column, windows, and a chunk of the drafter."""
    target = model_of(HYBRID)
    inputs = image_prompts(target, [[150, IMAGE, 140], [20, IMAGE, 11]])
    expected = target.generate(**inputs, **OPTIONS)
    for drafter in (oracle(target, inputs, expected), random_mtp(target)):
        out = target.generate(**inputs, **OPTIONS, assistant_model=drafter, num_assistant_tokens=3)
        assert torch.equal(out, expected) and drafter.stats.engine == "static"


def test_inference_mode():
    target, inputs = model_of(GEMMA), prompts_of(GEMMA)
    drafter = random_eagle3(target)
    with torch.inference_mode():
        cache = DynamicCache()
        out = target.generate(**inputs, **OPTIONS, **{OUTPUT_NAME: cache}, assistant_model=drafter)
        assert torch.equal(out, plain(GEMMA)) and drafter.stats.engine == "static"
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter), plain(GEMMA))


def test_continuous_batching_refuses_images():
    target, inputs = model_of(LLAVA), prompts_of(LLAVA)
    drafter = random_draft_model(target)
    with pytest.raises(ValueError, match=r"given pixel_values, but continuous batching runs prompts of text only"):
        target.generate_batch([[5, 6]], assistant_model=drafter, **OPTIONS, pixel_values=inputs["pixel_values"])
    out = target.generate_batch([[5, 6, 7]], assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert len(out["req_0"].generated_tokens) == 4
    with pytest.raises(ValueError, match="itself must run them in a pass of their own"):
        drafter = random_draft_model(model_of(PALIGEMMA))
        model_of(PALIGEMMA).generate_batch([[5, 6]], assistant_model=drafter, **OPTIONS)


def test_copies_of_keys_are_freed(monkeypatch):
    """During the rounds there are the engine's keys and values only."""
    target, drafter, kept = model_of(LLAVA), random_draft_model(model_of(LLAVA)), []
    target.generate(**prompts_of(LLAVA), **OPTIONS, assistant_model=drafter)  # the first call of a class is checked
    passes, made = [], static_engine.FirstPass
    monkeypatch.setattr(static_engine, "FirstPass", lambda *args: passes.append(made(*args)) or passes[-1])
    loop = static_engine.Run.run
    monkeypatch.setattr(static_engine.Run, "run", lambda self: kept.append(passes[-1]._cache) or loop(self))
    target.generate(**prompts_of(LLAVA), **OPTIONS, assistant_model=drafter)
    assert kept == [None]


def test_the_target_is_left_as_it_was():
    target = copy.deepcopy(model_of(QWEN))
    before = {name: dict(vars(module)) for name, module in target.named_modules()}
    target.generate(**prompts_of(QWEN), **OPTIONS, assistant_model=random_eagle3(target))
    for name, module in target.named_modules():
        now = dict(vars(module))
        for attributes in (before[name], now):
            attributes.pop("rope_deltas", None)
        assert now.keys() == before[name].keys(), name
    assert not has_hooks(list(target.modules()))
