"""Targets published as AWQ and GPTQ checkpoints, against dense models with the weights that the files stand for.

The helper `packed` writes the published layouts. What drafters do with such targets is in `test_quantised_libraries`.
"""

import copy
import json
import re

import pytest
import torch
from graph_stand_ins import tape_on_cpu
from images import IMAGE, image_model, image_prompts
from lossless import PROMPTS, greedy
from oracle import random_eagle3
from packed import Packed, change_config, save_packed
from safetensors.torch import load_file, save_file
from targets import padded_prompts, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BloomConfig, LlamaConfig, Qwen3Config

from hf_specdec import AutoDrafter, AwqConfig, GPTQConfig
from hf_specdec.loading import load_target
from hf_specdec.modules.stored_linear import StoredLinear
from hf_specdec.modules.weights import weight_of

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, **HEADS, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True),
}
FORMS = {
    "awq": Packed("awq"),
    "awq, groups of 128": Packed("awq", group=128),
    "gptq": Packed("gptq", symmetric=True),
    "gptq with zero points": Packed("gptq"),
    "gptq_v2": Packed("gptq", group=-1, format="gptq_v2"),
    "gptq, inputs in an order": Packed("gptq", desc_act=True),
    "gptq, 8 bits": Packed("gptq", 8, 64, symmetric=True, desc_act=True),
}
CONFIGS = {"awq": AwqConfig, "gptq": GPTQConfig}


