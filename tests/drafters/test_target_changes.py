"""A target that is changed after a drafter was bound to it: the drafter follows, or an error names the change."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from case_counts import cases
from lossless import PROMPTS, greedy
from oracle import RANDOM_DRAFTERS, SELDOM, random_draft_model, random_eagle3, random_mtp
from targets import padded_prompts, tiny_target
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import AutoDrafter, NoDrafter
from hf_specdec.drafters import shared_weights
from hf_specdec.drafters.shared_weights import SharedWeight
from hf_specdec.modules.weights import num_bytes

# Drafters that borrow both, one of them copying the head's rows of a draft vocabulary.
BORROWERS = {
    "eagle3": lambda target: random_eagle3(target, own_embedding=False, own_head=False),
    "eagle3-whole-vocabulary": lambda target: random_eagle3(
        target, own_embedding=False, own_head=False, draft_vocab_size=target.vocab_size
    ),
    "p-eagle": lambda target: RANDOM_DRAFTERS["p-eagle"](target, own_embedding=False, own_head=False),
    "dflash": RANDOM_DRAFTERS["dflash"],
    "mtp": random_mtp,
}


def own_target():
    """A target that a test may change."""
    return copy.deepcopy(tiny_target("llama"))


def noise(weight, seed=0):
    return 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=weight.dtype)


def weights_of(target):
    return [target.get_input_embeddings().weight, target.get_output_embeddings().weight]


def train(target):
    optimiser = torch.optim.SGD(weights_of(target), lr=0.5)
    for weight in weights_of(target):
        weight.grad = noise(weight)
    optimiser.step()
    optimiser.zero_grad()


def write_through_data(target):
    for weight in weights_of(target):
        weight.data.add_(noise(weight))


def load(target):
    target.load_state_dict({name: weight + noise(weight, 1) for name, weight in target.state_dict().items()})


@torch.inference_mode()
def write_in_inference_mode(target):
    for weight in weights_of(target):
        weight.add_(noise(weight))


def assign(target):
    state = {name: weight + noise(weight, 1) for name, weight in target.state_dict().items()}
    target.load_state_dict(state, assign=True)


def swap_data(target):
    for weight in weights_of(target):
        weight.data = weight.data + noise(weight)


def cast(target):
    target.double()


def replace_modules(target):
    for get, put in (
        (target.get_input_embeddings, target.set_input_embeddings),
        (target.get_output_embeddings, target.set_output_embeddings),
    ):
        module = copy.deepcopy(get())
        module.weight.data.add_(noise(module.weight))
        put(module)


def wrap_anew(target):
    """Other parameters over the same memory, which is written to."""
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        module.weight = torch.nn.Parameter(module.weight.data)
        module.weight.data.add_(noise(module.weight))


IN_PLACE = [wrap_anew, train, write_through_data, load, write_in_inference_mode]
REPLACED = [assign, swap_data, cast, replace_modules]


def drafts(target, drafter):
    """The text of a call, and what was accepted of its drafts."""
    text = target.generate(**padded_prompts(PROMPTS[3]), do_sample=False, max_new_tokens=8, assistant_model=drafter)
    return text.tolist(), drafter.stats.rows


# Every change with a drafter that copies a part of the head, one in place and one of another tensor with all others.
CHANGES = cases(
    every := list(itertools.product(BORROWERS, IN_PLACE + REPLACED)),
    [one for one in every if one[0] == "eagle3" or one[1] in (train, assign) or one == ("mtp", cast)],
)


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_drafter_follows_weight_changes(kind, change):
    target = own_target()
    drafter = BORROWERS[kind](target)
    drafts(target, drafter)
    places = {what: shared.weight.data_ptr() for what, shared in drafter._shared_weights.items()}
    change(target)
    generated, accepted = drafts(target, drafter)
    plain = target.generate(**padded_prompts(PROMPTS[3]), do_sample=False, max_new_tokens=8)
    fresh = BORROWERS[kind](target)
    assert generated == plain.tolist() and (generated, accepted) == drafts(target, fresh)
    for what, shared in drafter._shared_weights.items():
        assert torch.equal(shared.weight, fresh._shared_weights[what].weight) and shared.weight.dtype == target.dtype
    if change in IN_PLACE:
        assert places == {what: shared.weight.data_ptr() for what, shared in drafter._shared_weights.items()}


@pytest.mark.parametrize("kind", ["dflash2", "domino", "dspark", "dspine"])
@pytest.mark.parametrize("tree", [0, 6])
def test_drafter_of_another_dtype(kind, tree):
    target, inputs = own_target(), padded_prompts(PROMPTS[3])
    drafter = RANDOM_DRAFTERS[kind](target, own_head=False).bfloat16().configure(tree=tree)
    options = {**inputs, "do_sample": False, "max_new_tokens": 8}
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_another_drafter(kind, assign):
    """Its draft vocabulary, by which weights are shared, and what is computed of its weights are loaded with it."""
    target = own_target()
    other, drafter = RANDOM_DRAFTERS[kind](target, own_head=False), RANDOM_DRAFTERS[kind](target, 1, own_head=False)
    drafts(target, drafter)
    drafter.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert torch.equal(drafter.target_ids, other.target_ids)
    if kind == "p-eagle":
        assert torch.equal(drafter.mask_state, other.mask_state)
    assert torch.equal(drafter.head_weight, other.head_weight) and drafts(target, drafter) == drafts(target, other)


def sequential(target):
    target.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 96))


def shorten(target):
    target.lm_head = torch.nn.Linear(32, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [(sequential, "is Sequential. It cannot be bound again"), (shorten, "drafts the token 9., of which .* head of 64")],
)
def test_heads_that_cannot_be_shared(change, message):
    target = own_target()
    drafter = BORROWERS["eagle3"](target)
    change(target)
    with pytest.raises(ValueError, match=message):
        drafts(target, drafter)


def test_unchanged_weights_are_not_copied(monkeypatch):
    target = own_target()
    drafter = BORROWERS["eagle3"](target)
    drafts(target, drafter)
    version = drafter._shared_weights["head"].weight._version
    drafts(target, drafter)
    assert drafter._shared_weights["head"].weight._version == version
    monkeypatch.setattr(drafter, "bind", None)
    train(target)
    drafts(target, drafter)
    assert drafter._shared_weights["head"].weight._version > version


@pytest.mark.core
def test_weight_changes_drop_captured_graphs_only_where_needed(monkeypatch):
    """A copy that is mended where it lies leaves graphs as they are; one that lies elsewhere needs others."""
    target, released = own_target(), []
    drafter = BORROWERS["eagle3"](target)
    monkeypatch.setattr(drafter, "release", lambda: released.append(True))
    for change, expected in ((train, []), (assign, [True])):
        change(target)
        drafts(target, drafter)
        assert released == expected


@pytest.mark.parametrize("kind", [*BORROWERS, "draft-model"])
def test_copies_have_nothing_of_the_target(kind):
    """They must be bound before they draft, and then draft the same."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[1])
    drafter = {**RANDOM_DRAFTERS, **BORROWERS}[kind](target)
    plain, accepted = greedy(target, inputs, drafter, 3), drafter.stats.accepted
    size = len(pickle.dumps(drafter))
    for one in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert not one.is_bound and not one._shared_weights and one.sessions is None
        with pytest.raises(ValueError, match="is not bound to a target"):
            greedy(target, inputs, one, 3)
        one.bind(target)
        assert torch.equal(greedy(target, inputs, one, 3), plain) and one.stats.accepted == accepted
    assert drafter.is_bound and size < sum(map(num_bytes, (drafter.parameters(), drafter.buffers()))) + 2**15


