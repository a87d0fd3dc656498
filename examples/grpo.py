"""GRPO of TRL with a drafter for its rollouts: SmolLM2-135M-Instruct learns to answer in few words.

    pip install -e ".[rl]"
    python examples/grpo.py                       # with the EAGLE-3 drafter in model_cards/
    python examples/grpo.py --drafter none        # the engine without drafts
    python examples/grpo.py --learn               # the drafter learns from each step
    python examples/grpo.py --plain               # transformers alone, to compare with

The trainer is TRL's, unchanged: `DrafterCallback` attaches the drafter for the time of the training, and adds
`speculation/...` to its logs. `--continuous-batching` uses TRL's `use_transformers_continuous_batching`. At the end the
program prints the seconds of the steps; the first step includes checks and, on a GPU, captures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from smollm2 import load_smollm2
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_specdec import AutoDrafter, NoDrafter
from hf_specdec.trl import DrafterCallback

DRAFTER = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-instruct-eagle3"
SUBJECTS = ("the sea", "a violin", "bread", "the moon", "chess", "a river", "winter", "a bicycle")
QUESTIONS = ("Describe {} for a child.", "Why do people like {}?", "Tell me something surprising about {}.")


class StepTimes(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_step_end(self, *args, **kwargs) -> None:
        self.times.append(time.perf_counter())


def brevity(completions: list, **kwargs) -> list[float]:
    """The reward: the fewer words the better; 0 for no words."""
    words = [len(one[0]["content"].split()) for one in completions]
    return [1 / (1 + count / 20) if count else 0.0 for count in words]


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER), help='folder or Hub repository; "none" for no drafts')
    parser.add_argument("--plain", action="store_true", help="generate as transformers does")
    parser.add_argument("--continuous-batching", action="store_true")
    parser.add_argument("--learn", action="store_true", help="train the drafter, too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="of a step, on each process")
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-assistant-tokens", type=int, default=3, help="draft tokens a round")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    args = parser.parse_args(arguments)

    model, tokenizer = load_smollm2(device="cuda" if torch.cuda.is_available() else "cpu")
    callbacks: list[TrainerCallback] = [times := StepTimes()]
    if not args.plain:
        drafter = NoDrafter(model)
        if args.drafter != "none":
            options = {"target": model, "num_assistant_tokens": args.num_assistant_tokens}
            drafter = AutoDrafter.from_pretrained(args.drafter, **options)
        callbacks.append(DrafterCallback(drafter, learning=args.learn))
    questions = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=args.prompts * args.num_generations,
                num_generations=args.num_generations,
                max_completion_length=args.max_new_tokens,
                max_steps=args.steps,
                learning_rate=args.learning_rate,
                use_transformers_continuous_batching=args.continuous_batching,
                use_cpu=not torch.cuda.is_available(),
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            reward_funcs=brevity,
            callbacks=callbacks,
        )
        trainer.train()
    seconds = [after - before for before, after in zip(times.times, times.times[1:], strict=False)]
    print("seconds of the steps:", " ".join(f"{one:.1f}" for one in seconds))
    return trainer


if __name__ == "__main__":
    main()
