"""The program of every process of `test_tensor_parallel.py`: a target split with a `tp_plan`, and drafters on it.

    torchrun --nproc-per-node 2 tests/helpers/tensor_parallel_worker.py <targets> <answers> cpu|cuda

Reads targets from the first folder and writes `<rank>.json` into the second: outputs by the name of the case, on GPUs
from captured rounds.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu, show_all_slots
from images import IMAGE, image_prompts
from oracle import RANDOM_DRAFTERS, OracleDrafter
from targets import padded_prompts, set_policy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    ContinuousBatchingConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

from hf_specdec import Drafter, cli
from hf_specdec.auto_k.auto_drafts import ExpectedCosts
from hf_specdec.bench import traffic
from hf_specdec.bench.models import load_target
from hf_specdec.bench.traffic import round_bytes
from hf_specdec.drafters.none import NoDrafter
from hf_specdec.engine.target import patched_target
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.modules import signature
from hf_specdec.modules.patch import EXPERT_GATE
from hf_specdec.modules.signature import Fingerprint, Signature
from hf_specdec.modules.weights import local_shard
from hf_specdec.parallel import all_reduce
from hf_specdec.patching import fused_linear
from hf_specdec.patching.layer_kernels import _norm_forward
from hf_specdec.state import RoundShape

PROMPT_LENGTHS = [2, 13, 7]
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 40}
NEW_TOKENS = num_cases(12, 8)
BENCHED_TOKENS = num_cases(24, 12)
COMPILED_TOKENS = 2
BENCHED = cases(["eagle3", "p-eagle"], ["eagle3"])
# Recurrent layers, images, and several positions a token.
IMAGE_CLASS = "Qwen3_5ForConditionalGeneration"
OTHER_FAMILIES = ("gemma3", "gpt-oss", "qwen3-moe", "qwen3-next")
MIXTURES = ("gpt-oss", "qwen3-moe")


def borrower(target: PreTrainedModel) -> Drafter:
    """A drafter that has neither an embedding nor a head."""
    return RANDOM_DRAFTERS["eagle3"](target, own_embedding=False, own_head=False)


def uncompiled(target: PreTrainedModel, name: str) -> Drafter:
    """A drafter of `DRAFTERS`; its rounds are not compiled, since that would take far longer than the call."""
    return DRAFTERS[name](target).configure(compile_rounds=False)


GREEDY = cases(["borrower", "domino", "pard2"], ["borrower"])
# Without `--slow` one of each way to draft; the others do not differ in anything that a split changes.
KINDS = cases(
    ["p-eagle", "dflash", "dspark", "domino", "pard", "pard2", "draft-model"], ["p-eagle", "dspark", "draft-model"]
)
DRAFTERS = {"borrower": borrower} | {name: RANDOM_DRAFTERS[name] for name in KINDS}


def generate(
    target: PreTrainedModel,
    drafter: Drafter | None,
    seed: int = 3,
    lengths=PROMPT_LENGTHS,
    host_seed: int | None = None,
    **options,
) -> list:
    """New tokens, accepted drafts of each row by position, and how rounds were run."""
    set_seed(seed)
    if host_seed is not None:
        torch.default_generator.manual_seed(host_seed)
    if drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": 3}
    prompts = {name: tensor.to(target.device) for name, tensor in padded_prompts(lengths).items()}
    out = target.generate(**prompts, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **options})
    if drafter is None:
        return [out.tolist(), None, None]
    stats = drafter.stats
    drafter.release()  # A process group cannot end before the graphs that hold its collectives.
    return [out.tolist(), [row.accepted_per_position for row in stats.rows], stats.execution]


def generate_all(target: PreTrainedModel) -> dict[str, Any]:
    """Outputs of `target` with every drafter; the same wherever its weights are."""
    generated = {"plain": generate(target, None)}
    for name in DRAFTERS:
        drafter = uncompiled(target, name)
        if name in GREEDY:
            generated[f"{name}, greedy"] = generate(target, drafter)
        generated[f"{name}, sampling"] = generate(target, drafter, **SAMPLING)
    generated["row seeds"] = generate(target, uncompiled(target, "borrower"), **SAMPLING, seeds=[5, 6, 7])
    generated["continuous batching"] = generate_many(target, uncompiled(target, "borrower"))
    generated["auto, fewer rows"] = generate_many_by_time(target, uncompiled(target, "borrower"))
    generated["compiled, sampling"] = generate(target, borrower(target).configure(compile_rounds=True), **SAMPLING)
    stock = borrower(target).configure(engine="stock")
    generated["stock, greedy"] = generate(target, stock, lengths=[9])
    generated["stock, sampling"] = generate(target, stock, lengths=[9], **SAMPLING)
    return generated


def generate_many(target: PreTrainedModel, drafter: Drafter, rows: int = 2) -> list:
    """Texts of five requests on two rows, and how many drafts of each were accepted."""
    prompts = [list(range(5, 5 + length)) for length in (9, 2, 5, 14, 1)]
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    options = {**SAMPLING, "max_new_tokens": NEW_TOKENS, "num_assistant_tokens": 3, "seeds": 5}
    out = target.generate_batch(prompts, None, config, assistant_model=drafter, **options)
    accepted = [row.accepted for row in drafter.stats.rows]
    drafter.release()
    return [[one.generated_tokens for one in out.values()], accepted]


def generate_many_by_time(target: PreTrainedModel, drafter: Drafter) -> list:
    """Texts of requests with K chosen by times, which differ between processes; rows move to fewer rows."""
    prompts = [list(range(5, 5 + length)) for length in (9, 2, 5, 14, 1, 3, 4, 8, 6)]  # the last one is left alone
    config = ContinuousBatchingConfig(max_requests_per_batch=8)
    options = {"max_new_tokens": 36, "do_sample": False, "eos_token_id": None}
    with pytest.MonkeyPatch.context() as patch:  # the shapes of tiny targets say that drafts hardly pay
        patch.setattr(ExpectedCosts, "first", lambda _, asked: RoundShape(asked))
        out = target.generate_batch(prompts, None, config, assistant_model=drafter, **options)
    used = sorted(drafter.stats.rounds_by_k)
    # Where rounds are captured, a call that is so short is not worth further graphs.
    assert len(used) > 1 or target.device.type == "cuda", used
    assert drafter.stats.num_assistant_tokens == 7
    drafter.release()
    return [one.generated_tokens for one in out.values()]


def generate_with_generator(target: PreTrainedModel, seed: int) -> list:
    """Outputs of `target` on the stock engine with a generator of the call's own."""
    drafter = borrower(target).configure(engine="stock")
    return generate(target, drafter, lengths=[9], **SAMPLING, generator=torch.Generator().manual_seed(seed))


