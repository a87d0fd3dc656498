"""`hf-specdec inspect`: what a drafter checkpoint is, how it is interpreted, and whether it fits a target."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ..auto import AutoDrafter, NormalizedCheckpoint, find_checkpoint, read_checkpoint
from ..checkpoints.checkpoint import Checkpoint, check_folder, config_errors
from ..config import DraftLayersConfig
from ..drafters.target_checks import check_decoder
from ..loading import usable_device
from ..prompt_sources import encode
from .self_check import self_check

PROMPT = "Explain in a few sentences why the sky is blue, and then write a short poem about it."
# Titles of what families report (`DrafterConfig.report`); other names are their own titles.
_TITLES = {"aux_hidden_state_layer_ids": "aux layers", "model_type": "model", "rope_parameters": "RoPE"}
_SHOWN_ELSEWHERE = ("chaining", "target", "self_check")


def add_inspect(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="report what a drafter checkpoint is, how it is interpreted, and whether it fits a target",
        description=__doc__,
    )
    parser.add_argument("repo", help="folder or Hub repository of the drafter")
    parser.add_argument("--target", help="folder or Hub repository of the target; its config.json is enough")
    parser.add_argument("--revision", help="branch, tag or commit of the drafter")
    parser.add_argument("--subfolder", default="", help="folder of the drafter inside the repository")
    parser.add_argument("--token", help="Hub token")
    parser.add_argument(
        "--self-check",
        action="store_true",
        help="load both models and score every interpretation of the checkpoint on one prompt",
    )
    parser.add_argument("--device", help="device that the self-check runs on; by default a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> None:
    """Print the report; raises `OSError` or `ValueError` for a checkpoint that cannot be read or self-checked."""
    if arguments.self_check and arguments.target is None:
        raise ValueError("--self-check compares the drafter with its target; pass --target too.")
    if arguments.revision is not None and Path(arguments.repo).is_dir():
        raise ValueError(f"--revision is {arguments.revision!r}, but {arguments.repo} is a folder, which has none.")
    target = None
    if arguments.target is not None:
        check_folder(arguments.target)
        target = AutoConfig.from_pretrained(arguments.target, token=arguments.token)
    located = {name: getattr(arguments, name) for name in ("revision", "subfolder", "token")}
    checkpoint = find_checkpoint(arguments.repo, target, **located)
    found = read_checkpoint(checkpoint, target)
    if arguments.self_check and not isinstance(found.config, DraftLayersConfig):
        raise ValueError(
            f"{checkpoint.name} is a drafter of the family {found.config.family}, but --self-check scores EAGLE-3, "
            "P-EAGLE, DFlash and its kinds (DFlash-2, DSpark, DSpine, Domino) only. Drop --self-check."
        )
    report = describe(checkpoint, found)
    if target is not None:
        report["target"] = describe_fit(found, target, arguments.target)
    if arguments.self_check:
        report["self_check"] = run_self_check(arguments, located)
    print(json.dumps(report, indent=2) if arguments.json else render(report))


def describe(checkpoint: Checkpoint, found: NormalizedCheckpoint) -> dict[str, Any]:
    config = found.config
    stated = ("family", "dialect", "num_assistant_tokens", "parallel_drafting", "mask_token_id")
    return {
        "checkpoint": checkpoint.name,
        **{name: getattr(config, name) for name in (*stated, "vocab_size", "draft_vocab_size")},
        "trained_for": config.target_name_or_path,
        "decisions": [asdict(one) for one in found.decisions],
        "parameters": sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        "stored_layers": config.stored_layers or {},
        "quantised": _count_forms(checkpoint, found),
        "tensors": {
            name: {"shape": list(tensor.shape), "dtype": tensor.dtype} for name, tensor in checkpoint.tensors.items()
        },
        **config.report(),
    }


def _count_forms(checkpoint: Checkpoint, found: NormalizedCheckpoint) -> Counter[str]:
    """How many linear layers stay quantised, by their form in words."""
    names, forms = found.family.tensor_names(checkpoint, found.config), Counter()
    for name, (kind, rows, group) in (found.config.stored_layers or {}).items():
        size_out, size_in = checkpoint.tensors[names[f"{name}.weight"]].shape
        blocks = {(1, group): f"group of {group}", (1, size_in): "row", (size_out, size_in): "tensor"}
        forms[f"{kind}, a scale for each {blocks.get((rows, group), f'block of {rows} x {group}')}"] += 1
    return forms


def describe_fit(found: NormalizedCheckpoint, target: PreTrainedConfig, name: str) -> dict[str, Any]:
    report: dict[str, Any] = {"name": name, "model_type": target.model_type, "fits": True, "reason": None}
    config, num_layers = found.config, getattr(target.get_text_config(), "num_hidden_layers", 0)
    try:
        with config_errors(name):
            check_decoder(target, name)
            layer_ids = config.check_fit(target, num_layers, config.name_or_path)
    except ValueError as error:
        return report | {"fits": False, "reason": str(error)}
    return report if layer_ids is None else report | {"aux_hidden_state_layer_ids": layer_ids}


def run_self_check(arguments: argparse.Namespace, located: dict[str, Any]) -> dict[str, Any]:
    """Load the drafter and the target that `arguments` name, and score the interpretations; returns JSON values."""
    device = usable_device(arguments.device)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype="auto", token=arguments.token)
    target = target.to(device).eval()
    drafter = AutoDrafter.from_pretrained(arguments.repo, target, **located)
    result = self_check(drafter, target, _prompt(arguments.target, arguments.token, target))
    scores = [
        {"interpretation": score.interpretation, "agreement": list(score.agreement), "mean": score.mean}
        for score in result.scores
    ]
    return {
        "current": result.current,
        "best": result.best.interpretation,
        "conclusive": result.conclusive,
        "conclusion": result.conclusion,
        "scores": scores,
    }


def _prompt(name: str, token: str | None, target: PreTrainedModel) -> torch.Tensor:
    """`[1, n]` token ids: `PROMPT` in the target's chat format if it has one; without a tokenizer, any 16 tokens."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, token=token)
    except (OSError, ValueError):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(target.config.get_text_config().vocab_size, (1, 16), generator=generator)
    return encode(tokenizer, [PROMPT], return_tensors="pt").input_ids


