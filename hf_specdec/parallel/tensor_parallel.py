"""Processes that run one model together: tensor parallelism."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ..patching.linear import PLAIN_WEIGHTS
from ..patching.patch import ABSENT, replaced

if TYPE_CHECKING:
    from transformers.distributed.tensor_parallel import TensorParallelLayer


def num_processes() -> int:
    """How many processes torchrun, or accelerate, has started together with this one; 1 if nobody has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process speaks for those that were started together with it."""
    return int(os.environ.get("RANK", "0")) == 0


def local_rank() -> int:
    """Number of this process among those on its host, and of the device that it has there."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of `tensor`, sharing its memory; `tensor` itself if that is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_parallel_group(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The processes over which transformers has split the weights of `model` (`tp_plan`); None if they are all here."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    mesh = model._device_mesh
    return (mesh if mesh.ndim == 1 else mesh["tp"]).get_group()


def from_first_rank(tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """What the first of the processes that run `model` has for `tensor`, on its device; of the same shape on all."""
    group = tensor_parallel_group(model)
    if group is None:
        return tensor
    shared = tensor.to(model.device, copy=True)
    dist.broadcast(shared, group=group, group_src=0)
    return shared.to(tensor.device)


class Wrapper(NamedTuple):
    """What transformers has wrapped around a module of a split model.

    Attributes:
        forward: what is called now.
        style: how the module is split.
        mesh: over what.
        wrapped: the module's own `forward`.
    """

    forward: Callable
    style: TensorParallelLayer
    mesh: DeviceMesh
    wrapped: Callable


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """What transformers has wrapped around `module`; None if there is nothing, or something that others wrapped."""
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    forward = vars(module).get("forward")
    if not inspect.isfunction(forward):
        return None
    inside = inspect.getclosurevars(forward).nonlocals
    if not isinstance(inside.get("self"), TensorParallelLayer) or not {"mesh", "original_forward"} <= inside.keys():
        return None
    return Wrapper(forward, inside["self"], inside["mesh"], inside["original_forward"])


def _only_splits(module: nn.Module) -> bool:
    """Whether what is wrapped around `module` does nothing once its weights are local: it has rows of a weight."""
    from transformers.distributed.tensor_parallel import ColwiseParallel

    wrapper = wrapper_of(module)
    if wrapper is None or type(wrapper.style) is not ColwiseParallel or type(module) is not nn.Linear:
        return False
    style = wrapper.style
    is_plain = all(type(parameter) in PLAIN_WEIGHTS for parameter in module.parameters(recurse=False))
    return is_plain and (style.input_layouts, style.output_layouts) == (Replicate(), Shard(-1))


@contextmanager
def local_linears(model: PreTrainedModel) -> Iterator[None]:
    """Context in which split linear layers of `model` have this process's part of their weights as plain tensors.

    transformers computes with these parts where no gradients are asked for, but takes them out of the `DTensor`s at
    every call of a layer. That is work for the host, and more for a compiler, which has to follow it layer by layer.
    Layers whose outputs stay split are then ordinary ones, with nothing wrapped around them.
    """
    split: list[tuple[nn.Linear, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            if not isinstance(module, nn.Linear):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    split.append((module, name, parameter))
                    # Not a view of it, as `to_local` gives: where it is moved, `parameter` must follow.
                    module._parameters[name] = parameter._local_tensor
        with replaced("forward", [(module, ABSENT) for module in model.modules() if _only_splits(module)]):
            yield
    finally:
        for module, name, parameter in split:
            module._parameters[name] = parameter


def find_differences(model: PreTrainedModel, values: dict[str, Any]) -> list[str]:
    """Names of `values` that are not the same on all processes that run `model`; the answer is. One small collective.

    Args:
        model: the target.
        values: the same names on all processes; tensors, or what has a `repr` that tells it.
    """
    group = tensor_parallel_group(model)
    if group is None:
        return []
    digests = torch.tensor([_digest(value) for value in values.values()], device=model.device)
    gathered = [torch.empty_like(digests) for _ in range(group.size())]
    dist.all_gather(gathered, digests, group=group)
    differs = (torch.stack(gathered) != gathered[0]).any(dim=0).tolist()
    return [name for name, differ in zip(values, differs, strict=True) if differ]


def check_same_call(model: PreTrainedModel, criteria: StoppingCriteriaList, values: dict[str, Any]) -> None:
    """Raise `ValueError` unless all processes that run `model` were asked for the same; otherwise they would hang.

    Args:
        model: the target, split over processes.
        criteria: of the call.
        values: what makes the call, by name; see `find_differences`.
    """
    if any(isinstance(rule, MaxTimeCriteria) for rule in criteria):
        raise ValueError(
            f"max_time is set, but {type(model).__name__} is split over processes (tensor parallel) whose clocks "
            "differ, so that they would stop at different tokens; expected a limit on tokens. Use max_new_tokens."
        )
    different = find_differences(model, values)
    if different:
        raise ValueError(
            f"The processes that {type(model).__name__} is split over (tensor parallel) were called with different "
            f"{', '.join(different)}; expected the same call on every one of them."
        )


def check_same_tokens(model: PreTrainedModel, sequences: torch.Tensor) -> None:
    """Raise `RuntimeError` unless all processes that run `model` generated the same `sequences`."""
    if find_differences(model, {"tokens": sequences}):
        raise RuntimeError(
            f"The processes that {type(model).__name__} is split over (tensor parallel) generated different tokens, so "
            "that none of them can be trusted. Logits processors and stopping criteria must give the same answer on "
            "every process; if there are none of your own, check that all processes run the same versions and devices."
        )


def _digest(value: Any) -> int:
    content = value.cpu().numpy().tobytes() + repr(tuple(value.shape)).encode() if torch.is_tensor(value) else b""
    return int.from_bytes(hashlib.sha256(content or repr(value).encode()).digest()[:8], "little", signed=True)
