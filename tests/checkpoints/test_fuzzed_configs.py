"""Invalid values in the files of a checkpoint: it loads, or there is a one-line error, quickly and in little memory."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import blocks
import pard2_reference
import pytest
import torch
from case_counts import cases
from dialects import DIALECTS, PEAGLE, PEAGLE_DIALECTS, Spec, make_weights, tiny_target, write, write_draft_model
from mtp import publish
from safetensors.torch import load_file, save_file

from hf_specdec import AutoDrafter

SPEC = Spec()
NONSENSE = (-1, 0, 2**40, 10**30, 0.5, float("nan"), float("inf"), "x", [], [None], [10**12], {"x": 1}, None, True)
# Of the processor, whatever else it does meanwhile.
SECONDS = 2.0
BYTES = 2**30


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float32)


def paths(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field of a config.json, inside objects too."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield (*path, key)
            yield from paths(value, (*path, key))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return config | {key: changed(config[key], tuple(rest), value) if rest else value}


def check_loads_or_says_why(folder: Path, target: Any, what: Any) -> str | None:
    """What is wrong with how a checkpoint loads, or is refused; None if nothing is."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    problem = None
    try:
        AutoDrafter.from_pretrained(folder, target)
    except (ValueError, OSError, TypeError) as error:
        message = str(error)
        if "\n" in message or not message:
            problem = f"{type(error).__name__}: {message!r}"
    except BaseException as error:  # The kinds of errors that are promised are those above.
        problem = f"{type(error).__name__}: {error!r}"
    seconds = time.process_time() - start
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if seconds > SECONDS:
        problem = f"{seconds:.1f} s; {problem}"
    if grown > BYTES:
        problem = f"{grown / 2**20:.0f} MiB; {problem}"
    return None if problem is None else f"{what}: {problem}"


def write_eagle3(dialect: str) -> Callable[[Path, Any], Path]:
    spec = Spec(norm_before_fc=True)
    return lambda folder, target: write(dialect, folder, spec, make_weights(spec))


def write_peagle(dialect: str) -> Callable[[Path, Any], Path]:
    return lambda folder, target: write(dialect, folder, PEAGLE, make_weights(PEAGLE))


def write_blocks(layout: str) -> Callable[[Path, Any], Path]:
    spec = blocks.LAYOUTS[layout][0]
    return lambda folder, target: blocks.write(layout, folder, spec, blocks.make_weights(spec))


def write_own(make: Callable[[Path, Any], Path]) -> Callable[[Path, Any], Path]:
    """The normal form that a loaded drafter saves."""

    def save(folder: Path, target: Any) -> Path:
        AutoDrafter.from_pretrained(make(folder / "published", target), target).save_pretrained(folder / "own")
        return folder / "own"

    return save


BLOCK_LAYOUTS = ("z-lab", "z-lab-2", "speculators", "deepspec", "specforge-domino")
CHECKPOINTS: dict[str, Callable[[Path, Any], Path]] = {
    **{dialect: write_eagle3(dialect) for dialect in DIALECTS if dialect != "safeailab-bin"},
    **{dialect: write_peagle(dialect) for dialect in PEAGLE_DIALECTS},
    "own eagle-3": write_own(write_eagle3("speculators")),
    "own p-eagle": write_own(write_peagle("amazon")),
    **{f"blocks of {layout}": write_blocks(layout) for layout in BLOCK_LAYOUTS},
    "own dspark": write_own(write_blocks("specforge")),
    "draft model": lambda folder, target: write_draft_model(folder),
    "pard": lambda folder, target: write_draft_model(folder, pard_token=7),
    "pard2": lambda folder, target: pard2_reference.write(folder),
}


def fields_that_fail(folder: Path, target: Any, share: int, first: int) -> list[str]:
    """What goes wrong with one in `share` values of every field, other ones in each, of which `first` is the number."""
    config = json.loads((folder / "config.json").read_text())
    found = []
    for number, path in enumerate(paths(config), first):
        for value in NONSENSE[number % share :: share]:
            (folder / "config.json").write_text(json.dumps(changed(config, path, value)))
            found.append(check_loads_or_says_why(folder, target, f"{'.'.join(path)} = {value!r}"))
    return [problem for problem in found if problem is not None]


