"""The command that runs TRL's own tests counts what had drafts."""

import pytest
import trl_tests as command
from peer_tests import Outcome


def test_calls_are_counted():
    outcomes = {
        "a": Outcome("passed", notes=["drafted: 3 calls", "drafted: 2 calls"]),
        "b": Outcome("passed", notes=["plainly: beams"]),
        "c": Outcome("failed", notes=["drafted: 1 calls", "plainly: beams"]),
    }
    text = command.rollouts(outcomes)
    assert text.startswith("Of these that passed, 1 had rollouts") and "| beams | 1 |" in text


def test_checkout_without_the_tests(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--source", str(tmp_path)])
    assert "has no tests/test_grpo_trainer.py" in capsys.readouterr().err
