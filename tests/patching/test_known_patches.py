"""What is to be patched is looked up once, as long as target and drafter do not change."""

import copy
import gc
import weakref

import pytest
import torch
from graph_stand_ins import traces
from oracle import random_eagle3
from targets import set_policy, tiny_target
from torch import nn

from hf_specdec.drafters.none import NoDrafter
from hf_specdec.engine import target as engine_target
from hf_specdec.engine.hosted_target import HostedTarget
from hf_specdec.modules.signature import Signature
from hf_specdec.patching.fused_linear import FusedLinear

FAMILIES = ["llama", "qwen3-moe"]


@pytest.fixture
def look_ups(monkeypatch):
    """The look-ups so far; calls on a CPU are captured, and linear layers fused, as on a GPU."""
    for family in FAMILIES:
        tiny_target(family)  # the first time its class is checked, by calls that look up, too
    set_policy(monkeypatch, "cpu", cuda_graphs=True, fused_linear=True, layer_kernels=True, transposed_linear=False)
    made, look_up = [], engine_target._look_up
    monkeypatch.setattr(engine_target, "_look_up", lambda *models: made.append(models) or look_up(*models))
    return made


def own_target(family=FAMILIES[0]):
    return copy.deepcopy(tiny_target(family))


def patched(target, drafter):
    """Which modules compute differently, which attention and experts run, and what fused layers compute with."""
    with torch.no_grad(), HostedTarget(target, drafter) as lazy:
        lazy()
        modules = [module for model in (target, drafter) for module in model.modules()]
        closures = [getattr(vars(module).get("forward"), "__closure__", None) for module in modules]
        cells = [[cell.cell_contents for cell in closure or ()] for closure in closures]
        fused = [next((one for one in some if isinstance(one, FusedLinear)), None) for some in cells]
        forwards, hooks, chosen = traces(target, drafter)
        heard = [(len(after), len(before)) for after, before in hooks]
        kinds = [getattr(forward, "func", type(forward)) for forward in forwards]
        found = kinds, heard, chosen, [one and one.weight.data_ptr() for one in fused]
    assert lazy.hosting.fingerprint.weights == (Signature(target).weights, Signature(drafter).weights)
    return found


def reassign(target):
    layer = target.model.layers[1].self_attn
    layer.k_proj.weight = nn.Parameter(layer.k_proj.weight.detach().clone())


def replace(target):
    mlp = target.model.layers[0].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)


def tie(target):
    first, second = (layer.self_attn for layer in target.model.layers[:2])
    second.q_proj.weight = first.q_proj.weight


CHANGES = {
    "weights assigned": reassign,
    "a layer replaced": replace,
    "weights tied": tie,
    "cast": lambda target: target.double(),
    "forward set": lambda target: setattr(target.model.layers[0].mlp.gate_proj, "forward", torch.relu),
    "attention chosen": lambda target: target.set_attn_implementation("eager"),
}


@pytest.mark.core_for(change=["weights assigned", "a layer replaced"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_patched_is_looked_up_again_after_a_change(look_ups, change):
    target = own_target()
    drafter = random_eagle3(target)
    first, untouched = patched(target, drafter), traces(target, drafter)
    assert patched(target, drafter) == first and len(look_ups) == 1
    CHANGES[change](target)
    changed, untouched = patched(target, drafter), traces(target, drafter)
    assert len(look_ups) == 2
    assert patched(target, drafter) == changed and len(look_ups) == 2
    assert traces(target, drafter) == untouched
    drafter.release()
    assert patched(target, drafter) == changed and len(look_ups) == 3


def test_settings_that_are_switched_are_both_known(look_ups):
    target = own_target(FAMILIES[1])
    drafter = random_eagle3(target)
    names = ("grouped_mm", "batched_mm") * 2
    found = []
    for name in names:
        target.set_experts_implementation(name)
        found.append(patched(target, drafter))
        assert target.config._experts_implementation == name
    assert found[:2] == found[2:] and found[0] != found[1] and len(look_ups) == 2


def test_targets_share_a_drafter_and_are_not_kept_alive(look_ups):
    first = own_target()
    second = type(first)(first.config).eval()
    drafter = NoDrafter(first)
    found = {target: patched(target, drafter) for target in (first, second)}
    assert all(patched(target, drafter) == before for target, before in found.items()) and len(look_ups) == 2
    layer = weakref.ref(first.model.layers[0].mlp.up_proj)
    del first, found
    look_ups.clear()
    gc.collect()
    assert layer() is None
    patched(second, drafter)
    assert not look_ups


@pytest.mark.core
@pytest.mark.parametrize("is_known", [False, True])
def test_nothing_is_half_patched_after_an_error(look_ups, is_known, monkeypatch):
    target = own_target()
    drafter = random_eagle3(target)
    untouched = traces(target, drafter)
    if is_known:
        before = patched(target, drafter)

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine_target.AuxHiddenStateRecorder, "_register_hook", fail)
        patched(target, drafter)
    assert traces(target, drafter) == untouched
    assert len(look_ups) == 1
    after = patched(target, drafter)
    assert traces(target, drafter) == untouched
    assert (after == before and len(look_ups) == 1) if is_known else len(look_ups) == 2


def test_what_is_patched_meanwhile_is_neither_known_nor_kept(look_ups):
    target = own_target()
    other = type(target)(target.config).eval()  # of the same configuration
    drafter, others = random_eagle3(target), NoDrafter(other)
    before = patched(target, drafter)
    with torch.no_grad(), HostedTarget(other, others) as lazy:
        lazy()
        assert [patched(target, drafter) for _ in range(2)] == [before, before] and len(look_ups) == 4
        assert lazy.hosting.patches
    assert patched(target, drafter) == before and len(look_ups) == 4