def test_binding_in_inference_mode():
    target = own_target()
    with torch.inference_mode():
        drafter = BORROWERS["eagle3"](target)
        drafts(target, drafter)
    assert not any(shared.weight.is_inference() for shared in drafter._shared_weights.values())
    train(target)
    assert drafts(target, drafter) == drafts(target, BORROWERS["eagle3"](target))


def test_drafters_that_are_loaded_in_inference_mode_can_be_trained(tmp_path):
    target = own_target()
    BORROWERS["eagle3"](target).save_pretrained(tmp_path)
    with torch.inference_mode():
        drafter = AutoDrafter.from_pretrained(tmp_path, target=target)
    drafts(target, drafter)
    sum(parameter.square().sum() for parameter in drafter.parameters()).backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_target_made_in_inference_mode():
    """Nobody counts the changes of such weights."""
    with torch.inference_mode():
        target = own_target()
        for parameter in target.parameters():
            parameter.data = parameter.data.clone()
    drafter = BORROWERS["eagle3"](target)
    drafts(target, drafter)
    with torch.inference_mode():
        target.lm_head.weight[3] += 1.0
    drafts(target, drafter)
    assert torch.equal(drafter._shared_weights["head"].weight, target.lm_head.weight[drafter.target_ids])


# ---- another vocabulary


