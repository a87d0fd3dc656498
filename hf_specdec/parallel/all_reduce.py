"""Sums over the GPUs of one host in memory that they all read: torch's symmetric memory.

A round of a split target adds up many small tensors, two a layer. Through a process group that takes a message and its
answer each time; here every GPU writes its part to memory of its own that the others may read, and adds up all parts.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from ..device_policy import policy_of
from ..errors import first_line
from ..patching.linear import PLAIN_WEIGHTS
from ..patching.patch import replaced, runs_engine
from .tensor_parallel import (
    Wrapper,
    find_differences,
    tensor_parallel_group,
    wrapper_of,
)

logger = logging.getLogger(__name__)

# Bytes that are summed in this way at most: 32 rows of 4096 numbers in bfloat16. What is longer, as in prefill, gains
# nothing, because every GPU reads all parts of all others.
MOST_BYTES = 256 * 1024

# What torch's operator adds up, and to how many bytes lengths must be a multiple for its widest loads.
DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16


def are_linked(device: torch.device, count: int) -> bool:
    """Whether NVLink connects `device` with all that this process sees, at least `count` with itself.

    Over PCIe, memory could be read, too, but GPUs would wait for each other by operations that it does not have.
    """
    from torch._C._distributed_c10d import _detect_dma_connectivity

    links = _detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    return len(links) >= count and all(
        links[device.index][other] > 0 for other in range(len(links)) if other != device.index
    )


@contextmanager
def _without_multicast() -> Iterator[None]:
    # Sums need none, and where hosts do not allow it, torch fails when it sets it up.
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def allocate(size: int, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    """`[size]` uint8 on `device` that all processes of `group`, which call this together, can read."""
    from torch.distributed import _symmetric_memory

    with _without_multicast(), torch.inference_mode(False):
        buffer = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(buffer, group)
    return buffer


class SymmetricMemoryBuffer:
    """Memory in which the processes of a group add up tensors.

    One piece is enough for sums that follow each other: torch's operator waits for the others before it reads, and ends
    when all have read. It adds the parts in the order of the ranks on all of them, so that sums are the same bit for
    bit.

    Args:
        group: whose processes make it together.
        device: of this one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group_name = group.group_name
        self._buffer = allocate(MOST_BYTES, device, group)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This process's part of the memory as a tensor of `shape`, to write the part of a sum to."""
        return self._buffer[: _num_bytes(shape, dtype)].view(dtype).view(shape)

    def total(self, buffer: torch.Tensor) -> torch.Tensor:
        """The sum of what all processes have written to their `room`."""
        return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name)

    def check(self, rank: int, count: int) -> None:
        """Raise `RuntimeError` unless sums of whole numbers come out right, one after the other."""
        buffer = self.buffer((MOST_BYTES // 4,), torch.float32)
        numbers = torch.arange(len(buffer), device=buffer.device) % 1000
        for power in range(3):
            expected = sum(numbers * other**power for other in range(count))
            if not torch.equal(self.total(buffer.copy_(numbers * rank**power)), expected.float()):
                raise RuntimeError("sums in symmetric memory are wrong")


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def fits(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether tensors of `shape` and `dtype` can be summed in a `PeerMemory`."""
    size = _num_bytes(shape, dtype)
    return dtype in DTYPES and 0 < size <= MOST_BYTES and size % _ALIGNMENT == 0


# By process group, and freed with it; None where there cannot be one.
_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, SymmetricMemoryBuffer | None] = weakref.WeakKeyDictionary()


def peer_memory(model: PreTrainedModel) -> SymmetricMemoryBuffer | None:
    """The memory of the processes that run `model`; None if there cannot be one.

    It is made when it is first asked for. All processes must ask, and all get the same answer.
    """
    group = tensor_parallel_group(model)
    if group is None or not policy_of(model.device).symmetric_memory:
        return None
    if group not in _memories:
        _memories[group] = _set_up(model, group)
    return _memories[group]


def _set_up(model: PreTrainedModel, group: dist.ProcessGroup) -> SymmetricMemoryBuffer | None:
    made: list[SymmetricMemoryBuffer] = []

    def look() -> None:
        if not are_linked(model.device, group.size()):
            raise RuntimeError("NVLink does not connect the devices that this process sees")

    # Where one process failed the others would wait for it in the next step.
    steps: tuple[Callable[[], Any], ...] = (
        look,
        lambda: made.append(SymmetricMemoryBuffer(group, model.device)),
        lambda: made[0].check(group.rank(), group.size()),
    )
    if find_differences(model, {"host": socket.gethostname()}):
        logger.info(f"{type(model).__name__} is split over hosts: sums of its parts go through the process group.")
        return None
    for step in steps:
        failure = _failure_of(step)
        if find_differences(model, {"has failed": failure is not None}) or failure is not None:
            logger.warning(
                f"Sums of the parts of {type(model).__name__} go through the process group, which takes longer than "
                f"memory that its devices share: {failure or 'another process failed to set that up'}."
            )
            return None
    return made[0]


def _failure_of(step: Callable[[], Any]) -> str | None:
    try:
        step()
    except Exception as error:  # whatever torch, drivers and hosts may raise
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _memory_of(group_name: str) -> SymmetricMemoryBuffer:
    return _memories[_resolve_process_group(group_name)]


# Compilers look no further than these, and the memory is none of their business: what is returned is new.
@torch.library.custom_op("hf_specdec::sum_over_peers", mutates_args=(), schema="(Tensor part, str group) -> Tensor")
def _sum_over_peers(part: torch.Tensor, group: str) -> torch.Tensor:
    memory = _memory_of(group)
    return memory.total(memory.buffer(part.shape, part.dtype).copy_(part))


@_sum_over_peers.register_fake
def _(part: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "hf_specdec::linear_over_peers", mutates_args=(), schema="(Tensor input, Tensor weight, str group) -> Tensor"
)
def _linear_over_peers(input: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    memory = _memory_of(group)
    buffer = memory.buffer((*input.shape[:-1], len(weight)), input.dtype)
    torch.mm(input.reshape(-1, input.shape[-1]), weight.t(), out=buffer.view(-1, len(weight)))
    return memory.total(buffer)


@_linear_over_peers.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))


def _row_wise(layer: nn.Linear, wrapper: Wrapper, group_name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """`forward` of a layer that has columns of a weight: the product goes straight to the memory that is summed."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        if not runs_engine() or not fits((*inputs.shape[:-1], len(weight)), inputs.dtype):
            return wrapper.forward(inputs)
        total = torch.ops.hf_specdec.linear_over_peers(inputs, weight, group_name)
        return total if bias is None else total + bias

    return forward


def _experts(module: nn.Module, wrapper: Wrapper, group_name: str) -> Callable[..., torch.Tensor]:
    """`forward` of experts of which every process has a part, as transformers wraps them but for the sum."""
    style, mesh = wrapper.style, wrapper.mesh

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not runs_engine():
            return wrapper.forward(*args, **kwargs)
        args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with style.context_around_forward(module, mesh):
            part = wrapper.wrapped(*args, **kwargs)
        if not fits(part.shape, part.dtype):
            return style.transform_output_post_forward(module, part, mesh)
        return torch.ops.hf_specdec.sum_over_peers(part, group_name)

    return forward


def _summing_forward(module: nn.Module, group_name: str) -> Callable[..., torch.Tensor] | None:
    """What computes as `module` does now, with small sums in memory; None for modules that sum nothing or otherwise."""
    from transformers.distributed.tensor_parallel import MoeExpertsParallel, RowwiseParallel

    wrapper = wrapper_of(module)
    if wrapper is None:
        return None
    style = wrapper.style
    if type(style) is RowwiseParallel and type(module) is nn.Linear and type(module.weight) in PLAIN_WEIGHTS:
        is_plain = style.input_layouts == Shard(-1) and style.output_layouts == Replicate() and style.use_local_output
        return _row_wise(module, wrapper, group_name) if is_plain else None
    if type(style) is MoeExpertsParallel and any(
        isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)
        for parameter in module.parameters()
    ):
        return _experts(module, wrapper, group_name)
    return None


def symmetric_memory_all_reduce(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Context in which parts of `model` that its processes have are summed in their `peer_memory`, if they are small.

    To be entered by all of them, within `local_products`, and without gradients. Sums that are not small, or of other
    kinds than row-wise linear layers and experts have, go through the process group as they do outside.
    """
    forwards: list[tuple[nn.Module, Callable]] = []
    if peer_memory(model) is not None:
        group_name = tensor_parallel_group(model).group_name
        summing = ((module, _summing_forward(module, group_name)) for module in model.modules())
        forwards = [(module, forward) for module, forward in summing if forward is not None]
    return replaced("forward", forwards)
