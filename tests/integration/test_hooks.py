"""The hooks leave other calls of transformers unchanged, and a model as it was, also after errors."""

import json
import subprocess
import sys
import threading
from itertools import product

import pytest
import torch
from lossless import PROMPTS, continuations
from model_state import traces
from oracle import RANDOM_DRAFTERS, OracleDrafter, random_eagle3
from targets import PAD, padded_prompts, tiny_target
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import ContinuousBatchingManager, GenerationMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.generation.streamers import BaseStreamer

from hf_specdec import AutoDrafter, install, uninstall

PLAIN_CALLS = """
import json, sys, warnings, logging
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.generation import GenerationMixin

def model(seed, layers):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()

target, assistant = model(0, 3), model(1, 1)
assistant.generation_config.num_assistant_tokens = 3
prompt = torch.tensor([[1, 9, 33, 21, 9, 33]])
calls = {
    "greedy": dict(do_sample=False),
    "batch": dict(do_sample=False, inputs=prompt.repeat(2, 1), attention_mask=torch.tensor([[0] + [1] * 5, [1] * 6])),
    "sampling": dict(do_sample=True, temperature=0.8),
    "beams": dict(num_beams=3, do_sample=False),
    "assistant": dict(do_sample=False, assistant_model=assistant),
    "assistant_sampling": dict(do_sample=True, assistant_model=assistant),
    "assistant_number": dict(do_sample=False, assistant_model=assistant, num_assistant_tokens=2),
    "prompt_lookup": dict(do_sample=False, prompt_lookup_num_tokens=2),
}
refused = {
    "assistant_batch": dict(inputs=prompt.repeat(2, 1), assistant_model=assistant),
    "assistant_sequences": dict(num_return_sequences=2, do_sample=True, assistant_model=assistant),
}

def generate_all():
    generated = {}
    for name, options in calls.items():
        set_seed(0)
        generated[name] = target.generate(**{"inputs": prompt, "max_new_tokens": 12, **options}).tolist()
        generated[name + "_random"] = torch.rand(1).item()
    for name, options in refused.items():
        try:
            target.generate(**{"inputs": prompt, "max_new_tokens": 4, **options})
        except Exception as error:
            generated[name] = [type(error).__name__, str(error)]
    return generated

results = [generate_all()]
assert "hf_specdec" not in sys.modules
before = dict(vars(GenerationMixin))
import hf_specdec
assert vars(GenerationMixin) != before
results.append(generate_all())
hf_specdec.install()
hf_specdec.uninstall()
hf_specdec.uninstall()
after = dict(vars(GenerationMixin))
assert list(after) == list(before) and all(after[name] is before[name] for name in before)
results.append(generate_all())
print(json.dumps(results))
"""


