"""Mixtures of experts in MXFP4 that keep the format of the file, where transformers would convert them to bfloat16."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..host.quantised import IS_INITIALIZED
from ..kernels.types import StoredWeight
from ..modules.weights import register_weight_kind
from .experts import experts_forward, projections

# Suffixes of the parts of a weight, and inputs of a scale.
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32


class StoredExperts(nn.Module):
    """Experts of a class decorated with transformers' `use_experts_implementation`, computed by `experts_forward`.

    Instead of `gate_up_proj` they have `gate_up_proj_blocks`, `[experts, out, in / 32, 16]` uint8 with two e2m1 numbers
    each, the first one in the low half, and `gate_up_proj_scales`, `[experts, out, in / 32]` uint8, exponents of 2 plus
    127. `down_proj` is stored alike.
    """

    forward = experts_forward


@register_weight_kind("hf_specdec.StoredExperts")
def _of_stored_experts(module: StoredExperts, name: str) -> StoredWeight:
    blocks, exponents = (module._parameters[f"{name}{suffix}"] for suffix in (_BLOCKS, _SCALES))
    return StoredWeight(blocks.flatten(-2), exponents.view(torch.float8_e8m0fnu), None, 1, _GROUP, codes="e2m1")


@functools.cache
def _stored_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (StoredExperts, cls), {"__module__": cls.__module__})


def store_experts(experts: nn.Module) -> None:
    """Convert experts without numbers yet to `StoredExperts`."""
    for name in projections(experts):
        weight = experts._parameters.pop(name)
        count, size_out, size_in = (weight.mT if experts.is_transposed else weight).shape
        shape = (count, size_out, size_in // _GROUP)
        for suffix, one in {_BLOCKS: (*shape, _GROUP // 2), _SCALES: shape}.items():
            part = torch.empty(one, dtype=torch.uint8, device=weight.device)
            experts.register_parameter(f"{name}{suffix}", nn.Parameter(part, requires_grad=False))
    experts.__class__ = _stored_class(type(experts))
    setattr(experts, IS_INITIALIZED, True)  # their class would initialise parameters that they no longer have
