"""A target split over two ranks generates what one process generates, and ranks that disagree raise an error."""

import copy
import json
import re

import pytest
import torch
from case_counts import num_cases
from images import image_model
from oracle import eagle_options
from processes import ROOT, finish, launch
from targets import NUM_LAYERS, tiny_target
from tensor_parallel_worker import (
    BENCHED,
    BENCHED_TOKENS,
    COMPILED_TOKENS,
    DRAFTERS,
    GREEDY,
    IMAGE_CLASS,
    MIXTURES,
    OTHER_FAMILIES,
    generate,
    generate_all,
    generate_briefly,
    generate_with_generator,
    generate_with_images,
    modules_with_kernels,
)

from hf_specdec.bench.traffic import round_bytes
from hf_specdec.cli import main
from hf_specdec.config import Eagle3Config, PEagleConfig
from hf_specdec.parallel import all_reduce

# Layers of the target that is compiled: each of them takes as long.
SHALLOW = num_cases(2, 1)


def run_two_processes(folder, device):
    """What two processes generated on devices of the type `device`, each by the name of the case."""
    for family in ("llama", *OTHER_FAMILIES):
        tiny_target(family).save_pretrained(folder / family)
    image_model(IMAGE_CLASS).save_pretrained(folder / "images")
    tiny_target("llama", num_layers=SHALLOW).save_pretrained(folder / "shallow")
    target = tiny_target("llama")
    target.config.save_pretrained(folder / "bench" / "target")
    Eagle3Config(**eagle_options(target)).save_pretrained(folder / "bench" / "eagle3")
    PEagleConfig(**eagle_options(target), mask_token_id=2).save_pretrained(folder / "bench" / "p-eagle")
    worker = ROOT / "tests" / "helpers" / "tensor_parallel_worker.py"
    finish(launch(worker, folder, folder, device, on_gpus=device != "cpu"))
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    answers[0]["figures"] = json.loads((folder / "figures-0.json").read_text())
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the two processes generated on CPUs, each by the name of the case."""
    return run_two_processes(tmp_path_factory.mktemp("tensor_parallel"), "cpu")


@pytest.mark.core
def test_one_process_and_two_generate_the_same(answers):
    expected = json.loads(json.dumps(generate_all(tiny_target("llama"))))
    assert answers[0]["sharded"] == ["DTensor", 48, 32], "the target was not split"
    for rank, generated in enumerate(answers):
        different = [name for name in expected if generated[name] != expected[name]]
        assert not different, f"process {rank} generated something else: {different}"
    accepted = [sum(map(sum, expected[f"{name}, sampling"][1])) for name in DRAFTERS]
    assert all(count > 0 for count in accepted), "drafts were never accepted"
    assert all(expected[f"{name}, greedy"][0] == expected["plain"][0] for name in GREEDY)
    assert expected["borrower, sampling"][0] != expected["row seeds"][0]


@pytest.mark.core
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families(answers, family):
    expected = json.loads(json.dumps(generate_briefly(tiny_target(family))))
    assert [generated[family] for generated in answers] == [expected, expected]


@pytest.mark.core
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_on_different_processes(answers, family):
    expected = json.loads(json.dumps(generate_briefly(tiny_target(family))))
    assert [generated[f"{family}, experts apart"] for generated in answers] == [expected, expected]


@pytest.mark.core
def test_images(answers):
    expected = json.loads(json.dumps(generate_with_images(image_model(IMAGE_CLASS))))
    assert [generated["images"] for generated in answers] == [expected, expected]


@pytest.mark.core
def test_seeds_are_those_of_rank_0(answers):
    for case in ("seeds of their own", "generators of their own"):
        first, second = (generated[case] for generated in answers)
        assert first == second
    generated = [json.loads(json.dumps(generate_with_generator(tiny_target("llama"), seed))) for seed in (7, 8)]
    assert generated[0] == first and generated[1] != first


@pytest.mark.core
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other prompts", "ValueError: .* called with different prompts, .*; expected the same call on every one"),
        ("other settings", "ValueError: .* called with different generation settings; expected the same call"),
        ("other row seeds", "ValueError: .* called with different seeds"),
        ("other random state", r"ValueError: .* called with different random state \(set_seed\)"),
        ("a generator on one", "ValueError: .* called with different use of a generator; expected"),
        ("fsdp", r"ValueError: synced_gpus is set: .* \(FSDP or DeepSpeed stage 3\)"),
        ("max_time", "ValueError: max_time is set, .* clocks differ, .* Use max_new_tokens"),
        ("other log-probabilities", "ValueError: .* called with different return_logprobs; expected"),
        ("other settings of drafters", "ValueError: .* called with different settings of the drafter; expected"),
        ("other drafters", "ValueError: .* called with different drafters; expected"),
        ("other processors", "ValueError: .* called with different logits processors or stopping criteria; expected"),
        ("other rows", "ValueError: .* called with different settings of continuous batching; expected"),
        ("hooks on one", "ValueError: .* called with different forward hooks; expected"),
        ("other tokens", "RuntimeError: .* generated different tokens, .* Logits processors and stopping criteria"),
    ],
)
def test_ranks_that_disagree(answers, case, words):
    for generated in answers:
        assert re.match(words, generated[case]), generated[case]


@pytest.mark.core
@pytest.mark.parametrize(
    ("case", "words"), [("refused by one", "asks for beam_search"), ("wrong on one", "return_logprobs is 'some'")]
)
def test_a_call_that_one_rank_refuses(answers, case, words):
    """The other one raises an error, too, and the next calls of both belong together."""
    first, second = (generated[case] for generated in answers)
    assert first.startswith("OutOfStep: The processes") and "one of them has raised an error in this call" in first
    assert second.startswith("ValueError: ") and words in second


@pytest.mark.core
def test_ranks_that_have_kept_other_things_begin_anew_together(answers):
    for rank, generated in enumerate(answers):
        found = generated["after drift"]
        assert found.pop("another drafter") == [generated["auto, fewer rows"]] * 2
        if rank == 1:
            assert found.pop("streamer") == "RuntimeError: the client is gone"
        different = [name for name, text in found.items() if text != generated["borrower, sampling"][0]]
        assert not different


@pytest.mark.core
def test_split_rounds_are_captured(answers):
    """What transformers wraps around split layers is no obstacle."""
    for generated in answers:
        assert generated["replayed"] == [*generated["borrower, sampling"][:2], "captured in one graph, not compiled"]


@pytest.mark.core
def test_split_norms_and_experts_run_kernels(answers):
    """Wrappers that transformers puts around them are no obstacle."""
    expected = modules_with_kernels(tiny_target("qwen3-moe"))
    assert {"model.layers.0.self_attn.q_norm", "model.layers.0.mlp.experts", "model.norm"} <= set(expected)
    assert [generated["modules with kernels"] for generated in answers] == [expected, expected]


@pytest.mark.core
def test_small_all_reduces_use_symmetric_memory(answers):
    """Those of rounds, of layers and of experts, but not those of prefill; the output is that of one process."""
    expected = {
        family: json.loads(json.dumps(generate_briefly(tiny_target(family)))) for family in ("llama", "qwen3-moe")
    }
    sums, flat, check = [3, 4, 32], [12, 32], [2048 // 4]
    for generated in answers:
        in_memory = generated["in memory"]
        assert {family: in_memory[family] for family in expected} == expected
        assert in_memory["llama, sums"] == [sums, check]
        assert in_memory["qwen3-moe, sums"] == [sums, flat], "memory is made once for the same processes"
        assert generated["sums in memory"] == [], "there is no such memory on a CPU"


@pytest.mark.core
def test_rounds_with_symmetric_memory_are_compiled_whole(answers):
    plain = generate(tiny_target("llama", num_layers=SHALLOW), None, max_new_tokens=COMPILED_TOKENS)[0]
    for generated in answers:
        assert generated["in memory, as on a GPU"] == [plain, "captured in one graph, compiled"]


@pytest.mark.core
@pytest.mark.parametrize(
    ("failing", "words"),
    [
        ("host", ["is split over hosts", "is split over hosts"]),
        ("allocate", ["another process failed to set that up", "OSError: no such device"]),
        ("check", ["another process failed to set that up", "OSError: no such device"]),
    ],
)
def test_ranks_fall_back_from_symmetric_memory_together(answers, failing, words):
    """Where one of them cannot have it; each logs that once."""
    for generated, reason in zip(answers, words, strict=True):
        found = generated[f"without memory, {failing}"]
        assert found["generated"] == generated["borrower, sampling"]
        assert found["sums"] == ([[2048 // 4]] if failing == "check" else [])
        assert len(found["logged"]) == 1 and reason in found["logged"][0] and "advice" not in found["logged"][0]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 4, 4096), torch.bfloat16, True),
        ((8, 4, 4096), torch.float32, False),
        ((8, 2, 4096), torch.float32, True),
        ((1, 4, 4096), torch.float16, False),
        ((1, 1, 8), torch.bfloat16, True),
        ((1, 1, 4), torch.bfloat16, False),
        ((0, 4096), torch.bfloat16, False),
    ],
)
def test_sizes_for_symmetric_memory(shape, dtype, expected):
    assert all_reduce.fits(shape, dtype) is expected


def check_bench(answers):
    """Both processes measured, of a target drawn in two parts, and rank 0 alone printed."""
    first, second = (generated["bench"] for generated in answers)
    assert second == {"status": 0, "printed": "", "wrote": False, "spread": second["spread"]}
    for answer in (first, second):  # embeddings are as large as the sum of the layers' outputs
        assert answer["spread"] == pytest.approx(NUM_LAYERS**0.5, rel=0.02)
    assert first["status"] == 0 and first["wrote"]
    assert first["printed"].splitlines()[0].startswith("batch  case") and "drift: " in first["printed"]
    figures = answers[0]["figures"]
    assert figures["environment"]["processes"] == 2
    cases = {case["name"].rpartition("/")[2]: case for case in figures["cases"]}
    assert set(cases) == {"dynamic", "engine", *BENCHED}
    assert [case["error"] for case in cases.values()] == [None] * len(cases)
    for name in BENCHED:
        case = cases[name]
        assert case["tokens"] == 2 * BENCHED_TOKENS and 1.0 < case["acceptance_length"] < 4.0
        assert case["bytes_per_round"] > cases["engine"]["bytes_per_round"]
    return cases


@pytest.mark.core
def test_bench(answers):
    cases = check_bench(answers)
    assert "on a device of type cpu" in cases["engine"]["engine"]


def test_bytes_add_up_to_those_of_one_process(answers):
    """Half of everything but the norms, of which every process has its own."""
    whole = round_bytes(tiny_target("llama"), None, 0, batch=3, length=10)
    norms = 4 * (NUM_LAYERS * 2 * 32 + 32)
    assert [2 * generated["bytes"] - whole for generated in answers] == [norms, norms]


@pytest.mark.parametrize(
    ("options", "processes", "words"),
    [
        (["--tensor-parallel"], 1, "this is the only one; expected several. Start it with torchrun"),
        ([], 2, "This is one of 2 processes, .* or --tensor-parallel"),
        (["--tensor-parallel"], 2, r"GGUF file target\.gguf, .*; expected a folder or Hub repository"),
        (
            ["--tensor-parallel", "--target", "folder", "--device", "meta"],
            2,
            "--device is 'meta', .* expected no --device",
        ),
    ],
)
def test_invalid_tensor_parallel_arguments(monkeypatch, capsys, options, processes, words):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert main(["bench", "--target", "target.gguf", *options]) == 1
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_gpu_and_two_generate_the_same(tmp_path):
    """In captured rounds, which hold the processes' collectives too."""
    answers = run_two_processes(tmp_path, "cuda")
    expected = generate_all(copy.deepcopy(tiny_target("llama")).to("cuda"))
    expected |= {family: generate_briefly(copy.deepcopy(tiny_target(family)).to("cuda")) for family in OTHER_FAMILIES}
    expected |= {f"{family}, experts apart": expected[family] for family in MIXTURES}
    expected = json.loads(json.dumps(expected))
    executions = {name: expected[name][2] for name in ("borrower, greedy", "p-eagle, sampling", "compiled, sampling")}
    assert executions == {
        "borrower, greedy": "captured in one graph, not compiled",
        "p-eagle, sampling": "captured in one graph, not compiled",
        "compiled, sampling": "captured in one graph, compiled",
    }
    for rank, generated in enumerate(answers):
        different = [name for name in expected if generated[name] != expected[name]]
        assert not different, f"process {rank} generated something else: {different}"
        assert [4, 4, 32] in generated["sums in memory"], "sums went through the process group"
        assert generated["seeds of hosts"] == answers[0]["seeds of hosts"]
    for case in check_bench(answers).values():
        assert case["name"] == "dynamic" or case["engine"].endswith("captured in one graph, not compiled")