# All values of all fields take minutes: HF_SPECDEC_ALL_NONSENSE=1 runs them.
SHARE = 1 if os.environ.get("HF_SPECDEC_ALL_NONSENSE") else len(NONSENSE)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_invalid_values_of_every_config_field(name, target, tmp_path):
    folder = CHECKPOINTS[name](tmp_path / "checkpoint", target)
    assert fields_that_fail(folder, target, SHARE, first=list(CHECKPOINTS).index(name)) == []


@pytest.mark.parametrize(
    ("is_own", "family"),
    cases(
        every := list(product([False, True], ["deepseek-v3", "step-3.5", "qwen3.5-moe", "speculators"])),
        [one for one in every if not one[0] or one[1] == "deepseek-v3"],  # the normal form is the same for all
    ),
)
def test_invalid_values_of_every_field_of_mtp_configs(family, is_own, tmp_path):
    at = publish(family, tmp_path / "checkpoint")
    folder = at.folder
    if is_own:
        AutoDrafter.from_pretrained(folder, at.target).save_pretrained(tmp_path / "own")
        folder = tmp_path / "own"
    assert fields_that_fail(folder, at.target, SHARE, first=len(family)) == []


# ---- files


def refused(folder: Path, target: Any, *parts: str, error: type[Exception] = ValueError, **options: Any) -> None:
    """Loading must fail, at once and in one line, with all of `parts` in it."""
    start = time.process_time()
    with pytest.raises(error) as caught:
        AutoDrafter.from_pretrained(folder, target, **options)
    assert time.process_time() - start < SECONDS
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def rewrite(file: Path, **changes: Any) -> None:
    """Change a JSON file; `...` removes a key."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize("kind", ["eagle-3", "draft model"])
def test_shards_outside_the_folder(kind, target, tmp_path):
    """They exist, and hold what is asked for, so that only the rule stops them."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    if kind == "eagle-3":
        write("speculators", inside, SPEC, make_weights(SPEC), max_shard_size="20KB")
    else:
        write_draft_model(inside, max_shard_size="40KB")
    index = inside / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = next(iter(places))
    outside.mkdir()
    (outside / "moved.safetensors").write_bytes((inside / places[name]).read_bytes())
    for shard in (
        "../outside/moved.safetensors",
        str(outside / "moved.safetensors"),
        "x/../../outside/moved.safetensors",
    ):
        rewrite(index, weight_map={key: shard if at == places[name] else at for key, at in places.items()})
        refused(inside, target, str(index), f"in the shard {shard!r}", "a file in the same folder")
    for shard in (5, None, "", ["model.safetensors"], "C:\\moved.safetensors", "\\\\host\\moved.safetensors"):
        rewrite(index, weight_map=places | {name: shard})
        refused(inside, target, str(index), f"in the shard {shard!r}")


def test_subfolder_outside_the_folder(target, tmp_path):
    write("speculators", tmp_path / "a", SPEC, make_weights(SPEC))
    (tmp_path / "b" / "inside").mkdir(parents=True)
    for subfolder in ("../a", str(tmp_path / "a"), "inside/../../a", None):
        refused(tmp_path / "b", target, f"subfolder is {subfolder!r}; expected a folder inside", subfolder=subfolder)
    assert AutoDrafter.from_pretrained(tmp_path, target, subfolder="a").is_bound


