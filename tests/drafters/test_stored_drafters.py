"""Drafters whose linear layers stay quantised in 8 or 4 bits, as they are in the files."""

import copy
import itertools
import json

import pytest
import torch
from case_counts import cases
from compressed import arguments, save_compressed
from few_bits import EIGHT_BITS, FORMS, FOUR_BITS, dequantised_state, save_quantised, stored_layers
from graph_stand_ins import tape_on_cpu
from lossless import greedy
from oracle import RANDOM_DRAFTERS, random_eagle3, random_mtp
from safetensors.torch import load_file
from targets import build_target, padded_prompts, set_policy
from torch import nn

from hf_specdec import AutoDrafter, ops
from hf_specdec.inspection.self_check import with_interpretation
from hf_specdec.kernels.types import StoredWeight
from hf_specdec.training.learner import DrafterLearner

FAMILIES = ("eagle3", "p-eagle", "mtp", "dflash", "dspark", "dspine", "dflash2", "domino")
INPUTS = padded_prompts([9, 5, 3])
DRAWN = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12, "seeds": [1, 2, 3], "num_assistant_tokens": 3}
NUMBERS = dict.fromkeys(EIGHT_BITS, torch.float8_e4m3fn) | {"int8": torch.int8}
NUMBERS |= {form: torch.int32 if kind == "int4" else torch.uint8 for form, (kind, _) in FOUR_BITS.items()}
LAYER = {*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))}


@pytest.fixture(scope="module")
def target():
    """Of widths that are more than a block and no multiple of one."""
    sizes = {"hidden_size": 160, "intermediate_size": 288, "head_dim": 40, "vocab_size": 200, "num_hidden_layers": 3}
    return build_target("llama", **sizes, initializer_range=0.1)


@pytest.fixture(scope="module")
def text(target):
    return greedy(target, INPUTS)


def drafts(target, drafter):
    """Drawn texts, and how many drafts were accepted: other drafters have others by the same random numbers."""
    text = target.generate(**INPUTS, **DRAWN, assistant_model=drafter)
    return text.tolist(), [(row.accepted, row.rounds) for row in drafter.stats.rows]


def saved(family, form, target, folder):
    save_quantised(RANDOM_DRAFTERS[family](target), folder, form)
    return folder


@pytest.mark.core_for(family=["eagle3"], form=["blocks"])
@pytest.mark.parametrize(
    ("family", "form"),
    cases(
        [*itertools.product(FAMILIES, FORMS)],
        [
            *zip(FAMILIES, FORMS, strict=True),
            *zip(FAMILIES[::-1], FORMS, strict=True),
            *itertools.product(["eagle3"], FORMS[1:-1]),
        ],
    ),
)
def test_drafts_are_those_of_the_dequantised_drafter(family, form, target, text, tmp_path):
    folder = saved(family, form, target, tmp_path)
    drafter, plain = (AutoDrafter.from_pretrained(folder, target, dtype=dtype) for dtype in (None, torch.float32))
    layers, tensors = stored_layers(drafter), load_file(folder / "model.safetensors")
    assert layers and not stored_layers(plain) and drafter.dtype == plain.dtype == torch.float32
    for name, layer in layers.items():
        assert layer.weight.dtype == NUMBERS[form]
        for part, one in layer.named_parameters():
            if part != "weight_scale" or one.itemsize == 1:  # other scales have other dtypes and shapes in files
                assert torch.equal(one, tensors[f"{name}.{part}"])
    own, expected = dequantised_state(drafter), plain.state_dict()
    assert own.keys() == expected.keys() and all(torch.equal(own[name], one) for name, one in expected.items())
    assert drafts(target, drafter) == drafts(target, plain)
    assert torch.equal(greedy(target, INPUTS, drafter, 3), text)
    assert drafter.stats.engine == "static" and stored_layers(drafter).keys() == layers.keys()


