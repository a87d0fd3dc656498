"""Checkpoints of PARD-2 drafters: how they are read, what is wrong with them, what is saved."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pard2_reference
import pytest
import torch
from dialects import Spec, tiny_target
from pard2_reference import PROJECTION_FILE, write
from refused_loading import refuse
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.cli import main
from hf_specdec.drafters import Pard2Drafter

SPEC = Spec()
TEXT = torch.tensor([5, 17, 99, 3, 42, 42, 8, 120, 64])


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float64)


def change_projection(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Write other tensors of the projection, by what follows `target_proj.`; None removes one."""
    tensors = torch.load(folder / PROJECTION_FILE, weights_only=True)
    tensors |= {f"target_proj.{name}": tensor for name, tensor in changes.items()}
    torch.save({name: one for name, one in tensors.items() if one is not None}, folder / PROJECTION_FILE)
    return folder


@torch.no_grad()
def drafts(drafter: Pard2Drafter, target, num_steps: int) -> list[torch.Tensor]:
    """Logits of the drafts after `TEXT`, from the drafter's `unroll`, which has no cache."""
    states = target(TEXT[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    ids = [*drafter.aux_hidden_state_layer_ids, *([len(states) - 1] if drafter.reads_last_hidden_state else [])]
    recorded = torch.cat([states[layer_id] for layer_id in ids], dim=-1)
    aux_hidden_states = torch.nn.functional.pad(recorded, (0, 0, 0, 1))  # those of the newest token are not known
    outputs = drafter.unroll(TEXT[None], aux_hidden_states, num_steps)
    return [(output @ drafter.head_weight.T)[0, -1] for output in outputs]


# Indices as published, and the layers whose residual streams are read; the target has 8 layers.
ORDERS = {
    (-1, -4, 2): ([2, 5], True),
    (-1, -8): ([1], True),
    (0, 3, 7): ([0, 3, 7], False),
    (8,): ([], True),
    (-3, -5): ([4, 6], False),
}


@pytest.mark.parametrize("ids", ORDERS)
@pytest.mark.parametrize("bias", [False, True])
def test_drafts_are_those_of_the_definition(ids, bias, target, tmp_path):
    folder = write(tmp_path, list(ids), bias=bias)
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert type(drafter) is Pard2Drafter
    assert (drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state) == ORDERS[ids]
    assert drafter.num_assistant_tokens == 15 and drafter.config.mask_token_id == 5
    _, expected = pard2_reference.propose(folder, target, TEXT, 4)
    for ours, theirs in zip(drafts(drafter, target, 4), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_projection_may_be_among_the_weights_of_the_model(target, tmp_path):
    folder = write(tmp_path)
    before = AutoDrafter.from_pretrained(folder, target).state_dict()
    weights = load_file(folder / "model.safetensors") | torch.load(folder / PROJECTION_FILE, weights_only=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / PROJECTION_FILE).unlink()
    after = AutoDrafter.from_pretrained(folder, target).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())


def test_a_scale_that_config_json_does_not_have(target, tmp_path, caplog):
    assert AutoDrafter.from_pretrained(
        write(tmp_path / "a", pard2_scale=..., feat_scale=0.5), target
    ).config.hidden_state_scale == pytest.approx(0.5)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        drafter = AutoDrafter.from_pretrained(write(tmp_path / "b", pard2_scale=...), target)
    assert drafter.config.hidden_state_scale == 0.02
    assert "hidden_state_scale = 0.02: not in config.json" in caplog.text
    assert "accepted, state it in config.json." in caplog.text  # `--self-check` does not run this family


@pytest.mark.core
def test_save_and_load_round_trip(target, tmp_path):
    """What is saved is what AMD's code reads: a language model, and the projection in a file of its own."""
    folder = write(tmp_path / "a", bias=True)
    first = AutoDrafter.from_pretrained(folder, target)
    first.save_pretrained(tmp_path / "b")
    second = AutoDrafter.from_pretrained(tmp_path / "b", target)
    second.save_pretrained(tmp_path / "c")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    published, saved = (json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "b"))
    assert all(saved[key] == value for key, value in published.items() if key.startswith(("pard", "spd")))
    assert saved["para_num"] == 15
    assert AutoDrafter.from_pretrained(write(tmp_path / "e", para_num=6), target).num_assistant_tokens == 6
    projection = torch.load(tmp_path / "b" / PROJECTION_FILE, weights_only=True)
    for name, tensor in torch.load(folder / PROJECTION_FILE, weights_only=True).items():
        assert torch.equal(projection.pop(name).float(), tensor)
    assert not projection
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    for ours, theirs in zip(drafts(first, target, 3), drafts(second, target, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="uploads the model alone"):
        first.save_pretrained(tmp_path / "d", push_to_hub=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pard2_target_layers": ...}, "pard2_target_layers None in its config.json; expected the indices"),
        ({"pard2_target_layers": [1, 1, 2]}, "hidden_state_ids is [1, 1, 2]; expected a list of different"),
        ({"pard2_target_layers": [-1, 8, 2]}, "reads the hidden states [-1, 8, 2], but the target has 8 layers"),
        ({"pard2_target_layers": [-1, -10, 2]}, "reads the hidden states [-1, -10, 2], but the target has 8 layers"),
        ({"pard2_target_layers": [-1, 2]}, "made for a target with hidden_size 48, but"),
        ({"pard2_target_dim": 64}, "target_proj.weight reads 96 values, but by config.json there are 64"),
        ({"pard2_target_layers": [-1, -2, -3, -4, -5]}, "of 5 hidden states"),
        ({"pard2_proj_bias": True}, "pard2_proj_bias is True by config.json, but its weights have no tensor"),
        ({"pard_token": ...}, "has the mask token None"),
        ({"pard_token": 128}, "has the mask token 128; expected one of the 128 tokens"),
    ],
    ids=str,
)
def test_contradictions(changes, message, target, tmp_path):
    refuse(write(tmp_path, **changes), target, message)


def test_damaged_projections(target, tmp_path):
    refuse(change_projection(write(tmp_path / "a"), weight=None), target, "no matrix target_proj.weight")
    refuse(change_projection(write(tmp_path / "b"), bias=torch.zeros(24)), target, "pard2_proj_bias is False")
    folder = change_projection(write(tmp_path / "c"), weight=torch.zeros(25, 96))
    refuse(folder, target, "target_proj.weight is [25, 96], expected [24, 96]")
    refuse(change_projection(write(tmp_path / "d"), other=torch.zeros(1)), target, "unexpected tensors: target_proj.o")
    folder = write(tmp_path / "e")
    (folder / PROJECTION_FILE).unlink()
    refuse(folder, target, "no matrix target_proj.weight; expected it in warp_model.bin")
    (folder / PROJECTION_FILE).write_bytes(b"no weights")
    refuse(folder, target, "cannot be read as PyTorch weights")


def test_keywords(target, tmp_path):
    folder = write(tmp_path)
    assert AutoDrafter.from_pretrained(folder, target, mask_token_id=9).config.mask_token_id == 9
    for name, value in (("parallel_drafting", False), ("aux_hidden_state_layer_ids", [1, 2]), ("rope_theta", 1.0)):
        refuse(folder, target, f"is a drafter of the family pard-2: it takes no `{name}=`", **{name: value})


def test_inspect(target, tmp_path, capsys):
    target.save_pretrained(tmp_path / "target")
    folder = write(tmp_path / "drafter")
    capsys.readouterr()
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["family"], report["dialect"], report["num_assistant_tokens"]) == ("pard-2", "AMD", 15)
    assert report["aux_hidden_state_layer_ids"] == [-1, -4, 2] and report["mask_token_id"] == 5
    assert report["target"]["fits"] and report["target"]["aux_hidden_state_layer_ids"] == [8, 5, 2]
    assert report["tensors"]["target_proj.weight"] == {"shape": [24, 96], "dtype": "float32"}
    folder = write(tmp_path / "wide", target_hidden_size=40)
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target")]) == 0
    assert "does not fit" in (out := capsys.readouterr().out) and "hidden_size 40" in out
