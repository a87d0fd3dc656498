"""The ops of layers that PyTorch computes by several kernels each: norms, rotary embeddings, gated activations.

They are chosen and registered as those of `ops`.
"""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels.gated_activation_reference import ACTIVATIONS
from .kernels.types import AnglesKind, NormKind, RotaryKind
from .op_choice import kernel_op

# Widest rows that a program of the norm's kernel keeps in its registers.
MAX_NORM_WIDTH = 65536


_NORM_KIND = "bool cast_first, float offset, bool centered"
_ROTARY_KIND = ", ".join(f"bool {name}" for name in RotaryKind._fields)


def _like(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`[B, heads, n, D]` each, with the memory of `[B, n, heads, D]`."""
    return [one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in states]


def _like_angles(frequencies, positions, dtype, repeats, scaling):
    shape = *positions.shape, len(frequencies) * (1 if repeats == "once" else 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


rms_norm = kernel_op(
    "rms_norm.rms_norm",
    f"(Tensor inputs, Tensor? weight, float eps, {_NORM_KIND}) -> Tensor",
    lambda inputs, *rest: inputs.new_empty(inputs.shape),
    groups={3: NormKind},
)
add_rms_norm = kernel_op(
    "rms_norm.add_rms_norm",
    f"(Tensor inputs, Tensor addend, Tensor? weight, float eps, {_NORM_KIND}) -> (Tensor, Tensor)",
    lambda inputs, *rest: (inputs.new_empty(inputs.shape), inputs.new_empty(inputs.shape)),
    groups={4: NormKind},
)
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
# Reductions of rows with one order of summation, see `kernels.row_reductions_reference`.
row_sum = kernel_op(
    "row_reductions.row_sum",
    "(Tensor values, ScalarType dtype) -> Tensor",
    lambda values, dtype: values.new_empty(values.shape[0], values.shape[2], dtype=dtype),
)
row_softmax = kernel_op(
    "row_reductions.row_softmax",
    "(Tensor values, ScalarType dtype, bool is_log) -> Tensor",
    lambda values, dtype, is_log: values.new_empty(values.shape, dtype=dtype),
)
row_cumsum = kernel_op(
    "row_reductions.row_cumsum",
    "(Tensor values, ScalarType dtype) -> Tensor",
    lambda values, dtype: values.new_empty(values.shape, dtype=dtype),
)
