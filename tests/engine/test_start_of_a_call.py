"""What a call looks at before it runs: one walk over the modules, nothing kept that may have changed."""

import gc

import pytest
import torch
from graph_stand_ins import Recorder, replay_on_cpu, storages
from oracle import copy_of
from targets import PAD, new_target, padded_prompts, tiny_target
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_specdec import NoDrafter
from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.integration import validation
from hf_specdec.modules import signature
from hf_specdec.modules.signature import Signature, looked_at_once, signature_of
from hf_specdec.state import DecodeState, Shape

OPTIONS = {"do_sample": False, "max_new_tokens": 3}


@pytest.fixture
def target():
    """A target that a test may change."""
    return new_target("llama", num_layers=1)


@pytest.mark.core
def test_a_call_walks_over_modules_once(monkeypatch):
    target = tiny_target("llama")
    drafter, walk, walked = NoDrafter(target), signature.modules_of, []
    replay_on_cpu(monkeypatch)
    target.generate(**padded_prompts([5]), **OPTIONS, assistant_model=drafter)
    for module in (signature, validation):
        monkeypatch.setattr(module, "modules_of", lambda *models: walked.append(models) or walk(*models))
    target.generate(**padded_prompts([5]), **OPTIONS, assistant_model=drafter)
    # Over both at once go patches, which replays on a CPU look up anew.
    assert [models for models in walked if len(models) == 1] == [(target,), (drafter,)]


def test_a_signature_tells_own_attributes_and_hooks(target):
    layer, norm = target.model.layers[0], target.model.norm
    norm.forward = norm.forward
    after = layer.register_forward_hook(lambda *args: None)
    before = norm.register_forward_pre_hook(lambda *args: None)
    found = Signature(target)
    assert found.having("forward") == [norm] and set(found.hooked) == {layer, norm}
    after.remove(), before.remove()
    assert not Signature(target).hooked
    extra = nn.Sequential(norm, nn.ReLU())
    both = Signature(target, extra)
    assert both.modules[0] is target and len(both.modules) == len(found.modules) + 2
    assert set(both.modules) == {*found.modules, extra, extra[1]}
    assert all(one is vars(module) for module, one in zip(both.modules, both.attributes, strict=True))


class Norm(modeling_llama.LlamaRMSNorm):
    pass


