"""What every process of `test_tensor_parallel.py` runs: a target split with a `tp_plan`, and drafters on it.

    torchrun --nproc-per-node 2 tests/tensor_parallel.py <folder of the targets> <folder for the answers>

Writes `<rank>.json`: what was said, by the name of the case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from oracle import RANDOM_DRAFTERS, OracleDrafter
from targets import padded_prompts
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel, set_seed
from transformers.distributed import DistributedConfig

from hf_specdec import Drafter
from hf_specdec.sessions import fingerprint

PROMPT_LENGTHS = [2, 13, 7]
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 40}
NEW_TOKENS = 12
OTHER_FAMILIES = ("gemma3", "gpt-oss", "qwen3-moe")


def borrower(target: PreTrainedModel) -> Drafter:
    """A drafter that has neither an embedding nor a head."""
    return RANDOM_DRAFTERS["eagle3"](target, own_embedding=False, own_head=False)


DRAFTERS = {"borrower": borrower, "p-eagle": RANDOM_DRAFTERS["p-eagle"], "draft-model": RANDOM_DRAFTERS["draft-model"]}


def say(target: PreTrainedModel, drafter: Drafter | None, seed: int = 3, lengths=PROMPT_LENGTHS, **options) -> list:
    """Tokens that are generated, and how many drafts each row had accepted by position."""
    set_seed(seed)
    if drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": 3}
    out = target.generate(**padded_prompts(lengths), **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **options})
    return [out.tolist(), None if drafter is None else [row.accepted_per_position for row in drafter.stats.rows]]


def say_all(target: PreTrainedModel) -> dict[str, Any]:
    """What `target` says with every drafter; the same wherever its weights are."""
    said = {"plain": say(target, None)}
    for name, make in DRAFTERS.items():
        drafter = make(target)
        said[f"{name}, greedy"] = say(target, drafter)
        said[f"{name}, sampling"] = say(target, drafter, **SAMPLING)
    said["row seeds"] = say(target, borrower(target), **SAMPLING, seeds=[5, 6, 7])
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
    drafter = borrower(target)
    return [say(target, drafter), say(target, drafter, **SAMPLING)]


def load_split(folder: Path) -> PreTrainedModel:
    split = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=split).eval()


def main(folder: str, answers: str) -> None:
    target = load_split(Path(folder) / "llama")
    rank = dist.get_rank()
    said = say_all(target)
    said |= {family: say_briefly(load_split(Path(folder) / family)) for family in OTHER_FAMILIES}
    drafter = borrower(target)
    assert drafter.head_weight.shape[0] == drafter.config.draft_vocab_size
    assert type(drafter._borrowed["embedding"]) in (torch.Tensor, torch.nn.Parameter)
    before = fingerprint(target, drafter)
    assert fingerprint(target, drafter) == before
    head = target.lm_head.weight
    target.lm_head.weight = torch.nn.Parameter(torch.empty_like(head).copy_(head), requires_grad=False)
    assert fingerprint(target, drafter) != before, "a part of a weight moved unnoticed"
    own_seed = say(target, drafter, seed=rank, **SAMPLING)
    texts = torch.tensor([[2] * NEW_TOKENS])
    oracle = OracleDrafter(target, texts, [9], accuracy=1.0)
    last = LogitsProcessorList([Willful(9 + NEW_TOKENS - 1)])
    said |= {
        "seeds of their own": own_seed,
        "other prompts": error_of(lambda: say(target, drafter, lengths=[5 + rank])),
        "other settings": error_of(lambda: say(target, drafter, max_new_tokens=4 + rank)),
        "other row seeds": error_of(lambda: say(target, drafter, **SAMPLING, seeds=[1, 2, rank])),
        "other random state": error_of(
            lambda: say(target, borrower(target).configure(engine="stock"), rank, [9], **SAMPLING)
        ),
        "max_time": error_of(lambda: say(target, drafter, max_time=100.0)),
        "other tokens": error_of(lambda: say(target, oracle, lengths=[9], logits_processor=last)),
        "fsdp": error_of(lambda: managed_by_fsdp(target, drafter)),
        "sharded": [
            str(type(parameter).__name__) for name, parameter in target.named_parameters() if "lm_head" in name
        ],
    }
    (Path(answers) / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
