"""`examples/grpo.py` on a tiny model, with a drafter that learns and one that does not."""

import pytest
from targets import new_target

grpo = pytest.importorskip("grpo", exc_type=ImportError)
trl_trainings = pytest.importorskip("trl_trainings", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about arguments of TRL
@pytest.mark.parametrize("flags", [["--drafter", "none", "--continuous-batching"], [], ["--learn"]])
def test_logs(monkeypatch, tmp_path, flags):
    target, words = new_target("llama", num_layers=2), trl_trainings.tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    trl_trainings.eagle3(target).save_pretrained(tmp_path)
    monkeypatch.setattr(grpo, "load_smollm2", lambda device: (target, words))
    sizes = ["--steps", "2", "--prompts", "2", "--num-generations", "2", "--max-new-tokens", "8"]
    trainer = grpo.main(["--drafter", str(tmp_path), *sizes, *flags])
    logs = [one for one in trainer.state.log_history if "loss" in one]
    assert len(logs) == 2
    for one in logs:
        assert one["speculation/acceptance_length"] >= 1 and one["speculation/refusals"] == 0
        assert (one.get("speculation/draft_loss", 0) > 0) == ("--learn" in flags)