class ForbidsOnOtherRanks(LogitsProcessor):
    """Forbids the tokens that the first process likes best from `length` on, on the other processes only."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores):
        if dist.get_rank() == 0 or input_ids.shape[1] < self.length:
            return scores
        return scores.scatter(1, scores.argmax(dim=1, keepdim=True), -torch.inf)


def managed_by_fsdp(target: PreTrainedModel, drafter: Drafter) -> list:
    """`generate` with the mark of FSDP models, for which transformers sets `synced_gpus` by itself."""
    target._is_fsdp_managed_module = True
    try:
        return generate(target, drafter)
    finally:
        del target._is_fsdp_managed_module


def generate_hooked(target: PreTrainedModel, drafter: Drafter, count: int) -> list:
    """`generate` with forward hooks of the caller."""
    hooks = [target.model.norm.register_forward_hook(lambda *arguments: None) for _ in range(count)]
    try:
        return generate(target, drafter)
    finally:
        for one in hooks:
            one.remove()


def error_of(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def generate_briefly(target: PreTrainedModel) -> list:
    """Sampled outputs with a drafter that shares embedding and head; greedily no drafts would be accepted."""
    return generate(target, uncompiled(target, "borrower"), **SAMPLING)


def generate_with_images(target: PreTrainedModel) -> list:
    """Texts of prompts with and without images, and how many drafts of MTP modules were accepted."""
    drafter = RANDOM_DRAFTERS["mtp"](target).configure(compile_rounds=False)
    inputs = image_prompts(target, [[4, IMAGE, 5], [3]])
    inputs = {name: tensor.to(target.device) for name, tensor in inputs.items()}
    out = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=drafter)
    assert drafter.stats.engine == "static"
    drafter.release()
    return [out.tolist(), [row.accepted_per_position for row in drafter.stats.rows]]


def load_split(folder: Path, auto_class: type = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    split = DistributedConfig(tp_plan="auto", **options)
    return auto_class.from_pretrained(folder, dtype=torch.float32, distributed_config=split).eval()


def with_experts_apart(folder: str, family: str) -> PreTrainedModel:
    """The target with half of the experts on each process (expert parallel)."""
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        options: dict[str, Any] = {"tp_size": 2, "ep_size": 2}
    else:
        options = {"enable_expert_parallel": True}
    target = load_split(Path(folder) / family, **options)
    weights = [one for name, one in target.named_parameters() if name.endswith("experts.down_proj")]
    assert all(local_shard(one).shape[0] == one.shape[0] // 2 for one in weights) and weights
    return target


def check_weights(target: PreTrainedModel) -> None:
    """Assert that shared weights of a drafter are whole and plain, and that it notices a change of any part of them."""
    drafter = borrower(target)
    assert drafter.head_weight.shape[0] == drafter.config.draft_vocab_size
    assert type(drafter._shared_weights["embedding"].weight) in (torch.Tensor, torch.nn.Parameter)
    before = Fingerprint.of(target.device, Signature(target, drafter))
    assert Fingerprint.of(target.device, Signature(target, drafter)) == before
    head = target.lm_head.weight
    target.lm_head.weight = torch.nn.Parameter(torch.empty_like(head).copy_(head), requires_grad=False)
    assert Fingerprint.of(target.device, Signature(target, drafter)) != before, "a part of a weight moved unnoticed"


def errors_of_disagreeing_ranks(target: PreTrainedModel) -> dict[str, str]:
    """The errors of processes that disagree, by the subject."""
    rank, drafter = dist.get_rank(), borrower(target)
    texts = torch.tensor([[2] * NEW_TOKENS])
    oracle = OracleDrafter(target, texts, [9], accuracy=1.0)
    last = LogitsProcessorList([ForbidsOnOtherRanks(9 + NEW_TOKENS - 1)])
    drafters = [uncompiled(target, name) for name in ("borrower", "p-eagle")]
    return {
        "other prompts": error_of(lambda: generate(target, drafter, lengths=[5 + rank])),
        "other settings": error_of(lambda: generate(target, drafter, max_new_tokens=4 + rank)),
        "other row seeds": error_of(lambda: generate(target, drafter, **SAMPLING, seeds=[1, 2, rank])),
        "other random state": error_of(
            lambda: generate(target, borrower(target).configure(engine="stock"), rank, [9], **SAMPLING)
        ),
        "a generator on one": error_of(
            lambda: generate(
                target, borrower(target), **SAMPLING, generator=None if rank else torch.Generator().manual_seed(3)
            )
        ),
        "max_time": error_of(lambda: generate(target, drafter, max_time=100.0)),
        "other tokens": error_of(lambda: generate(target, oracle, lengths=[9], logits_processor=last)),
        "fsdp": error_of(lambda: managed_by_fsdp(target, drafter)),
        "other log-probabilities": error_of(
            lambda: generate(target, drafter, return_dict_in_generate=True, return_logprobs=[None, "raw"][rank])
        ),
        "other settings of drafters": error_of(
            lambda: generate(target, borrower(target).configure(compile_rounds=rank == 0))
        ),
        "other drafters": error_of(lambda: generate(target, drafters[rank])),
        "other processors": error_of(
            lambda: generate(target, drafter, logits_processor=LogitsProcessorList([ForbidsOnOtherRanks(99)] * rank))
        ),
        "other rows": error_of(lambda: generate_many(target, uncompiled(target, "borrower"), rows=2 + rank)),
        "hooks on one": error_of(lambda: generate_hooked(target, drafter, rank)),
        "refused by one": error_of(lambda: generate(target, drafter, num_beams=1 + rank)),
        "wrong on one": error_of(lambda: generate(target, drafter, return_logprobs=[None, "some"][rank])),
    }


class FailingStreamer(BaseStreamer):
    """Raises an error at the third token."""

    count = 0

    def put(self, value):
        self.count += 1
        if self.count == 3:
            raise RuntimeError("the client is gone")

    def end(self):
        raise AssertionError("it has ended")


def texts_after_drift(target: PreTrainedModel) -> dict[str, Any]:
    """Texts by what the last process alone has done before: in captured rounds, and with K chosen by times."""
    is_last, head = dist.get_rank() == 1, target.lm_head.weight
    drafters = [uncompiled(target, "borrower") for _ in range(2)]

    def text(streamer: BaseStreamer | None = None) -> list:
        set_seed(3)
        options = {"max_new_tokens": NEW_TOKENS, "num_assistant_tokens": 3, "streamer": streamer, **SAMPLING}
        return target.generate(**padded_prompts(PROMPT_LENGTHS), assistant_model=drafters[0], **options).tolist()

    def replace_head() -> None:
        target.lm_head.weight = torch.nn.Parameter(head.detach().clone(), requires_grad=False)

    def write_head() -> None:
        with torch.no_grad():
            target.lm_head.weight.mul_(1)

    changes = {
        "nothing": lambda: None,
        "free buffers": drafters[0].release,
        "forget facts": signature._facts.clear,
        "replace the head": replace_head,
        "write to the head": write_head,
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        replay_on_cpu(patch)
        for name, change in changes.items():
            if is_last:
                change()
            found[name] = text()
        found["streamer"] = error_of(lambda: text(FailingStreamer())) if is_last else text()
    target.lm_head.weight = head
    found["another drafter"] = [generate_many_by_time(target, drafters[is_last * call]) for call in range(2)]
    return found


def generate_replayed(target: PreTrainedModel) -> list:
    """`generate`, sampling, in the second of two calls, which only replays by a stand-in for the CUDA graph."""
    drafter = uncompiled(target, "borrower")
    with pytest.MonkeyPatch.context() as patch:
        capture = replay_on_cpu(patch)
        patch.setattr(drafter, "release", lambda: None)
        generated = [generate(target, drafter, **SAMPLING) for _ in range(2)]
        assert generated[0] == generated[1] and (capture.count, capture.hostings) == (2, 1)
    return generated[1]


def sum_by_messages(room: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
    """The result of torch's operator on symmetric memory: the parts of all ranks, added in the order of the ranks."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    parts = [torch.empty_like(room) for _ in range(group.size())]
    dist.all_gather(parts, room.contiguous(), group=group)
    return torch.stack(parts).sum(dim=0)


