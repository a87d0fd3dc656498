"""Sessions kept between calls are reused only as long as an eager call would generate the same."""

import copy
import functools
import gc
import logging
import weakref

import pytest
import torch
from adapters import with_adapters
from case_counts import cases
from graph_stand_ins import Tape, tape_on_cpu
from oracle import RANDOM_DRAFTERS, copy_of
from targets import padded_prompts, set_policy, tiny_target
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specdec.engine import lease, sessions
from hf_specdec.graphs import cuda_graphs
from hf_specdec.modules.signature import Fingerprint, Signature, torch_settings

CPU = torch.device("cpu")


@pytest.fixture
def tape(monkeypatch):
    return tape_on_cpu(monkeypatch)


def own_target():
    """A target that a test may change."""
    return copy.deepcopy(tiny_target("llama"))


def texts(target, drafter, **options):
    """What `target` says with `drafter`, and without; of three prompts."""
    options = {**padded_prompts([9, 1, 5]), "do_sample": False, "max_new_tokens": 8, **options}
    return (
        target.generate(**options, assistant_model=drafter, num_assistant_tokens=3).tolist(),
        target.generate(**options).tolist(),
    )


@pytest.mark.core_for(kind=["eagle3"])
@pytest.mark.parametrize("kind", ["eagle3", "draft-model"])
def test_adapters_switched_between_calls(tape, kind):
    target = own_target()
    adapted = with_adapters(target)
    drafter = RANDOM_DRAFTERS[kind](target)
    generated = {}

    def generate(name, num_captures):
        before = tape.count
        captured, plain = texts(target, drafter)
        assert captured == plain, name
        assert generated.setdefault(name, plain) == plain, name
        assert tape.count - before == num_captures, name

    generate("a", 2)
    adapted.set_adapter("b")
    generate("b", 0)
    adapted.set_adapter("a")
    generate("a", 0)
    with adapted.disable_adapter():
        generate("off", 0)
    adapted.base_model.set_adapter(["a", "b"])
    generate("both", 0)
    adapted.set_adapter("a")
    generate("a", 0)
    adapted.set_adapter("b")
    generate("b", 0)
    adapted.merge_adapter()
    assert texts(target, drafter)[0] == texts(target, drafter)[1]
    adapted.unmerge_adapter()
    assert texts(target, drafter)[0] == texts(target, drafter)[1]
    for module in target.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("b", 5.0)
    generate("b, stronger", 2)
    assert len(set(map(str, generated.values()))) == 5, "adapters change nothing, so nothing was shown"


@pytest.mark.core
def test_adapters_added_and_removed(tape):
    """Sessions whose modules are gone are freed, not those that modules come back to."""
    target = own_target()
    drafter = copy_of(target, noise=0.02)
    texts(target, drafter)
    adapted = with_adapters(target)
    assert len(set(map(str, [*texts(target, drafter), *texts(target, drafter)]))) == 1
    adapted.delete_adapter("b")
    gc.collect()
    generated, plain = texts(target, drafter)
    assert generated == plain and len(drafter.sessions) == 2 and tape.count == 6
    base = adapted.unload()
    assert base is target
    generated, plain = texts(target, drafter)
    assert generated == plain and tape.count == 6


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def double(module):
    forward = module.forward
    module.forward = lambda inputs: 2 * forward(inputs)


def replace_act(target):
    target.model.layers[0].mlp.act_fn = nn.ReLU()


def swap_layers(target):
    layers = target.model.layers._modules
    layers["0"], layers["1"] = layers["1"], layers["0"]


def share_layer(target):
    target.model.layers[1].mlp.up_proj = target.model.layers[1].mlp.gate_proj


