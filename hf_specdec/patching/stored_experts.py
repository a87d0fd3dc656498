"""Mixtures of experts in MXFP4 that keep the format of the file, where transformers would convert them to bfloat16."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..host.quantised import IS_INITIALIZED
from .experts import BLOCKS, GROUP, SCALES, experts_forward


class StoredExperts(nn.Module):
    """Experts of a class decorated with transformers' `use_experts_implementation`, computed by `experts_forward`.

    Instead of `gate_up_proj` they have `gate_up_proj_blocks`, `[experts, out, in / 32, 16]` uint8 with two e2m1 numbers
    each, the first one in the low half, and `gate_up_proj_scales`, `[experts, out, in / 32]` uint8, exponents of 2 plus
    127. `down_proj` is stored alike.
    """

    forward = experts_forward


def is_experts(module: nn.Module) -> bool:
    """Whether the class of `module` is decorated with transformers' `use_experts_implementation`."""
    return all(hasattr(module, one) for one in ("down_proj", "is_transposed", "has_gate"))


@functools.cache
def _stored_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (StoredExperts, cls), {"__module__": cls.__module__})


def store_experts(experts: nn.Module) -> None:
    """Convert experts without numbers yet to `StoredExperts`."""
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        weight = experts._parameters.pop(name)
        count, size_out, size_in = (weight.mT if experts.is_transposed else weight).shape
        shape = (count, size_out, size_in // GROUP)
        for suffix, one in {BLOCKS: (*shape, GROUP // 2), SCALES: shape}.items():
            part = torch.empty(one, dtype=torch.uint8, device=weight.device)
            experts.register_parameter(f"{name}{suffix}", nn.Parameter(part, requires_grad=False))
    experts.__class__ = _stored_class(type(experts))
    setattr(experts, IS_INITIALIZED, True)  # their class would initialise parameters that they no longer have
