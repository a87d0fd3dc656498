"""Examples that nothing else runs."""

import json

import drafting_time


def test_drafting_time(tmp_path):
    arguments = "--shapes tiny --num-assistant-tokens 1 3 --batch-sizes 2 --repeats 2 --device cpu --dtype float32"
    drafting_time.main([*arguments.split(), "--output", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {(row["drafter"], row["k"]) for row in rows} == {
        (name, k) for name in ("EAGLE-3, 1 layer", "P-EAGLE, 1 layer", "P-EAGLE, 4 layers") for k in (1, 3)
    }
    assert all(row["eager_ms"] > 0 for row in rows)