# Weights and inputs, by form.
LIBRARY = {
    "int4": ((4, "int", "group"), {"group_size": 32}, None),
    "int4-rows": ((4, "int", "channel"), {}, None),
    "nvfp4": ((4, "float", "tensor_group"), {"group_size": 16, "scale_dtype": torch.float8_e4m3fn}, None),
    "mxfp4": ((4, "float", "group"), {"group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}, None),
    "int8": ((8, "int", "channel"), {}, (8, "int", "token")),
    "rows": ((8, "float", "channel"), {}, (8, "float", "token")),
}


@pytest.mark.parametrize("form", LIBRARY)
@pytest.mark.parametrize("random_drafter", [random_eagle3, random_mtp])
def test_drafters_that_the_library_compresses(random_drafter, form, target, text, tmp_path):
    """Some layers; weights are those that the library decompresses, which rounds those in e2m1 to bfloat16."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    weights, options, inputs = LIBRARY[form]
    theirs, weights = random_drafter(target), arguments(*weights, **options)
    inputs = inputs and arguments(*inputs, dynamic=True)
    save_compressed(theirs, tmp_path, weights, inputs, ignore=["re:.*down_proj", "lm_head"])
    drafter, plain = (AutoDrafter.from_pretrained(tmp_path, target, dtype=dtype) for dtype in (None, torch.float32))
    compressors.ModelCompressor.from_pretrained_model(theirs).decompress_model(theirs)
    linear = {name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)}
    assert stored_layers(drafter).keys() == {one for one in linear if not one.endswith(("down_proj", "lm_head"))}
    own, expected = dequantised_state(drafter), theirs.state_dict()
    for name, one in plain.state_dict().items():
        for found in (own[name], one):
            torch.testing.assert_close(found, expected[name].to(found.dtype), rtol=0.01, atol=1e-6)
    assert torch.equal(greedy(target, INPUTS, drafter, 3), text)


@pytest.mark.parametrize("form", ["rows", "int4", "nvfp4"])
def test_heads_embeddings_and_other_dtypes_are_dequantised(form, target, tmp_path):
    save_quantised(random_eagle3(target), tmp_path, form, lambda name: "norm" not in name)
    found = AutoDrafter.from_pretrained(tmp_path, target)
    assert found.lm_head.weight.dtype == found.embed_tokens.weight.dtype == torch.float32
    assert stored_layers(found).keys() == {"fc", *(f"layers.0.{part}" for part in LAYER)}
    found = AutoDrafter.from_pretrained(tmp_path, target, dtype=torch.bfloat16)
    assert not stored_layers(found) and found.dtype == found.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "form"),
    [("eagle3", "blocks"), ("mtp", "int8"), ("eagle3", "nvfp4"), ("mtp", "int4"), ("dflash", "mxfp4")],
)
def test_saved_and_copied_drafters_are_the_same(family, form, target, tmp_path):
    first = AutoDrafter.from_pretrained(saved(family, form, target, tmp_path / "a"), target)
    first.save_pretrained(tmp_path / "b")
    second = AutoDrafter.from_pretrained(tmp_path / "b", target)
    second.save_pretrained(tmp_path / "c")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["stored_layers"].keys() == stored_layers(first).keys()
    torch.save(first, tmp_path / "first.pt")  # by pickle alone torch cannot load float8
    pickled = torch.load(tmp_path / "first.pt", weights_only=False)
    for one in (second, copy.deepcopy(first), pickled, type(first).from_pretrained(tmp_path / "b")):
        own, theirs = one.state_dict(), first.state_dict()
        assert own.keys() == theirs.keys() and all(torch.equal(own[key], part) for key, part in theirs.items())
        assert all(own[key].dtype == part.dtype for key, part in theirs.items())
        assert {key: layer.form for key, layer in stored_layers(one).items()} == {
            key: layer.form for key, layer in stored_layers(first).items()
        }
    pickled.eval().bind(target)
    assert drafts(target, pickled) == drafts(target, first)


@pytest.mark.parametrize("form", ["blocks", "int4", "nvfp4", "mxfp4"])
def test_casts_leave_the_numbers(form, target, tmp_path):
    """Of a drafter whose first weight is quantised, with the target's embedding and head."""
    save_quantised(random_eagle3(target, own_embedding=False, own_head=False), tmp_path, form)
    drafter = AutoDrafter.from_pretrained(tmp_path, target)
    layers = stored_layers(drafter)
    assert drafter.dtype == torch.float32 and next(drafter.parameters()).dtype == NUMBERS[form]
    before = {name: {part: one.clone() for part, one in layer.named_parameters()} for name, layer in layers.items()}
    for dtype in (torch.bfloat16, torch.float32):
        drafter.to(dtype)
        assert drafter.dtype == dtype == drafter.norm.weight.dtype
        for name, one in layers.items():
            for part, tensor in one.named_parameters():
                was = before[name][part]
                assert tensor.dtype == (dtype if was.dtype == torch.float32 else was.dtype)
                assert torch.equal(tensor.to(was.dtype), was)
    plain = AutoDrafter.from_pretrained(tmp_path, target, dtype=torch.float32)
    assert drafts(target, drafter) == drafts(target, plain)


@pytest.fixture
def products(monkeypatch):
    """Weights of products by `ops.linear`, where a CPU takes the ways of a GPU."""
    policy = {"few_row_linear": True, "fused_linear": True, "layer_kernels": True, "batch_invariant": True}
    set_policy(monkeypatch, "cpu", transposed_linear=False, **policy)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    monkeypatch.setattr(ops, "has_fast_linear", lambda inputs, _: True)
    weights, original = [], ops.linear

    def linear(inputs, weight, *args):
        weights.append(weight)
        return original(inputs, weight, *args)

    monkeypatch.setattr(ops, "linear", linear)
    return weights


def loaded_to_memory(drafter):
    """`drafter`, whose weights are not the memory of the file, which cannot be moved."""
    for one in drafter.parameters():
        one.data = one.data.clone()
    return drafter


@pytest.mark.core_for(family=["eagle3"])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("eagle3", "rows"),
        ("dflash", "blocks"),
        ("mtp", "int8"),
        ("eagle3", "int4"),
        ("mtp", "nvfp4"),
        ("dflash", "mxfp4"),
    ],
)
def test_kernels_compute_them_in_captured_rounds(family, form, target, text, products, tmp_path, monkeypatch):
    tape_on_cpu(monkeypatch)
    drafter = loaded_to_memory(AutoDrafter.from_pretrained(saved(family, form, target, tmp_path), target))
    assert torch.equal(greedy(target, INPUTS, drafter, 3), text)
    assert drafter.stats.execution.startswith("captured")
    found = [one for one in products if isinstance(one, StoredWeight)]
    assert {one.values.dtype for one in found} == {torch.uint8 if form in FOUR_BITS else NUMBERS[form]}
    # Gate and up are one product, and query, key and value, unless a block has outputs of two layers, or there are
    # scales of scales.
    wide = {one.shape[0] for one in found if one.shape[0] > 300}
    expected = {"rows": {320}, "int8": {576, 320}, "int4": {320}, "mxfp4": {320}}
    assert wide == expected.get(form, set())
    plain = AutoDrafter.from_pretrained(tmp_path, target, dtype=torch.float32)
    assert drafts(target, drafter) == drafts(target, plain)


