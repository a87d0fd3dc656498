"""`examples/batch_invariance.py` on a tiny target. References for a CPU promise texts in float32, and no bits."""

import json

import batch_invariance
import pytest
from targets import set_policy

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    set_policy(monkeypatch, "cpu", batch_invariant=True)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    family = batch_invariance.FAMILIES["gemma3"] | TINY | {"sliding_window": 6}
    monkeypatch.setitem(batch_invariance.FAMILIES, "gemma3", family)


def test_compares_texts_and_logits(tmp_path):
    options = "--families gemma3 --drafters none draft-model -k 2 --batch-sizes 1 3 --prompts 3 --prompt-length 9"
    file = tmp_path / "outcome.json"
    arguments = [*options.split(), "--new-tokens", "6", "--device", "cpu", "--dtype", "float32", "--output", str(file)]
    status = batch_invariance.main(batch_invariance.parse_arguments(arguments))
    outcome = json.loads(file.read_text())["gemma3"]
    texts = {name: count for name, count in outcome["different"].items() if "logits" not in name}
    assert texts == dict.fromkeys(
        [
            "none, K = 0, batch 1",
            "none, K = 0, batch 3",
            "draft-model, K = 2, batch 1",
            "draft-model, K = 2, batch 3",
            "draft-model, continuous, 3 rows",
        ],
        0,
    )
    assert status == int(any(outcome["different"].values()))
    assert outcome["tokens a round"]["draft-model, K = 2"] > 1
    batch_invariance.main(batch_invariance.parse_arguments([*arguments[:-2], "--texts", str(tmp_path / "texts.json")]))
    assert len(json.loads((tmp_path / "texts.json").read_text())) == 3
