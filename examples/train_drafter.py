"""Train a drafter (EAGLE-3, P-EAGLE, PARD, PARD-2, DFlash, DSpark, MTP) for any chat model, on text that it generates.

    accelerate launch examples/train_drafter.py --target smollm2 --data runs/data --out runs/drafter --minutes 20

First the target answers the prompts of `--prompts`, and then prompts that it generates, into `--data`, unless that has
`--tokens` already. Then the drafter is trained for `--minutes`, or for `--steps`. The folder `--out` can be uploaded to
the Hub. On several GPUs every process generates a share of the data and trains on a share of each step's batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from tqdm import tqdm
from training.card import write_card
from training.channels import divide_channels, folded_weights
from training.data import Documents, draft_vocabulary, shard_counts, written_options
from training.drafters import DEFAULTS, choose_mask_token, new_drafter, start_from
from training.prompts import PromptFilter
from training.targets import load_target
from training.writing import WriteOptions, Writer, write_data
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import AutoDrafter
from hf_specdec.drafters.cached import CachedDrafter
from hf_specdec.prompt_sources import load_prompts
from hf_specdec.training.objective import LOSSES, BlockObjective, DraftObjective, Teacher, summarize

PROMPTS = Path(__file__).parent / "prompts"
WARMUP, FINAL_LR = 0.04, 0.02
# Batches by which the sizes of hidden states' channels are measured.
MEASURED_BATCHES = 8


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="smollm2", help="Hub id, folder or GGUF file of a chat model, or 'smollm2'")
    add("--target-name", default=None, help="what the model card calls the target, if not by --target's own name")
    add("--data", type=Path, default=Path("runs/data"), help="folder of the training data, written or read")
    add("--out", type=Path, default=Path("runs/drafter"), help="folder of the trained drafter")
    add("--repo-id", default=None, help="name on the Hub that the model card uses; by default the folder's")
    add("--seed", type=int, default=0)
    add("--mixed-precision", choices=("no", "bf16"), default="bf16" if torch.cuda.is_available() else "no")
    add_data_arguments(parser.add_argument_group("data"))
    add_drafter_arguments(parser.add_argument_group("drafter"))
    add_training_arguments(parser.add_argument_group("training"))
    args = parser.parse_args(arguments)
    if (args.minutes is None) == (args.steps is None) and not args.write_only:
        parser.error("give either --minutes or --steps")
    defaults = DEFAULTS[args.family]
    for name in sorted({name for options in DEFAULTS.values() for name in options} - defaults.keys()):
        if getattr(args, name) is not None:
            having = ", ".join(family for family, options in DEFAULTS.items() if name in options)
            parser.error(f"--{name.replace('_', '-')} is no option of {args.family}, only of {having}")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.family == "mtp" and not 1 <= args.layers <= args.num_steps:
        parser.error(
            f"--layers is {args.layers}, but module k is trained at step k; expected 1 to --num-steps, {args.num_steps}"
        )
    if args.weight_bits == 8 and args.family in ("pard", "pard2"):
        parser.error(
            f"--weight-bits is 8, but {args.family} is saved as a language model, which transformers loads; expected 16"
        )
    if not 0 <= args.long_share < 1:
        parser.error(f"--long-share is {args.long_share}; expected a share of the documents, 0 or more and below 1")
    if not 0 <= args.composed_share <= 1:
        parser.error(f"--composed-share is {args.composed_share}; expected a share of the prompts, 0 to 1")
    if args.long_share > 0 and args.max_document_tokens < 2 * args.max_answer_tokens:
        parser.error(
            f"--max-document-tokens is {args.max_document_tokens}; expected at least twice --max-answer-tokens, "
            f"{2 * args.max_answer_tokens}, or no long documents: --long-share 0"
        )
    args.repo_id = args.repo_id or args.out.name
    return args


def add_data_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tokens", type=float, default=30e6, help="tokens to write, over all processes")
    add("--write-minutes", type=float, default=None, help="stop writing after this time")
    add("--write-only", action="store_true", help="write data and stop")
    about = "jsonl files with `prompt`, or hub:name[:split[:column]], answered before the target writes its own prompts"
    add("--prompts", nargs="*", default=[], help=about)
    add("--held-out-prompts", type=Path, nargs="*", default=sorted(PROMPTS.glob("*.jsonl")))
    for name in ("prompts_per_round", "batch_size", "max_prompt_tokens", "max_answer_tokens", "max_document_tokens"):
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(WriteOptions, name))
    for name in ("prompt_temperature", "min_p", "composed_share", "long_share"):
        add(f"--{name.replace('_', '-')}", type=float, default=getattr(WriteOptions, name))
    add("--answer-temperatures", type=float, nargs="+", default=list(WriteOptions.answer_temperatures))


def add_drafter_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--family", choices=tuple(DEFAULTS), default="eagle3")
    about = "of pard and pard2, copies of the target's; of mtp, modules"
    add("--layers", type=int, default=None, help=f"{about}; {by_family('layers')}")
    add("--draft-vocab-size", type=int, default=None, help=f"{by_family('draft_vocab_size')}; 0 is the target's")
    add("--intermediate-size", type=int, default=None, help="by default the target's; not of pard and pard2")
    about = "heads of keys and values of its attention"
    add("--key-value-heads", type=int, default=None, help=f"{about}; by default the target's; not of pard, pard2, mtp")
    about = "layers of the target whose hidden states are read; by default as many as --layers"
    add("--aux-layers", type=int, default=None, help=f"{about}; of dflash and dspark")
    about = "trained drafter to initialize from; may have fewer layers, wider or smaller MLPs"
    add("--init-from", default=None, help=f"{about}; not of pard, pard2 and mtp")
    about = "of all but eagle3 and mtp; by default one not in the data"
    add("--mask-token-id", type=int, default=None, help=about)
    add("--markov-rank", type=int, default=None, help=f"width of the Markov head; {by_family('markov_rank')}")
    switch = argparse.BooleanOptionalAction
    about = "normalize every auxiliary hidden state: those of some targets have huge outliers"
    add("--fc-norm", action=switch, default=None, help=f"{about}; {by_family('fc_norm')}")
    about = "feed the output after the final norm to the next draft step"
    add("--norm-output", action=switch, default=None, help=f"{about}; {by_family('norm_output')}")


def add_training_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--minutes", type=float, default=None, help="train for this time; the schedule follows the clock")
    add("--steps", type=int, default=None, help="train for this many optimizer steps")
    about = "end this part of the training after so long, with a checkpoint that --resume continues from"
    add("--part-minutes", type=float, default=None, help=f"{about}; the schedule is still that of --minutes or --steps")
    about = "depth of training-time test; of dflash and dspark, drafts of a block"
    add("--num-steps", type=int, default=None, help=f"{about}; {by_family('num_steps')}")
    add("--anchors", type=int, default=None, help=f"most blocks of a document; {by_family('anchors')}")
    about = "share of the blocks that are moved to where the round after them begins"
    add("--replay-share", type=float, default=None, help=f"{about}; {by_family('replay_share')}")
    about = "share of the batches whose blocks have fewer drafts, a random number of them"
    add("--short-share", type=float, default=None, help=f"{about}; {by_family('short_share')}")
    about = "dspark: 0.1 cross-entropy + 0.9 distance of the distributions"
    add("--loss", choices=tuple(LOSSES), default="cross-entropy", help=about)
    about = "loss weight of step s is this to the power of s"
    add("--step-decay", type=float, default=None, help=f"{about}; {by_family('step_decay')}")
    about = "step s unrolls this to the power of s of the documents"
    add("--depth-ratio", type=float, default=None, help=f"{about}; {by_family('depth_ratio')}")
    about = "loss weight of places after the end of a greedy chain of right drafts"
    add("--survival-floor", type=float, default=None, help=f"{about}; {by_family('survival_floor')}")
    about = "loss weight of chains that greedy decoding with the present drafts would not begin"
    add("--round-floor", type=float, default=None, help=f"{about}; {by_family('round_floor')}")
    add("--greedy-share", type=float, default=0.0, help="of the labels: so much of the most likely token alone")
    about = "padded tokens a step and process; a token of a prompt counts a quarter"
    add("--tokens-per-batch", type=int, default=32768, help=about)
    add("--max-length", type=int, default=4096, help="documents are cut to this length")
    about = "muon: Muon for the matrices of layers, with updates of AdamW's size, and AdamW for all else"
    add("--optimizer", choices=("adamw", "muon"), default=None, help=f"{about}; {by_family('optimizer')}")
    add("--lr", type=float, default=None, help=by_family("lr"))
    add("--weight-decay", type=float, default=0.01)
    add("--held-out", type=int, default=512, help="documents kept for measuring")
    add("--save-every", type=int, default=500, help="steps between checkpoints and measurements")
    add("--train-only", default="", help="freeze what has no name that begins so: confidence_head, layers.0")
    about = "resume from the checkpoint in --out, if there is one"
    add("--resume", action="store_true", help=about)
    add("--estimate", action="store_true", help="say what training takes, time, memory and disk, and stop")
    add("--max-shard-size", default="50GB", help="of the drafter's files, such as 15MB; no tensor is split")
    about = "of the drafter's matrices in its files; 8: integers with a scale for each row"
    add("--weight-bits", type=int, choices=(8, 16), default=16, help=about)
    add("--compile", action="store_true", help="compile layers and the loss")


def by_family(name: str) -> str:
    """The defaults of an argument, for its help."""
    having = {family: defaults[name] for family, defaults in DEFAULTS.items() if name in defaults}
    return "by default " + ", ".join(f"{default} ({family})" for family, default in having.items())


def write_own_data(
    args: argparse.Namespace, accelerator: Accelerator, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    given = {field.name: getattr(args, field.name, field.default) for field in fields(WriteOptions)}
    options = WriteOptions(
        **given | {"answer_temperatures": tuple(args.answer_temperatures), "prompts": tuple(args.prompts)}
    )
    held_out = PromptFilter(text for path in args.held_out_prompts for text in load_prompts(path))
    writer = Writer(target, tokenizer, options, held_out)
    prompts = [text for source in args.prompts for text in load_prompts(source)]
    random.Random(args.seed).shuffle(prompts)
    prompts = prompts[accelerator.process_index :: accelerator.num_processes]
    share = math.ceil(args.tokens / accelerator.num_processes)
    seconds = math.inf if args.write_minutes is None else 60 * args.write_minutes
    write_data(args.data, writer, share, seconds, accelerator.process_index, tqdm.write, prompts)
    writer.drafter.release()


class Progress:
    """Progress of training, saved in checkpoints."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.curve: list[dict] = []

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


