"""Linear layers for a few rows, and language model heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import ops
from ..device_policy import DEFAULT_POLICY, DEVICE_POLICIES, policy_of
from ..kernels.types import StoredWeight
from ..modules.hidden_states import modules_of
from ..modules.patch import Replacements, bound, is_unpatched, this_thread
from ..modules.signature import fact
from ..modules.weights import quantised_class, weight_of
from .row_adapters import LowRankUpdates

# Up to this many rows `linear` computes the transposed matmul.
MAX_TRANSPOSED_ROWS = 16
# Least elements of a weight for that: smaller ones stay in a core's cache, so transposing takes longer than it saves.
MIN_TRANSPOSED_WEIGHT = 128 * 128


def _linear(
    module: nn.Linear | None,
    inputs: torch.Tensor,
    weight: torch.Tensor | StoredWeight | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`inputs @ weight.T + bias`, `[..., in]` by `[out, in]`. With a plain `module` it is its `forward`, which outside
    of an engine's passes computes as always.

    `ops.linear` computes a few rows in 16-bit floating point on a GPU, and all rows of batch-invariant passes. A few
    float32 rows on a CPU with a large weight are computed as `(weight @ inputs.T).T`. A stored weight must be one that
    `computes` allows.

    On a CPU, matmuls that are bound by reading the weight run about twice as fast when transposed: on two cores the
    linear layers of a 135M-parameter model take 31 ms instead of 71 ms at 5 rows (torch 2.13, SmolLM2 shapes). One row
    is computed as two for the same reason. Rows are flattened first: otherwise `F.linear` may run one matmul for each
    of the B batch rows.
    """
    if module is not None:
        if not torch.compiler.is_compiling() and this_thread.engine is None:
            return nn.Linear.forward(module, inputs)
        weight, bias = module.weight, module.bias
    rows = inputs.numel() // inputs.shape[-1]
    flat = inputs.reshape(rows, inputs.shape[-1])
    policy = DEVICE_POLICIES.get(inputs.device.type, DEFAULT_POLICY)
    if isinstance(weight, StoredWeight) or (policy.few_row_linear and ops.has_fast_linear(flat, weight)):
        out = ops.linear(flat, weight, bias)
    elif (
        rows > MAX_TRANSPOSED_ROWS
        or not policy.transposed_linear
        or weight.dtype != torch.float32
        or weight.numel() < MIN_TRANSPOSED_WEIGHT
    ):
        out = F.linear(flat, weight, bias)
    else:
        out = (weight @ (flat.repeat(2, 1) if rows == 1 else flat).t())[:, :rows].t().contiguous()
        if bias is not None:
            out = out + bias
    return out.reshape(*inputs.shape[:-1], out.shape[-1])


# Takes inputs, a weight and perhaps a bias.
linear = functools.partial(_linear, None)


def computes(inputs: torch.Tensor, weight: torch.Tensor | StoredWeight) -> bool:
    """Whether `linear` computes `[..., in]` by `weight`, which it always does for plain ones; else its library does."""
    if not isinstance(weight, StoredWeight):
        return True
    policy = DEVICE_POLICIES.get(inputs.device.type, DEFAULT_POLICY)
    if torch.compiler.is_compiling() or not policy.few_row_linear:
        return False
    return ops.has_fast_linear(inputs.reshape(-1, inputs.shape[-1]), weight)


def _stored_linear(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """`_linear` for a module with a quantised weight; its library computes what `linear` does not."""
    if not torch.compiler.is_compiling() and this_thread.engine is None:
        return type(module).forward(module, inputs)
    weight = weight_of(module)
    if weight is None or not computes(inputs, weight):
        return type(module).forward(module, inputs)
    return linear(inputs, weight, module.bias)


def gated_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    bias: torch.Tensor | None,
    updates: LowRankUpdates | None,
    activation: str,
) -> torch.Tensor:
    """`activation(gate) * up` of `[..., in]`; gate and up are the halves of the output of `linear` with its low-rank
    updates, `[..., N]` each."""
    if updates is not None:
        out = updates.outputs(inputs, weight, bias, activation)
        if out is None:
            both = linear(inputs, weight, bias)
            updates.add(both, inputs)
            out = ops.gated_activation(*both.chunk(2, dim=-1), activation)
        return out
    flat = inputs.reshape(-1, inputs.shape[-1])
    policy = DEVICE_POLICIES.get(inputs.device.type, DEFAULT_POLICY)
    if policy.few_row_linear and ops.has_gated_linear(flat, weight):
        out = ops.linear(flat, weight, bias, activation)
        return out.reshape(*inputs.shape[:-1], out.shape[-1])
    return ops.gated_activation(*linear(inputs, weight, bias).chunk(2, dim=-1), activation)


def runs_linear(module: nn.Module) -> bool:
    """Whether the `forward` of `module` runs `linear` with its weight and bias."""
    return "forward" in vars(module) and is_unpatched(module, _linear, _stored_linear)


@fact
def _quantised_classes(model: PreTrainedModel) -> frozenset[tuple[str, bool]]:
    """Package and class of the quantised linear layers of `model`, each with whether the kernels know such a layer."""
    classes = ((quantised_class(one), one) for one in model.modules() if isinstance(one, nn.Linear))
    return frozenset((name, weight_of(one) is not None) for name, one in classes if name is not None)


def computed_by_libraries(model: PreTrainedModel) -> list[str]:
    """Package and class of the quantised linear layers of `model` that `linear` does not compute, sorted."""
    classes = _quantised_classes(model)
    has_kernels = bool(classes) and policy_of(model.device).few_row_linear
    return sorted({name for name, is_known in classes if not (is_known and has_kernels)})


def patched_linear(*models: nn.Module) -> Replacements:
    """Context in which the linear layers of `models` compute with `linear`; only the heads on devices without a way of
    their own.

    Layers with sharded weights, with weights quantised in a way that the kernels do not know, or with a `forward`
    attribute are left as they are.
    """
    modules = modules_of(*models)
    heads = {id(module.get_output_embeddings()) for module in modules if isinstance(module, PreTrainedModel)}

    def own_forward(module: nn.Module) -> Callable | None:
        is_own = isinstance(module, nn.Linear) and is_unpatched(module, _linear, _stored_linear)
        if not is_own or (weight := weight_of(module)) is None:
            return None
        policy = policy_of(module.weight.device)
        if isinstance(weight, StoredWeight):
            return _stored_linear if policy.few_row_linear else None
        has_own = policy.few_row_linear or policy.transposed_linear or id(module) in heads
        return _linear if has_own else None

    found = ((module, own_forward(module)) for module in modules)
    return Replacements({"forward": [(module, bound(own)) for module, own in found if own is not None]})
