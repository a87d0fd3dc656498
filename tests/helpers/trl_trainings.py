"""Trainings of tiny models by TRL, and their texts.

    torchrun --nproc-per-node 2 tests/helpers/trl_trainings.py FOLDER

trains by GRPO, without and with a drafter attached, all weights and a LoRA adapter, and writes texts and final weights
to `<rank>.pt` in the folder.
"""

import itertools
import sys
from pathlib import Path

import datasets
import torch
import trl
from oracle import random_eagle3
from peft import LoraConfig
from targets import new_target
from transformers import TrainerCallback
from word_tokenizer import word_tokenizer

from hf_specdec.trl import DrafterCallback

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
        learning: of its callback.
        settings: of its configuration.

    Attributes:
        texts: answers of each step, and the weights at the end.
        note: called after each step with the trainer's callback.
    """

    def __init__(self, name, make=None, peft_config=None, note=None, family="llama", learning=False, **settings):
        self.model, words = new_target(family, num_layers=2), tokenizer()
        self.model.generation_config.eos_token_id = self.model.config.eos_token_id = 2
        self.texts, self.callback = [], None
        callbacks = []
        if make is not None:
            self.callback = DrafterCallback(make(self.model), learning)
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

    def distillation(self, words, settings, callbacks, peft_config):
        trainer = trl.DistillationTrainer(
            self.model,
            teacher_model=new_target("llama", seed=1, num_layers=2),
            args=trl.DistillationConfig(max_completion_length=NEW, generation_kwargs={"do_sample": False}, **settings),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts_of(words)}),
            processing_class=words,
            callbacks=callbacks,
        )
        generate = trainer._generate_single_turn

        def noted(*arguments, **options):
            found = generate(*arguments, **options)
            self.texts.append([list(one) for one in found])
            return found

        trainer._generate_single_turn = noted
        return trainer

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


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 128},
}


def main(folder):
    lora = {"beta": 0.1, "peft_config": LoraConfig(**LORA)}
    found = []
    # transformers' own continuous batching draws random numbers for greedy texts, too, so TRL shuffles rows otherwise.
    for plainly, with_drafter in (({}, {}), (lora, lora | CONTINUOUS)):
        trainings = [
            Training("grpo", make, output_dir=folder / "run", bf16=False, ddp_backend="gloo", **settings)
            for make, settings in ((None, plainly), (eagle3, with_drafter))
        ]
        args, attachment = trainings[1].trainer.args, trainings[1].callback.attachment
        assert args.world_size == 2
        counts = attachment.stats.calls, sum(attachment.refusals.values())
        found.append(([(one.texts, one.weights) for one in trainings], *counts))
    torch.save(found, folder / f"{args.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
