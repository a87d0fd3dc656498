"""`hf-specdec inspect`."""

from __future__ import annotations

import json

import pytest
import torch
from dialects import PEAGLE, Spec, make_weights, tiny_target, write, write_draft_model
from few_bits import FOUR_BITS, quantise
from safetensors.torch import load_file, save_file
from transformers import BertConfig, DistilBertConfig, GPTNeoXConfig, T5Config, ViTConfig

from hf_specdec import AutoDrafter
from hf_specdec.cli import build_parser, main

SPEC = Spec()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """Only config.json: inspect must not need more."""
    folder = tmp_path_factory.mktemp("target")
    tiny_target(SPEC).config.save_pretrained(folder)
    return folder


@pytest.mark.core
def test_text(target_folder, tmp_path, capsys):
    folder = write("modelopt", tmp_path, SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder), "--target", str(target_folder)]) == 0
    out = capsys.readouterr().out
    for part in (
        "eagle3 (NVIDIA ModelOpt)",
        "aux layers   [2, 4, 5]",
        "40 of the target's 128 tokens",
        "5 draft tokens a round",
        "fc.weight  F32 [32, 96]",
        "aux_hidden_state_layer_ids = [2, 4, 5]  (in doubt): ",
        "eagle_aux_hidden_state_layer_ids in eagle_config begins with 1",
        "norm_before_residual = False: not in config.json; the default of NVIDIA ModelOpt",
        "share_embedding = True: embed_tokens.weight is not in the checkpoint",
        "(llama): fits",
    ):
        assert part in out


def test_layers_that_stay_quantised(tmp_path, capsys):
    """Blocks of other sizes and heads do not."""
    weights = make_weights(SPEC)
    for name, block, count in (("kept", (128, 128), 7), ("other", (16, 24), 0)):
        stored, _ = quantise(weights, "blocks", block, lambda name: "proj" in name or "lm_head" in name)
        settings = {"quant_method": "fp8", "weight_block_size": list(block)}
        folder = write("specforge", tmp_path / name, SPEC, stored, quantization_config=settings)
        assert main(["inspect", str(folder)]) == 0
        out = capsys.readouterr().out
        assert "midlayer.self_attn.q_proj.weight  F8_E4M3 [32, 64]" in out
        line = "quantised    7 linear layers, as in the file: float8_e4m3fn, a scale for each tensor"
        assert (line in out) == ("quantised" in out) == (count > 0)
        assert main(["inspect", str(folder), "--json"]) == 0
        layers = json.loads(capsys.readouterr().out)["stored_layers"]
        assert len(layers) == count
        assert not count or layers["layers.0.self_attn.q_proj"] == ["float8_e4m3fn", 32, 64]


@pytest.mark.parametrize(("form", "block"), [("int4-rows", "row"), ("nvfp4", "group of 16")])
def test_layers_that_stay_packed(form, block, tmp_path, capsys):
    stored, _ = quantise(make_weights(SPEC), form)
    settings = {"config_groups": {"group_0": {"weights": {"group_size": FOUR_BITS[form][1]}}}}
    folder = write("specforge", tmp_path, SPEC, stored, quantization_config=settings)
    assert main(["inspect", str(folder)]) == 0
    out, kind = capsys.readouterr().out, FOUR_BITS[form][0]
    assert f"midlayer.self_attn.q_proj.weight  {kind} [32, 64]" in out and "weight_scale" not in out
    assert f"quantised    7 linear layers, as in the file: {kind}, a scale for each {block}\n" in out
    assert main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stored_layers"]["layers.0.self_attn.q_proj"] == [kind, 1, FOUR_BITS[form][1] or 64]
    assert report["quantised"] == {f"{kind}, a scale for each {block}": 7}


