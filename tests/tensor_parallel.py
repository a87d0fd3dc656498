"""What every process of `test_tensor_parallel.py` runs: a target split with a `tp_plan`, and drafters on it.

    torchrun --nproc-per-node 2 tests/tensor_parallel.py <folder of the targets> <folder for the answers> cpu|cuda

Writes `<rank>.json`: what was said, by the name of the case. On GPUs that is what is said in captured rounds.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import RANDOM_DRAFTERS, OracleDrafter
from replay import replay_on_cpu
from targets import padded_prompts
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel, set_seed
from transformers.distributed import DistributedConfig

from hf_specdec import Drafter, cli
from hf_specdec.bench import traffic
from hf_specdec.bench.traffic import round_bytes
from hf_specdec.sessions import fingerprint

PROMPT_LENGTHS = [2, 13, 7]
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 40}
NEW_TOKENS = 12
OTHER_FAMILIES = ("gemma3", "gpt-oss", "qwen3-moe")


def borrower(target: PreTrainedModel) -> Drafter:
    """A drafter that has neither an embedding nor a head."""
    return RANDOM_DRAFTERS["eagle3"](target, own_embedding=False, own_head=False)


def uncompiled(target: PreTrainedModel, name: str) -> Drafter:
    """A drafter of `DRAFTERS`; compiling takes far longer than what it is to say."""
    return DRAFTERS[name](target).configure(compile_rounds=False)


DRAFTERS = {"borrower": borrower, "p-eagle": RANDOM_DRAFTERS["p-eagle"], "draft-model": RANDOM_DRAFTERS["draft-model"]}


def say(target: PreTrainedModel, drafter: Drafter | None, seed: int = 3, lengths=PROMPT_LENGTHS, **options) -> list:
    """Tokens that are generated, how many drafts each row had accepted by position, and how rounds were run."""
    set_seed(seed)
    if drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": 3}
    prompts = {name: tensor.to(target.device) for name, tensor in padded_prompts(lengths).items()}
    out = target.generate(**prompts, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **options})
    if drafter is None:
        return [out.tolist(), None, None]
    stats = drafter.stats
    drafter.release()  # A process group cannot end before the graphs that hold its collectives.
    return [out.tolist(), [row.accepted_per_position for row in stats.rows], stats.execution]


def say_all(target: PreTrainedModel) -> dict[str, Any]:
    """What `target` says with every drafter; the same wherever its weights are."""
    said = {"plain": say(target, None)}
    for name in DRAFTERS:
        drafter = uncompiled(target, name)
        said[f"{name}, greedy"] = say(target, drafter)
        said[f"{name}, sampling"] = say(target, drafter, **SAMPLING)
    said["row seeds"] = say(target, uncompiled(target, "borrower"), **SAMPLING, seeds=[5, 6, 7])
    said["compiled, sampling"] = say(target, borrower(target), **SAMPLING)
    stock = borrower(target).configure(engine="stock")
    said["stock, greedy"] = say(target, stock, lengths=[9])
    said["stock, sampling"] = say(target, stock, lengths=[9], **SAMPLING)
    return said


class Willful(LogitsProcessor):
    """Forbids the tokens that the first process likes best from `length` on, on the other processes only."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores):
        if dist.get_rank() == 0 or input_ids.shape[1] < self.length:
            return scores
        return scores.scatter(1, scores.argmax(dim=1, keepdim=True), -torch.inf)


def managed_by_fsdp(target: PreTrainedModel, drafter: Drafter) -> list:
    """`say` with the mark that transformers knows such models by; it then sets `synced_gpus` by itself."""
    target._is_fsdp_managed_module = True
    try:
        return say(target, drafter)
    finally:
        del target._is_fsdp_managed_module


def error_of(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def say_briefly(target: PreTrainedModel) -> list:
    """What `target` says with a drafter that it lends its embedding and head."""
    drafter = uncompiled(target, "borrower")
    return [say(target, drafter), say(target, drafter, **SAMPLING)]


def load_split(folder: Path) -> PreTrainedModel:
    split = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=split).eval()