@contextmanager
def peer_memory_on_cpu() -> Iterator[pytest.MonkeyPatch]:
    """Context in which processes on CPUs sum through shared memory as GPUs do, by a stand-in for torch's operator."""
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("one_shot_all_reduce", sum_by_messages, "CPU")
        set_policy(patch, "cpu", symmetric_memory=True)
        patch.setattr(all_reduce, "MAX_BYTES", 2048)  # more than what rounds of three rows sum, less than their prefill
        patch.setattr(all_reduce, "has_nvlink", lambda device, count: True)
        patch.setattr(all_reduce, "allocate", lambda size, device, group: torch.empty(size, dtype=torch.uint8))
        patch.setattr(all_reduce, "_buffers", weakref.WeakKeyDictionary())
        yield patch


@contextmanager
def watched_sums() -> Iterator[list[tuple[int, ...]]]:
    """Context that records the shapes of sums through shared memory."""
    total, shapes = all_reduce.SymmetricMemoryBuffer.all_reduce, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            all_reduce.SymmetricMemoryBuffer,
            "all_reduce",
            lambda memory, room: shapes.append(tuple(room.shape)) or total(memory, room),
        )
        yield shapes


def generate_with_symmetric_memory(folder: Path) -> dict[str, Any]:
    """Outputs of targets with small all-reduces through symmetric memory, and the shapes of these."""
    generated = {}
    with peer_memory_on_cpu():
        for family in ("llama", "qwen3-moe"):
            target = load_split(folder / family)
            modules = [(module, vars(module).get("forward")) for module in target.modules()]
            with watched_sums() as before:  # memory is tried, and the check runs rows of its own
                assert why_not_equivalent(target, "static") is None
            with watched_sums() as shapes:
                generated[family] = generate_briefly(target)
            generated[f"{family}, sums"] = sorted({*shapes, *(shape for shape in before if len(shape) == 1)})
            assert all(vars(module).get("forward") is forward for module, forward in modules), "wrappers were changed"
    return generated


