"""TRL's trainers with a drafter attached to their model: the texts and weights of training without one."""

from pathlib import Path

import pytest
import torch
from graph_stand_ins import replay_on_cpu
from processes import ACCELERATE, finish, launch

from hf_specdec import NoDrafter
from hf_specdec.hosting import equivalence

trl_trainings = pytest.importorskip("trl_trainings", exc_type=ImportError)
CONTINUOUS, LORA, STEPS = trl_trainings.CONTINUOUS, trl_trainings.LORA, trl_trainings.STEPS
Training, eagle3 = trl_trainings.Training, trl_trainings.eagle3

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about arguments of TRL


@pytest.mark.parametrize(
    ("name", "make", "adapts", "settings"),
    [
        ("grpo", eagle3, False, {}),
        ("grpo", NoDrafter, False, CONTINUOUS),
        ("grpo", eagle3, True, {"beta": 0.1}),
        ("grpo", eagle3, True, {"beta": 0.1, **CONTINUOUS}),
        ("rloo", eagle3, False, {"beta": 0.0, **CONTINUOUS}),
        ("rloo", NoDrafter, False, {"beta": 0.0}),
        ("online_dpo", eagle3, False, {}),
        ("gkd", eagle3, False, {}),
        ("distillation", eagle3, False, {}),
    ],
)
def test_rollouts_are_those_without_a_drafter(name, make, adapts, settings, tmp_path):
    settings = {"output_dir": str(tmp_path), "bf16": False, **settings}
    if adapts:
        settings["peft_config"] = trl_trainings.LoraConfig(**LORA)
    # transformers' own continuous batching draws random numbers for greedy texts, too, so TRL shuffles rows otherwise.
    plain = Training(name, **{key: value for key, value in settings.items() if key not in CONTINUOUS})
    attached = Training(name, make, **settings)
    assert len(plain.texts) == STEPS and attached.texts == plain.texts
    assert all(torch.equal(attached.weights[key], one) for key, one in plain.weights.items())
    stats = attached.callback.attachment.stats
    assert stats.calls == STEPS and stats.committed and not attached.callback.attachment.refusals
    logs = [one for one in attached.trainer.state.log_history if "loss" in one]
    assert all(one["speculation/acceptance_length"] >= 1 and one["speculation/refusals"] == 0 for one in logs)


def test_defaults_of_trl_keep_graphs(monkeypatch, tmp_path):
    """Gradient checkpointing, bfloat16 and fused AdamW: nothing is captured or checked after the first steps."""
    replay, checks, seen = replay_on_cpu(monkeypatch), [], []
    difference = equivalence._difference
    monkeypatch.setattr(equivalence, "_difference", lambda *args: (checks.append(1), difference(*args))[1])

    def note(training):
        seen.append((replay.count, len(checks), training.model.training))

    training = Training("grpo", eagle3, note=note, output_dir=str(tmp_path), max_steps=8, lengths=(9,))
    args, attachment = training.trainer.args, training.callback.attachment
    assert args.bf16 and args.gradient_checkpointing and args.optim == "adamw_torch_fused"
    assert len(training.model.get_input_embeddings()._forward_hooks) > 8
    assert seen[0][0] > 0 and seen[3:] == [(*seen[2][:2], True)] * 5
    assert not attachment.refusals and attachment.drafter.stats.execution.startswith("captured")
    assert attachment.stats.captures == replay.count
    assert len(attachment.drafter.sessions) == 0, "detached"


def test_a_drafter_that_learns_changes_no_training(tmp_path):
    """Texts and weights are those without a drafter; acceptance and loss are logged."""
    settings = {"output_dir": tmp_path, "bf16": False}
    plain = Training("grpo", **settings)
    learning = Training("grpo", eagle3, learning={"learning_rate": 1e-3}, **settings)
    assert learning.texts == plain.texts
    assert all(torch.equal(learning.weights[key], one) for key, one in plain.weights.items())
    assert learning.callback.learner.skipped == 0
    losses = [one["speculation/draft_loss"] for one in learning.trainer.state.log_history if "loss" in one]
    assert len(losses) == STEPS and min(losses) > 0
    student = learning.callback.learner._student
    published = learning.callback.attachment.drafter.state_dict()
    assert all(torch.equal(published[name], one) for name, one in student.named_parameters())
    assert not torch.equal(published["fc.weight"], eagle3(plain.model).fc.weight)


def test_two_processes(tmp_path):
    """As those of one: texts of each process and weights are those of training without a drafter, of all weights by
    `generate()` and of adapters by `generate_batch()`. With `--slow` they are started by `accelerate launch`."""
    finish(launch(Path(trl_trainings.__file__), tmp_path, slow_launcher=ACCELERATE))
    for ranks in zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True):
        for ((plain, weights), (texts, attached)), calls, num_refused in ranks:
            assert len(plain) == STEPS and texts == plain and (calls, num_refused) == (STEPS, 0)
            assert all(torch.equal(attached[key], one) for key, one in weights.items())
        first, second = (trainings[1] for trainings, *_ in ranks)
        assert all(torch.equal(second[1][key], one) for key, one in first[1].items())
        assert first[0] != second[0], "each has prompts of its own"
