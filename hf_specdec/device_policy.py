"""How engines compute on each kind of device: one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DevicePolicy:
    """What is used on one kind of device.

    Attributes:
        triton: Triton kernels for the operations of a round; where not, and in float64, their PyTorch references.
        cuda_graphs: rounds and prefills are captured as CUDA graphs and replayed.
        compiler: backend of `torch.compile` for what is captured; None to capture it as it is.
        fused_linear: linear layers of one input (q, k, v; gate, up) as one.
        transposed_linear: `nn.Linear` of a few float32 rows as `(weight @ inputs.T).T`, see `patching.linear`.
        symmetric_memory: small all-reduces of a split target through torch's symmetric memory.
        rounds_ahead: rounds that the device may run ahead of what the host has read.
    """

    triton: bool = False
    cuda_graphs: bool = False
    compiler: str | None = None
    fused_linear: bool = False
    transposed_linear: bool = False
    symmetric_memory: bool = False
    rounds_ahead: int = 0


# By `torch.device.type`; other kinds have the defaults.
DEVICE_POLICIES = {
    "cuda": DevicePolicy(
        triton=True, cuda_graphs=True, compiler="inductor", fused_linear=True, symmetric_memory=True, rounds_ahead=1
    ),
    "cpu": DevicePolicy(transposed_linear=True),
}
_DEFAULT = DevicePolicy()


def policy_of(device: torch.device) -> DevicePolicy:
    """The policy for the kind of `device`."""
    return DEVICE_POLICIES.get(device.type, _DEFAULT)
