"""Weights of modules: parameters, or shards of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Types of weights that are neither quantised nor sharded: parameters, and the local shards that `local_linears` sets.
PLAIN_WEIGHTS = frozenset({nn.Parameter, torch.Tensor})


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `tensor`, sharing its memory; `tensor` itself if it is not a `DTensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
