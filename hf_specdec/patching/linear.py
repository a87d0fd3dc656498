"""Linear layers of a few rows on a CPU, and language model heads anywhere."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..device_policy import policy_of
from .patch import replaced, runs_engine

# Rows up to which `linear` multiplies the other way round.
MOST_TRANSPOSED_ROWS = 16


# Weights that are neither quantised nor split: parameters, and the parts that `local_products` takes out of those.
PLAIN_WEIGHTS = (nn.Parameter, torch.Tensor)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`inputs @ weight.T + bias`, `[..., in]` by `[out, in]`; a few float32 rows on a CPU as `(weight @ inputs.T).T`.

    Weight-bound products run about twice as fast that way round: on two cores the products of a 135M-parameter model
    take 31 ms instead of 71 ms at 5 rows (torch 2.13, SmolLM2 shapes). One row is computed as two for the same reason.

    `F.linear` of some columns of `[B, n, in]` by a weight that takes no gradient is a product for each of B rows, which
    reads the weight B times; here it is read once.
    """
    rows = inputs.numel() // inputs.shape[-1]
    flat = inputs.reshape(rows, -1)
    if rows > MOST_TRANSPOSED_ROWS or not policy_of(inputs.device).transposed_linear or weight.dtype != torch.float32:
        out = F.linear(flat, weight, bias)
    else:
        out = (weight @ (flat.repeat(2, 1) if rows == 1 else flat).t())[:, :rows].t().contiguous()
        if bias is not None:
            out = out + bias
    return out.reshape(*inputs.shape[:-1], -1)


def _forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if not runs_engine():
        return nn.Linear.forward(module, inputs)
    return linear(inputs, module.weight, module.bias)


def _is_unchanged(module: nn.Linear) -> bool:
    """Whether nobody has given `module` a `forward` of its own, other calls with a drafter excepted."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "func", None) is _forward


def patched_linear(*models: nn.Module) -> AbstractContextManager[None]:
    """Context in which the `nn.Linear` layers of `models` on a CPU, and their heads anywhere, compute by `linear`.

    Layers with weights of another kind (quantised, sharded) or a `forward` of their own are left alone.
    """
    modules = [module for model in models for module in model.modules()]
    heads = {id(module.get_output_embeddings()) for module in modules if isinstance(module, PreTrainedModel)}
    chosen = {
        module: functools.partial(_forward, module)
        for module in modules
        if type(module) is nn.Linear
        and type(module.weight) in PLAIN_WEIGHTS
        and _is_unchanged(module)
        and (policy_of(module.weight.device).transposed_linear or id(module) in heads)
    }
    return replaced("forward", chosen.items())