# By what was changed: how. All of them change what the target generates, and none moves a weight that stays.
CHANGES = {
    "forward of a module": lambda target: double(target.model.layers[0].mlp.down_proj),
    "class of a module": lambda target: setattr(target.model.layers[0].mlp.down_proj, "__class__", Doubled),
    "module": replace_act,
    "order of modules": swap_layers,
    "module in two places": share_layer,
    "number": lambda target: setattr(target.model.layers[0].input_layernorm, "variance_epsilon", 30.0),
    "number, -1 to -2": lambda target: setattr(target.model.layers[1].self_attn, "scaling", -2.0),
    "bias": lambda target: setattr(target.model.layers[0].mlp.up_proj, "bias", nn.Parameter(torch.randn(64))),
    "weight": lambda target: setattr(target.lm_head, "weight", nn.Parameter(torch.randn(96, 32))),
    "weight, transposed": lambda target: setattr(
        target.model.layers[0].self_attn.q_proj.weight, "data", target.model.layers[0].self_attn.q_proj.weight.data.t()
    ),
    "buffer": lambda target: setattr(
        target.model.rotary_emb, "inv_freq", target.model.rotary_emb.inv_freq.flip(0).clone()
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_captures_do_not_see_capture_again(tape, change):
    target = own_target()
    target.model.layers[1].self_attn.scaling = -1.0
    drafter = copy_of(tiny_target("llama"))
    drafter.bind(target)
    generated, plain = texts(target, drafter)
    assert generated == plain
    CHANGES[change](target)
    changed, plain = texts(target, drafter)
    assert changed == plain and changed != generated
    assert tape.count == 4
    assert texts(target, drafter)[0] == changed and tape.count == 4


def test_weights_changed_in_place_are_not_captured_again(tape):
    target = own_target()
    drafter = copy_of(target, noise=0.02)
    before, _ = texts(target, drafter)
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    for _ in range(2):
        target.train()
        target(**padded_prompts([9, 1, 5]), labels=padded_prompts([9, 1, 5])["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        target.eval()
        generated, plain = texts(target, drafter)
        assert generated == plain
    assert generated != before and tape.count == 2


def test_changes_that_rounds_do_not_read_are_not_captured_again(tape):
    target = own_target()
    drafter = copy_of(target, noise=0.02)
    texts(target, drafter)
    drafter.configure(num_assistant_tokens=7, engine="static", draft_probs=False)
    target.generation_config = GenerationConfig.from_dict(target.generation_config.to_dict())
    target.generate(**padded_prompts([3]), max_new_tokens=3, cache_implementation="static", disable_compile=True)
    target.requires_grad_(False)
    forward = vars(target.model.norm)["forward"] = target.model.norm.forward
    del target.model.norm.forward, forward
    generated, plain = texts(target, drafter)
    assert generated == plain and tape.count == 2


@pytest.mark.core
def test_autocast_weights_are_cast_again(tape):
    """Of weights that have changed; and rounds of one precision are not replayed in another."""
    target = own_target()
    drafter = copy_of(target, noise=0.02)

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            return texts(target, drafter)[0]

    generated = cast()
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
    changed = cast()
    assert changed != generated and tape.count == 2
    drafter.release()
    assert cast() == changed and tape.count == 4
    assert torch.is_autocast_cache_enabled()
    generated, plain = texts(target, drafter)
    assert generated == plain and tape.count == 6


def test_fingerprint_of_torch_settings():
    before = torch_settings(CPU)
    for enter, leave in {
        functools.partial(torch.set_float32_matmul_precision, "high"): functools.partial(
            torch.set_float32_matmul_precision, "highest"
        ),
        functools.partial(torch.use_deterministic_algorithms, True): functools.partial(
            torch.use_deterministic_algorithms, False
        ),
        functools.partial(torch.set_default_dtype, torch.float64): functools.partial(
            torch.set_default_dtype, torch.float32
        ),
        functools.partial(
            setattr, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
        ): functools.partial(setattr, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    }.items():
        enter()
        try:
            assert torch_settings(CPU) != before
        finally:
            leave()
    for options in ({"dtype": torch.bfloat16}, {"dtype": torch.float16}):
        with torch.autocast("cpu", **options):
            assert torch_settings(CPU) != before


def fingerprint_of(target):
    return Fingerprint.of(CPU, Signature(target))


class Settings:
    def __init__(self, window):
        self.window = window
        self.itself = self


class Slots:
    __slots__ = ("window",)


ATTRIBUTES = [
    (3, 4),
    (True, False),
    (None, "a"),
    (-1, -2),
    ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1, "b": 1}, {"a": 1, "c": 1}),
    ({"a"}, {"b"}),
    ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
    (torch.ones(2), torch.ones(2)),
    ([torch.ones(2)], [torch.ones(2)]),
    (Settings(3), Settings(3)),
    (Slots(), Slots()),
    (torch.relu, torch.tanh),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (Settings(3).__init__, Settings(3).__init__),
    (torch.float16, torch.bfloat16),
    (nn.Linear, nn.Embedding),
    (Settings(3), "no object"),
    (Slots(), "no object"),
]


@pytest.mark.parametrize(("one", "other"), ATTRIBUTES)
def test_fingerprint_of_attributes(one, other):
    target = own_target()
    norm = target.model.norm
    found = []
    for value in (one, other, one):
        norm.own = value
        found.append(fingerprint_of(target))
        assert fingerprint_of(target) == found[-1]
    assert found[0] == found[2] and found[0] != found[1] and found[1] != found[2]
    del norm.own
    assert fingerprint_of(target) not in found


def test_fingerprint_of_changes_inside_attributes():
    target = own_target()
    norm = target.model.norm
    norm.own = {"scaling": {"a": 1.0}, "names": ["a"], "object": Settings(3)}
    seen = [fingerprint_of(target)]
    for change in (
        lambda: norm.own["scaling"].update(a=2.0),
        lambda: norm.own["names"].append("b"),
        lambda: setattr(norm.own["object"], "window", 4),
        lambda: setattr(target.config, "rms_norm_eps", 1.0),
        lambda: target.config.rope_parameters.update(rope_theta=5.0),
        target.train,
        lambda: target.half(),
    ):
        change()
        seen.append(fingerprint_of(target))
        assert seen[-1] == fingerprint_of(target) and seen[-1] not in seen[:-1]


@pytest.mark.core
def test_fingerprint_of_class_forwards(monkeypatch):
    target = own_target()
    before = fingerprint_of(target)
    forward = type(target.model.norm).forward
    monkeypatch.setattr(type(target.model.norm), "forward", lambda self, hidden: 2 * forward(self, hidden))
    assert fingerprint_of(target) != before


def test_fingerprint_keeps_no_references():
    target = own_target()
    norm = target.model.norm
    norm.forward = lambda hidden: hidden
    norm.own = Settings(3)
    norm.weights = [torch.ones(3)]
    gone = [weakref.ref(one) for one in (norm.forward, norm.own, norm.weights[0], norm.weight, norm)]
    before = fingerprint_of(target)
    del norm.forward, norm.own, norm.weights
    gc.collect()
    norm.forward = lambda hidden: hidden
    norm.own = Settings(3)
    assert [one() is None for one in gone] == [True, True, True, False, False]
    assert fingerprint_of(target) != before
    target.model.norm = copy.deepcopy(norm)
    del norm
    gc.collect()
    assert [one() is None for one in gone] == [True] * 5
    assert before.is_past(before)


def test_sessions_of_deleted_weights_are_freed(tape):
    """Not those of other settings, which may come back."""
    target = own_target()
    drafter = copy_of(target, noise=0.02)
    texts(target, drafter)
    target.model.norm.variance_epsilon = 1.0
    texts(target, drafter)
    assert len(drafter.sessions) == 2
    states = [weakref.ref(session.state) for _, session in drafter.sessions._idle]
    target.lm_head.weight = nn.Parameter(target.lm_head.weight.clone())
    texts(target, drafter, max_new_tokens=4)
    gc.collect()
    assert len(drafter.sessions) == 1 and all(state() is None for state in states)


def test_captures_of_a_session_are_bounded(tape, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_CAPTURES", 3)
    target = own_target()
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    made = []
    capture_round = lease.capture_round

    def noting(*args):
        made.append(weakref.ref(captured := capture_round(*args)))
        return captured

    monkeypatch.setattr(lease, "capture_round", noting)

    def call(min_p, length=9):
        options = {**padded_prompts([length]), "do_sample": True, "max_new_tokens": 6, "seeds": 3, "top_k": 0}
        before = len(made)
        out = target.generate(**options, min_p=min_p, assistant_model=drafter, num_assistant_tokens=3)
        return out.tolist(), len(made) - before

    texts = {min_p: call(min_p)[0] for min_p in (0.1, 0.2, 0.3)}
    assert call(0.1) == (texts[0.1], 0)
    call(0.4)  # 0.2 was used least recently
    gc.collect()
    assert [captured() is None for captured in made] == [False, True, False, False]
    assert call(0.1)[1] == call(0.3)[1] == 0 and call(0.2) == (texts[0.2], 1)
    ((_, session),) = drafter.sessions._idle
    for length in (17, 33, 65, 9):
        call(0.1, length)
    assert len(session.rounds) == len(session.prefills) == 3


class Fails(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise OSError("of the caller")


def fail_alone(target, options):
    target.generate(**padded_prompts([9, 1]), stopping_criteria=StoppingCriteriaList([Fails()]), **options)


def fail_in_bulk(target, options):
    failing = LogitsProcessorList([lambda input_ids, scores: Fails()(input_ids, scores)])
    target.generate_batch([[3, 4, 5], [6]], logits_processor=failing, **options)


@pytest.mark.parametrize("fail", [fail_alone, fail_in_bulk])
def test_an_error_that_is_kept_keeps_no_graphs(tape, monkeypatch, fail):
    """Those of a split target would keep its process group; others memory."""
    made, capture = [], lease.capture_round

    def noting(*args):
        made.append(weakref.ref(captured := capture(*args)))
        return captured

    monkeypatch.setattr(lease, "capture_round", noting)
    target = own_target()
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    options = {"do_sample": False, "max_new_tokens": 8, "assistant_model": drafter, "num_assistant_tokens": 3}
    with pytest.raises(OSError, match="of the caller") as error:
        fail(target, options)
    assert made and all(one() is None for one in made) and error.tb is not None
    assert texts(target, drafter)[0] == texts(target, drafter)[1]


@pytest.mark.parametrize("kind", cases(list(RANDOM_DRAFTERS), ["eagle3", "p-eagle", "draft-model", "mtp-by-target"]))
def test_round_in_one_graph_returns_the_results(tape, monkeypatch, kind):
    """Scores and logits of all rounds that a session has captured would stay in memory."""
    results = []

    def noting(function, memory):
        results.append((captured := Tape(function, memory)).result)
        return captured

    set_policy(monkeypatch, "cpu", cuda_graphs=True)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", noting)
    target = own_target()
    for options in ({}, {"do_sample": True, "top_p": 0.9}):
        generated, plain = texts(target, RANDOM_DRAFTERS[kind](target), **options)
        assert options or generated == plain
    rounds = [result for result in results if result is not None]
    assert len(rounds) == 2  # prefills return nothing
    assert all(one[1:] == ((), None, None, None) for one in rounds)
    assert all(tensor.shape in ((4,), (4, 4)) and tensor.dtype == torch.int64 for one, *_ in rounds for tensor in one)


@pytest.mark.core
def test_modules_with_python_state_run_eagerly(tape, caplog):
    """A replay would not count, and a number that changes is never looked up again."""
    target = own_target()
    norm, forward = target.model.norm, target.model.norm.forward
    norm.calls = 0

    def counting(hidden):
        norm.calls += 1
        return forward(hidden)

    norm.forward = counting
    drafter = copy_of(target, noise=0.02)
    generated, plain = texts(target, drafter)
    assert generated == plain and drafter.stats.execution == "eager: a round cannot be captured"
    assert "changes attributes of modules" in caplog.text


@pytest.mark.parametrize("where", ["module", "drafter", "all modules"])
def test_hooks_are_called_with_a_warning_about_their_cost(tape, caplog, where):
    logging.Logger.warning_once.cache_clear()
    target = own_target()
    drafter = copy_of(target, noise=0.02)
    texts(target, drafter)
    calls = []

    def hook(module, args, output):
        calls.append(module)

    handle = {
        "module": lambda: target.model.layers[1].register_forward_hook(hook),
        "drafter": lambda: drafter.model.lm_head.register_forward_hook(hook),
        "all modules": lambda: nn.modules.module.register_module_forward_hook(hook),
    }[where]()
    try:
        for _ in range(2):
            calls.clear()
            generated, plain = texts(target, drafter)
            assert generated == plain and len(calls) > 3
            assert drafter.stats.execution.startswith("eager: modules have hooks")
    finally:
        handle.remove()
    assert caplog.text.count("modules have hooks") == 1
    texts(target, drafter)
    assert drafter.stats.execution.startswith("captured") and tape.count == 2
