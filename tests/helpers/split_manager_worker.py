"""The program of every process of `test_split_manager.py`: managers of a target split with a `tp_plan`.

    torchrun --nproc-per-node 2 tests/helpers/split_manager_worker.py <target> <answers> cpu|cuda

Writes `<rank>.json` into the second folder: the texts of requests, by the name of the case. Rounds are captured; on
CPUs a stand-in replays them.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graph_stand_ins import replay_on_cpu
from oracle import RANDOM_DRAFTERS
from tensor_parallel_worker import error_of, load_split
from transformers import ContinuousBatchingConfig, PreTrainedModel

from hf_specdec import Drafter
from hf_specdec.serving.manager import SpeculativeBatchingManager

PROMPTS = [list(range(5, 5 + length)) for length in (9, 2, 5, 14, 1, 7)]
NEW_TOKENS = 14
SAMPLING = {"do_sample": True, "temperature": 1.5}


def managed(target: PreTrainedModel, drafter: Drafter, rows: int = 2, **options: Any) -> SpeculativeBatchingManager:
    settings = ContinuousBatchingConfig(max_requests_per_batch=rows, cpu_group_timeout=60)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, **options}
    options |= {"continuous_batching_config": settings, "assistant_model": drafter, "num_assistant_tokens": 3}
    return target.init_continuous_batching(**options)


def said(results) -> dict[str, list]:
    return {one.request_id: [one.generated_tokens, one.error] for one in results}


def arrive_at_the_first(target: PreTrainedModel, drafter: Drafter) -> dict[str, list]:
    """Requests that arrive at the first process while rounds run; one is cancelled."""
    manager = managed(target, drafter)
    manager.start()
    if dist.get_rank() == 0:
        for number, prompt in enumerate(PROMPTS):
            manager.add_request(prompt, request_id=f"r{number}", streaming=number == 1)
            time.sleep(0.03 * (number % 3))
        manager.add_request(PROMPTS[0], request_id="cancelled", max_new_tokens=400)
        manager.cancel_request("cancelled")
    finished = []
    while len(finished) < len(PROMPTS) + 1:
        result = manager.get_result(timeout=60)
        assert result is not None, manager.background_thread_status.fatal_error
        if result.is_finished():
            finished.append(result)
    manager.stop()
    found = said(finished)
    found["cancelled"] = found["cancelled"][1]
    return found


def the_same_script(target: PreTrainedModel, drafter: Drafter) -> list:
    """All processes add the same requests, pause, make a call of their own, and go on."""
    ids, texts = [], []
    manager = managed(target, drafter, **SAMPLING)
    manager.start()
    for seed, prompt in enumerate(PROMPTS[:3]):
        ids.append(manager.add_request(prompt, seed=seed))
    first = torch.tensor([PROMPTS[0]], device=target.device)
    wrong = error_of(lambda: target.generate(first, assistant_model=drafter, max_new_tokens=3))
    with manager.pause():
        inputs = torch.tensor([PROMPTS[3]], device=target.device)
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
        plain = target.generate(inputs, assistant_model=drafter, **options)[0, inputs.shape[1] :].tolist()
    for name in ids:
        result = manager.get_result(name, timeout=60)
        texts.append([result.request_id, result.generated_tokens])
    manager.stop()
    manager.start()  # again
    again = manager.add_request(PROMPTS[1], seed=1)
    texts.append([again, manager.get_result(again, timeout=60).generated_tokens])
    manager.stop()
    return [texts, plain, wrong]


def stopped_by_another(target: PreTrainedModel, drafter: Drafter) -> str:
    """The last process asks for a stop after the round that runs; requests of all end.

    That process alone frees its graphs, which the next call must notice.
    """
    manager = managed(target, drafter)
    manager.start()
    if dist.get_rank() == 0:
        manager.add_request(PROMPTS[0], request_id="long", max_new_tokens=400, streaming=True)
    assert manager.get_result(timeout=60).request_id == "long"
    if dist.get_rank() == 1:
        manager.stop(hard_stop=True)
    manager.join(time.perf_counter(), timeout=60)
    results = list(manager)
    assert not manager.is_running()
    return results[-1].error


def made_otherwise(target: PreTrainedModel, drafter: Drafter) -> list[str]:
    """Errors of managers that processes make with other settings, and of one that only the first process warms up."""
    rank = dist.get_rank()
    others = error_of(lambda: managed(target, drafter, rows=2 + rank))
    manager = managed(target, drafter)
    return [others, error_of(manager.warmup if rank == 0 else lambda: managed(target, drafter))]


def failing_on_one(target: PreTrainedModel, drafter: Drafter) -> list:
    """The thread of one process fails; that of the other ends, too."""
    manager = managed(target, drafter)
    if dist.get_rank() == 1:

        def fail(requests):
            raise OSError("no room, in a test")

        manager._queue.on_tokens = fail
    manager.start()
    if dist.get_rank() == 0:
        manager.add_request(PROMPTS[0], request_id="any", max_new_tokens=400)
    manager._rounds.thread.join(60)
    assert not manager.is_running()
    error = manager.background_thread_status.fatal_error
    return [type(error).__name__, str(error)]


def main(folder: str, answers: str, device: str) -> None:
    logging.disable(logging.ERROR)
    target = load_split(Path(folder))
    assert target.device.type == device
    drafter = RANDOM_DRAFTERS["eagle3"](target, own_embedding=False, own_head=False).configure(compile_rounds=False)
    if device == "cpu":
        replay_on_cpu(pytest.MonkeyPatch())
    found = {
        "arrive": arrive_at_the_first(target, drafter),
        "same": the_same_script(target, drafter),
        "stopped": stopped_by_another(target, drafter),
        "otherwise": made_otherwise(target, drafter),
        "failing": failing_on_one(target, drafter),
        "threads": [one.name for one in threading.enumerate() if one.name.startswith("hf_specdec")],
    }
    drafter.release()  # a process group cannot end before the graphs that hold its collectives
    (Path(answers) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
