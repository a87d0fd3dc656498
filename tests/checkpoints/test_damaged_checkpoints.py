"""Damaged and contradictory checkpoints: one clear error each, and nothing is left half done."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dialects import PEAGLE, PEAGLE_DIALECTS, Spec, make_weights, tiny_target, write
from refused_loading import refuse
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration

from hf_specdec import AutoDrafter, NoDrafter

SPEC = Spec()
NESTED = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float32)


@pytest.mark.parametrize("dialect", ["safeailab-bin", "specforge", "speculators", "modelopt"])
def test_missing_unexpected_and_reshaped_tensors(dialect, target, tmp_path):
    weights = make_weights(SPEC)
    del weights["layers.0.mlp.up_proj.weight"]
    weights["layers.0.mlp.side_proj.weight"] = torch.zeros(2, 2)
    weights["layers.0.self_attn.o_proj.weight"] = torch.zeros(32, 31)
    folder = write(dialect, tmp_path, SPEC, weights)
    refuse(
        folder,
        target,
        str(folder),
        "missing tensors: layers.0.mlp.up_proj.weight;",
        "unexpected tensors: layers.0.mlp.side_proj.weight;",
        "wrong shapes: layers.0.self_attn.o_proj.weight is [32, 31], expected [32, 32]",
    )


def test_missing_d2t_table(target, tmp_path):
    weights = make_weights(SPEC)
    del weights["d2t"]
    refuse(write("modelopt", tmp_path, SPEC, weights), target, "missing tensors: d2t")


def test_absolute_d2t_table(target, tmp_path):
    weights = make_weights(SPEC)
    weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
    folder = write("specforge", tmp_path, SPEC, weights)
    refuse(folder, target, "d2t", "absolute table", "Subtract torch.arange")


def test_invalid_d2t_table(target, tmp_path):
    weights = make_weights(SPEC)
    weights["d2t"] = weights["d2t"].clone()
    weights["d2t"][-1] = 1000
    weights["d2t"][3] = 999
    refuse(write("specforge", tmp_path / "a", SPEC, weights), target, "d2t", "is no draft vocabulary", "128")
    full = replace(SPEC, draft_vocab_size=128, maps_vocabulary=False)
    weights = make_weights(full) | {"d2t": torch.arange(128).flip(0) - torch.arange(128)}
    refuse(write("specforge", tmp_path / "b", full, weights), target, "d2t", "permutes the vocabulary")


def test_zero_d2t_table_is_warned_about(target, tmp_path, caplog):
    weights = make_weights(SPEC)
    weights["d2t"] = torch.zeros_like(weights["d2t"])
    drafter = AutoDrafter.from_pretrained(write("safeailab", tmp_path, SPEC, weights), target)
    assert torch.equal(drafter.target_ids, torch.arange(SPEC.draft_vocab_size))
    assert "all zero" in caplog.text


@pytest.mark.parametrize(
    ("extra", "changes", "parts"),
    [
        ({}, {"norm_before_fc": True}, ("norm_before_fc is True", "no tensor input_norm.weight")),
        ({}, {"fc_norm": True}, ("fc_norm is True", "no tensor fc_norm.0.weight")),
        ({"fc_norm.0.weight": 32}, {"fc_norm": False}, ("fc_norm is False", "a tensor fc_norm.0.weight")),
        (
            {},
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            ("q_norm", "no tensor layers.0.self_attn.q_norm.weight"),
        ),
        ({}, {"attention_bias": True}, ("attention_bias is True", "no tensor layers.0.self_attn.q_proj.bias")),
        ({"layers.0.mlp.gate_proj.bias": 48}, {"mlp_bias": False}, ("mlp_bias is False", "gate_proj.bias")),
        ({}, {"num_hidden_layers": 2}, ("num_hidden_layers is 2", "draft layers [0]")),
        ({}, {"target_hidden_size": 48}, ("fc.weight reads 96", "target_hidden_size 48")),
        (
            {},
            {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]},
            ("model_type 'gemma3'", "['llama', 'qwen3']"),
        ),
        ({}, {"draft_vocab_size": 41}, ("d2t is [40], expected [41]", "lm_head.weight is [40, 32], expected [41, 32]")),
        ({}, {"head_dim": 16}, ("q_proj.weight is [32, 64], expected [64, 64]",)),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state is False", "fc.weight")),
    ],
)
def test_contradictions(extra, changes, parts, target, tmp_path):
    weights = make_weights(SPEC) | {name: torch.ones(size) for name, size in extra.items()}
    refuse(write("safeailab", tmp_path, SPEC, weights, **changes), target, str(tmp_path), *parts)


def test_two_norms_before_fc(target, tmp_path):
    spec = replace(SPEC, norm_before_fc=True, fc_norm=True)
    refuse(write("speculators", tmp_path, spec, make_weights(spec)), target, "norm_before_fc and fc_norm")


@pytest.mark.parametrize("dialect", ["safeailab-bin", "specforge"])
@pytest.mark.parametrize("kept", [0, 20, 2000])
def test_truncated_file(dialect, kept, target, tmp_path):
    write(dialect, tmp_path, SPEC, make_weights(SPEC))
    file = tmp_path / ("pytorch_model.bin" if dialect == "safeailab-bin" else "model.safetensors")
    file.write_bytes(file.read_bytes()[:kept])
    refuse(tmp_path, target, str(file), "truncated")


def test_files_of_another_format(target, tmp_path):
    write("specforge", tmp_path / "a", SPEC, make_weights(SPEC))
    (tmp_path / "a" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refuse(tmp_path / "a", target, "model.safetensors", "not a complete safetensors file")
    write("specforge", tmp_path / "b", SPEC, make_weights(SPEC))
    torch.save({}, tmp_path / "b" / "model.safetensors")
    refuse(tmp_path / "b", target, "model.safetensors", "not a complete safetensors file")


@pytest.mark.core
def test_bin_with_code_is_not_run(target, tmp_path):
    write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    torch.save({"fc.weight": Mischief(tmp_path / "written")}, tmp_path / "pytorch_model.bin")
    refuse(tmp_path, target, "pytorch_model.bin", "weights_only=True")
    assert not (tmp_path / "written").exists()


class Mischief:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return (Path.write_text, (self.file, "ran"))


def test_bin_that_is_no_state_dict(target, tmp_path):
    write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    torch.save({"model": {"fc.weight": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    refuse(tmp_path, target, "pytorch_model.bin", "expected a dictionary of tensors")


def test_bin_of_the_old_format(target, tmp_path):
    """Files of torch before 1.6 are no zip archives, so they cannot be mapped into memory; they load all the same."""
    write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    drafter = AutoDrafter.from_pretrained(tmp_path, target)
    assert torch.equal(drafter.lm_head.weight, make_weights(SPEC)["lm_head.weight"])


def test_missing_files(target, tmp_path):
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", target, "has no config.json", "Offline", "was downloaded before", error=OSError)
    write("specforge", tmp_path / "bare", SPEC, make_weights(SPEC))
    (tmp_path / "bare" / "model.safetensors").unlink()
    refuse(tmp_path / "bare", target, "no weight file", "model.safetensors, ", "pytorch_model.bin", error=OSError)
    write("specforge", tmp_path / "sharded", SPEC, make_weights(SPEC), max_shard_size="20KB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    refuse(tmp_path / "sharded", target, shard.name, error=OSError)
    refuse(tmp_path / "absent", target, "absent", error=OSError)
    refuse(tmp_path / "bare" / "config.json", target, "config.json is not a folder", error=OSError)
    refuse(tmp_path, target, "has no config.json", subfolder="empty", error=OSError)


def test_config_that_is_no_json(target, tmp_path):
    write("specforge", tmp_path, SPEC, make_weights(SPEC))
    (tmp_path / "config.json").write_text("{")
    refuse(tmp_path, target, "config.json is not a JSON file")
    (tmp_path / "config.json").write_text("[]")
    refuse(tmp_path, target, "config.json holds a JSON list")


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (replace(SPEC, target_hidden_size=48), ("hidden_size 32", "48", "a drafter for another model")),
        (replace(SPEC, vocab_size=160), ("vocabulary of 128", "160", "a drafter for another model")),
        (replace(SPEC, target_layers=4), ("[2, 4, 5]", "4 layers", "a drafter for another model")),
    ],
    ids=["hidden-size", "vocabulary", "layers"],
)
def test_drafter_for_another_model(other, parts, tmp_path):
    refuse(write("speculators", tmp_path, SPEC, make_weights(SPEC)), tiny_target(other), *parts)


def test_layer_ids_outside_the_target(target, tmp_path):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    refuse(folder, target, "reads the auxiliary hidden states [2, 4, 9]", aux_hidden_state_layer_ids=[2, 4, 9])
    refuse(folder, target, "which is not 2 auxiliary hidden states", aux_hidden_state_layer_ids=[2, 4])
    drafter = AutoDrafter.from_pretrained(folder, target, aux_hidden_state_layer_ids=[0, 4, 8])
    assert drafter.aux_hidden_state_layer_ids == [0, 4, 8]


@pytest.mark.core
def test_arguments(target, tmp_path):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    refuse(folder, target, "num_assistant_tokens is 0", num_assistant_tokens=0)
    refuse(folder, target, "engine is 'fast'", engine="fast")
    refuse(folder, target, "draft_probs is 'no'", draft_probs="no")
    for wrong in (None, 5):
        refuse(wrong, target, f"pretrained_model_name_or_path is {wrong}; expected str | Path.")
    for wrong in (["cpu"], 1.5, True):
        refuse(folder, target, f"device_map is {wrong}; expected str | int | device | Mapping.", device_map=wrong)
    for wrong in ({}, 99, {"": 99}):
        refuse(folder, target, "device_map, by default", f"is {wrong}, ", "devices with memory", device_map=wrong)
    refuse(folder, target, "unexpected keyword argument 'tap'", tap=[1], error=TypeError)
    with pytest.raises(TypeError, match="target"):
        AutoDrafter.from_pretrained(folder)
    with pytest.raises(TypeError, match="target is a DataParallel; expected the model that generates"):
        AutoDrafter.from_pretrained(folder, target=torch.nn.DataParallel(target))
    for wrong in (None, "meta-llama/Llama-3.1-8B", target.config):
        for call in (lambda one: AutoDrafter.from_pretrained(folder, one), NoDrafter):
            with pytest.raises(
                TypeError, match=f"target is a {type(wrong).__name__}; expected the model that generates"
            ):
                call(wrong)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    refuse(folder, t5, "T5ForConditionalGeneration is an encoder-decoder")


def test_saved_checkpoint_with_a_missing_tensor(target, tmp_path):
    AutoDrafter.from_pretrained(write("speculators", tmp_path / "a", SPEC, make_weights(SPEC)), target).save_pretrained(
        tmp_path / "b"
    )
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    refuse(tmp_path / "b", target, "missing tensors: layers.1.input_layernorm.weight")


def test_every_shard_is_read(target, tmp_path):
    """A tensor that only the second shard holds counts."""
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC), max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert AutoDrafter.from_pretrained(folder, target).is_bound


def test_error_has_one_sentence_a_problem(target, tmp_path):
    """No traceback of a loader inside the message."""
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"draft_vocab_size": 4}))
    with pytest.raises(ValueError) as caught:
        AutoDrafter.from_pretrained(tmp_path, target)
    assert not re.search(r"\n|Traceback", str(caught.value))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"hidden_size": -4},
        {"num_attention_heads": 5, "head_dim": ...},
        {"hidden_act": "none-such"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", ["specforge", "automodel"])
def test_invalid_config_values(dialect, changes, target, tmp_path):
    spec = PEAGLE if dialect == "automodel" else SPEC
    folder = write(dialect, tmp_path, spec, make_weights(spec), **changes)
    refuse(folder, target, f"config.json of {folder} describes no model that can be built")


# ---- P-EAGLE


@pytest.mark.parametrize("dialect", PEAGLE_DIALECTS)
def test_damaged_peagle(dialect, target, tmp_path):
    weights = make_weights(PEAGLE)
    del weights["layers.1.mlp.up_proj.weight"]
    weights["layers.1.side_norm.weight"] = torch.zeros(32)
    weights["mask_hidden"] = torch.zeros(1, 1, 95)
    folder = write(dialect, tmp_path, PEAGLE, weights)
    shape, expected = ([1, 95], [1, 96]) if dialect == "automodel" else ([1, 1, 95], [1, 1, 96])
    refuse(
        folder,
        target,
        str(folder),
        "missing tensors: layers.1.mlp.up_proj.weight;",
        "unexpected tensors: layers.1.side_norm.weight;",
        f"wrong shapes: mask_hidden is {shape}, expected {expected}",
    )


@pytest.mark.parametrize("dialect", [dialect for dialect in PEAGLE_DIALECTS])
def test_peagle_without_its_mask(dialect, target, tmp_path):
    weights = make_weights(PEAGLE)
    del weights["mask_hidden"]
    refuse(write(dialect, tmp_path, PEAGLE, weights), target, "missing tensors: mask_hidden.")


def test_peagle_with_a_missing_layer(target, tmp_path):
    """`midlayer` is layer 0, so layers 1 and 3 beside it leave a hole."""
    weights = {name.replace("layers.1.", "layers.3."): tensor for name, tensor in make_weights(PEAGLE).items()}
    folder = write("amazon", tmp_path, PEAGLE, weights, num_hidden_layers=4)
    refuse(folder, target, "num_hidden_layers is 4", "the draft layers [0, 3]")


def test_masks_are_for_peagle(target, tmp_path):
    """EAGLE-3 has no mask_hidden, neither as published nor as saved."""
    folder = write("speculators", tmp_path / "a", SPEC, make_weights(SPEC))
    AutoDrafter.from_pretrained(folder, target, parallel_drafting=False).save_pretrained(tmp_path / "b")
    for place in (folder, tmp_path / "b"):
        what = f"{place} is an EAGLE-3 drafter, which drafts token by token: it takes no "
        both = {"parallel_drafting": True, "mask_token_id": 3}
        refuse(place, target, what + "`mask_token_id=`, `parallel_drafting=`. Drop that keyword", **both)
        refuse(place, target, what + "`parallel_drafting=`", parallel_drafting=True)
        refuse(place, target, what + "`mask_token_id=`", mask_token_id=3)


def test_mask_token_of_the_normal_form(target, tmp_path):
    folder = write("specforge-peagle", tmp_path / "a", PEAGLE, make_weights(PEAGLE), mask_token_id=...)
    AutoDrafter.from_pretrained(folder, target, parallel_drafting=False).save_pretrained(tmp_path / "b")
    refuse(tmp_path / "b", target, "mask_token_id is None", parallel_drafting=True)
    refuse(tmp_path / "b", target, "mask_token_id is 128", parallel_drafting=True, mask_token_id=128)
    drafter = AutoDrafter.from_pretrained(tmp_path / "b", target, parallel_drafting=True, mask_token_id=3)
    assert drafter.config.parallel_drafting and drafter.config.mask_token_id == 3
