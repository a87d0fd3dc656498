"""Detection of drafter families; unsupported ones are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from dialects import Spec, make_weights, tiny_target, write
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdec import AutoDrafter
from hf_specdec.checkpoints.detection import Published
from hf_specdec.drafters import (
    CacheReaderDrafter,
    DFlash2Drafter,
    DFlashDrafter,
    DominoDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    DSpineDrafter,
    Eagle3Drafter,
    MtpDrafter,
    Pard2Drafter,
    PEagleDrafter,
)
from hf_specdec.drafters.registry import find_family

SPEC = Spec()
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 128}
EAGLE3 = LLAMA | {"draft_vocab_size": 40}
SPECULATORS = {"architectures": ["X"], "transformer_layer_config": {"model_type": "llama"}, "draft_vocab_size": 40}
MASK = ["fc.weight", "mask_hidden"]
MEDUSA_HEAD = "parallel_draft_heads.0.medusa_layers.0.linear.weight"

BLOCK = LLAMA | {"architectures": ["DFlashDraftModel"], "block_size": 16}

REFUSED = {
    "eagle-1 of SafeAILab": (
        LLAMA | {"bias": True},
        ["fc.weight", "layers.0.mlp.up_proj.weight"],
        "EAGLE-1 or EAGLE-2",
    ),
    "eagle-1 of vLLM": ({"model_type": "eagle", "model": LLAMA, "architectures": ["EAGLEModel"]}, [], "EAGLE-1"),
    "eagle-1 of speculators": (SPECULATORS | {"speculators_model_type": "eagle"}, [], "EAGLE-1"),
    "medusa": ({"model_type": "medusa", "medusa_num_heads": 4}, [], "Medusa heads"),
    "medusa by key": (LLAMA | {"medusa_num_heads": 4, "medusa_num_layers": 1}, [], "Medusa heads"),
    "medusa of ModelOpt": (EAGLE3 | {"eagle_config": {"parallel_draft_step": 3}}, [], "Medusa heads"),
    "medusa by tensor": (EAGLE3, ["fc.weight", MEDUSA_HEAD], "Medusa heads"),
    "dflash-2 with a beam": (BLOCK | {"architectures": ["DFlash2BeamDraftModel"]}, [], "DFlash-2 with a beam"),
    "domino of speculators": (SPECULATORS | {"speculators_model_type": "domino"}, [], "Domino of speculators"),
    "xpress": (LLAMA | {"architectures": ["Qwen3XPressModel"]}, [], "XPress"),
    "xpress of speculators": (SPECULATORS | {"speculators_model_type": "xpress"}, [], "XPress"),
    "xpress by tensor": (BLOCK, ["refiner_head.0.weight"], "XPress"),
    "jetspec with an adapter": (BLOCK, ["hidden_dim_adapter.proj.weight"], "JetSpec with an adapter"),
    "lilicorr": (BLOCK | {"architectures": ["LiLiCorrDraftModel"]}, [], "LiLiCorr"),
    "lilicorr by key": (BLOCK | {"lilicorr_top_k": 16}, [], "LiLiCorr"),
    "eagle-4": (EAGLE3 | {"architectures": ["LlamaForCausalLMEagle4"]}, ["fc.weight"], "EAGLE-4"),
    "eagle-4 by tensor": (EAGLE3, ["midlayer.mlp.up_proj.weight", "efficient_lm_head.weight"], "EAGLE-4"),
    "laguna": (BLOCK, ["layers.0.self_attn.g_proj.weight"], "Laguna"),
    "laguna by norms": (BLOCK, ["aux_hidden_norms.0.weight"], "Laguna"),
    "mimo": (BLOCK, ["layers.0.self_attn.attention_sink_bias"], "MiMo"),
    "mimo by key": (BLOCK | {"dflash_config": {"attention_value_scale": 0.7}}, [], "MiMo"),
    "dspark of deepseek-v4": (LLAMA | {"dspark_block_size": 7, "dspark_noise_token_id": 3}, [], "DeepSeek-V4"),
    "dspark of deepseek-v4 by speculators": (
        SPECULATORS | {"speculators_model_type": "dsv4_dspark"},
        [],
        "DeepSeek-V4",
    ),
    "dspark of gemma 4": (LLAMA | {"architectures": ["Gemma4DSparkModel"]}, [], "Gemma 4"),
    "dflash with mla": (BLOCK, ["layers.0.self_attn.kv_a_proj_with_mqa.weight"], "other attention"),
    "dspark with linear attention": (BLOCK | {"dflash_config": {"attention_mode": "kda"}}, [], "other attention"),
    "a projector of tomorrow": (BLOCK | {"dflash_config": {"projector_type": "novel"}}, [], "projector_type 'novel'"),
    "mlp speculator": ({"model_type": "mlp_speculator", "n_predict": 3}, [], "MLP speculator"),
    "mla": (
        EAGLE3 | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"},
        [],
        "latent attention",
    ),
    "mla by tensor": (EAGLE3, ["midlayer.self_attn.kv_a_proj_with_mqa.weight"], "latent attention"),
    "p-eagle with mla": (
        EAGLE3 | {"ptd_token_id": 7},
        [*MASK, "midlayer.self_attn.kv_a_proj_with_mqa.weight"],
        "latent attention",
    ),
    "mtp": (LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}, [], "MTP modules"),
    "mtp of minimax": ({"model_type": "minimax_m3", "num_mtp_modules": 1}, [], "MTP modules"),
    "mtp of a model that transformers does not have": (
        {"model_type": "mimo_of_tomorrow", "architectures": ["MiMoForCausalLM"]},
        ["model.mtp.layers.0.enorm.weight"],
        "MTP modules",
    ),
}

RECOGNISED = {
    "p-eagle of speculators": (
        SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": 3},
        [],
        PEagleDrafter,
    ),
    "p-eagle of speculators, by its name too": (
        SPECULATORS | {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]},
        ["fc.weight"],
        PEagleDrafter,
    ),
    "p-eagle by token": (EAGLE3 | {"ptd_token_id": 7}, [], PEagleDrafter),
    "p-eagle by pard_token": (EAGLE3 | {"pard_token": 7}, [], PEagleDrafter),
    "p-eagle by tensor": (EAGLE3, MASK, PEagleDrafter),
    "p-eagle by tensor with a prefix": (LLAMA, ["model.fc.weight", "model.mask_hidden"], PEagleDrafter),
    "p-eagle by name": (EAGLE3 | {"architectures": ["PEagleDraftModel"]}, [], PEagleDrafter),
    "dflash": (BLOCK | {"dflash_config": {}}, [], DFlashDrafter),
    "dflash of speculators": (SPECULATORS | {"speculators_model_type": "dflash"}, [], DFlashDrafter),
    "dflash of transformers": ({"architectures": ["MuseGlimmerAssistantModel"]}, [], DFlashDrafter),
    "dflash with a mask token": (EAGLE3 | {"dflash_config": {"mask_token_id": 3}}, ["fc.weight"], DFlashDrafter),
    "dflash by its block": (
        {"model_type": "qwen3", "block_size": 8},
        ["fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"],
        DFlashDrafter,
    ),
    "dflash of DeepSpec, by name dspark": (
        LLAMA | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "block_size": 7},
        ["fc.weight"],
        DFlashDrafter,
    ),
    "dspark of DeepSpec": (LLAMA | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, [], DSparkDrafter),
    "dspark of SpecForge": (BLOCK | {"dflash_config": {"markov_rank": 256}}, [], DSparkDrafter),
    "dspark of newer SpecForge": (BLOCK | {"dspark_config": {"markov_rank": 256}}, [], DSparkDrafter),
    "dspark of speculators": (SPECULATORS | {"speculators_model_type": "dspark", "markov_rank": 8}, [], DSparkDrafter),
    "dspark by tensor": (BLOCK, ["markov_w1.weight"], DSparkDrafter),
    "dspine": (BLOCK | {"architectures": ["DSpineDraftModel"]}, [], DSpineDrafter),
    "dspine by key": (BLOCK | {"dspine_config": {"top_k": 4}}, [], DSpineDrafter),
    "dspine by tensor": (BLOCK, ["transfer_codes"], DSpineDrafter),
    "dflash-2": (BLOCK | {"architectures": ["DFlash2DraftModel"]}, [], DFlash2Drafter),
    "dflash-2 by another name": (BLOCK | {"architectures": ["MiniMaxDFlash2DraftModel"]}, [], DFlash2Drafter),
    "dflash-2 of speculators": (SPECULATORS | {"speculators_model_type": "dflash2"}, [], DFlash2Drafter),
    "dflash-2 by tensor": (BLOCK, ["candidate_selector.predecessor_codebook"], DFlash2Drafter),
    "dflash-2 by key": (BLOCK | {"dflash_config": {"selector_rank": 256}}, [], DFlash2Drafter),
    "domino": (BLOCK | {"architectures": ["DominoDraftModel"]}, [], DominoDrafter),
    "domino of ModelOpt": (BLOCK | {"dflash_config": {"projector_type": "domino"}}, [], DominoDrafter),
    "domino of its authors": (BLOCK | {"dflash_config": {"projector_type": "causal_v5"}}, [], DominoDrafter),
    "domino by tensor": (BLOCK, ["logit_head.prefix_gru.weight_hh_l0"], DominoDrafter),
    "p-eagle with nested layers": (
        {"architectures": ["LlamaForCausalLM"], "transformer_layer_config": {}, "ptd_token_id": 7},
        ["fc.weight"],
        PEagleDrafter,
    ),
    "p-eagle of Automodel": (
        EAGLE3 | {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "mask_token_id": 3},
        ["model.fc.weight"],
        PEagleDrafter,
    ),
    "p-eagle with keys of others": (
        EAGLE3 | {"dflash_config": {"mask_token_id": 3}, "dspark_noise_token_id": 3, "num_nextn_predict_layers": 1},
        MASK,
        PEagleDrafter,
    ),
    "eagle-3 of Automodel": (
        EAGLE3 | {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": False, "mask_token_id": 3},
        ["model.fc.weight"],
        Eagle3Drafter,
    ),
    "eagle-3 of DeepSpec": (
        {"model_type": "qwen3", "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 9, 17, 25, 33]},
        ["fc.weight", "layers.0.hidden_norm.weight"],
        Eagle3Drafter,
    ),
    "mtp of deepseek": (
        {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        ["model.layers.61.enorm.weight"],
        MtpDrafter,
    ),
    "mtp of qwen3-next, which does not say so": (
        {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
        ["model.embed_tokens.weight", "mtp.fc.weight"],
        MtpDrafter,
    ),
    "mtp of qwen3.5": ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}, [], MtpDrafter),
    "mtp of speculators": (
        SPECULATORS | {"speculators_model_type": "mtp", "transformer_layer_config": {"model_type": "qwen3"}},
        ["mtp_layers.0.input_proj.weight"],
        MtpDrafter,
    ),
    "pard": (LLAMA | {"pard_token": 7, "spd_type": "pard"}, ["model.embed_tokens.weight"], DraftModelDrafter),
    "pard-2": (LLAMA | {"pard2_target_dim": 128, "pard2_scale": 0.02, "pard_token": 5}, [], Pard2Drafter),
    "pard-2 by type": (LLAMA | {"spd_type": "pard2", "pard_token": 5}, [], Pard2Drafter),
    "pard-2 by tensor": (LLAMA | {"pard_token": 5}, ["model.norm.weight", "target_proj.weight"], Pard2Drafter),
    "draft model": (LLAMA, ["model.layers.0.mlp.up_proj.weight"], DraftModelDrafter),
    "draft model with latent attention": (
        LLAMA | {"architectures": ["DeepseekV2ForCausalLM"]},
        ["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"],
        DraftModelDrafter,
    ),
    "draft model with a layer c_fc": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        ["transformer.h.0.mlp.c_fc.weight"],
        DraftModelDrafter,
    ),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC)


@pytest.mark.core_for(case=["mtp", "mtp of minimax", "mla"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case, target, tmp_path):
    config, tensors, family = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in tensors or ["x"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path} is .*{family}"):
        AutoDrafter.from_pretrained(tmp_path, target)


@pytest.mark.core_for(
    case=[
        "p-eagle of speculators",
        "mtp of deepseek",
        "mtp of qwen3.5",
        "draft model",
        "draft model with latent attention",
    ]
)
@pytest.mark.parametrize("case", RECOGNISED)
def test_recognised(case):
    config, tensors, family = RECOGNISED[case]
    assert find_family(Published("it", config, tensors)).drafter is family


def test_error_for_an_unknown_dialect_names_the_expected_tensors(target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no known drafter dialect.*speculators_model_type.*'bert'.*hidden_size"):
        AutoDrafter.from_pretrained(tmp_path, target)


@pytest.mark.parametrize("extra", [{}, {"block_size": 8}, {"model_type": "eagle"}], ids=str)
@pytest.mark.parametrize("tensors", [["x"], ["fc.weight"], MASK], ids=str)
def test_unknown_type_of_speculators(extra, tensors, target, tmp_path):
    """It is named, whatever else its files are like."""
    config = SPECULATORS | {"speculators_model_type": "novel"} | extra
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in tensors}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="of speculators_model_type 'novel', which is not known here; expected 'eagle3'"
    ):
        AutoDrafter.from_pretrained(tmp_path, target)


def plain_config(model_type):
    """config.json of a published model of the type, all at its defaults."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return AutoConfig.for_model(model_type).to_dict() | {
        "architectures": [names] if isinstance(names, str) else [*names]
    }


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["big_bird", "deepseek_v3", "glm4_moe", "llama", "minimax", "qwen3_5"])
def test_language_models_are_draft_models(model_type):
    found = Published("it", plain_config(model_type), ["model.embed_tokens.weight"])
    assert find_family(found).drafter is DraftModelDrafter