@pytest.mark.parametrize("form", ["rows", "int4", "nvfp4"])
def test_batch_invariant_calls(form, target, text, products, tmp_path):
    drafter = AutoDrafter.from_pretrained(saved("eagle3", form, target, tmp_path), target, batch_invariant=True)
    found = greedy(target, INPUTS, drafter, 2, max_new_tokens=4)
    assert torch.equal(found, text[:, : found.shape[1]])
    assert drafter.stats.batch_invariant and any(isinstance(one, StoredWeight) for one in products)


@pytest.mark.parametrize("form", ["rows", "int4", "nvfp4"])
def test_written_weights(form, target, tmp_path):
    """Plain numbers are not taken for quantised ones; quantised ones come with their scales."""
    drafter = AutoDrafter.from_pretrained(saved("eagle3", form, target, tmp_path / "a"), target)
    save_quantised(random_eagle3(target, seed=1), tmp_path / "b", form)
    other = AutoDrafter.from_pretrained(tmp_path / "b", target)
    state = {name: one for name, one in other.state_dict().items() if name != "d2t"}
    plain = {name: one for name, one in dequantised_state(other).items() if name != "d2t"}
    before, name = copy.deepcopy(drafter.state_dict()), "layers.0.mlp.up_proj.weight"
    if form in FOUR_BITS:
        with pytest.raises(ValueError, match=r"fc\.weight is none of its weights"):
            drafter.load_weights(plain)
        name += "_packed"
    scaled = {key: one for key, one in state.items() if key.startswith(name.removesuffix("_packed"))}
    lacking = [{key: one for key, one in scaled.items() if key != part} for part in scaled if part != name]
    for wrong in (*([] if form in FOUR_BITS else [plain]), {name: state[name]}, {name: state[name].float()}, *lacking):
        with pytest.raises(ValueError, match=rf"expected {NUMBERS[form]} and its scales: it is quantised"):
            drafter.load_weights(wrong)
        assert all(torch.equal(one, before[name]) for name, one in drafter.state_dict().items())
    drafter.load_weights(state)
    assert all(torch.equal(drafter.state_dict()[name], one) for name, one in state.items())


@pytest.mark.parametrize("form", ["rows", "int4"])
def test_learning_needs_plain_weights(form, target, tmp_path):
    drafter = AutoDrafter.from_pretrained(saved("eagle3", form, target, tmp_path), target)
    with pytest.raises(ValueError, match=r"it has quantised layers; expected plain weights.*dtype=target\.dtype"):
        DrafterLearner(drafter, target)
    DrafterLearner(AutoDrafter.from_pretrained(tmp_path, target, dtype=target.dtype), target)


@torch.no_grad()
@pytest.mark.parametrize("form", ["blocks", "nvfp4"])
def test_other_interpretations_have_the_same_weights(form, target, tmp_path):
    drafter = AutoDrafter.from_pretrained(saved("eagle3", form, target, tmp_path), target)
    other = with_interpretation(drafter, target, {"rope_theta": 50.0})
    assert stored_layers(other).keys() == stored_layers(drafter).keys()
    assert all(one.data_ptr() == other.state_dict()[name].data_ptr() for name, one in drafter.state_dict().items())
    tokens = INPUTS["input_ids"][:1]
    aux_hidden_states = torch.randn(*tokens.shape, drafter.config.aux_hidden_size)
    logits, others = (one(tokens, aux_hidden_states)[0] for one in (drafter, other))
    torch.testing.assert_close(logits[:, 0], others[:, 0])
    assert not torch.allclose(logits, others, atol=1e-3)


@pytest.mark.parametrize("form", ["rows", "int4"])
def test_experts_of_modules_become_plain(form, tmp_path):
    """transformers stacks them; layers beside them stay."""
    target = build_target("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    save_quantised(random_mtp(target), tmp_path, form)
    drafter = AutoDrafter.from_pretrained(tmp_path, target)
    names = {name.rpartition(".")[2] for name in stored_layers(drafter)}
    assert names == {"projection", *(f"{name}_proj" for name in "qkvo")}
    assert torch.equal(greedy(target, INPUTS, drafter, 3), greedy(target, INPUTS))
