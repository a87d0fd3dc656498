"""`examples/quantised_rounds.py` measures formats, and experts in MXFP4."""

import pytest
import quantised_rounds
from oracle import random_eagle3
from targets import tiny_target


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
