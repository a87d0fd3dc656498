"""Tensor parallelism: the ranks that run one model together, and the part of its weights on each rank."""

from __future__ import annotations

import hashlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList

from ..host.generation import BaseStreamer
from ..host.serving import ColwiseParallel, ReplicatedWithGradAllReduce, TensorParallelLayer, tensor_parallel_mesh
from ..modules.hidden_states import modules_of
from ..modules.locks import lock_of
from ..modules.patch import ABSENT, Replacements, constant
from ..modules.weights import PLAIN_WEIGHTS


def num_processes() -> int:
    """Number of processes that torchrun or accelerate started together, including this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process has rank 0; only that one prints and writes files."""
    return int(os.environ.get("RANK", "0")) == 0


def local_rank() -> int:
    """Index of this process among those on its host, which is also the index of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def tensor_parallel_group(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The ranks over which transformers has sharded the weights of `model` (`tp_plan`); None if it is not sharded."""
    mesh = tensor_parallel_mesh(model)
    return None if mesh is None else mesh.get_group()


def is_first_rank(model: PreTrainedModel) -> bool:
    """Whether this is the first of the ranks that run `model`, or the only one."""
    group = tensor_parallel_group(model)
    return group is None or dist.get_rank(group) == 0


def from_first_rank(tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The first rank's `tensor`, by a broadcast to the ranks of `model`; its shape must be the same on all ranks."""
    group = tensor_parallel_group(model)
    if group is None:
        return tensor
    shared = tensor.to(model.device, copy=True)
    dist.broadcast(shared, group=group, group_src=0)
    return shared.to(tensor.device)


class Wrapper(NamedTuple):
    """The wrapper that transformers has put around the `forward` of a module of a tensor-parallel model.

    Attributes:
        forward: the wrapping `forward`, an attribute of the module.
        style, mesh: how the module is sharded, and over which devices.
        wrapped: the `forward` of the module without the wrapper.
    """

    forward: Callable
    style: Any
    mesh: DeviceMesh
    wrapped: Callable


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """The wrapper around the `forward` of `module`; None if there is none, or if it is not transformers'."""
    forward = vars(module).get("forward")
    if not inspect.isfunction(forward):
        return None
    inside = inspect.getclosurevars(forward).nonlocals
    if not isinstance(inside.get("self"), TensorParallelLayer()) or not {"mesh", "original_forward"} <= inside.keys():
        return None
    return Wrapper(forward, inside["self"], inside["mesh"], inside["original_forward"])


def _only_splits(module: nn.Module) -> bool:
    """Whether the wrapper of `module` does nothing once its weights are local: a plain column-parallel linear layer."""
    wrapper = wrapper_of(module)
    if wrapper is None or type(wrapper.style) is not ColwiseParallel() or type(module) is not nn.Linear:
        return False
    style = wrapper.style
    shards = (_shard_without_view(parameter) for parameter in module.parameters(recurse=False))
    is_plain = all(type(shard) in PLAIN_WEIGHTS for shard in shards)
    return is_plain and (style.input_layouts, style.output_layouts) == (Replicate(), Shard(-1))


def _only_sums_gradients(module: nn.Module) -> bool:
    """Whether the wrapper of `module` only lets ranks sum gradients of its weights."""
    code = getattr(vars(module).get("forward"), "__code__", None)
    return code is not None and code in ReplicatedWithGradAllReduce().install_forward.__code__.co_consts


def _shard_without_view(parameter: nn.Parameter) -> torch.Tensor:
    """The local shard itself instead of a view of it, so that `parameter` follows if the shard is moved."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class local_linears(Replacements):
    """Context in which sharded linear layers of `model` have this rank's shards of their weights as plain tensors.

    Without gradients transformers computes with these shards, too, but extracts them from the `DTensor`s in every call,
    which costs time on the host and in a compiler. Wrappers that have nothing left to do are removed: those of
    column-parallel layers whose outputs stay sharded, and those that sum gradients.
    """

    def __init__(self, model: PreTrainedModel):
        modules = modules_of(model)
        idle = (one for one in modules if _only_splits(one) or _only_sums_gradients(one))
        super().__init__({"forward": [(module, constant(ABSENT)) for module in idle]})
        self._sharded = [
            (weakref.ref(module), name)
            for module in modules
            if isinstance(module, nn.Linear)
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        self.is_empty = self.is_empty and not self._sharded

    def _enter(self, stack: ExitStack) -> None:
        for reference, name in self._sharded:
            module = reference()
            if module is not None:
                parameter = module._parameters[name]
                stack.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = _shard_without_view(parameter)
        super()._enter(stack)


class OutOfStep(ValueError):
    """Ranks of one model are at different steps of their calls; raised on all of them."""


# Numbers that each rank sends in `find_differences`, whatever the step of a call: ranks at different steps must notice.
_NUM_DIGESTS = 32
# The step of a rank that has raised an error.
_ERROR = {"error": None}


def find_differences(model: PreTrainedModel, values: dict[str, Any]) -> list[str]:
    """Names of `values` that differ between the ranks of `model`; the same list on all ranks, from one all-gather of
    hashes.

    `values` are tensors, or objects that are equal if their `repr` is. Raises `OutOfStep` if their names are others on
    other ranks, or if one of these has raised an error in `failing_together`.
    """
    group = tensor_parallel_group(model)
    if group is None:
        return []
    digests = torch.zeros(_NUM_DIGESTS, dtype=torch.int64)
    digests[: 1 + len(values)] = torch.tensor([_step(values), *map(_digest, values.values())])
    digests = digests.to(model.device)
    gathered = [torch.empty_like(digests) for _ in range(group.size())]
    dist.all_gather(gathered, digests, group=group)
    (step, *others), *rows = zip(*torch.stack(gathered).tolist(), strict=True)
    if any(one != step for one in others):
        has_failed = _step(_ERROR) in (step, *others)
        what = "one of them has raised an error in this call" if has_failed else "they make different calls"
        raise OutOfStep(
            f"The processes that {type(model).__name__} is split over (tensor parallel) are not at the same step: "
            f"{what}; expected the same calls, in the same order, on every one of them. See the errors of all."
        )
    return [name for name, (one, *others) in zip(values, rows, strict=False) if any(other != one for other in others)]


@contextmanager
def failing_together(model: PreTrainedModel) -> Iterator[None]:
    """Context of a part of a call in which the ranks of `model` run it only as their agreements say. An error of one of
    them is told to the others, whose next `find_differences` raises `OutOfStep`."""
    try:
        yield
    except OutOfStep:
        raise
    except Exception:
        if tensor_parallel_group(model) is not None:
            # A `RuntimeError` if a process has died, or if the call was not to be made, as a manager runs its rounds.
            with suppress(OutOfStep, RuntimeError), lock_of(model):
                find_differences(model, _ERROR)
        raise


def check_same_call(
    model: PreTrainedModel, criteria: StoppingCriteriaList, values: dict[str, Any], kept: dict[str, Any]
) -> list[str]:
    """Check that all ranks of `model` make the same call; with different calls they would hang. Raises `ValueError` if
    the arguments `values` differ, or if `criteria` have a time limit, which ranks would reach at different tokens.

    Returns the names of what ranks have `kept` of earlier calls and differs, which they must find out anew together.
    """
    if any(isinstance(rule, MaxTimeCriteria) for rule in criteria):
        raise ValueError(
            f"max_time is set, but {type(model).__name__} is split over processes (tensor parallel) whose clocks "
            "differ, so that they would stop at different tokens; expected a limit on tokens. Use max_new_tokens."
        )
    different = find_differences(model, values | kept)
    wrong = [name for name in different if name in values]
    if wrong:
        raise ValueError(
            f"The processes that {type(model).__name__} is split over (tensor parallel) were called with different "
            f"{', '.join(wrong)}; expected the same call on every one of them."
        )
    return different


def check_same_tokens(model: PreTrainedModel, sequences: torch.Tensor) -> None:
    """Raise `RuntimeError` unless all ranks of `model` generated the same `sequences`."""
    if find_differences(model, {"tokens": sequences}):
        raise RuntimeError(
            f"The processes that {type(model).__name__} is split over (tensor parallel) generated different tokens, so "
            "that none of them can be trusted. Logits processors and stopping criteria must give the same answer on "
            "every process; if there are none of your own, check that all processes run the same versions and devices."
        )


def _step(values: dict[str, Any]) -> int:
    return _digest(tuple(values))


def _digest(value: Any) -> int:
    content = value.cpu().numpy().tobytes() + repr(tuple(value.shape)).encode() if torch.is_tensor(value) else b""
    return int.from_bytes(hashlib.sha256(content or repr(value).encode()).digest()[:8], "little", signed=True)


class LateErrors(BaseStreamer):
    """A `streamer` on one rank of a split target. Its first error ends it, and is raised after the call, in which other
    ranks wait for this one in every round."""

    def __init__(self, streamer: BaseStreamer):
        self._streamer, self._error = streamer, None

    def put(self, value: torch.Tensor) -> None:
        self._run(lambda: self._streamer.put(value))

    def end(self) -> None:
        self._run(self._streamer.end)

    def _run(self, function: Callable[[], object]) -> None:
        if self._error is None:
            try:
                function()
            except Exception as error:
                self._error = error

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class RankAgreement:
    """A process group on the CPUs of the ranks of `model`, used by one thread of each rank.

    All ranks make it at the same time, and call the same methods in the same order. A rank waits `timeout` seconds for
    the others; None for torch's default.

    Attributes:
        is_first: whether this is the first of the ranks.
    """

    def __init__(self, model: PreTrainedModel, timeout: float | None):
        ranks = dist.get_process_group_ranks(tensor_parallel_group(model))
        self.is_first = is_first_rank(model)
        self._first = ranks[0]
        self._group = dist.new_group(
            ranks,
            timeout=None if timeout is None else timedelta(seconds=timeout),
            backend="gloo",
            # Other ranks of the world run other replicas of the model, or none.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )

    def most(self, values: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each of `values`."""
        shared = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return shared.tolist()

    def from_first(self, value: Any) -> Any:
        """A copy of the first rank's `value`, which must be picklable; on that rank `value` itself."""
        holder = [value if self.is_first else None]
        dist.broadcast_object_list(holder, src=self._first, group=self._group, device=torch.device("cpu"))
        return value if self.is_first else holder[0]

    def close(self) -> None:
        dist.destroy_process_group(self._group)