def render(report: dict[str, Any]) -> str:
    drafting = "token by token"
    if report["parallel_drafting"]:
        drafting = f"all tokens in one pass, the mask token {report['mask_token_id']} where there is none yet"
    lines = [
        f"checkpoint   {report['checkpoint']}",
        f"family       {report['family']} ({report['dialect']})",
        f"trained for  {report['trained_for'] or 'not stated'}",
        f"K            {report['num_assistant_tokens']} draft tokens a round",
        f"drafting     {drafting}",
        f"vocabulary   {report['draft_vocab_size']} of the target's {report['vocab_size']} tokens are drafted",
    ]
    names = list(report)
    of_family = [name for name in names[names.index("tensors") + 1 :] if name not in _SHOWN_ELSEWHERE]
    lines += [f"{_TITLES.get(name, name):<12} {_render_value(name, report)}" for name in of_family]
    for form, count in report["quantised"].items():
        lines.append(f"quantised    {count} linear layers, as in the file: {form}")
    lines.append(f"tensors      {len(report['tensors'])}, {report['parameters']:,} values")
    lines += [f"  {name}  {tensor['dtype']} {tensor['shape']}" for name, tensor in sorted(report["tensors"].items())]
    lines.append("decisions    " + ("" if report["decisions"] else "none: the checkpoint is in normal form"))
    for one in report["decisions"]:
        lines.append(f"  {one['name']} = {one['value']}{'  (in doubt)' if one['doubtful'] else ''}: {one['rule']}")
    if "target" in report:
        target = report["target"]
        answer = "fits" if target["fits"] else f"does not fit: {target['reason']}"
        lines.append(f"target       {target['name']} ({target['model_type']}): {answer}")
    if "self_check" in report:
        lines += _render_self_check(report["self_check"])
    return "\n".join(lines)


def _render_value(name: str, report: dict[str, Any]) -> str:
    value = report[name]
    if name == "modules":
        return f"{value}, caches chained by {report['chaining']}"
    if name == "aux_hidden_state_layer_ids":
        return str(value or "decided with --target")
    if name == "rope_parameters" or not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {one}" for key, one in value.items())


def _render_self_check(result: dict[str, Any]) -> list[str]:
    lines = ["self-check   agreement with the target's first choice, mean | by draft step"]
    for score in result["scores"]:
        steps = " ".join(f"{value:.3f}" for value in score["agreement"])
        mark = "*" if score["interpretation"] == result["current"] else " "
        lines.append(f" {mark} {score['mean']:.3f} | {steps}  {score['interpretation']}")
    lines.append(f"  * the current interpretation; {result['conclusion']}")
    return lines