def test_no_language_model_is_called_a_drafter_of_another_family():
    """No key of a configuration of transformers is mistaken for a drafter's."""
    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = plain_config(model_type)
        except Exception:  # Some configurations cannot be built without a part of them.
            continue
        if any(head in name for name in config["architectures"] for head in ("CausalLM", "LMHead")):
            try:
                published = Published("it", config, ["model.embed_tokens.weight"])
                found[model_type] = find_family(published).drafter
            except ValueError as error:
                found[model_type] = str(error)
    assert len(found) > 100
    assistants = {"gemma4_assistant": CacheReaderDrafter, "gemma4_unified_assistant": CacheReaderDrafter}
    others = {model_type: family for model_type, family in found.items() if family != DraftModelDrafter}
    assert others.items() <= assistants.items()


def test_tensors_alone_tell_eagle3(target, tmp_path):
    """A config without draft_vocab_size, as an ordinary Llama's, whose weights are EAGLE-3's."""
    folder = write("safeailab", tmp_path, SPEC, make_weights(SPEC), draft_vocab_size=...)
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.config.draft_vocab_size == SPEC.draft_vocab_size


def test_normal_form_of_a_newer_version(target, tmp_path):
    config = EAGLE3 | {"model_type": "hf_specdec_of_tomorrow"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'hf_specdec_of_tomorrow', which is not registered"):
        AutoDrafter.from_pretrained(tmp_path, target)
