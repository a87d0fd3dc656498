"""The ops of layers that PyTorch computes by several kernels each: norms, rotary embeddings, gated activations.

They are chosen and registered as those of `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels import gated_activation_reference, rms_norm_reference, rotary_reference
from .kernels.gated_activation_reference import ACTIVATIONS
from .kernels.types import NormKind, RotaryKind
from .op_choice import is_for_triton, register_op

__all__ = ["ACTIVATIONS", "MAX_NORM_WIDTH", "NormKind", "RotaryKind", "gated_activation", "rms_norm", "rotary"]

# Widest rows that a program of the norm's kernel keeps in its registers.
MAX_NORM_WIDTH = 65536


@register_op(
    "hf_specdec::rms_norm",
    schema="(Tensor inputs, Tensor? weight, float eps, bool cast_first, float offset, bool centered) -> Tensor",
)
def _rms_norm(inputs, weight, eps, cast_first, offset, centered):
    from .kernels.rms_norm import rms_norm

    return rms_norm(inputs, weight, eps, NormKind(cast_first, offset, centered))


@_rms_norm.register_fake
def _(inputs, *rest):
    return inputs.new_empty(inputs.shape)


@register_op("hf_specdec::rotary", schema="(Tensor cos, Tensor sin, Tensor[] states, bool[] kind) -> Tensor[]")
def _rotary(cos, sin, states, kind):
    from .kernels.rotary import rotary

    return rotary(cos, sin, states, RotaryKind(*kind))


@_rotary.register_fake
def _(cos, sin, states, kind):
    sizes = [(batch, columns, heads, size) for batch, heads, columns, size in (one.shape for one in states)]
    return [one.new_empty(shape).transpose(1, 2) for one, shape in zip(states, sizes, strict=True)]


@register_op("hf_specdec::gated_activation", schema="(Tensor gate, Tensor up, str activation) -> Tensor")
def _gated_activation(gate, up, activation):
    from .kernels.gated_activation import gated_activation

    return gated_activation(gate, up, activation)


@_gated_activation.register_fake
def _(gate, up, activation):
    return gate.new_empty(gate.shape)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind) -> torch.Tensor:
    """See `kernels.rms_norm_reference.rms_norm`; a Triton kernel on GPUs, for rows of up to `MAX_NORM_WIDTH`."""
    if is_for_triton(inputs) and inputs.shape[-1] <= MAX_NORM_WIDTH:
        return _rms_norm(inputs, weight, eps, *kind)
    return rms_norm_reference.rms_norm(inputs, weight, eps, kind)


def rotary(
    cos: torch.Tensor, sin: torch.Tensor, states: Sequence[torch.Tensor], kind: RotaryKind
) -> list[torch.Tensor]:
    """See `kernels.rotary_reference.rotary`; a Triton kernel on GPUs."""
    if is_for_triton(states[0]):
        return _rotary(cos, sin, list(states), list(kind))
    return rotary_reference.rotary(cos, sin, states, kind)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `kernels.gated_activation_reference.gated_activation`; a Triton kernel on GPUs."""
    return (_gated_activation if is_for_triton(gate) else gated_activation_reference.gated_activation)(
        gate, up, activation
    )