class Trainer:
    """The training loop: batches, learning rate schedule, evaluation, checkpoints; the target is frozen, the drafter
    bound to it. `about` has the entries of `training.json` besides the arguments and the curve."""

    def __init__(
        self,
        args: argparse.Namespace,
        accelerator: Accelerator,
        target: PreTrainedModel,
        drafter: CachedDrafter,
        documents: Documents,
        about: dict,
    ):
        self.args, self.accelerator, self.documents, self.about = args, accelerator, documents, about
        self.drafter = drafter
        self.teacher = Teacher(target, drafter, args.greedy_share)
        self.train_indices, self.held_out_indices = documents.split(min(args.held_out, len(documents) // 2), args.seed)
        divide_channels(drafter, self._states_at_answers(), is_trained=args.init_from is not None)
        common = (drafter, args.num_steps, args.step_decay, args.survival_floor, args.loss)
        if "anchors" in DEFAULTS[args.family]:
            shares = {"replay_share": args.replay_share, "short_share": args.short_share}
            objective = BlockObjective(*common, num_anchors=args.anchors, **shares)
        else:
            objective = DraftObjective(*common, depth_ratio=args.depth_ratio, round_floor=args.round_floor)
        if args.compile:
            objective.row_losses = torch.compile(objective.row_losses, dynamic=True)
            compile_layers(drafter)
            compile_layers(target)
        self.objective, *self.optimizers = accelerator.prepare(objective, *new_optimizers(args, drafter))
        self.progress = Progress()
        accelerator.register_for_checkpointing(self.progress)
        self.checkpoint = args.out / "checkpoint"
        # A run that was killed between two renames has its checkpoint under the other name.
        found = next((path for path in (self.checkpoint, self._before) if path.exists()), None)
        if args.resume and found is not None:
            accelerator.load_state(str(found))

    def _states_at_answers(self) -> Iterator[torch.Tensor]:
        """The auxiliary hidden states of the first batches, `[n, width]` each, the same on all processes."""
        order = self.documents.epoch(self.train_indices, self.args.tokens_per_batch, self.args.seed)
        for indices in order[:MEASURED_BATCHES]:
            outputs = self.teacher.read(self.documents.batch(indices).to(self.accelerator.device))
            yield outputs.aux_hidden_states.flatten(0, 1)[outputs.places]

    @property
    def _before(self) -> Path:
        return self.checkpoint.with_name("checkpoint.before")

    def estimate(self) -> dict[str, float]:
        """Costs of a step and of the whole training, by the third of three batches without an update.

        `seconds` of a step and `target_share` of it in the target, `tokens_per_second` over all processes, `steps` and
        `minutes` in all, `epochs` of the data, `memory_gb` of a GPU, the most `disk_gb` of `--out`, and
        `states_gb` that the hidden states of the data would take if they were stored.
        """
        device, processes = self.accelerator.device, self.accelerator.num_processes
        order = self.documents.epoch(self.train_indices, self.args.tokens_per_batch, self.args.seed)
        batch = self.documents.batch(order[self.accelerator.process_index % len(order)]).to(device)
        self.objective.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(3):  # the first two are compiled, for one shape and for others, and find memory
                times = [self._now()]
                outputs = self.teacher.read(batch)
                times.append(self._now())
                self.accelerator.backward(self.objective(outputs)[0])
                self.objective.zero_grad(set_to_none=True)
                times.append(self._now())
        seconds, parameters = times[2] - times[0], sum(one.numel() for one in self.drafter.parameters())
        steps = self.args.steps or 60 * self.args.minutes / seconds
        width = 0 if outputs.aux_hidden_states is None else outputs.aux_hidden_states.shape[2]
        found = {
            "seconds": seconds,
            "target_share": (times[1] - times[0]) / seconds,
            "tokens_per_second": batch.input_ids.numel() * processes / seconds,
            "steps": steps,
            "minutes": steps * seconds / 60,
            "epochs": steps * processes / len(order),
            "disk_gb": parameters * (2 * 12 + 2) / 1e9,  # two checkpoints in float32 at once, the drafter in bfloat16
            "states_gb": 2 * width * len(self.documents.tokens) / 1e9,
        }
        if device.type == "cuda":
            found["memory_gb"] = (torch.cuda.max_memory_allocated(device) + 8 * parameters) / 1e9
        found = {name: float(f"{value:.3g}") for name, value in found.items()}
        self.accelerator.print(f"estimate: {json.dumps(found)}")
        return found

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def train(self) -> None:
        bar = tqdm(desc="train", unit="step", initial=self.progress.step, disable=not self.accelerator.is_main_process)
        batches, counts = self.batches(), None
        before = self.progress.seconds
        start = time.monotonic()
        while (share := self.share_done()) < 1 and not self.part_is_done(before):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.args.lr * schedule(share)
            self.objective.train()
            batch = next(batches)
            loss, counted = self.objective(self.teacher.read(batch))
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.objective.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self.objective.zero_grad(set_to_none=True)

            counts = counted if counts is None else counts + counted
            self.progress.step += 1
            self.progress.tokens += batch.input_ids.numel() * self.accelerator.num_processes
            self.progress.seconds = before + time.monotonic() - start
            bar.update()
            if self.progress.step % 20 == 0:
                rate = self.progress.tokens / self.progress.seconds
                bar.set_postfix(loss=f"{loss.item():.3f}", tokens_per_second=f"{rate:.0f}")
            if self.progress.step % self.args.save_every == 0:
                self.measure(counts)
                self.save()
                counts = None
        if counts is not None:
            self.measure(counts)
        self.save()

    def share_done(self) -> float:
        """Share of the budget, steps or time, that is spent; the same on all processes."""
        if self.args.steps is not None:
            return self.progress.step / self.args.steps
        return self._agreed(self.progress.seconds / (60 * self.args.minutes))

    def part_is_done(self, before: float) -> bool:
        """Whether this part of the training, begun after `before` seconds, is to end; the same on all processes."""
        minutes = self.args.part_minutes
        return minutes is not None and self._agreed((self.progress.seconds - before) / (60 * minutes)) >= 1

    def _agreed(self, share: float) -> float:
        """`share` of the first process."""
        if self.accelerator.num_processes == 1:
            return share
        return broadcast(torch.tensor(share, device=self.accelerator.device)).item()

    def batches(self):
        """Endless batches for this process, from the step of `progress` on."""
        processes, step = self.accelerator.num_processes, 0
        for epoch in range(1_000_000):
            order = self.documents.epoch(self.train_indices, self.args.tokens_per_batch, self.args.seed + epoch)
            order = order + order[: -len(order) % processes]
            for group in range(0, len(order), processes):
                if step >= self.progress.step:
                    indices = order[group + self.accelerator.process_index]
                    yield self.documents.batch(indices).to(self.accelerator.device)
                step += 1

    @torch.no_grad()
    def measure(self, train_counts: torch.Tensor) -> None:
        """Add a point to the curve: the metrics in training since the last point, and those on held-out documents."""
        self.objective.eval()
        order = self.documents.epoch(self.held_out_indices, self.args.tokens_per_batch, self.args.seed)
        held_out_counts = torch.zeros_like(train_counts)
        for indices in order[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = self.documents.batch(indices).to(self.accelerator.device)
            held_out_counts += self.accelerator.unwrap_model(self.objective)(self.teacher.read(batch))[1]
        train, held_out = (
            summarize(self.accelerator.reduce(counts, "sum")) for counts in (train_counts, held_out_counts)
        )
        point = {"step": self.progress.step, "tokens": self.progress.tokens, "seconds": round(self.progress.seconds, 1)}
        self.progress.curve.append({**point, "train": train, "held_out": held_out})
        if self.accelerator.is_main_process:
            tqdm.write(f"step {self.progress.step}: train loss {train['loss']}, held out {json.dumps(held_out)}")

    def save(self) -> None:
        """Write a checkpoint to resume from, the drafter, `training.json` and the model card.

        The new checkpoint has another name until it is whole, so that a run may be killed at any time.
        """
        partial = self.checkpoint.with_name("checkpoint.partial")
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if self.checkpoint.exists():
                shutil.rmtree(self._before, ignore_errors=True)
                self.checkpoint.rename(self._before)
            partial.rename(self.checkpoint)
            shutil.rmtree(self._before, ignore_errors=True)
            save_drafter(self.drafter, self.args.out, self.args.max_shard_size, self.args.weight_bits)
            places = ("target", "data", "out")
            arguments = {key: value for key, value in vars(self.args).items() if key not in places}
            arguments["held_out_prompts"] = [path.name for path in self.args.held_out_prompts]
            report = {**self.about, "arguments": arguments, "curve": self.progress.curve}
            (self.args.out / "training.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
            write_card(self.args.out)


def keep_trainable(drafter: CachedDrafter, prefix: str) -> None:
    """Freeze the parameters whose names do not begin with `prefix`; raises `ValueError` if none does."""
    parameters = dict(drafter.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name.startswith(prefix))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        parts = ", ".join(dict.fromkeys(name.split(".")[0] for name in parameters))
        raise ValueError(
            f"--train-only is {prefix}, but no parameter of a {type(drafter).__name__} has a name that begins so; "
            f"expected the beginning of a name, the first part of which is one of {parts}."
        )


def new_optimizers(args: argparse.Namespace, drafter: CachedDrafter) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters of `drafter`, or as `--optimizer muon` says."""
    # Embeddings and heads, also those of Markov heads, have one row for each token.
    tokens = {drafter.config.vocab_size, drafter.config.draft_vocab_size}
    matrices, others, settings = [], [], {"lr": args.lr, "weight_decay": args.weight_decay}
    for one in drafter.parameters():
        if not one.requires_grad:
            continue
        is_matrix = one.ndim == 2 and tokens.isdisjoint(one.shape) and min(one.shape) > 1
        (matrices if args.optimizer == "muon" and is_matrix else others).append(one)
    adamw = {"betas": (0.9, 0.95), "fused": drafter.device.type == "cuda"} | settings
    optimizers = [torch.optim.AdamW(others, **adamw)] if others else []
    return optimizers + ([torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings)] if matrices else [])


def schedule(share: float) -> float:
    """Learning rate, relative to its peak, when `share` of the budget is spent: linear warm-up, then cosine decay."""
    if share < WARMUP:
        return (share + 1e-3) / (WARMUP + 1e-3)
    return FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP))) / 2


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the decoder layers and norms of `model` in place, to avoid the launch overhead of small operations."""
    # One function is compiled for the layers of both models, for all dtypes and layouts, with and without gradients.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "DecoderLayer")):
            module.forward = torch.compile(module.forward, dynamic=True)


def save_drafter(drafter: CachedDrafter, folder: Path, max_shard_size: str, weight_bits: int = 16) -> None:
    """Save as `save_pretrained` does, in bfloat16 or `in_8_bits`, without a change of the training's random numbers."""
    with torch.random.fork_rng(devices=[]):
        saved = type(drafter)(copy.deepcopy(drafter.config))
    weights = folded_weights(drafter)
    saved.load_state_dict(weights)
    stored = in_8_bits(weights) if weight_bits == 8 else None
    saved.to(torch.bfloat16).save_pretrained(folder, state_dict=stored, max_shard_size=max_shard_size)


def in_8_bits(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` with matrices as int8, each with a float32 scale `[rows, 1]` named `<name>_scale`, as in
    compressed-tensors, and other floating-point tensors as bfloat16."""
    found = {}
    for name, weight in weights.items():
        weight = weight.detach().cpu()
        if weight.ndim == 2:
            scale = (weight.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
            found |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            found[name] = weight.bfloat16() if weight.is_floating_point() else weight
    return found


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(args.seed)
    dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
    target, tokenizer = load_target(args.target, dtype, accelerator.device)

    write_own_data(args, accelerator, target, tokenizer)
    accelerator.wait_for_everyone()
    if args.write_only:
        return
    documents = Documents.load(args.data, args.max_length)
    written = written_options(args.data)
    vars(args).update({name: value for name, value in written.items() if name != "seed" and hasattr(args, name)})
    vocab_size = target.config.get_text_config().vocab_size
    stop_ids = [tokenizer.eos_token_id]
    draft_size = min(args.draft_vocab_size or vocab_size, vocab_size)
    counts = documents.answer_counts(vocab_size)
    d2t, coverage = draft_vocabulary(counts, draft_size, stop_ids)
    trained = None
    if args.init_from is not None:
        trained = AutoDrafter.from_pretrained(args.init_from, target=target, dtype=torch.float32)
        if hasattr(trained, "markov_head") and trained.d2t is not None:  # which has weights for each draft token
            d2t = trained.d2t.cpu()
            coverage = float(counts[d2t + torch.arange(len(d2t))].sum() / counts.sum().clamp(min=1))
    mask_token_id = None
    if "mask_token_id" in DEFAULTS[args.family]:
        mask_token_id = args.mask_token_id
        if mask_token_id is None:
            mask_token_id = choose_mask_token(documents.counts(vocab_size), tokenizer)
    drafter = new_drafter(args, target, d2t, mask_token_id)
    if trained is not None:
        start_from(drafter, trained)
    keep_trainable(drafter, args.train_only)
    about = {
        "family": args.family,
        "target": drafter.config.target_name_or_path,
        "mask_token_id": mask_token_id,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "draft_vocab_size": len(d2t),
        "coverage": coverage,
        "data": {"documents": len(documents), "tokens": len(documents.tokens), **shard_counts(args.data)},
    }
    accelerator.print(json.dumps(about))
    trainer = Trainer(args, accelerator, target, drafter, documents, about)
    trainer.estimate()
    if not args.estimate:
        trainer.train()
    accelerator.end_training()


if __name__ == "__main__":
    main()
