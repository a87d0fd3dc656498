"""What engines use on each type of device (Triton kernels, CUDA graphs, torch.compile, ...), in one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DevicePolicy:
    """What is used on one type of device.

    Attributes:
        triton: run the operations of a round with Triton kernels; if False, and in float64, with PyTorch references.
        cuda_graphs: capture rounds and prefills as CUDA graphs and replay them.
        compiler: `torch.compile` backend of captured rounds; None to capture them without compilation.
        fused_linear: run linear layers of one input (q, k, v; gate, up) as one matmul, see `patching.fused_linear`.
        few_row_linear: run 16-bit floating point linear layers on few rows with `ops.linear`, see `patching.linear`.
        batch_invariant: there are kernels whose bits depend on no other row, see `Drafter.configure`.
        transposed_linear: run `nn.Linear` on a few float32 rows as `(weight @ inputs.T).T`, see `patching.linear`.
        layer_kernels: run norms, rotary embeddings and gated activations of layers that are not compiled with `ops`,
            see `patching.layer_kernels`.
        symmetric_memory: run small all-reduces of a tensor-parallel target through torch's symmetric memory.
        rounds_ahead: rounds that are launched before the host has read the results of the last one.
        max_rows: default of the most rows in continuous batching.
        virtual_memory: commit memory to rows of continuous batching as their texts grow, if the driver or the operating
            system supports it, see `virtual_memory`.
        cache_bytes: most bytes that such rows hold together; None for all free memory.
    """

    triton: bool = False
    cuda_graphs: bool = False
    compiler: str | None = None
    fused_linear: bool = False
    few_row_linear: bool = False
    batch_invariant: bool = False
    transposed_linear: bool = False
    layer_kernels: bool = False
    symmetric_memory: bool = False
    rounds_ahead: int = 0
    max_rows: int = 16
    virtual_memory: bool = False
    cache_bytes: int | None = None


# By `torch.device.type`; other types have the default policy.
DEVICE_POLICIES = {
    "cuda": DevicePolicy(
        triton=True,
        cuda_graphs=True,
        compiler="inductor",
        fused_linear=True,
        few_row_linear=True,
        batch_invariant=True,
        layer_kernels=True,
        symmetric_memory=True,
        rounds_ahead=1,
        max_rows=256,
        virtual_memory=True,
    ),
    "cpu": DevicePolicy(transposed_linear=True, virtual_memory=True),
}
DEFAULT_POLICY = DevicePolicy()


def policy_of(device: torch.device) -> DevicePolicy:
    """The policy for the type of `device`."""
    return DEVICE_POLICIES.get(device.type, DEFAULT_POLICY)
