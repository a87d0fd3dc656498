"""`examples/quantised_rounds.py` measures formats, and experts in MXFP4."""

import copy

import pytest
import quantised_rounds
from oracle import random_eagle3
from targets import set_policy, tiny_target

from hf_specdec.patching.fused_linear import fused_linears


@pytest.mark.parametrize(("family", "name"), [("llama", "NVFP4"), ("gpt-oss", "MXFP4 experts")])
def test_rounds_of_stored_weights(family, name, tmp_path):
    target = tiny_target(family)
    target.config.save_pretrained(tmp_path / "target")
    random_eagle3(target).config.save_pretrained(tmp_path / "drafter")
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--runs", "1"]
    arguments += ["--batch-sizes", "1", "--max-new-tokens", "6", "--formats", "none", name]
    found = quantised_rounds.main(arguments)
    assert [(one["format"], one["drafter"]) for one in found] == [
        (one, drafter) for one in ("none", name) for drafter in ("none", "drafter")
    ]
    assert all(one["ms"] > 0 and one["engine"].startswith("static") for one in found)
    assert found[2]["floor_ms"] > 0 and found[2]["bytes"] < 0.7 * found[0]["bytes"]


def test_stored_layers_are_fused(monkeypatch):
    """As those of libraries are, whose numbers and scales are parameters."""
    set_policy(monkeypatch, "cpu", fused_linear=True)
    target = copy.deepcopy(tiny_target("llama"))
    quantised_rounds.store(target, quantised_rounds.FORMATS["FP8 row"])
    with fused_linears(target):
        for layer in target.model.layers:
            for first, others in ((layer.self_attn.q_proj, 2), (layer.mlp.gate_proj, 1)):
                assert len(vars(first)["forward"].fused.layers) == 1 + others
