"""Managers of a target that is split over two processes admit and retire the same requests on both."""

import copy
import json

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from processes import ROOT, finish, launch
from split_manager_worker import NEW_TOKENS, PROMPTS, SAMPLING, managed
from targets import tiny_target

two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=two_gpus)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def answers(tmp_path_factory, device):
    """What the two processes found, by the name of the case."""
    folder = tmp_path_factory.mktemp("split_manager")
    tiny_target("llama").save_pretrained(folder / "llama")
    worker = ROOT / "tests" / "helpers" / "split_manager_worker.py"
    finish(launch(worker, folder / "llama", folder, device, on_gpus=device == "cuda"), seconds=240)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def target_on(device):
    return copy.deepcopy(tiny_target("llama")).to(device)


def alone(prompt, device, **options):
    target, inputs = target_on(device), torch.tensor([prompt], device=device)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, **options}
    return target.generate(inputs, **options)[0, len(prompt) :].tolist()


def test_requests_of_the_first_process_run_on_both(answers, device):
    for found in answers:
        assert found["arrive"].pop("cancelled") == "The request cancelled was cancelled."
        assert found["arrive"] == {f"r{number}": [alone(prompt, device), None] for number, prompt in enumerate(PROMPTS)}


def test_the_same_script_on_both(answers, device):
    target = target_on(device)
    drafter = RANDOM_DRAFTERS["eagle3"](target, own_embedding=False, own_head=False)
    manager = managed(target, drafter, **SAMPLING)
    manager.start()
    ids = [manager.add_request(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS[:3])]
    expected = [[name, manager.get_result(name, timeout=60).generated_tokens] for name in ids]
    manager.stop()
    for found in answers:
        texts, plain, wrong = found["same"]
        assert texts == [*expected, ["req_3", expected[1][1]]]
        assert plain == alone(PROMPTS[3], device)
        assert "within manager.pause()" in wrong and wrong.startswith("RuntimeError: LlamaForCausalLM is split over")


def test_managers_that_are_not_the_same(answers):
    for found in answers:
        others, warmed_up = found["otherwise"]
        assert "called with different settings of continuous batching" in others
        assert warmed_up.startswith("OutOfStep: ") and "they make different calls" in warmed_up


def test_a_stop_and_an_error_reach_both(answers):
    for rank, found in enumerate(answers):
        assert found["stopped"] == "The manager was stopped before the request had ended."
        kind, message = found["failing"]
        expected = (
            ("RuntimeError", "Another process that runs the model has failed") if rank == 0 else ("OSError", "no room")
        )
        assert kind == expected[0] and message.startswith(expected[1])
        assert not found["threads"], "threads of managers have ended"