def generate_with_gpu_policy(folder: Path) -> list:
    """Outputs without drafts of compiled rounds, with fused linear layers and all-reduces through symmetric memory.

    The local parts of weights are moved, without a second copy.
    """
    with peer_memory_on_cpu() as patch, watched_sums() as shapes:
        target = load_split(folder / "shallow")
        attention = target.model.layers[0].self_attn
        expected = attention.k_proj.weight.full_tensor()
        fused = {name for names in fused_linear.GROUPS for name in names}
        for name, module in target.named_modules():
            if name.rpartition(".")[2] in fused:  # loaded to a GPU, their parts are no views of the file
                part = module.weight._local_tensor
                part.data = part.clone()
        replay_on_cpu(patch)
        show_all_slots(patch)
        set_policy(patch, "cpu", compiler="eager")
        set_policy(patch, "cpu", fused_linear=True)
        set_policy(patch, "cpu", transposed_linear=False)
        drafter = NoDrafter(target).configure(compile_rounds=True)
        options = {"do_sample": False, "max_new_tokens": COMPILED_TOKENS, "assistant_model": drafter}
        out = target.generate(**padded_prompts(PROMPT_LENGTHS), **options)
        assert (4, 1, 32) in shapes
        first, second = (layer.weight.to_local() for layer in (attention.q_proj, attention.k_proj))
        assert first.data_ptr() + first.nbytes == second.data_ptr(), "linears were not fused"
        assert torch.equal(attention.k_proj.weight.full_tensor(), expected)
    return [out.tolist(), drafter.stats.execution]