@pytest.mark.core
def test_json(target_folder, tmp_path, capsys):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder), "--target", str(target_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "eagle3" and report["dialect"] == "speculators"
    assert report["aux_hidden_state_layer_ids"] == [2, 4, 5] and report["num_assistant_tokens"] == 3
    assert (report["vocab_size"], report["draft_vocab_size"]) == (128, 40)
    assert report["trained_for"] == "org/target"
    assert report["tensors"]["d2t"] == {"shape": [40], "dtype": "I64"}
    assert report["target"]["fits"] is True
    names = {one["name"] for one in report["decisions"]}
    assert {
        "aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_output",
        "final_norm",
        "rope_theta",
        "share_head",
    } <= names


def test_pickled_weights_and_no_target(tmp_path, capsys):
    folder = write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "decided with --target" in out and "midlayer.hidden_norm.weight  float32 [32]" in out
    assert "target  " not in out


def test_target_of_another_size(target_folder, tmp_path, capsys):
    spec = Spec(vocab_size=160)
    folder = write("speculators", tmp_path, spec, make_weights(spec))
    assert main(["inspect", str(folder), "--target", str(target_folder), "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["target"]
    assert fit["fits"] is False and "vocabulary of 160 tokens" in fit["reason"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            T5Config(vocab_size=SPEC.vocab_size, d_model=SPEC.hidden_size, num_layers=8),
            "is an encoder-decoder; hf_spec",
        ),
        (BertConfig(vocab_size=SPEC.vocab_size, hidden_size=SPEC.hidden_size), "is an encoder; hf_spec"),
        (DistilBertConfig(vocab_size=SPEC.vocab_size, dim=SPEC.hidden_size), "is an encoder; hf_spec"),
        (ViTConfig(hidden_size=SPEC.hidden_size), "describes no model that can be built (AttributeError: "),
    ],
)
def test_targets_that_say_no_text(config, reason, tmp_path, capsys):
    config.save_pretrained(tmp_path / "target")
    folder = write("speculators", tmp_path / "drafter", SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target"), "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["target"]
    assert fit["fits"] is False and reason in fit["reason"]


@pytest.mark.parametrize(("kind", "is_decoder"), [(BertConfig, True), (GPTNeoXConfig, False)])
def test_decoders_of_classes_that_may_be_encoders(kind, is_decoder, tmp_path, capsys):
    sizes = {"vocab_size": SPEC.vocab_size, "hidden_size": SPEC.hidden_size, "num_attention_heads": 4}
    kind(**sizes, is_decoder=is_decoder).save_pretrained(tmp_path / "target")
    folder = write("speculators", tmp_path / "drafter", SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["fits"] is True


def test_devices_that_torch_cannot_use(target_folder, tmp_path, capsys):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    for device in ("nonsense", "meta"):
        arguments = ["inspect", str(folder), "--target", str(target_folder), "--self-check", "--device", device]
        assert main(arguments) == 1
        assert f"--device is '{device}', which torch cannot use here: " in capsys.readouterr().err


def test_normal_form(target_folder, tmp_path, capsys):
    drafter = AutoDrafter.from_pretrained(
        write("safeailab", tmp_path / "a", SPEC, make_weights(SPEC)), tiny_target(SPEC, dtype=torch.float32)
    )
    drafter.save_pretrained(tmp_path / "b" / "inside")
    arguments = ["inspect", str(tmp_path / "b"), "--subfolder", "inside", "--target", str(target_folder)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "none: the checkpoint is in normal form" in out and "fits" in out


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("hf-specdec: ") and captured.err.count("\n") == 1
    assert "has no config.json" in captured.err
    for arguments in (["/nonexistent"], ["./nonexistent"], [str(tmp_path), "--target", "/nonexistent"]):
        assert main(["inspect", *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"hf-specdec: {arguments[-1]} is not a folder; expected one, or a repository")
        assert captured.err.count("\n") == 1
    assert main(["inspect", str(tmp_path), "--revision", "main"]) == 1
    assert f"--revision is 'main', but {tmp_path} is a folder" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--self-check"]) == 1
    assert "pass --target too" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "Medusa heads" in capsys.readouterr().err


def test_peagle(target_folder, tmp_path, capsys):
    folder = write("specforge-peagle", tmp_path, PEAGLE, make_weights(PEAGLE))
    assert main(["inspect", str(folder), "--target", str(target_folder)]) == 0
    out = capsys.readouterr().out
    for part in (
        "p-eagle (SpecForge)",
        "8 draft tokens a round",
        "all tokens in one pass, the mask token 5 where there is none yet",
        "aux layers   [2, 4, 5]",
        "mask_hidden  F32 [1, 1, 96]",
        "mask_token_id = 5: mask_token_id of config.json",
        "(in doubt): SpecForge's P-EAGLE trainer leaves out the llama3 scaling",
        "(llama): fits",
    ):
        assert part in out
    assert main(["inspect", str(folder), "--target", str(target_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "p-eagle" and report["parallel_drafting"] and report["mask_token_id"] == 5
    assert report["target"] == {
        "name": str(target_folder),
        "model_type": "llama",
        "fits": True,
        "reason": None,
        "aux_hidden_state_layer_ids": [2, 4, 5],
    }


def test_draft_models(target_folder, tmp_path, capsys):
    pard, plain = write_draft_model(tmp_path / "pard", pard_token=7), write_draft_model(tmp_path / "plain")
    capsys.readouterr()
    assert main(["inspect", str(pard), "--target", str(target_folder)]) == 0
    captured = capsys.readouterr()
    for part in (
        "draft model (PARD)",
        "all tokens in one pass, the mask token 7 where",
        "model        llama",
        "hidden_size 32, intermediate_size 64, num_hidden_layers 2",
        "128 of the target's 128 tokens",
        "(llama): fits",
    ):
        assert part in captured.out
    assert captured.err == ""
    assert main(["inspect", str(plain), "--target", str(target_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["dialect"], report["model_type"]) == ("draft model", "transformers", "llama")
    assert report["parallel_drafting"] is False and report["mask_token_id"] is None
    assert report["sizes"]["num_hidden_layers"] == 2 and report["target"]["fits"] is True
    assert report["tensors"]["lm_head.weight"] == {"shape": [128, 32], "dtype": "F32"}
    assert main(["inspect", str(plain)]) == 0
    assert "target  " not in capsys.readouterr().out


@pytest.mark.parametrize(("size", "fits"), [(100, True), (170, True), (2000, False)])
def test_vocabulary_of_a_draft_model(size, fits, target_folder, tmp_path, capsys):
    folder = write_draft_model(tmp_path, spec=Spec(vocab_size=size, target_layers=2))
    capsys.readouterr()
    assert main(["inspect", str(folder), "--target", str(target_folder), "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["target"]
    assert fit["fits"] is fits
    assert fits or "vocabulary of 2000 tokens" in fit["reason"]


def test_damaged_draft_model(tmp_path, capsys):
    folder = write_draft_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "missing tensors: lm_head.weight." in captured.err


def test_draft_models_have_one_interpretation(target_folder, tmp_path, capsys):
    folder = write_draft_model(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(folder), "--target", str(target_folder), "--self-check"]) == 1
    assert (
        "EAGLE-3, P-EAGLE, DFlash and its kinds (DFlash-2, DSpark, DSpine, Domino) only. Drop --self-check"
        in capsys.readouterr().err
    )


def test_usage():
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([])
    assert caught.value.code == 2
