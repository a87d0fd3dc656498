"""`hf-specdec doctor`: what is installed, which parts of transformers are found, and which engine a target gets.

It does not import anything that needs these parts, so that it runs where the package itself does not.
"""

from __future__ import annotations

import argparse
import importlib
import platform

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .. import __version__
from ..errors import first_line
from ..host import parts as host_parts
from ..host.parts import TESTED, installed_version, is_tested, missing, why_broken

_PACKAGES = ("torch", "transformers", "triton", "accelerate", "safetensors", "huggingface-hub")
_NO_TRITON = "triton is not installed; expected it beside a GPU: pip install triton"


def add_doctor(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="show what is installed, whether this transformers has what is needed, and which engine a target gets",
        description="Exit status 1 if the static engine cannot run: here, or for the target.",
    )
    parser.add_argument("target", nargs="?", help="folder or Hub repository of a target; its config.json is enough")
    parser.add_argument(
        "--load", action="store_true", help="load the target's weights, and compare a few tokens with plain generate()"
    )
    parser.add_argument("--parts", action="store_true", help="print the table of parts of transformers as Markdown")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the report. Returns the exit status: 1 if the static engine cannot run, else 0."""
    if arguments.parts:
        print(parts_table())
        return 0
    lacks_triton = torch.cuda.is_available() and installed_version("triton") is None
    obstacles = [one for one in (why_broken(), _NO_TRITON if lacks_triton else None) if one is not None]
    print("\n".join(_describe_installation()))
    for obstacle in obstacles:
        print(f"the static engine cannot run: {obstacle}")
    if arguments.target is None or why_broken() is not None:
        return bool(obstacles)
    kind, reason = _why_not_target(arguments.target, arguments.load)
    engine = "static" if reason is None else "stock"
    print(f"target            {kind}: {engine} engine{f', since {reason}' if reason else ''}")
    if reason is None and not arguments.load:
        print("                  its first call compares a few tokens with plain generate(); --load does so now")
    return bool(obstacles) or reason is not None


def _describe_installation() -> list[str]:
    lines = [f"hf_specdec        {__version__}", f"python            {platform.python_version()}"]
    for package in _PACKAGES:
        note = "" if package != "transformers" else f" (tested with {TESTED[0]} to {TESTED[1]})"
        note += ", newer than tested" if package == "transformers" and not is_tested() else ""
        lines.append(f"{package:<17} {installed_version(package) or 'not installed'}{note}")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    lines.append(f"GPU               {', '.join(gpus) or 'none: rounds run on the CPU, without CUDA graphs'}")
    if gpus:
        lines.append(f"cuda.bindings     {_describe_module('cuda.bindings', 'memory of rows follows their texts')}")
    lines.append(f"server            {_describe_module('fastapi', 'hf-specdec serve')}")
    lost = [one for one in host_parts.PARTS if not one.is_found()]
    lines.append(f"transformers      {len(host_parts.PARTS) - len(lost)} of {len(host_parts.PARTS)} parts found")
    for one in lost:
        lines.append(f"                  {one} ({one.why}){', nothing runs' if one in missing() else ''}")
    return lines


def _describe_module(name: str, purpose: str) -> str:
    try:
        importlib.import_module(name)
    except ImportError:
        package = {"cuda.bindings": "cuda-bindings", "fastapi": "'transformers[serving]'"}[name]
        return f"not installed: pip install {package} for {purpose}"
    return f"found, for {purpose}"


def _why_not_target(name: str, is_loaded: bool) -> tuple[str, str | None]:
    """The class of the target `name`, and the reason why the static engine does not run it; None if it does."""
    from ..checkpoints.checkpoint import check_folder
    from ..drafters.target_checks import check_decoder
    from ..hosting.equivalence import why_not_equivalent
    from ..loading import load_target, usable_device
    from ..patching.support import why_not_supported

    check_folder(name)
    if is_loaded:
        device = usable_device(None)
        target = load_target(name, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        check_decoder(target.config, name)
        return type(target).__name__, why_not_supported(target) or why_not_equivalent(target, "static")
    try:
        with torch.device("meta"):
            target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    except Exception as error:  # a class may raise anything
        raise ValueError(
            f"transformers makes no causal language model of {name} ({type(error).__name__}: {first_line(error)}); "
            "expected a decoder-only target."
        ) from error
    check_decoder(target.config, name)
    return type(target).__name__, why_not_supported(target)


def parts_table() -> str:
    """The table of docs/transformers.md."""
    lines = ["| part of transformers | why | versions |", "|---|---|---|"]
    for part in sorted(host_parts.PARTS, key=lambda one: (one.where, one.names)):
        names = ", ".join(f"`{name}`" for name in part.names) or "the module"
        lines.append(f"| `{part.where.replace(':', '.')}`: {names} | {part.why} | {part.since} |")
    return "\n".join(lines)
