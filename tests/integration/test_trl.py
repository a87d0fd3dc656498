"""TRL's trainers with a drafter attached to their model: the texts and weights of training without one."""

import itertools

import pytest
import torch
from graph_stand_ins import replay_on_cpu
from oracle import random_eagle3
from targets import new_target
from transformers import TrainerCallback
from word_tokenizer import word_tokenizer

from hf_specdec import NoDrafter
from hf_specdec.hosting import equivalence
from hf_specdec.trl import DrafterCallback

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about arguments of TRL

STEPS, ROWS, NEW = 4, 4, 10


def tokenizer():
    found = word_tokenizer()
    found.pad_token, found.bos_token, found.eos_token = found.convert_ids_to_tokens([0, 1, 2])
    return found


def prompts_of(words, lengths=(5, 9, 7, 12)):
    generator = torch.Generator().manual_seed(3)
    lengths = itertools.islice(itertools.cycle(lengths), STEPS * 20)
    # The first 16 words are letters, into which the tokenizer cuts a text.
    return [words.decode(torch.randint(3, 16, (length,), generator=generator)) for length in lengths]


class Training:
    """A training of some steps on a new model.

    Args:
        name: of the trainer.
        make: makes the drafter from the model; None to train without one.
        settings: of its configuration.

    Attributes:
        texts: answers of each step, and the weights at the end.
        note: called after each step with the trainer's callback.
    """

    def __init__(self, name, make=None, peft_config=None, note=None, family="llama", **settings):
        self.model, words = new_target(family, num_layers=2), tokenizer()
        self.model.generation_config.eos_token_id = self.model.config.eos_token_id = 2
        self.texts, self.callback = [], None
        callbacks = []
        if make is not None:
            self.callback = DrafterCallback(make(self.model))
            callbacks.append(self.callback)
        if note is not None:
            callbacks.append(_Note(lambda: note(self)))
        common = {
            "output_dir": settings.pop("output_dir"),
            "per_device_train_batch_size": ROWS,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "report_to": [],
            "logging_steps": 1,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 5,
        }
        self.trainer = getattr(self, name)(words, {**common, **settings}, callbacks, peft_config)
        self.trainer.train()
        self.weights = {name: one.detach().clone() for name, one in self.model.state_dict().items()}

    def reward(self, prompts, completions, completion_ids=None, **_):
        ids = completion_ids or [self.trainer.processing_class(text)["input_ids"] for text in completions]
        self.texts.append([list(one) for one in ids])
        return [(7 * number + sum(one)) % 11 / 11 for number, one in enumerate(ids)]

    def rollouts(self, kind, words, settings, callbacks, peft_config):
        config = {
            "num_generations": 2,
            "max_completion_length": NEW,
            "generation_kwargs": {"do_sample": False},
            **settings,
        }
        lengths = config.pop("lengths", (5, 9, 7, 12))
        return getattr(trl, f"{kind}Trainer")(
            self.model,
            args=getattr(trl, f"{kind}Config")(**config),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts_of(words, lengths)}),
            processing_class=words,
            reward_funcs=self.reward,
            callbacks=callbacks,
            peft_config=peft_config,
        )

    def grpo(self, *arguments):
        return self.rollouts("GRPO", *arguments)

    def rloo(self, *arguments):
        return self.rollouts("RLOO", *arguments)

    def online_dpo(self, words, settings, callbacks, peft_config):
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        config = {"max_new_tokens": NEW, "max_length": 64, "generation_kwargs": {"do_sample": False}, **settings}
        return OnlineDPOTrainer(
            self.model,
            args=OnlineDPOConfig(**config),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts_of(words)}),
            processing_class=words,
            reward_funcs=self.reward,
            callbacks=callbacks,
        )

    def gkd(self, words, settings, callbacks, peft_config):
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        roles = ("user", "assistant")
        messages = [[{"role": role, "content": prompt} for role in roles] for prompt in prompts_of(words)]
        trainer = GKDTrainer(
            self.model,
            teacher_model=new_target("llama", seed=1, num_layers=2),
            args=GKDConfig(max_new_tokens=NEW, max_length=128, lmbda=1.0, **settings),
            train_dataset=datasets.Dataset.from_dict({"messages": messages}),
            processing_class=words,
            callbacks=callbacks,
        )
        trainer.generation_config.do_sample, generate = False, trainer.generate_on_policy_outputs

        def noted(*arguments):
            found = generate(*arguments)
            self.texts.append(found[0].tolist())
            return found

        trainer.generate_on_policy_outputs = noted
        return trainer


class _Note(TrainerCallback):
    def __init__(self, note):
        self._note = note

    def on_step_end(self, *_, **__):
        self._note()


def eagle3(model):
    return random_eagle3(model, aux_hidden_state_layer_ids=[0, 1, 2])


CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 128},
}


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


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
    ],
)
def test_rollouts_are_those_without_a_drafter(name, make, adapts, settings, tmp_path):
    settings = {"output_dir": str(tmp_path), "bf16": False, **settings}
    if adapts:
        settings["peft_config"] = pytest.importorskip("peft").LoraConfig(**LORA)
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
