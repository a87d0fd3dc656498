"""`hf-specdec inspect`."""

from __future__ import annotations

import json

import pytest
import torch
from dialects import Spec, make_weights, tiny_target, write

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
        "taps         [2, 4, 5]",
        "40 of the target's 128 tokens",
        "5 draft tokens a round",
        "fc.weight  F32 [32, 96]",
        "taps = [2, 4, 5]  (in doubt): ids [1, 3, 4] in eagle_config",
        "norm_before_residual = False: not in config.json; the default of NVIDIA ModelOpt",
        "share_embedding = True: embed_tokens.weight is not in the checkpoint",
        "(llama): fits",
    ):
        assert part in out


@pytest.mark.core
def test_json(target_folder, tmp_path, capsys):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder), "--target", str(target_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "eagle3" and report["dialect"] == "speculators"
    assert report["taps"] == [2, 4, 5] and report["num_assistant_tokens"] == 3
    assert (report["vocab_size"], report["draft_vocab_size"]) == (128, 40)
    assert report["trained_for"] == "org/target"
    assert report["tensors"]["d2t"] == {"shape": [40], "dtype": "I64"}
    assert report["target"]["fits"] is True
    names = {one["name"] for one in report["decisions"]}
    assert {"taps", "norm_before_residual", "norm_output", "final_norm", "rope_theta", "share_head"} <= names


def test_pickled_weights_and_no_target(tmp_path, capsys):
    folder = write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "settled with --target" in out and "midlayer.hidden_norm.weight  float32 [32]" in out
    assert "target  " not in out


def test_target_of_another_size(target_folder, tmp_path, capsys):
    spec = Spec(vocab_size=160)
    folder = write("speculators", tmp_path, spec, make_weights(spec))
    assert main(["inspect", str(folder), "--target", str(target_folder), "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)["target"]
    assert fit["fits"] is False and "vocabulary of 160 tokens" in fit["reason"]


def test_normal_form(target_folder, tmp_path, capsys):
    drafter = AutoDrafter.from_pretrained(
        write("safeailab", tmp_path / "a", SPEC, make_weights(SPEC)), tiny_target(SPEC, dtype=torch.float32)
    )
    drafter.save_pretrained(tmp_path / "b" / "inside")
    arguments = ["inspect", str(tmp_path / "b"), "--subfolder", "inside", "--target", str(target_folder)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "none: the checkpoint is in normal form" in out and "fits" in out


@pytest.mark.core
def test_errors_are_one_line(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("hf-specdec: ") and captured.err.count("\n") == 1
    assert "has no config.json" in captured.err
    assert main(["inspect", str(tmp_path), "--self-check"]) == 1
    assert "pass --target too" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "Medusa heads" in capsys.readouterr().err


def test_usage():
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([])
    assert caught.value.code == 2
