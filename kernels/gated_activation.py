"""Triton gated activation; the reference is `gated_activation_reference.gated_activation`.

It is computed in float32, and the activation and the product are rounded to the dtype, as in PyTorch's two kernels.
Results are the same bits, except that the last bit of GELU may differ: PyTorch may have been compiled with another erf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .launch import kernel, wait_for_inputs

BLOCK, _WARPS = tl.constexpr(1024), 4


@triton.jit
def activate(x, NAME: tl.constexpr, LIBDEVICE: tl.constexpr):
    """Activation of float32 values. The interpreter has no LIBDEVICE; without it the last bits may differ."""
    if NAME == "silu":
        power = libdevice.exp(-x) if LIBDEVICE else tl.exp(-x)
        return tl.div_rn(x, 1.0 + power)
    elif NAME == "gelu":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        if LIBDEVICE:
            tanh = libdevice.tanh(inner)
        else:
            power = tl.exp(-2.0 * tl.abs(inner))
            tanh = (1.0 - power) / (1.0 + power)
            tanh = tl.where(inner < 0.0, -tanh, tanh)
        return 0.5 * x * (1.0 + tanh)
    else:
        tl.static_assert(NAME == "relu")
        return tl.where(x <= 0.0, 0.0, x)


@kernel
def _gated_activation_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    width,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """A block of elements of one row.

    Grid: (rows, blocks of N). Reads the program's elements of `gate` and `up`, each COLUMN_STRIDE-th of their rows;
    writes those of `out`. LIMIT, ALPHA and OFFSET are those of a `ClampedGate`; LIMIT is None for other gates.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    wait_for_inputs()
    gate = tl.load(gate_ptr + row * gate_stride + column * COLUMN_STRIDE, mask=is_column, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column * COLUMN_STRIDE, mask=is_column, other=0.0)
    dtype = gate.dtype
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if LIMIT is not None:
        limit = tl.full([1], LIMIT, dtype).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)  # NaN stays NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up = (up + OFFSET).to(dtype).to(tl.float32)
    if ALPHA is not None:
        inner = (gate * ALPHA).to(dtype).to(tl.float32)
        power = libdevice.exp(-inner) if LIBDEVICE else tl.exp(-inner)
        activated = gate * tl.div_rn(1.0, 1.0 + power).to(dtype).to(tl.float32)
    else:
        activated = activate(gate, ACTIVATION, LIBDEVICE)
    activated = activated.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + column, (activated * up).to(dtype), mask=is_column)


def gated_activation(gate, up, activation, clamped=None):
    """See `gated_activation_reference.gated_activation`. One launch, which depends only on shapes and strides.

    `gate` and `up` may be slices of the rows of a wider tensor, or each second column of one.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype, "gate and up must have the same shape and dtype"
    width = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    gate, up = (part.reshape(-1, width) for part in (gate, up))
    limit, alpha, offset = clamped or (None, None, 0.0)
    column_stride = 2 if gate.stride(1) == up.stride(1) == 2 else 1
    gate, up = (part if part.stride(1) == column_stride else part.contiguous() for part in (gate, up))
    _gated_activation_kernel[(len(gate), triton.cdiv(width, BLOCK.value))](
        gate,
        up,
        out,
        width,
        gate.stride(0),
        up.stride(0),
        ACTIVATION=activation,
        LIBDEVICE=gate.is_cuda,
        COLUMN_STRIDE=column_stride,
        LIMIT=limit,
        ALPHA=alpha,
        OFFSET=offset,
        num_warps=_WARPS,
        # As PyTorch's kernels are compiled; Triton's default depends on its version.
        enable_fp_fusion=True,
    )
    return out