@pytest.mark.parametrize("kind", ["eagle-3", "draft model"])
def test_damaged_index(kind, target, tmp_path):
    if kind == "eagle-3":
        write("speculators", tmp_path, SPEC, make_weights(SPEC), max_shard_size="20KB")
    else:
        write_draft_model(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    for changes, part in (
        ({"metadata": ...}, 'no object "metadata"'),
        ({"metadata": []}, 'no object "metadata"'),
        ({"weight_map": []}, "a weight_map that is a list; expected an object"),
        ({"weight_map": "model.safetensors"}, "a weight_map that is a str"),
    ):
        index.write_text(whole)
        rewrite(index, **changes)
        refused(tmp_path, target, str(index), part)
    for weight_map in ({}, ...):
        index.write_text(whole)
        rewrite(index, weight_map=weight_map)
        refused(tmp_path, target, "of which are missing: all", error=OSError)
    index.write_text(whole)
    rewrite(index, metadata={})
    assert AutoDrafter.from_pretrained(tmp_path, target).is_bound


@pytest.mark.parametrize("kind", ["eagle-3", "draft model"])
def test_safetensors_without_metadata(kind, target, tmp_path):
    """As other tools write them; transformers loads such files."""
    if kind == "eagle-3":
        write("speculators", tmp_path, SPEC, make_weights(SPEC))
    else:
        write_draft_model(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors")
    assert AutoDrafter.from_pretrained(tmp_path, target).is_bound


def test_deep_json(target, tmp_path):
    write("speculators", tmp_path, SPEC, make_weights(SPEC))
    whole = (tmp_path / "config.json").read_text()
    for depth, part in ((40, "more than 32 levels"), (100_000, "not a JSON file")):
        for one in ('{"x": ', "["):
            deep = one * depth + "1" + {"[": "]"}.get(one, "}") * depth
            (tmp_path / "config.json").write_text(whole.rstrip()[:-1] + f', "more": {deep}}}')
            refused(tmp_path, target, part)


@pytest.mark.core_for(kind=["draft model"])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 in its config.json; expected at most 1024"),
        ({"head_dim": 2**40}, "head_dim 1099511627776 in its config.json; expected at most"),
        ({"num_attention_heads": 0}, "describes no model that can be built (ZeroDivisionError"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan in its config.json; expected a number"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor 2 in its config.json; expected 0 to 1"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 2**40}}},
            "partial_rotary_factor 1099511627776 in its config.json; expected 0 to 1",
        ),
        ({"torch_dtype": "float7", "hidden_size": "x"}, "describes no model that can be built"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["safeailab", "draft model"])
def test_values_no_model_can_have(kind, changes, part, target, tmp_path):
    changes = changes | ({"head_dim": ...} if "num_attention_heads" in changes else {})
    if kind == "draft model":
        write_draft_model(tmp_path, **changes)
    else:
        write(kind, tmp_path, SPEC, make_weights(SPEC), **changes)
    refused(tmp_path, target, str(tmp_path), part)


def test_unknown_dtype(target, tmp_path):
    """The target's is used, whatever is in config.json; for a draft model transformers reads it first."""
    folder = write("safeailab", tmp_path / "a", SPEC, make_weights(SPEC), torch_dtype="float7")
    assert AutoDrafter.from_pretrained(folder, target).dtype == target.dtype
    refused(write_draft_model(tmp_path / "b", dtype="float7"), target, "float7")


def test_num_assistant_tokens_has_an_upper_bound(target, tmp_path):
    folder = write("speculators", tmp_path / "a", SPEC, make_weights(SPEC))
    AutoDrafter.from_pretrained(folder, target, num_assistant_tokens=1024).save_pretrained(tmp_path / "b")
    refused(folder, target, "num_assistant_tokens is 1000000000000", "at most 1024", num_assistant_tokens=10**12)
    rewrite(tmp_path / "b" / "config.json", num_assistant_tokens=10**12)
    refused(tmp_path / "b", target, "num_assistant_tokens is 1000000000000", "at most 1024")
    methods = [{"proposal_type": "greedy", "speculative_tokens": 10**12}]
    rewrite(folder / "config.json", speculators_config={"proposal_methods": methods})
    refused(folder, target, "num_assistant_tokens is 1000000000000", "at most 1024")


def test_flags_must_be_booleans(target, tmp_path):
    """As a string, "false" would be true."""
    for number, name in enumerate(("norm_before_residual", "norm_output")):
        folder = write("speculators", tmp_path / str(number), SPEC, make_weights(SPEC), **{name: "false"})
        refused(folder, target, f"{name} 'false' in its config.json; expected true or false")
    folder = write("automodel", tmp_path / "p", PEAGLE, make_weights(PEAGLE), parallel_drafting="false")
    refused(folder, target, "parallel_drafting 'false' in its config.json; expected true or false")


def test_config_part_that_is_no_object(target, tmp_path):
    """Taken for absent, it would leave the layer ids to a default."""
    folder = write("specforge", tmp_path, SPEC, make_weights(SPEC), eagle_config="x")
    refused(folder, target, "eagle_config 'x' in its config.json; expected an object")
