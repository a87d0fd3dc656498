"""Small all-reduces of a tensor-parallel target through torch's symmetric memory.

A round of such a target all-reduces many small tensors, two a layer, whose time through NCCL is latency. With symmetric
memory every GPU of a host writes its addend to a buffer that the others can read, and sums the addends of all ranks.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from ..device_policy import policy_of
from ..errors import first_line
from ..host.serving import MoeExpertsParallel, RowwiseParallel
from ..modules.hidden_states import modules_of
from ..modules.patch import Replacements, runs_engine
from ..modules.weights import PLAIN_WEIGHTS
from .tensor_parallel import Wrapper, find_differences, tensor_parallel_group, wrapper_of

logger = logging.getLogger(__name__)

# Largest all-reduce in symmetric memory: 32 rows of 4096 numbers in bfloat16. Larger ones, as in prefill, are not
# faster than NCCL's, since every GPU reads the whole addends of all others.
MAX_BYTES = 256 * 1024

# Dtypes of torch's operator; sizes must be a multiple of this number of bytes for its widest loads.
DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16


def has_nvlink(device: torch.device, count: int) -> bool:
    """Whether NVLink connects `device` with all devices that this process sees, of which there must be `count`.

    PCIe does not suffice: it lacks the atomic operations with which GPUs wait for each other.
    """
    from torch._C._distributed_c10d import _detect_dma_connectivity

    links = _detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    return len(links) >= count and all(
        links[device.index][other] > 0 for other in range(len(links)) if other != device.index
    )


@contextmanager
def _without_multicast() -> Iterator[None]:
    # Multicast is not needed here, and torch fails to set it up on hosts that do not allow it.
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
    """A buffer `[size]` uint8 on `device` that all ranks of `group` can read. All ranks must call this together."""
    from torch.distributed import _symmetric_memory

    with _without_multicast(), torch.inference_mode(False):
        buffer = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(buffer, group)
    return buffer


class SymmetricMemoryBuffer:
    """Symmetric memory in which the ranks of `group` sum tensors; all ranks must construct it together.

    One buffer serves successive all-reduces: torch's operator waits for the other ranks before it reads, and returns
    after all have read. Every rank adds the addends in the order of the ranks, so results are bit-identical.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group_name = group.group_name
        self._buffer = allocate(MAX_BYTES, device, group)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's buffer as a tensor of `shape`, to write the addend to."""
        return self._buffer[: _num_bytes(shape, dtype)].view(dtype).view(shape)

    def all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of what they wrote to their `buffer`: a new tensor of its shape."""
        return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name)

    def check(self, rank: int, num_ranks: int) -> None:
        """Raise `RuntimeError` unless three successive all-reduces of integers give the right sums."""
        buffer = self.buffer((MAX_BYTES // 4,), torch.float32)
        numbers = torch.arange(len(buffer), device=buffer.device) % 1000
        for power in range(3):
            expected = sum(numbers * other**power for other in range(num_ranks))
            if not torch.equal(self.all_reduce(buffer.copy_(numbers * rank**power)), expected.float()):
                raise RuntimeError("sums in symmetric memory are wrong")


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def fits(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether tensors of `shape` and `dtype` can be all-reduced in a `SymmetricMemoryBuffer`."""
    size = _num_bytes(shape, dtype)
    return dtype in DTYPES and 0 < size <= MAX_BYTES and size % _ALIGNMENT == 0


# Buffers by process group, freed with it; None if the group cannot have one.
_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, SymmetricMemoryBuffer | None] = weakref.WeakKeyDictionary()


def symmetric_memory_of(model: PreTrainedModel) -> SymmetricMemoryBuffer | None:
    """The buffer of the ranks of `model`, or None on all of them. All ranks must call this together."""
    group = tensor_parallel_group(model)
    if group is None or not policy_of(model.device).symmetric_memory:
        return None
    if group not in _buffers:
        _buffers[group] = _set_up(model, group)
    return _buffers[group]


