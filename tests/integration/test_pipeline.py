"""transformers' text-generation pipeline generates the same with a drafter as without one."""

import copy
import json
import pickle

import pytest
from case_counts import cases
from oracle import NUM_DRAFT_TOKENS, RANDOM_DRAFTERS, eagle_options, random_eagle3
from targets import tiny_target
from transformers import TextIteratorStreamer, pipeline
from word_tokenizer import word_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "ef"}, {"role": "user", "content": "gk"}]
OPTIONS = {"max_new_tokens": 10, "do_sample": False}


def tokenizer():
    words = word_tokenizer()
    words.pad_token, words.chat_template = words.convert_ids_to_tokens(0), TEMPLATE
    return words


def pipelines(target, drafter, **options):
    """A pipeline without the drafter, and one with it."""
    common = {"task": "text-generation", "model": target, "tokenizer": tokenizer(), **options}
    return pipeline(**common), pipeline(**common, assistant_model=drafter)


@pytest.mark.core_for(kind=["eagle3", "draft-model"])
@pytest.mark.parametrize("kind", cases(list(RANDOM_DRAFTERS), ["eagle3", "draft-model", "mtp"]))
def test_pipeline_generates_the_same(kind):
    target = tiny_target("llama")
    drafter = RANDOM_DRAFTERS[kind](target)
    plain, fast = pipelines(target, drafter)
    for prompt in ("abcdef", ["abc", "pdfga", "h"], CHAT, [CHAT, CHAT[:1]]):
        assert fast(prompt, **OPTIONS) == plain(prompt, **OPTIONS)
        assert drafter.stats.engine == "static" and drafter.stats.committed == 9
        assert drafter.stats.num_assistant_tokens == drafter.num_assistant_tokens
    assert fast.assistant_model is drafter


def test_batches_padded_by_the_pipeline():
    target = tiny_target("llama")
    plain, fast = pipelines(target, random_eagle3(target), batch_size=2)
    prompts = ["abc", "pdfga", "h", "abcdefgh", "bb"]
    assert fast(prompts, **OPTIONS) == plain(prompts, **OPTIONS)


@pytest.mark.core
def test_streaming_and_stop_strings():
    target = tiny_target("llama")
    plain, fast = pipelines(target, random_eagle3(target))
    text = plain("abc", **OPTIONS, return_full_text=False)[0]["generated_text"]
    streamer = TextIteratorStreamer(fast.tokenizer, skip_prompt=True)
    fast("abc", **OPTIONS, streamer=streamer)
    assert "".join(streamer) == text
    stop = {"stop_sequence": text[3:5]}
    assert fast("abc", **OPTIONS, **stop) == plain("abc", **OPTIONS, **stop)


@pytest.mark.core
def test_number_of_drafts_in_a_pipeline(caplog):
    """Older versions hand every call a configuration that is filled with defaults, which nobody asked for."""
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    plain, fast = pipelines(target, drafter)
    for options, expected in (({}, NUM_DRAFT_TOKENS), ({"num_assistant_tokens": 2}, 2)):
        assert fast("abc", **OPTIONS, **options) == plain("abc", **OPTIONS)
        assert drafter.stats.num_assistant_tokens == expected
    assert "no effect" not in caplog.text


@pytest.mark.core_for(kind=["eagle3", "draft-model"])
@pytest.mark.parametrize("kind", cases(list(RANDOM_DRAFTERS), ["eagle3", "draft-model", "pard2", "mtp"]))
def test_special_tokens_are_the_targets_and_not_saved(kind, tmp_path):
    target = copy.deepcopy(tiny_target("llama"))
    drafter = RANDOM_DRAFTERS[kind](target)
    assert (drafter.config.bos_token_id, drafter.config.eos_token_id, drafter.config.pad_token_id) == (1, None, 0)
    target.config.eos_token_id = 7  # what the owner sets later counts too
    assert drafter.config.eos_token_id == 7
    pipelines(target, drafter)
    for saved in (drafter.config, copy.deepcopy(drafter.config), pickle.loads(pickle.dumps(drafter.config))):
        saved.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert not {"bos_token_id", "eos_token_id", "pad_token_id", "target"} & written.keys()


@pytest.mark.core
def test_special_tokens_of_a_file_stay_in_it():
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    config = type(drafter.config)(**drafter.config.to_dict(), eos_token_id=5)
    assert config.eos_token_id == 5 and config.pad_token_id is None and config.to_dict()["eos_token_id"] == 5
    unbound = type(drafter)(config).eval()
    unbound.bind(target)
    assert unbound.config.eos_token_id is None and unbound.config.to_dict()["eos_token_id"] == 5


@pytest.mark.core
def test_equal_settings_stay_equal():
    """What a drafter is bound to is no part of its settings."""
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    assert drafter.config == type(drafter.config)(**eagle_options(target))