@pytest.mark.core_for(kind=["eagle3", "mtp", "draft-model"], size=[101], engine=["static"])
@pytest.mark.parametrize(
    ("kind", "size", "engine"),
    cases(
        every := list(itertools.product({**BORROWERS, **RANDOM_DRAFTERS}, [101, 90], ["static", "stock"])),
        [
            one
            for one in every
            if (one[1:] == (101, "static") and one[0] not in (*SELDOM, "mtp-by-target"))
            or (one[1:] == (90, "stock") and one[0] in ("eagle3", "mtp", "draft-model"))
        ],
    ),
)
def test_resized_vocabulary(kind, size, engine):
    target = own_target()
    drafter = {**RANDOM_DRAFTERS, **BORROWERS}[kind](target).configure(engine=engine)
    target.resize_token_embeddings(size)
    inputs = padded_prompts(PROMPTS[1])
    inputs["input_ids"] %= 80
    options = {**inputs, "do_sample": False, "max_new_tokens": 12}
    if kind in ("pard", "pard2", "draft-model"):  # which say what both know
        out = target.generate(**options, assistant_model=drafter)
        assert torch.equal(out, target.generate(**options)) and drafter.config.vocab_size == size
        return
    with pytest.raises(ValueError, match=f"its vocabulary had 96 tokens and has {size}") as error:
        target.generate(**options, assistant_model=drafter)
    message = str(error.value)
    assert "LlamaForCausalLM has changed since" in message and "load a drafter that was made for it" in message
    if kind in BORROWERS and kind != "eagle3":
        assert f"its embedding was [96, 32] in float32 on cpu and is [{size}, 32] in float32 on cpu" in message
    target.resize_token_embeddings(96)
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "dflash", "mtp", "draft-model"])
def test_vocabulary_of_three_tokens(kind):
    """All of them special: the passes that look at a target take tokens that it has."""
    config = LlamaConfig.from_dict(tiny_target("llama").config.to_dict() | {"vocab_size": 3, "eos_token_id": 2})
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    drafter, prompt = RANDOM_DRAFTERS[kind](target), torch.tensor([[1, 2, 2, 1]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=9, eos_token_id=None)
    text = target.generate(prompt, do_sample=False, max_new_tokens=9, eos_token_id=None, assistant_model=drafter)
    assert torch.equal(text, plain) and drafter.stats.engine == "static"


@pytest.mark.core
@pytest.mark.parametrize(
    ("by_config", "message"), [(False, "has 2 layers, so ids 0 to 2"), (True, r"nothing at the layer ids \[3, 4\]")]
)
def test_layers_taken_away_and_put_back(by_config, message):
    target, inputs = copy.deepcopy(tiny_target("llama", num_layers=4)), padded_prompts(PROMPTS[1])
    drafter, layers = RANDOM_DRAFTERS["eagle3"](target), target.model.layers
    options = {**inputs, "do_sample": False, "max_new_tokens": 4, "assistant_model": drafter}
    expected = target.generate(**options)
    if by_config:
        target.config.num_hidden_layers = 2
    else:
        target.model.layers = layers[:2]
    with pytest.raises(ValueError, match=rf"it had 4 decoder layers and has 2\. .* {message}"):
        target.generate(**options)
    target.model.layers, target.config.num_hidden_layers = layers, 4
    assert torch.equal(target.generate(**options), expected)


def test_vocabulary_resized_back_binds_again():
    target = own_target()
    drafter = random_draft_model(target)
    for size in (120, 96, 97):
        target.resize_token_embeddings(size)
        inputs = padded_prompts(PROMPTS[3])
        options = {**inputs, "do_sample": False, "max_new_tokens": 8}
        assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
        assert drafter.config.draft_vocab_size == min(size, 96)


KINDS = [kind for kind in {**BORROWERS, **RANDOM_DRAFTERS} if kind not in SELDOM] + ["none"]


@pytest.mark.parametrize("kind", KINDS)
def test_targets_with_a_generate_of_their_own(kind):
    """One that cannot reach a drafter is refused by every family, before anything is changed; others are not."""
    target, drafter_of = own_target(), {**RANDOM_DRAFTERS, **BORROWERS, "none": NoDrafter}[kind]
    drafter = drafter_of(target)
    vocab_size, shared = drafter.config.vocab_size, dict(drafter._shared_weights)

    class Diffusion(type(target)):
        @torch.no_grad()
        def generate(self, input_ids, **options):
            return (input_ids,) if self.generation_config.return_dict_in_generate else input_ids

    class Wrapper(type(target)):
        def generate(self, *args, **options):
            return super().generate(*args, **options)

    before = type(target).generate

    class Patched(type(target)):
        def generate(self, *args, **options):
            return before(self, *args, **options)

    own, wrapped, patched = (copy.deepcopy(target) for _ in range(3))
    own.__class__, wrapped.__class__, patched.__class__ = Diffusion, Wrapper, Patched
    own.resize_token_embeddings(97)
    with pytest.raises(ValueError, match="generate of Diffusion is a generate\\(\\) of its own that does not use"):
        drafter.bind(own)
    assert drafter.config.vocab_size == vocab_size and drafter._shared_weights == shared
    options = {**padded_prompts([3, 5]), "do_sample": False, "max_new_tokens": 4}
    for other in (wrapped, patched):
        drafter.bind(other)
        if kind in cases(KINDS, ["eagle3", "draft-model", "none"]):
            assert torch.equal(other.generate(**options, assistant_model=drafter), target.generate(**options))


def test_description_of_a_device_or_dtype_change():
    module = torch.nn.Embedding(6, 4)
    target = SimpleNamespace(get_input_embeddings=lambda: module)
    shared = SharedWeight(target, "embedding", 4, "it")
    assert shared.how_changed(target) is None
    module.to("meta")
    assert shared.how_changed(target) == ("its embedding was [6, 4] in float32 on cpu and is [6, 4] in float32 on meta")


@pytest.mark.core
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_of_fused_optimizers_are_seen(monkeypatch, optimizer):
    """They are not counted by the versions of weights; a write to few rows is in none of those that are compared."""
    monkeypatch.setattr(shared_weights, "_NUM_SAMPLES", 4)
    target = own_target()
    drafter = BORROWERS["eagle3"](target)
    drafts(target, drafter)
    weight = target.get_output_embeddings().weight
    rows = drafter._shared_weights["head"]._rows
    versions = weight._version
    weight.grad = torch.zeros_like(weight)
    weight.grad[rows[7]] = 1.0
    optimizer([weight], lr=0.5, weight_decay=0.0, fused=True).step()
    assert weight._version == versions
    drafts(target, drafter)
    fresh = BORROWERS["eagle3"](target)
    assert torch.equal(drafter._shared_weights["head"].weight, fresh._shared_weights["head"].weight)
    weight.grad = None


class Quantised(torch.nn.Module):
    """Has its weight as layers that torch has quantised (`torch.ao.quantization.quantize_dynamic`)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def weight(self):
        return self.inner.weight

    def forward(self, inputs):
        return self.inner(inputs)


def test_weights_that_are_methods():
    target = own_target()
    drafter, borrower = random_draft_model(target), BORROWERS["eagle3"](target)
    target.lm_head = Quantised(target.lm_head)
    generated, _ = drafts(target, drafter)
    plain = target.generate(**padded_prompts(PROMPTS[3]), do_sample=False, max_new_tokens=8)
    assert generated == plain.tolist() and drafter.stats.engine == "static", drafter.stats.reason
    with pytest.raises(ValueError, match="the target's is Quantised; expected a module with a floating-point `weight`"):
        drafts(target, borrower)


@pytest.mark.parametrize("part", ["model.layers.0.mlp", "lm_head"])
def test_compiled_parts(part, request):
    """`torch.compile(module)` is a module around it without attributes of its own."""
    # After its limit of shapes torch compiles no further module of the process.
    request.addfinalizer(torch._dynamo.reset)
    target = own_target()
    target.set_submodule(part, torch.compile(target.get_submodule(part), backend="eager"))
    drafter = random_draft_model(target)
    generated, _ = drafts(target, drafter)
    plain = target.generate(**padded_prompts(PROMPTS[3]), do_sample=False, max_new_tokens=8)
    assert generated == plain.tolist() and drafter.stats.engine == "static", drafter.stats.reason
