"""The ops of layers that PyTorch computes by several kernels each: norms, rotary embeddings, gated activations.

They are chosen and registered as those of `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels import rms_norm_reference
from .kernels.gated_activation_reference import ACTIVATIONS
from .kernels.types import AnglesKind, NormKind, RotaryKind
from .op_choice import is_for_triton, kernel_op, register_op

__all__ = [
    "ACTIVATIONS",
    "MAX_NORM_WIDTH",
    "AnglesKind",
    "NormKind",
    "RotaryKind",
    "add_rms_norm",
    "gated_activation",
    "gather_rows",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "rotate_and_store",
]

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


@register_op(
    "hf_specdec::add_rms_norm",
    schema="(Tensor inputs, Tensor addend, Tensor? weight, float eps, bool cast_first, float offset, bool centered) "
    "-> (Tensor, Tensor)",
)
def _add_rms_norm(inputs, addend, weight, eps, cast_first, offset, centered):
    from .kernels.rms_norm import add_rms_norm

    return add_rms_norm(inputs, addend, weight, eps, NormKind(cast_first, offset, centered))


@_add_rms_norm.register_fake
def _(inputs, *rest):
    return inputs.new_empty(inputs.shape), inputs.new_empty(inputs.shape)


_ROTARY_KIND = ", ".join(f"bool {name}" for name in RotaryKind._fields)


def _like(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`[B, heads, n, D]` each, with the memory of `[B, n, heads, D]`."""
    return [one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in states]


def _like_angles(frequencies, positions, dtype, repeats, scaling):
    shape = *positions.shape, len(frequencies) * (1 if repeats == "once" else 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


rotary = kernel_op(
    "rotary.rotary",
    f"(Tensor cos, Tensor sin, Tensor[] states, {_ROTARY_KIND}) -> Tensor[]",
    lambda cos, sin, states, *rest: _like(states),
    groups={3: RotaryKind},
)
rotate_and_store = kernel_op(
    "rotary.rotate_and_store",
    f"(Tensor cos, Tensor sin, Tensor[] states, {_ROTARY_KIND}, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor value_states, Tensor positions, Tensor(c!)? scales) -> Tensor[]",
    lambda cos, sin, states, *rest: _like(states[:-1]),
    mutates_args=("keys", "values", "scales"),
    groups={3: RotaryKind},
)
rotary_angles = kernel_op(
    "rotary_angles.rotary_angles",
    "(Tensor frequencies, Tensor positions, ScalarType dtype, str repeats, float scaling) -> (Tensor, Tensor)",
    _like_angles,
    groups={3: AnglesKind},
)
gated_activation = kernel_op(
    "gated_activation.gated_activation",
    "(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda gate, up, activation: gate.new_empty(gate.shape),
)
gather_rows = kernel_op(
    "gather_rows.gather_rows",
    "(Tensor table, Tensor index, Tensor? fill) -> Tensor",
    lambda table, index, fill: table.new_empty(*index.shape, table.shape[2]),
)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind) -> torch.Tensor:
    """See `kernels.rms_norm_reference.rms_norm`; a Triton kernel on GPUs, for rows of up to `MAX_NORM_WIDTH`."""
    if is_for_triton(inputs) and inputs.shape[-1] <= MAX_NORM_WIDTH:
        return _rms_norm(inputs, weight, eps, *kind)
    return rms_norm_reference.rms_norm(inputs, weight, eps, kind)


def add_rms_norm(
    inputs: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rms_norm_reference.add_rms_norm`; a Triton kernel on GPUs, for rows of up to `MAX_NORM_WIDTH`."""
    if is_for_triton(inputs) and inputs.shape[-1] <= MAX_NORM_WIDTH:
        return _add_rms_norm(inputs, addend, weight, eps, *kind)
    return rms_norm_reference.add_rms_norm(inputs, addend, weight, eps, kind)