@pytest.mark.core
def test_calls_without_a_drafter_are_unchanged():
    """Plain generate() and transformers' own assistants do the same without the package, with it, and uninstalled."""
    run = subprocess.run([sys.executable, "-c", PLAIN_CALLS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    alone, installed, uninstalled = json.loads(run.stdout.splitlines()[-1])
    assert alone["assistant"] == alone["greedy"] and "batch" in alone["assistant_batch"][1]
    assert installed == alone
    assert uninstalled == alone


@pytest.mark.core
@pytest.mark.parametrize("owner", [GenerationMixin, ContinuousMixin, ContinuousBatchingManager])
def test_install_twice_and_uninstall(owner):
    ours = dict(vars(owner))
    try:
        install()
        assert dict(vars(owner)) == ours
        uninstall()
        theirs = dict(vars(owner))
        assert list(theirs) == list(ours), "names appeared or vanished"
        changed = {name for name in ours if theirs[name] is not ours[name]}
        assert changed and not any("hf_specdec" in theirs[name].__code__.co_filename for name in changed)
        assert all("hf_specdec" in ours[name].__code__.co_filename for name in changed)
        uninstall()
        assert dict(vars(owner)) == theirs
        install()
        assert dict(vars(owner)) == ours
    finally:
        install()


@pytest.mark.core
def test_configurations_that_a_model_prepares_itself():
    """Musicgen's own `generate()` makes its configuration without `_prepare_generation_config`."""
    torch.manual_seed(0)
    config = MusicgenDecoderConfig(
        vocab_size=64,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_codebooks=2,
        pad_token_id=64,
        bos_token_id=64,
    )
    model = MusicgenForCausalLM(config).eval()
    prompt = torch.randint(64, (2 * config.num_codebooks, 5))
    # It fills in no defaults.
    options = {"num_return_sequences": 1, "guidance_scale": 1.0, "decoder_start_token_id": 64}
    generated = []
    for prepare in (install, uninstall):
        try:
            prepare()
            generated.append(model.generate(prompt, do_sample=False, max_new_tokens=8, **options))
        finally:
            install()
    assert generated[0].shape[-1] > 5 and torch.equal(*generated)


@pytest.mark.core
def test_requests_of_managers_refuse_drafters():
    target = tiny_target("llama")
    drafter, prompts = random_eagle3(target), [[5, 6, 7]]
    calls = {
        "add_request": lambda **options: ContinuousBatchingManager.add_request(None, prompts[0], **options),
        "add_requests": lambda **options: ContinuousBatchingManager.add_requests(None, prompts, **options),
    }
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=rf"{name}\(\) was given assistant_model=Eagle3Drafter, but the drafter is"
        ):
            call(assistant_model=drafter)
        with pytest.raises(ValueError, match=r"assistant_model is <class 'hf_specdec\.auto\.AutoDrafter'>; expected"):
            call(assistant_model=AutoDrafter)
    for call in (target.generate_batch, target.init_continuous_batching, target.continuous_batching_context_manager):
        with pytest.raises(ValueError, match=r"assistant_model is <class 'hf_specdec\.auto\.AutoDrafter'>; expected"):
            call(prompts, assistant_model=AutoDrafter)
    assert target.generate_batch([], assistant_model=None) == {}


@pytest.mark.core
def test_a_drafter_needs_the_hooks_installed():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target)
    uninstall()
    try:
        with pytest.raises(AttributeError, match="no attribute 'generation_config'"):
            target.generate(**inputs, max_new_tokens=4, assistant_model=drafter)
    finally:
        install()
    assert target.generate(**inputs, max_new_tokens=4, assistant_model=drafter).shape[0] == 3


class Trouble(Exception):
    pass


def in_trouble_after(calls):
    """A function that raises `Trouble` when it is called more than `calls` times."""
    count = 0

    def call():
        nonlocal count
        count += 1
        if count > calls:
            raise Trouble

    return call


class TroubledProcessor(LogitsProcessor):
    def __init__(self, call):
        self.call = call

    def __call__(self, input_ids, scores):
        self.call()
        return scores


class TroubledCriterion(StoppingCriteria):
    def __init__(self, call):
        self.call = call

    def __call__(self, input_ids, scores, **kwargs):
        self.call()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TroubledStreamer(BaseStreamer):
    def __init__(self, call):
        self.call = call

    def put(self, value):
        self.call()

    def end(self):
        pass


OPTIONS = {
    "processor": lambda call: {"logits_processor": LogitsProcessorList([TroubledProcessor(call)])},
    "criterion": lambda call: {"stopping_criteria": StoppingCriteriaList([TroubledCriterion(call)])},
    "streamer": lambda call: {"streamer": TroubledStreamer(call)},
}