CHANGES = {
    "class of a module": lambda target, patch: patch.setattr(target.model.norm, "__class__", Norm),
    "forward of a class": lambda target, patch: patch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, states: states
    ),
    "function of a file": lambda target, patch: patch.setattr(modeling_llama, "rotate_half", lambda states: states),
    "name of the attention": lambda target, patch: patch.setitem(
        vars(target.config), "_attn_implementation_internal", "eager"
    ),
    "attention of a name": lambda target, patch: patch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kwargs: None
    ),
    "module": lambda target, patch: patch.setitem(target.model.layers[0].mlp._modules, "act_fn", nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kind_is_that_of_now(target, monkeypatch, change):
    before = Signature(target).kind
    assert Signature(target).kind == before
    with monkeypatch.context() as patch:
        CHANGES[change](target, patch)
        changed = Signature(target).kind
        assert changed != before and Signature(target).kind == changed
    assert Signature(target).kind == before


def test_kinds_with_functions_that_take_the_place_of_freed_ones(target):
    """Python gives a new object the `id` of one that is gone."""
    norm, seen = target.model.norm, []
    forward = norm.forward
    for number in range(4):
        norm.forward = lambda states, number=number: forward(states) + number
        seen.append(Signature(target).kind)
        hash(seen[-1])  # while it lives, as where facts are looked up
        del norm.forward
        gc.collect()
    assert len(set(seen)) == 4


def test_settings_are_read_anew_outside(target):
    config = target.config
    before = signature_of(target).kind
    assert signature_of(target).kind == before
    for name, value in (("rms_norm_eps", 0.5), ("rope_parameters", {**config.rope_parameters, "rope_theta": 5.0})):
        kept = getattr(config, name)
        with looked_at_once():
            inside = signature_of(target).kind
            setattr(config, name, value)
            assert signature_of(target).kind == inside == before
            with looked_at_once():
                assert signature_of(target).kind == signature_of(target).kind != before
        assert signature_of(target).kind != before
        setattr(config, name, kept)
    config.rope_parameters["rope_theta"] += 1  # in place
    assert signature_of(target).kind != before


def test_what_a_check_looks_at_is_not_kept_for_the_call(target, monkeypatch):
    """Its drafters have buffers of their own."""
    monkeypatch.setattr(signature, "_facts", {})
    with looked_at_once():
        assert why_not_equivalent(target, "static") is None
        assert list(signature._thread.signatures) == [target]


@pytest.fixture
def caches(monkeypatch):
    """The caches that `generate()` makes."""
    made = []

    class Counted(DynamicCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(generation_utils, "DynamicCache", Counted)
    return made


def test_transformers_cache_is_made_where_it_is_needed(caches):
    target, inputs = tiny_target("llama"), padded_prompts([6])
    drafter, options = copy_of(target), {**OPTIONS, "return_dict_in_generate": True}
    target.generate(**inputs, **OPTIONS, assistant_model=drafter)  # checks the class if no other test has
    caches.clear()
    plain = target.generate(**inputs, **options)
    assert len(caches) == 1 and plain[OUTPUT_NAME] is caches[0]
    config = GenerationConfig(**options, pad_token_id=PAD)
    ours = target.generate(**inputs, generation_config=config, assistant_model=drafter)
    assert len(caches) == 1 and torch.equal(ours.sequences, plain.sequences)
    again = target.generate(**inputs, generation_config=config)
    assert len(caches) == 2 and again[OUTPUT_NAME] is caches[1]
    drafter.configure(engine="stock")
    stock = target.generate(**inputs, **options, assistant_model=drafter)
    assert stock[OUTPUT_NAME] in caches[2:] and torch.equal(stock.sequences, plain.sequences)
    drafter.configure(engine="static")
    embedded = {**inputs, "inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach()}
    by_target = target.generate(**embedded, **options, assistant_model=drafter)
    assert torch.equal(by_target.sequences[:, -3:], plain.sequences[:, -3:])


class OwnCache:
    """A class whose caches are made by a method of its own, which expects that of transformers."""

    def _prepare_cache_for_generation(self, config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(config, model_kwargs, *args, **kwargs)
        assert isinstance(model_kwargs[OUTPUT_NAME], DynamicCache)


def test_classes_that_make_caches_in_their_own_way_get_one(target, caches):
    target.__class__ = type("LlamaForCausalLM", (OwnCache, type(target)), {})
    drafter = NoDrafter(target)
    caches.clear()
    target.generate(**padded_prompts([6]), **OPTIONS, assistant_model=drafter)
    assert caches


@pytest.mark.parametrize("batch", [2, 3])
def test_rows_begin_as_they_are_admitted(batch):
    shape = Shape(batch, slots=12, num_draft_tokens=2, is_sampling=True, draft_probs=False, num_ends=3)
    states = [DecodeState(shape, attention_layers(1), torch.device("cpu")) for _ in range(2)]
    prompts, ends = [torch.arange(1, 5), torch.arange(3)], [[5], [5]]
    one, other = states
    for row, name in enumerate(("lengths", "limits", "seeds", "prompt_length_gap", "row_top_k", "eos", "row_tail")):
        getattr(other, name).fill_(row + 9)  # of an earlier call
    for state, rows in ((one, range(2)), (other, [0, 1])):
        state.set_temperature(0.7)
        if batch > len(rows):
            state.clear()
        state.admit(rows, prompts, [4, 2], [7, 8], ends, cached=[1, 0], prompt_length_gap=[0, 1])
    names = [name for name, value in vars(one).items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    assert one.lengths.tolist() == [4, 3, 1][:batch] and one.limits.tolist() == [8, 5, 1][:batch]


def test_writes_to_buffers_do_not_grow_with_the_rows():
    """On a GPU each is a launch, for which the first token waits; and so is each copy to the device."""
    counts, copies = [], []
    for batch in (2, 8):
        shape = Shape(batch, slots=12, num_draft_tokens=2, is_sampling=False, draft_probs=False, num_ends=3)
        state = DecodeState(shape, attention_layers(1), torch.device("cpu"))
        buffers = storages([value for value in vars(state).values() if isinstance(value, torch.Tensor)])
        with Recorder() as recorder:
            state.admit(range(batch), [torch.arange(4)] * batch, [4] * batch, [0] * batch, [[5]] * batch)
        written = [storages(out) for function, *_, out in recorder.operations if "_." in str(function)]
        copies.append(sum("lift_fresh" in str(function) for function, *_ in recorder.operations))
        counts.append(sum(not buffers.isdisjoint(one) for one in written))
    assert 0 < counts[0] == counts[1] <= 5 and copies == [1, 1]
