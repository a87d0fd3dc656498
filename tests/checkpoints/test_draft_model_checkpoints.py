"""Checkpoints of draft models: how they are read, what is wrong with them, what is saved."""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from dialects import Spec, tiny_target, write_draft_model
from refused_loading import refuse
from safetensors.torch import load_file, save_file
from targets import FAMILIES as MOE
from targets import STOCK_FAMILY, padded_prompts
from targets import tiny_target as tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BigBirdConfig,
    BigBirdForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specdec import AutoDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter

SPEC = Spec()
PROMPT = torch.tensor([[5, 17, 99, 3, 42, 42, 8, 120, 64]])


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float32)


def change_weights(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Write other tensors by their names, `__` for a dot; None removes one."""
    file = folder / "model.safetensors"
    weights = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, file, metadata={"format": "pt"})
    return folder


def check_lossless(target: PreTrainedModel, drafter: DraftModelDrafter, engine: str = "static") -> None:
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = target.generate(PROMPT, **options)
    assert torch.equal(target.generate(PROMPT, **options, assistant_model=drafter), plain)
    assert drafter.stats.engine == engine and drafter.stats.drafted > 0


# ---- reading


def test_ordinary(target, tmp_path):
    drafter = AutoDrafter.from_pretrained(write_draft_model(tmp_path), target)
    config = drafter.config
    assert type(drafter) is DraftModelDrafter and type(drafter.model) is LlamaForCausalLM
    assert (config.dialect, config.parallel_drafting, config.mask_token_id) == ("transformers", False, None)
    assert (config.vocab_size, config.draft_vocab_size, drafter.num_assistant_tokens) == (128, 128, 5)
    assert drafter.is_bound and not drafter.training and drafter.aux_hidden_state_layer_ids == []
    check_lossless(target, drafter)


def test_pard(target, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_specdec"):
        drafter = AutoDrafter.from_pretrained(write_draft_model(tmp_path, pard_token=7), target)
    config = drafter.config
    assert (config.dialect, config.parallel_drafting, config.mask_token_id) == ("PARD", True, 7)
    assert drafter.num_assistant_tokens == 8
    (record,) = [record for record in caplog.records if record.name.startswith("hf_specdec")]
    assert record.levelname == "INFO" and "mask_token_id = 7: pard_token of config.json" in record.getMessage()
    check_lossless(target, drafter)


def test_pard_forced_sequential(target, tmp_path):
    drafter = AutoDrafter.from_pretrained(write_draft_model(tmp_path, pard_token=7), target, parallel_drafting=False)
    assert not drafter.config.parallel_drafting and drafter.num_assistant_tokens == 5
    check_lossless(target, drafter)


def test_ordinary_forced_parallel(target, tmp_path):
    folder = write_draft_model(tmp_path)
    refuse(folder, target, str(folder), "pard_token is None", "Pass `mask_token_id=`", parallel_drafting=True)
    refuse(folder, target, str(folder), "mask_token_id 9", "Pass `parallel_drafting=True` too", mask_token_id=9)
    drafter = AutoDrafter.from_pretrained(folder, target, parallel_drafting=True, mask_token_id=9)
    assert drafter.config.parallel_drafting and drafter.config.mask_token_id == 9
    check_lossless(target, drafter)


@pytest.mark.parametrize("token", [-1, None])
def test_pard_without_its_token(token, target, tmp_path):
    """-1 is what PARD's trainer writes when its settings name no token."""
    folder = write_draft_model(tmp_path, spd_type="pard", pard_token=... if token is None else token)
    refuse(folder, target, str(folder), f"pard_token is {token}", "Pass `mask_token_id=`")
    assert AutoDrafter.from_pretrained(folder, target, mask_token_id=9).config.mask_token_id == 9
    check_lossless(target, AutoDrafter.from_pretrained(folder, target, parallel_drafting=False))


def test_token_outside_the_vocabulary(target, tmp_path):
    folder = write_draft_model(tmp_path, pard_token=128)
    refuse(folder, target, str(folder), "mask token 128", "one of the 128 tokens")
    refuse(folder, target, str(folder), "mask token -5", "one of the 128 tokens", mask_token_id=-5)


@pytest.mark.parametrize("token", [None, 7])
def test_keywords_of_other_families(token, target, tmp_path):
    folder = write_draft_model(tmp_path, pard_token=token)
    for options in (
        {"aux_hidden_state_layer_ids": [1, 2]},
        {"norm_output": True},
        {"rope_theta": 1.0},
        {"share_head": False},
    ):
        (name,) = options
        refuse(folder, target, str(folder), f"draft model, which reads tokens only: it takes no `{name}=`", **options)


@pytest.mark.parametrize("token", [None, 7], ids=["ordinary", "pard"])
@pytest.mark.parametrize("size", [100, 170, 1100])
def test_padded_vocabulary(size, token, target, tmp_path):
    folder = write_draft_model(tmp_path, token, spec=Spec(vocab_size=size, target_layers=2))
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert (drafter.config.vocab_size, drafter.config.draft_vocab_size) == (128, min(size, 128))
    assert size >= 128 or int(PROMPT.max()) >= size, "no token that the drafter cannot embed"
    check_lossless(target, drafter)


def test_other_vocabulary(target, tmp_path):
    folder = write_draft_model(tmp_path, spec=Spec(vocab_size=1152, target_layers=2))
    refuse(folder, target, str(folder), "vocabulary of 1152 tokens", "128", "another tokenizer")


@pytest.mark.core
def test_image_text_model_as_draft_model(target, tmp_path):
    """Kimi-K2.5: transformers has it as an image-text model only, whose text part is a DeepSeek-V3."""
    text = {
        **MOE["deepseek-v3"],
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokens = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
    tokens |= {"projection_hidden_size": 16, "tie_word_embeddings": False}
    config = AutoConfig.for_model("kimi_k25", text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    drafter = AutoDrafter.from_pretrained(tmp_path / "small", target)
    assert type(drafter.model) is type(model)
    check_lossless(target, drafter)
    drafter.save_pretrained(tmp_path / "again")
    check_lossless(target, AutoDrafter.from_pretrained(tmp_path / "again", target))


def test_keys_of_other_families_do_not_stop_a_model(target, tmp_path):
    """A count of modules that the weights do not hold, and the block size of sparse attention."""
    for number, changes in enumerate(({"num_nextn_predict_layers": 1}, {"block_size": 64})):
        check_lossless(
            target, AutoDrafter.from_pretrained(write_draft_model(tmp_path / str(number), **changes), target)
        )


@pytest.mark.core
def test_big_bird(target, tmp_path):
    """Its block_size is not DFlash's."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BigBirdConfig(**sizes, intermediate_size=64, is_decoder=True, attention_type="original_full")
    folder = saved(BigBirdForCausalLM(config), tmp_path)
    check_lossless(target, AutoDrafter.from_pretrained(folder, target), engine="static")


# ---- damaged files


@pytest.mark.core_for(token=[7])
@pytest.mark.parametrize("token", [None, 7], ids=["ordinary", "pard"])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lm_head__weight": None}, "missing tensors: lm_head.weight."),
        ({"model__layers__1__mlp__up_proj__weight": None}, "missing tensors: model.layers.1.mlp.up_proj.weight."),
        (
            {"model__layers__1__mlp__side_proj__weight": torch.zeros(2)},
            "unexpected tensors: model.layers.1.mlp.side_proj.weight.",
        ),
        ({"model__norm__weight": torch.ones(31)}, "wrong shapes: model.norm.weight is [31], expected [32]."),
    ],
    ids=["head", "missing", "unexpected", "shape"],
)
def test_damaged_weights(changes, part, token, target, tmp_path):
    folder = change_weights(write_draft_model(tmp_path, token), **changes)
    refuse(folder, target, f"The weights of {folder} do not fit its config.json", part)


def test_all_problems_are_in_one_message(target, tmp_path):
    folder = write_draft_model(tmp_path, num_hidden_layers=5, hidden_size=64)
    with pytest.raises(ValueError) as caught:
        AutoDrafter.from_pretrained(folder, target)
    message = str(caught.value)
    assert "missing tensors: model.layers.2." in message and "wrong shapes: lm_head.weight is [128, 32]" in message
    assert " more" in message and "\n" not in message and len(message) < 4000


@pytest.mark.core
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"vocab_size": None},
        {"hidden_size": -4},
        {"num_attention_heads": 5, "head_dim": ...},
        {"hidden_act": "none-such"},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
    ],
    ids=str,
)
def test_invalid_config_values(changes, target, tmp_path):
    folder = write_draft_model(tmp_path, **changes)
    refuse(folder, target, f"config.json of {folder} describes no model that can be built")


def test_tied_head_may_be_absent(target, tmp_path):
    folder = change_weights(write_draft_model(tmp_path, tie_word_embeddings=True), lm_head__weight=None)
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.model.lm_head.weight is drafter.model.model.embed_tokens.weight
    check_lossless(target, drafter)


def test_damaged_shards(target, tmp_path):
    folder = write_draft_model(tmp_path, max_shard_size="40KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    refuse(folder, target, shards[1].name, "truncated")
    shards[1].unlink()
    refuse(folder, target, shards[1].name, error=OSError)
    shards[1].write_bytes(whole)
    check_lossless(target, AutoDrafter.from_pretrained(folder, target))


def test_pickled_weights(target, tmp_path):
    folder = write_draft_model(tmp_path, pard_token=7)
    weights = load_file(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    check_lossless(target, AutoDrafter.from_pretrained(folder, target))
    del weights["model.norm.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    refuse(folder, target, "missing tensors: model.norm.weight")


# ---- models that cannot draft


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()


def tiny_gpt_neo():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "initializer_range": 0.3}
    own = {"max_position_embeddings": 256, "attention_types": [[["global", "local"], 1]], "window_size": 32}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **own, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()


@pytest.mark.core
@pytest.mark.parametrize("is_target", [True, False])
def test_layers_of_another_name(is_target, tmp_path):
    """GPT-2 keeps them in `transformer.h`, the one list of as many modules as there are layers."""
    gpt2 = tiny_gpt2()
    if is_target:
        drafter = AutoDrafter.from_pretrained(write_draft_model(tmp_path), gpt2)
        check_lossless(gpt2, drafter, engine="static")
    else:
        target = tiny_gpt2()
        drafter = AutoDrafter.from_pretrained(saved(gpt2, tmp_path / "gpt2"), target)
        check_lossless(target, drafter, engine="static")
        assert drafter.stats.acceptance_length > 1.5, "the drafter is the target"


@pytest.mark.core
def test_models_that_cannot_draft(target, tmp_path):
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    refuse(saved(t5, tmp_path / "t5"), target, str(tmp_path / "t5"), "'t5', an encoder-decoder")
    refuse(
        saved(tiny_model(STOCK_FAMILY), tmp_path / "phimoe"),
        target,
        f"{tmp_path / 'phimoe'} (PhimoeForCausalLM) cannot draft here",
        "the draft model's RoPE (longrope) changes with the length of the text",
        "pass that as assistant_model",
    )
    refuse(
        saved(tiny_gpt_neo(), tmp_path / "neo"),
        target,
        f"{tmp_path / 'neo'} (GPTNeoForCausalLM) cannot draft here",
        "its own attention does not do what a mask over 256 slots says",
    )
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    folder = write_draft_model(tmp_path / "code", model_type="own", auto_map=code)
    refuse(folder, target, str(folder), "runs on code of its own", "modeling_own")
    folder = write_draft_model(tmp_path / "unknown", model_type="own")
    refuse(folder, target, str(folder), "model_type 'own'", "does not know")
    folder = write_draft_model(tmp_path / "vision", model_type="clip_vision_model")
    refuse(folder, target, str(folder), "no causal language model")


@pytest.mark.core
def test_code_in_a_repository_is_not_run(target, tmp_path):
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = write_draft_model(tmp_path, auto_map=code)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert type(AutoDrafter.from_pretrained(folder, target).model) is LlamaForCausalLM
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("token", [None, 7], ids=["ordinary", "pard"])
def test_target_with_attention_of_its_own(token, tmp_path):
    """The static engine reports that it does not do what a mask says, and the stock one runs it."""
    target, drafter_folder = tiny_gpt_neo(), write_draft_model(tmp_path, token)
    drafter = AutoDrafter.from_pretrained(drafter_folder, target)
    check_lossless(target, drafter, engine="stock")
    assert "its own attention does not do what a mask" in drafter.stats.reason
    drafter.configure(engine="static")
    with pytest.raises(ValueError, match=r'engine="static" was forced, but its own attention does not'):
        target.generate(PROMPT, max_new_tokens=4, assistant_model=drafter)
    inputs, options = padded_prompts([4, 2, 7]), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter.configure(engine="auto")), plain)


# ---- saving


def drafts(drafter: DraftModelDrafter) -> list[int]:
    """What it drafts after `PROMPT`, a token at a time or behind masks, without a cache."""
    tokens, num = PROMPT, 5
    mask = drafter.config.mask_token_id
    model = copy.deepcopy(drafter.model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        if drafter.config.parallel_drafting:
            masked = torch.cat([tokens, torch.full((1, num - 1), mask)], dim=1)
            return model(masked).logits[0, -num:].argmax(-1).tolist()
        for _ in range(num):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, -num:].tolist()


@pytest.mark.core_for(options=[{"mask_token_id": 9}])
@pytest.mark.parametrize(
    ("token", "options"),
    [
        (None, {}),
        (7, {}),
        (7, {"parallel_drafting": False}),
        (7, {"mask_token_id": 9}),
        (None, {"parallel_drafting": True, "mask_token_id": 9}),
        (-1, {"parallel_drafting": False}),
    ],
    ids=["ordinary", "pard", "pard-sequential", "pard-other-token", "ordinary-parallel", "pard-without-token"],
)
def test_save_and_load_round_trip(token, options, target, tmp_path):
    folder = write_draft_model(tmp_path / "a", token)
    first = AutoDrafter.from_pretrained(folder, target, **options)
    if first.config.parallel_drafting:
        first.config.num_assistant_tokens = 6  # not the published drafters' depth
    first.save_pretrained(tmp_path / "b")
    second = AutoDrafter.from_pretrained(tmp_path / "b", target)
    second.save_pretrained(tmp_path / "c")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    for name in ("parallel_drafting", "mask_token_id", "num_assistant_tokens", "vocab_size", "draft_vocab_size"):
        assert getattr(first.config, name) == getattr(second.config, name)
    original, saved_weights = load_file(folder / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert original.keys() == saved_weights.keys()
    assert all(torch.equal(saved_weights[name], tensor) for name, tensor in original.items())
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])

    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert config.get("pard_token", -1) == (-1 if first.config.mask_token_id is None else first.config.mask_token_id)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values()) and type(model) is LlamaForCausalLM
    check_lossless(target, second)
    drafted = [drafts(drafter) for drafter in (first, second)]
    assert drafted[0] == drafted[1]


def test_saved_checkpoints_take_keywords(target, tmp_path):
    AutoDrafter.from_pretrained(write_draft_model(tmp_path / "a", 7), target).save_pretrained(tmp_path / "b")
    drafter = AutoDrafter.from_pretrained(tmp_path / "b", target, parallel_drafting=False)
    assert not drafter.config.parallel_drafting
    drafter.save_pretrained(tmp_path / "c")
    assert not AutoDrafter.from_pretrained(tmp_path / "c", target).config.parallel_drafting
    again = AutoDrafter.from_pretrained(tmp_path / "c", target, parallel_drafting=True)
    assert again.config.parallel_drafting and again.config.mask_token_id == 7
    refuse(
        tmp_path / "c",
        target,
        "reads tokens only: it takes no `aux_hidden_state_layer_ids=`",
        aux_hidden_state_layer_ids=[1],
    )