def _set_up(model: PreTrainedModel, group: dist.ProcessGroup) -> SymmetricMemoryBuffer | None:
    made: list[SymmetricMemoryBuffer] = []

    def require_nvlink() -> None:
        if not has_nvlink(model.device, group.size()):
            raise RuntimeError("NVLink does not connect the devices that this process sees")

    # After each step ranks exchange whether it failed: the next step would wait for ranks that do not take part.
    steps: tuple[Callable[[], Any], ...] = (
        require_nvlink,
        lambda: made.append(SymmetricMemoryBuffer(group, model.device)),
        lambda: made[0].check(group.rank(), group.size()),
    )
    if find_differences(model, {"host": socket.gethostname()}):
        logger.info(f"{type(model).__name__} is split over hosts: its all-reduces go through the process group.")
        return None
    for step in steps:
        failure = None
        try:
            step()
        except Exception as error:  # torch and drivers raise errors of many types here
            failure = f"{type(error).__name__}: {first_line(error)}"
        if find_differences(model, {"has failed": failure is not None}) or failure is not None:
            logger.warning(
                f"All-reduces of {type(model).__name__} go through the process group, which is slower than symmetric "
                f"memory: {failure or 'another process failed to set that up'}."
            )
            return None
    return made[0]


def _buffer_of(group_name: str) -> SymmetricMemoryBuffer:
    return _buffers[_resolve_process_group(group_name)]


# Custom ops are opaque to torch.compile. They mutate no argument and return new tensors, so it need not see the buffer.
@torch.library.custom_op("hf_specdec::all_reduce", mutates_args=(), schema="(Tensor addend, str group) -> Tensor")
def _all_reduce(addend: torch.Tensor, group: str) -> torch.Tensor:
    memory = _buffer_of(group)
    return memory.all_reduce(memory.buffer(addend.shape, addend.dtype).copy_(addend))


@_all_reduce.register_fake
def _(addend: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(addend, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "hf_specdec::linear_all_reduce", mutates_args=(), schema="(Tensor input, Tensor weight, str group) -> Tensor"
)
def _linear_all_reduce(input: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    memory = _buffer_of(group)
    buffer = memory.buffer((*input.shape[:-1], len(weight)), input.dtype)
    torch.mm(input.reshape(-1, input.shape[-1]), weight.t(), out=buffer.view(-1, len(weight)))
    return memory.all_reduce(buffer)


@_linear_all_reduce.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))


def _row_parallel_forward(
    layer: nn.Linear, wrapper: Wrapper, group_name: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`forward` of a row-parallel linear layer whose matmul writes its output directly to symmetric memory."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        if not runs_engine() or not fits((*inputs.shape[:-1], len(weight)), inputs.dtype):
            return wrapper.forward(inputs)
        output = torch.ops.hf_specdec.linear_all_reduce(inputs, weight, group_name)
        return output if bias is None else output + bias

    return forward


def _experts_forward(module: nn.Module, wrapper: Wrapper, group_name: str) -> Callable[..., torch.Tensor]:
    """`forward` of sharded experts: that of transformers' wrapper, except for the all-reduce."""
    style, mesh = wrapper.style, wrapper.mesh

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not runs_engine():
            return wrapper.forward(*args, **kwargs)
        args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with style.context_around_forward(module, mesh):
            output = wrapper.wrapped(*args, **kwargs)
        if not fits(output.shape, output.dtype):
            return style.transform_output_post_forward(module, output, mesh)
        return torch.ops.hf_specdec.all_reduce(output, group_name)

    return forward


def _all_reducing_forward(group_name: str, module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """`forward` of `module` with small all-reduces in symmetric memory; None if it has no known all-reduce."""
    wrapper = wrapper_of(module)
    if wrapper is None:
        return None
    style = wrapper.style
    if type(style) is RowwiseParallel() and type(module) is nn.Linear and type(module.weight) in PLAIN_WEIGHTS:
        is_plain = style.input_layouts == Shard(-1) and style.output_layouts == Replicate() and style.use_local_output
        return _row_parallel_forward(module, wrapper, group_name) if is_plain else None
    if type(style) is MoeExpertsParallel() and any(
        isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)
        for parameter in module.parameters()
    ):
        return _experts_forward(module, wrapper, group_name)
    return None


def symmetric_memory_all_reduce(model: PreTrainedModel) -> Replacements:
    """Context in which small all-reduces (see `fits`) of `model` go through its `symmetric_memory_of`. Larger ones, and
    those of modules other than row-parallel linear layers and experts, go through the process group.

    All ranks must enter it together, within `local_linears` and without gradients.
    """
    if symmetric_memory_of(model) is None:
        return Replacements({})
    make = functools.partial(_all_reducing_forward, tensor_parallel_group(model).group_name)
    return Replacements({"forward": [(module, make) for module in modules_of(model) if make(module) is not None]})