def load(folder, method, **options):
    options = {"dtype": torch.float32, "quantization_config": CONFIGS[method](), **options}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder and dense model by form and family, made once."""
    made = {}

    def checkpoint(form, family="llama"):
        if (form, family) not in made:
            torch.manual_seed(0)
            model, folder = AutoModelForCausalLM.from_config(FAMILIES[family]).eval(), tmp_path_factory.mktemp("file")
            for one in model.modules():
                if getattr(one, "bias", None) is not None:
                    nn.init.normal_(one.bias)
            save_packed(model, folder, FORMS[form])
            made[form, family] = folder, model
        return made[form, family]

    return checkpoint


@pytest.fixture
def changed(checkpoints, tmp_path):
    """A copy of a checkpoint with other tensors, by a function, and other entries of its `quantization_config`."""

    def change(form, tensors=lambda found: None, **settings):
        folder, _ = checkpoints(form)
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        change_config(tmp_path, quantization_config=FORMS[form].settings | settings)
        return tmp_path

    return change


def inputs_for(lengths):
    inputs = padded_prompts(lengths)
    return inputs | {"input_ids": inputs["input_ids"] % SIZES["vocab_size"]}


@pytest.mark.core_for(form=["awq", "gptq, inputs in an order"], family=["llama"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_what_the_file_stands_for(form, family, checkpoints, tmp_path):
    """They stay in its bits, and are saved as they were, with a configuration that loads again."""
    folder, dense = checkpoints(form, family)
    target, inputs = load(folder, FORMS[form].method), inputs_for(PROMPTS[3])
    layers = [one for one in target.modules() if isinstance(one, StoredLinear)]
    assert len(layers) == 7 * SIZES["num_hidden_layers"] and None not in map(weight_of, layers)
    size = sum(one.nbytes for layer in layers for name, one in layer.named_parameters() if name != "bias")
    numbers = sum(one.in_features * one.out_features for one in layers)
    assert size <= numbers * (FORMS[form].bits / 8 + 0.17)
    torch.testing.assert_close(target(**inputs).logits, dense(**inputs).logits)
    target.save_pretrained(tmp_path)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path))
    assert before.keys() == after.keys()
    for name, one in before.items():
        assert one.dtype == after[name].dtype and torch.equal(one, after[name]), name
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert FORMS[form].settings.items() - {("static_groups", False)} <= settings.items()
    again = load(tmp_path, FORMS[form].method)
    assert torch.equal(again(**inputs).logits, target(**inputs).logits)


@pytest.mark.parametrize("form", FORMS)
def test_captured_rounds(form, checkpoints, monkeypatch):
    """Texts of a batch with EAGLE-3 are those without a drafter."""
    folder, _ = checkpoints(form, "qwen3")
    target, inputs = load(folder, FORMS[form].method), inputs_for(PROMPTS[3])
    plain = greedy(target, inputs, max_new_tokens=8)
    tape_on_cpu(monkeypatch)
    drafter = random_eagle3(target, own_embedding=False, own_head=False)
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=8), plain)
    assert drafter.stats.execution.startswith("captured in one graph") and drafter.stats.accepted is not None
    assert [one for one in target.modules() if isinstance(one, StoredLinear)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_keep_the_dtype_of_the_file(dtype, checkpoints):
    folder, dense = checkpoints("gptq with zero points")
    target, inputs = load(folder, "gptq", dtype=dtype), inputs_for(PROMPTS[1])
    layer = target.model.layers[0].mlp.up_proj
    assert (layer.weight_scale.dtype, target.lm_head.weight.dtype) == (torch.float16, dtype)
    found, expected = target(**inputs).logits, dense(**inputs).logits
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize("form", ["awq", "gptq, inputs in an order"])
def test_copied_cast_and_moved_states(form, checkpoints):
    folder, _ = checkpoints(form)
    target, inputs = load(folder, FORMS[form].method), inputs_for(PROMPTS[1])
    expected = target(**inputs).logits
    other = copy.deepcopy(target)
    for layer in other.modules():
        if isinstance(layer, StoredLinear):
            layer.weight_packed.zero_()
    assert not torch.allclose(other(**inputs).logits, expected)
    other.load_state_dict(target.state_dict())
    assert torch.equal(other(**inputs).logits, expected)
    other.get_input_embeddings().weight.requires_grad_()
    other(**inputs).logits.sum().backward()


def test_targets_and_draft_models_by_name(checkpoints):
    folder, _ = checkpoints("awq")
    target = load_target(str(folder), torch.float32, torch.device("cpu"))
    target.generation_config.pad_token_id = 0
    drafter = AutoDrafter.from_pretrained(checkpoints("gptq, 8 bits")[0], target=target)
    for model in (target, drafter.model):
        assert type(model.model.layers[0].mlp.up_proj) is StoredLinear
    inputs = inputs_for(PROMPTS[3])
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.accepted > 0


@pytest.mark.parametrize(
    ("form", "settings", "reason"),
    [
        ("awq", {"version": "gemv"}, "by awq in format gemv with 4 bits, but hf_specdec reads gemm with 4 bits"),
        ("awq", {"bits": 8}, "by awq in format gemm with 8 bits"),
        ("gptq", {"bits": 3}, "by gptq in format gptq with 3 bits, but hf_specdec reads gptq with 4 bits, gptq with 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "by gptq in format marlin with 4 bits"),
    ],
)
def test_formats_that_are_refused(form, settings, reason, changed):
    with pytest.raises(ValueError, match=reason):
        load(changed(form, **settings), FORMS[form].method)


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "tensors", "reason"),
    [
        ("awq", lambda found: found.pop(f"{LAYER}.qzeros"), f"has no {LAYER}.qzeros, though .* is quantised"),
        ("awq", lambda found: found.pop("lm_head.weight"), "has no lm_head.weight, though .* lm_head is not quantised"),
        ("gptq, 8 bits", lambda found: found[f"{LAYER}.qzeros"].add_(1), f"{LAYER} cannot be read: .* not all 128"),
        (
            "gptq",
            lambda found: found[f"{LAYER}.g_idx"].clamp_(max=3),
            f"{LAYER} cannot be read: .* other sizes than 32",
        ),
    ],
)
def test_tensors_that_are_refused(form, tensors, reason, changed):
    with pytest.raises(ValueError, match=reason):
        load(changed(form, tensors), FORMS[form].method)


@pytest.mark.parametrize(
    "packed",
    [Packed("awq", excluded=("visual", "self_attn"), stated=("self_attn",)), Packed("gptq", excluded=("visual",))],
)
def test_layers_that_stay_dense(packed, tmp_path):
    """All but those of the decoder, and those that `modules_to_not_convert` of AWQ names, in part."""
    model = image_model("Qwen2_5_VLForConditionalGeneration")
    save_packed(model, tmp_path, packed._replace(group=-1))
    options = {"dtype": torch.float32, "quantization_config": CONFIGS[packed.method]()}
    target = AutoModelForImageTextToText.from_pretrained(tmp_path, **options).eval()
    layers = {name: one for name, one in target.named_modules() if isinstance(one, nn.Linear)}
    stored = {name for name, one in layers.items() if type(one) is StoredLinear}
    excluded = (*packed.excluded, "lm_head")
    assert stored == {name for name in layers if not any(one in name for one in excluded)} != set()
    inputs = image_prompts(model, [[3, IMAGE, 2], [5]])
    # In float64, because float32 rounds otherwise on some processors.
    torch.testing.assert_close(target.double()(**inputs).logits, model.double()(**inputs).logits)


def test_models_that_are_refused(tmp_path, checkpoints):
    """Experts, whose tensors are stacked, activations with scales, and layers that are offloaded."""
    tiny_target("qwen3-moe").save_pretrained(tmp_path / "experts")
    change_config(tmp_path / "experts", quantization_config=FORMS["awq"].settings)
    with pytest.raises(ValueError, match=r"layers\.0\..*are experts"):
        load(tmp_path / "experts", "awq")
    bloom = BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(bloom).save_pretrained(tmp_path / "activations")
    change_config(tmp_path / "activations", quantization_config=FORMS["awq"].settings)
    with pytest.raises(ValueError, match="scales activations of bloom"):
        load(tmp_path / "activations", "awq")
    places = {"model.layers.1": "disk", **dict.fromkeys(("model.embed_tokens", "model.layers.0"), "cpu")}
    places |= dict.fromkeys(("model.norm", "model.rotary_emb", "lm_head"), "cpu")
    with pytest.raises(ValueError, match=re.escape("model.layers.1.self_attn.q_proj is offloaded")):
        load(checkpoints("awq")[0], "awq", device_map=places, offload_folder=tmp_path)
