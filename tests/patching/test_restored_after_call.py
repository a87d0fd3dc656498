"""After any call, also one that raises, a target and its drafter are restored exactly."""

import copy
import hashlib
import itertools
import linecache
import pickle
import sys
from contextlib import nullcontext
from functools import partial
from itertools import product

import lossless
import pytest
import torch
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from model_state import traces
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import padded_prompts, set_policy, tiny_target
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.modules import patch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENGINES = ["static", "captured", "stock"]  # captured rounds patch all that eager ones do, and the stock engine less
HYBRIDS = ["qwen3-next", "falcon-h1"]
greedy = partial(lossless.greedy, max_new_tokens=num_cases(16, 8))


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    set_policy(monkeypatch, DEVICE, fused_linear=True, layer_kernels=True)
    if request.param == "captured" and DEVICE == "cpu":
        set_policy(monkeypatch, "cpu", transposed_linear=False)
        replay_on_cpu(monkeypatch)
    return request.param


def looks(value, seen):
    """`value` as something that can be compared: its parts and their identities."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        is_alone = storage.data_ptr() == value.data_ptr() and storage.nbytes() == value.nbytes
        flags = value.requires_grad, value.is_inference(), value.is_leaf, value._version, value.grad is None
        backward = len(value._backward_hooks or ()), len(getattr(value, "_post_accumulate_grad_hooks", None) or ())
        layout = value.dtype, value.device, value.stride(), value.storage_offset(), is_alone
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return id(value), flags, backward, layout, hashlib.sha256(content).hexdigest()
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device, type)):
        return value
    if isinstance(value, dict):
        return type(value), [(looks(key, seen), looks(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [looks(item, seen) for item in value]
    if isinstance(value, (nn.Module, PreTrainedConfig)) or hasattr(value, "to_dict"):
        if id(value) in seen:
            return id(value)
        seen.add(id(value))
        kept = ("_last_stats", "sessions")  # a drafter keeps these of a call
        own = {name: item for name, item in vars(value).items() if name not in kept}
        return id(value), type(value), looks(own, seen)
    return id(value)


def snapshot(*models):
    return [looks(model, set()) for model in models], [(vars(type(model)).keys(), model.training) for model in models]


def check(before, *models):
    now = snapshot(*models)
    if now != before:
        raise AssertionError(f"changed: {first_difference(before, now)}")
    assert not patch._replaced and patch.this_thread.engine is None


def first_difference(one, other, path=""):
    if type(one) is type(other) and isinstance(one, (list, tuple)) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                name = one[0] if index and isinstance(one[0], str) else index
                return first_difference(*pair, f"{path}/{name}")
    return f"{path}: {str(one)[:300]} became {str(other)[:300]}"


def fresh(family):
    target = copy.deepcopy(tiny_target(family)).to(DEVICE)
    return target, {name: tensor.to(DEVICE) for name, tensor in padded_prompts([9]).items()}


def configured(drafter, engine):
    return drafter.configure(engine="stock" if engine == "stock" else "auto", compile_rounds=False)


CALLS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "inference mode": {},
}


@pytest.mark.core_for(engine=["static"])
@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        *product(["captured"], ["eagle3", "draft-model", "mtp-by-target"]),
        ("static", "draft-model"),
        ("stock", "eagle3"),
    ],
    indirect=["engine"],
)
def test_models_are_restored_after_every_kind_of_call(engine, kind):
    target, inputs = fresh("llama")
    drafter = configured(RANDOM_DRAFTERS[kind](target), engine)
    before = snapshot(target, drafter)
    for name, options in CALLS.items():
        for _ in range(2 if engine == "captured" else 1):  # the second call only replays
            with torch.inference_mode() if name == "inference mode" else nullcontext():
                greedy(target, inputs, drafter, 3, **options)
            check(before, target, drafter)


@pytest.mark.core_for(family=["qwen3-moe"])
@pytest.mark.parametrize(
    ("engine", "family"),
    [
        *product(["captured"], ["gpt-oss", "qwen3-moe"]),
        *product(["static"], ["llama", *HYBRIDS]),
        ("stock", HYBRIDS[0]),
    ],
    indirect=["engine"],
)
def test_every_kind_of_target_is_restored(engine, family):
    target, inputs = fresh(family)
    drafter = configured(random_eagle3(target), engine)
    before = snapshot(target, drafter)
    for options in CALLS.values():
        greedy(target, inputs, drafter, 3, **options)
        check(before, target, drafter)


@pytest.mark.core
def test_output_hidden_states_leaves_what_it_leaves_without_a_drafter(engine):
    """transformers installs hooks of its own, once, where somebody asks for hidden states."""
    target, inputs = fresh("llama")
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    greedy(target, inputs, **options)
    drafter = configured(random_eagle3(target), engine)
    before = snapshot(target, drafter)
    greedy(target, inputs, drafter, 3, **options)
    check(before, target, drafter)


class Stop(BaseException):
    """What no library catches, as `KeyboardInterrupt`."""


class Breaks(LogitsProcessor):
    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 5:
            raise self.error
        return scores


class BreaksRule(Breaks, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class BreaksStream(Breaks, BaseStreamer):
    def put(self, value):
        self(value, value)

    def end(self):
        pass


BREAKS = {
    "processor": lambda error: {"logits_processor": LogitsProcessorList([Breaks(error)])},
    "criterion": lambda error: {"stopping_criteria": StoppingCriteriaList([BreaksRule(error)])},
    "streamer": lambda error: {"streamer": BreaksStream(error)},
}


@pytest.mark.core_for(error=[ValueError], where=["processor", "streamer"])
@pytest.mark.parametrize(
    ("engine", "where", "error"),
    [
        *product(["captured"], BREAKS, [ValueError]),
        *(("static", "criterion", KeyboardInterrupt), ("static", "processor", Stop), ("stock", "streamer", ValueError)),
    ],
    indirect=["engine"],
)
def test_models_are_restored_after_errors_of_the_caller(engine, where, error):
    target, inputs = fresh("gpt-oss")
    drafter = configured(random_eagle3(target), engine)
    plain, before = greedy(target, inputs), snapshot(target, drafter)
    for is_inference in (False, True):
        with pytest.raises(error), torch.inference_mode() if is_inference else nullcontext():
            greedy(target, inputs, drafter, 3, **BREAKS[where](error("by the caller")))
        check(before, target, drafter)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert torch.equal(greedy(target, inputs, drafter, 3), plain)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps])
def test_copies_during_a_call_are_refused(copy_of):
    """They would stay patched; between the rounds of a manager, when it pauses, they are whole."""
    target, inputs = fresh("llama")
    drafter = random_eagle3(target)
    plain, refused = greedy(target, inputs), []

    class Copies(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            for one in (target, drafter):
                with pytest.raises(RuntimeError, match=f"{type(one).__name__} was to be copied or pickled during a c"):
                    copy_of(one)
                refused.append(one)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=DEVICE)

    assert torch.equal(greedy(target, inputs, drafter, 3, stopping_criteria=[Copies()]), plain) and refused
    with target.continuous_batching_context_manager(assistant_model=drafter, max_new_tokens=24) as manager:
        name = manager.add_request([3, 4, 5])
        with manager.pause():
            copied = copy.deepcopy(target)
        assert manager.get_result(name, timeout=60).error is None
    assert torch.equal(greedy(copied, inputs), plain) and traces(copied)["hooks"] == traces(target)["hooks"]


@pytest.mark.core_for(engine=["captured"], at=[4])
@pytest.mark.parametrize(
    ("engine", "at"),
    cases(every := list(product(ENGINES, (1, 4, 7))), [one for one in every if one[0] == "captured" or one[1] == 4]),
    indirect=["engine"],
)
def test_models_are_restored_after_errors_of_a_drafter(engine, at, monkeypatch):
    target, inputs = fresh("qwen3-moe")
    drafter = configured(random_eagle3(target), engine)
    plain, before = greedy(target, inputs), snapshot(target, drafter)
    extend_cache, calls = type(drafter).extend_cache, []

    def breaking(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return extend_cache(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(drafter), "extend_cache", breaking)
        greedy(target, inputs, drafter, 3)
    check(before, target, drafter)
    assert torch.equal(greedy(target, inputs, drafter, 3), plain)


@pytest.mark.core
def test_hooks_and_settings_of_the_user_are_kept(engine):
    target, inputs = fresh("llama")
    heard = []
    target.model.layers[0].register_forward_hook(lambda *_: heard.append(1))
    target.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    target.set_attn_implementation("eager")
    target.generation_config.temperature, target.generation_config.num_assistant_tokens = 0.3, 7
    drafter = configured(random_eagle3(target), engine)
    before = snapshot(target, drafter)
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    check(before, target, drafter)
    assert heard


class Refuses(StoppingCriteria):
    """Changes a setting of the target while a call runs, which is to stay."""

    def __init__(self, target):
        self.target = target

    def __call__(self, input_ids, scores, **kwargs):
        self.target.set_attn_implementation("eager")
        return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.core_for(engine=["static"])
def test_settings_changed_during_a_call_are_kept(engine):
    target, inputs = fresh("llama")
    drafter = configured(random_eagle3(target), engine)
    rules = StoppingCriteriaList([Refuses(target)])
    greedy(target, inputs, drafter, 3, stopping_criteria=rules)
    assert target.config._attn_implementation == "eager"


def test_overlapping_replacements():
    class Owner:
        pass

    owner, other = Owner(), Owner()
    owner.name = "own"
    contexts = [patch.replaced("name", [(owner, value), (other, value)]) for value in ("first", "second")]
    contexts[0].__enter__()
    contexts[1].__enter__()
    assert owner.name == other.name == "second" and patch.original(owner, "name") == "own"
    contexts[0].__exit__(None, None, None)
    assert owner.name == other.name == "second" and patch.original(other, "name") is None
    contexts[1].__exit__(None, None, None)
    assert owner.name == "own" and vars(other) == {} and not patch._replaced
    with patch.replaced("name", [(owner, patch.ABSENT), (other, "ours")]):
        assert vars(owner) == {}
        other.name = "somebody else's"
    assert owner.name == "own" and other.name == "somebody else's" and not patch._replaced


def test_replacements_are_undone_after_an_interrupt():
    """As of Ctrl-C, before any line that puts values in place or takes them back; `with` and `try` are Python's own."""

    class Owner:
        pass

    def interrupt(frame, event, arg):
        nonlocal left
        if frame.f_globals is not vars(patch):
            return None
        line = linecache.getline(patch.__file__, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith(("with ", "try:")):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    tracer, interrupts = sys.gettrace(), 0
    for count in itertools.count(1):
        owner, other, left = Owner(), Owner(), count
        owner.name = "own"
        with patch.replaced("name", [(owner, "before"), (other, "before")]):
            try:
                sys.settrace(interrupt)
                with patch.replaced("name", [(owner, "ours"), (other, patch.ABSENT)]):
                    pass
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.settrace(tracer)
            assert vars(owner) == vars(other) == {"name": "before"}
        assert vars(owner) == {"name": "own"} and vars(other) == {} and not patch._replaced
        if left > 0:
            break
    assert interrupts == count - 1 > 20