def check_weights(target: PreTrainedModel) -> None:
    """A drafter's borrowed weights are whole and plain; a change of any part of the target's is noticed."""
    drafter = borrower(target)
    assert drafter.head_weight.shape[0] == drafter.config.draft_vocab_size
    assert type(drafter._borrowed["embedding"]) in (torch.Tensor, torch.nn.Parameter)
    before = fingerprint(target, drafter)
    assert fingerprint(target, drafter) == before
    head = target.lm_head.weight
    target.lm_head.weight = torch.nn.Parameter(torch.empty_like(head).copy_(head), requires_grad=False)
    assert fingerprint(target, drafter) != before, "a part of a weight moved unnoticed"


def say_what_is_wrong(target: PreTrainedModel) -> dict[str, str]:
    """The errors of processes that disagree, by what they disagree about."""
    rank, drafter = dist.get_rank(), borrower(target)
    texts = torch.tensor([[2] * NEW_TOKENS])
    oracle = OracleDrafter(target, texts, [9], accuracy=1.0)
    last = LogitsProcessorList([Willful(9 + NEW_TOKENS - 1)])
    return {
        "other prompts": error_of(lambda: say(target, drafter, lengths=[5 + rank])),
        "other settings": error_of(lambda: say(target, drafter, max_new_tokens=4 + rank)),
        "other row seeds": error_of(lambda: say(target, drafter, **SAMPLING, seeds=[1, 2, rank])),
        "other random state": error_of(
            lambda: say(target, borrower(target).configure(engine="stock"), rank, [9], **SAMPLING)
        ),
        "max_time": error_of(lambda: say(target, drafter, max_time=100.0)),
        "other tokens": error_of(lambda: say(target, oracle, lengths=[9], logits_processor=last)),
        "fsdp": error_of(lambda: managed_by_fsdp(target, drafter)),
    }


def say_again_and_again(target: PreTrainedModel) -> list:
    """`say`, sampling, in the second of two calls, which only replays by a stand-in for the CUDA graph."""
    drafter = uncompiled(target, "borrower")
    with pytest.MonkeyPatch.context() as patch:
        capture = replay_on_cpu(patch)
        patch.setattr(drafter, "release", lambda: None)
        said = [say(target, drafter, **SAMPLING) for _ in range(2)]
        assert said[0] == said[1] and (capture.count, capture.hostings) == (2, 1)
    return said[1]


def bench(folder: Path, output: Path) -> dict[str, Any]:
    """What the command prints and writes in this process, and what it measured."""
    drafters = [folder / "eagle3", folder / "p-eagle"]
    options = [
        "--random-weights",
        "--prompt-length",
        5,
        "--max-new-tokens",
        24,
        "--runs",
        1,
        "--batch-size",
        2,
        "-k",
        3,
    ]
    options += ["--baselines", "dynamic", "engine", "--synthetic-acceptance", 2.0, "--no-compile", "--output", output]
    command = ["bench", "--tensor-parallel", "--target", folder / "target", "--drafter", *drafters, *options]
    traffic.COPY_BYTES = 2**20
    with redirect_stdout(io.StringIO()) as printed:
        status = cli.main([str(argument) for argument in command])
    return {"status": status, "printed": printed.getvalue(), "wrote": output.exists()}


def main(folder: str, answers: str, device: str) -> None:
    target = load_split(Path(folder) / "llama")
    assert target.device.type == device
    rank = dist.get_rank()
    head = target.lm_head.weight
    said = say_all(target) | {
        "sharded": [type(head).__name__, *head.to_local().shape],
        "seeds of their own": say(target, uncompiled(target, "borrower"), seed=rank, **SAMPLING),
        "bytes": round_bytes(target, None, 0, batch=3, length=10),
    }
    said |= {family: say_briefly(load_split(Path(folder) / family)) for family in OTHER_FAMILIES}
    if device == "cpu":
        said["replayed"] = say_again_and_again(target)
        said |= say_what_is_wrong(target)
        check_weights(target)
    said["bench"] = bench(Path(folder) / "bench", Path(answers) / f"figures-{rank}.json")
    (Path(answers) / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