@pytest.mark.core_for(who=[*OPTIONS, "propose"], calls=[4])
@pytest.mark.parametrize(
    ("calls", "who", "engine"),
    [
        *product([4], [*OPTIONS, "propose", "nobody"], ["static"]),
        *product([0], ["prefill", "new_memory"], ["static"]),
        *((4, "processor", "stock"), (4, "propose", "stock"), (0, "prefill", "stock")),
    ],
)
def test_model_is_restored_after_an_error_of_a_callback(who, engine, calls, monkeypatch):
    target = tiny_target("gemma3")
    inputs = padded_prompts(PROMPTS[3])
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD}
    before, plain = traces(target), target.generate(**inputs, **options)
    drafter = random_eagle3(target).configure(engine=engine, num_assistant_tokens=2)
    call = in_trouble_after(calls)
    with monkeypatch.context() as patch:
        if who in OPTIONS:
            options_in_trouble = {**options, **OPTIONS[who](call)}
        elif who == "nobody":
            options_in_trouble = options
        else:
            verb = getattr(drafter, who)
            patch.setattr(drafter, who, lambda *args: (call(), verb(*args))[1])
            options_in_trouble = {**options, "prefill_chunk_size": 1 if engine == "static" else None}
        once_a_call = who == "new_memory" or (who == "prefill" and engine == "stock")
        if who == "nobody" or (once_a_call and calls > 0):
            target.generate(**inputs, **options_in_trouble, assistant_model=drafter)
        else:
            with pytest.raises(Trouble):
                target.generate(**inputs, **options_in_trouble, assistant_model=drafter)
    assert traces(target) == before
    assert torch.equal(target.generate(**inputs, **options), plain)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)


@pytest.mark.core_for(kind=["mtp"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [("p-eagle", "static"), ("dspark", "stock"), ("pard", "static"), ("draft-model", "static"), ("mtp", "stock")],
)
def test_drafter_is_restored_after_an_error(kind, engine, monkeypatch):
    """Also after an error; and the target is."""
    target = tiny_target("llama")
    inputs, options = padded_prompts(PROMPTS[3]), {"do_sample": False, "max_new_tokens": 8}
    plain = target.generate(**inputs, **options)
    drafter = RANDOM_DRAFTERS[kind](target).configure(engine=engine, num_assistant_tokens=3)
    before = traces(target), traces(drafter.eval())
    call, draw = in_trouble_after(1), drafter.draw
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "draw", lambda *args, **kwargs: (call(), draw(*args, **kwargs))[1])
        with pytest.raises(Trouble):
            target.generate(**inputs, **options, assistant_model=drafter)
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert (traces(target), traces(drafter)) == before


@pytest.mark.core
def test_model_is_restored_after_an_error_in_the_target(monkeypatch):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    before, plain = traces(target), target.generate(**inputs, max_new_tokens=12)
    drafter = OracleDrafter(target, continuations(inputs, plain), PROMPTS[3], accuracy=0.6)
    call = in_trouble_after(3)
    with monkeypatch.context() as patch:
        forward, is_called = target.model.norm.forward, []
        patch.setitem(vars(target.model.norm), "forward", lambda *args: (is_called and call(), forward(*args))[1])
        target.generate(**inputs, max_new_tokens=1, assistant_model=drafter)  # the check of that forward
        is_called.append(True)
        with pytest.raises(Trouble):
            target.generate(**inputs, max_new_tokens=12, assistant_model=drafter)
    assert traces(target) == before
    assert torch.equal(target.generate(**inputs, max_new_tokens=12, assistant_model=drafter), plain)


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_threads_take_turns_on_a_target(engine):
    """Two drafters and a third thread with the first of them again, all at once on one target."""
    target = tiny_target("llama")
    batches = [padded_prompts([length], seed=length) for length in (3, 9, 14)]
    options = {"do_sample": False, "max_new_tokens": 12}
    plain = [target.generate(**inputs, **options) for inputs in batches]
    drafters = [RANDOM_DRAFTERS[kind](target).configure(engine=engine) for kind in ("eagle3", "pard")]
    start, generated = threading.Barrier(3), {}

    def generate(index):
        start.wait()
        for turn in range(3):
            generated[index, turn] = target.generate(**batches[index], **options, assistant_model=drafters[index % 2])

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(generated) == 9
    assert all(torch.equal(text, plain[index]) for (index, _), text in generated.items())