def modules_with_kernels(target: PreTrainedModel) -> list[str]:
    """Names of the norms and experts of `target` that run kernels of this package where layers do."""
    with pytest.MonkeyPatch.context() as patch:
        set_policy(patch, "cpu", layer_kernels=True)
        with torch.no_grad(), patched_target(target, NoDrafter(target), False):
            found = {name: dict(vars(module)) for name, module in target.named_modules()}
    return [
        name
        for name, own in found.items()
        if EXPERT_GATE in own or ("norm" in name and getattr(own.get("forward"), "func", None) is _norm_forward)
    ]


def generate_without_symmetric_memory(folder: Path, failing: str) -> dict[str, Any]:
    """Outputs, logs and all-reduces through symmetric memory if rank 1 fails in one step of its set-up."""
    check = all_reduce.SymmetricMemoryBuffer.check

    def fail(*arguments: Any) -> None:
        if failing == "check":  # which needs all of them until its sums are there
            check(*arguments)
        raise OSError("no such device\nand advice")

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    all_reduce.logger.addHandler(handler)
    all_reduce.logger.setLevel(logging.INFO)
    try:
        with peer_memory_on_cpu() as patch, watched_sums() as shapes:
            if failing == "host":
                patch.setattr(all_reduce.socket, "gethostname", lambda: f"host {dist.get_rank()}")
            elif dist.get_rank() == 1:
                patch.setattr(
                    *{"allocate": (all_reduce, "allocate"), "check": (all_reduce.SymmetricMemoryBuffer, "check")}[
                        failing
                    ],
                    fail,
                )
            target = load_split(folder / "llama")
            generated = generate_briefly(target)
    finally:
        all_reduce.logger.setLevel(logging.NOTSET)
        all_reduce.logger.removeHandler(handler)
    return {"generated": generated, "logged": logged, "sums": sorted(set(shapes))}


def bench(folder: Path, output: Path) -> dict[str, Any]:
    """The command's output and files in this process, and its measurements."""
    drafters = [folder / name for name in BENCHED]
    options = [
        "--random-weights",
        "--prompt-length",
        5,
        "--max-new-tokens",
        BENCHED_TOKENS,
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
    target = load_target(str(folder / "target"), torch.float32, torch.device("cpu"), True, True)
    spread = local_shard(target.get_input_embeddings().weight).std().item()
    return {"status": status, "printed": printed.getvalue(), "wrote": output.exists(), "spread": spread}


def main(folder: str, answers: str, device: str) -> None:
    target = load_split(Path(folder) / "llama")
    assert target.device.type == device
    rank = dist.get_rank()
    head = target.lm_head.weight
    with watched_sums() as shapes:
        generated = generate_all(target)
    generated |= {
        "sums in memory": sorted(set(shapes)),
        "sharded": [type(head).__name__, *head.to_local().shape],
        "seeds of their own": generate(target, uncompiled(target, "borrower"), seed=rank, **SAMPLING),
        "generators of their own": generate_with_generator(target, 7 + rank),
        "bytes": round_bytes(target, None, 0, batch=3, length=10),
    }
    if device == "cuda":
        stock = borrower(target).configure(engine="stock")
        generated["seeds of hosts"] = generate(target, stock, lengths=[9], host_seed=rank, **SAMPLING)
    generated |= {family: generate_briefly(load_split(Path(folder) / family)) for family in OTHER_FAMILIES}
    generated |= {
        f"{family}, experts apart": generate_briefly(with_experts_apart(folder, family)) for family in MIXTURES
    }
    generated["images"] = generate_with_images(load_split(Path(folder) / "images", AutoModelForImageTextToText))
    if device == "cpu":
        generated["replayed"] = generate_replayed(target)
        generated |= errors_of_disagreeing_ranks(target)
        generated["after drift"] = texts_after_drift(target)
        generated["in memory"] = generate_with_symmetric_memory(Path(folder))
        generated["in memory, as on a GPU"] = generate_with_gpu_policy(Path(folder))
        for failing in ("host", "allocate", "check"):
            generated[f"without memory, {failing}"] = generate_without_symmetric_memory(Path(folder), failing)
        check_weights(target)
        generated["modules with kernels"] = modules_with_kernels(load_split(Path(folder) / "qwen3-moe"))
    generated["bench"] = bench(Path(folder) / "bench", Path(answers) / f"figures-{rank}.json")
    (Path(answers) / f"{rank}.json").write_text(json.dumps(generated))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
