"""Mixture-of-experts layers for few tokens, registered with transformers as an experts implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .. import ops
from ..host.modeling import ALL_EXPERTS_FUNCTIONS, EXPERTS_ENTRY, apply_gate
from ..kernels.types import StoredWeight
from ..modules.hidden_states import modules_of
from ..modules.patch import DTYPES, Replacements, constant, original, runs_engine
from ..modules.signature import signature_of
from ..modules.weights import PLAIN_WEIGHTS

EXPERTS_NAME = "hf_specdec"
BATCHED_NAME = "hf_specdec_batched"

# Limits on the average number of tokens of an expert. Up to the first, blocks have 16 rows, beyond 64; up to the
# second, the Triton kernel computes bfloat16, beyond torch's grouped matmul. Measured on one H200, microseconds of both
# linears of 128 experts of Qwen3-MoE's width, 8 experts a token; in brackets grouped matmul with the sorting around it:
# 4 tokens 76 (133); 128 tokens 288 (933); 512 tokens 313 in blocks of 64 rows, 417 in blocks of 16 (488).
MAX_TOKENS_OF_SMALL_BLOCKS = 8
MAX_TOKENS_OF_KERNEL = 64

# Implementations that transformers chooses by itself if the user has set none.
DEFAULTS = ("eager", "grouped_mm")


# Suffixes of MXFP4's parts of a weight `[experts, out, in]`: blocks `[experts, out, in / 32, 16]` uint8, and exponents
# of groups `[experts, out, in / 32]` uint8.
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32


def expert_weight(module: nn.Module, name: str) -> torch.Tensor | StoredWeight:
    """The weight `name` of `module`, see `experts_forward`, as the op takes it."""
    blocks = module._parameters.get(f"{name}{BLOCKS}")
    if blocks is None:
        return getattr(module, name)
    exponents = module._parameters[f"{name}{SCALES}"].view(torch.float8_e8m0fnu)
    return StoredWeight(blocks.flatten(-2), exponents, None, 1, GROUP, codes="e2m1")


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface: outputs of the routed experts for every token, weighted and summed.

    Of transformers' implementations "eager" synchronizes with the device, "batched_mm" copies weights for every token,
    and "grouped_mm" sorts tokens in a dozen launches. This one reads the weights of the routed experts once, in three
    launches besides the activation and the sum.

    Args:
        module: of a class decorated with transformers' `use_experts_implementation`.
        hidden_states: `[n, H]`.
        top_k_index: `[n, k]` int64, the experts of each token; numbers from the number of experts on add nothing.
        top_k_weights: `[n, k]`.

    Returns:
        `[n, H]` in the dtype of `hidden_states`.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    first, second = expert_weight(module, name), expert_weight(module, "down_proj")
    num_experts, num_pairs, is_stored = second.shape[0], top_k_index.numel(), isinstance(first, StoredWeight)
    is_many = num_pairs > MAX_TOKENS_OF_KERNEL * num_experts and not is_stored and first.dtype == torch.bfloat16
    if is_many and not ops.is_batch_invariant():
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    rows = 16 if num_pairs <= MAX_TOKENS_OF_SMALL_BLOCKS * num_experts else 64
    if is_stored:  # it keeps twice as many results in registers
        rows //= 2
    plan = ops.plan_experts(top_k_index, num_experts, rows)

    def linear(inputs: torch.Tensor, weight: torch.Tensor | StoredWeight, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        if is_stored:
            return ops.expert_linear(inputs, weight, bias, plan, rows, False)
        return ops.expert_linear(inputs.to(weight.dtype), weight, bias, plan, rows, module.is_transposed)

    inner = linear(hidden_states, first, name)
    inner = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
    outputs = linear(inner, second, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    outputs = outputs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
    return outputs.sum(1).to(hidden_states.dtype)


def _for_engines(implementation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`implementation` if an engine runs the experts; their original implementation if other code does."""

    def forward(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        return (implementation if runs_engine() else _original_experts(module))(module, *args)

    return forward


def _original_experts(module: nn.Module) -> Callable[..., torch.Tensor]:
    # "eager" is the forward of the class itself, which transformers' decorator wraps.
    wrapper = next(
        vars(cls)["forward"] for cls in type(module).__mro__ if hasattr(vars(cls).get("forward"), "__wrapped__")
    )
    return ALL_EXPERTS_FUNCTIONS.get_interface(original(module.config, EXPERTS_ENTRY), wrapper.__wrapped__)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _for_engines(experts_forward))
ALL_EXPERTS_FUNCTIONS.register(BATCHED_NAME, _for_engines(ALL_EXPERTS_FUNCTIONS["batched_mm"]))


def _is_suitable(model: PreTrainedModel) -> bool:
    """Whether `experts_forward` can compute with the experts' weights in `model`: none is quantised but as MXFP4."""
    # Experts' weights are stacked, [experts, out, in]; the hidden state of a mask token, [1, 1, width], is no weight.
    modules = (one for one in modules_of(model) if f"down_proj{BLOCKS}" not in one._parameters)
    parameters = (one for module in modules for one in module._parameters.values() if one is not None)
    stacked = (parameter for parameter in parameters if parameter.dim() == 3 and len(parameter) > 1)
    return all(type(weight) in (*PLAIN_WEIGHTS, DTensor) and weight.dtype in DTYPES for weight in stacked)


def original_experts_implementation(model: PreTrainedModel) -> str | None:
    """The experts implementation that `model` has outside of the contexts of this module."""
    return original(model.config.get_text_config(), EXPERTS_ENTRY)


def _with_experts(name: str, models: Iterable[PreTrainedModel], entry_of: Callable[[Any, str], Any]) -> Replacements:
    """Context in which the implementation `name` replaces those of `DEFAULTS`; `entry_of` reads the present ones."""
    configs = (config for model in models for config in signature_of(model).configs)
    chosen = (config for config in configs if entry_of(config, EXPERTS_ENTRY) in DEFAULTS)
    return Replacements({EXPERTS_ENTRY: [(config, constant(name)) for config in chosen]})


def triton_experts(*models: PreTrainedModel) -> Replacements:
    """Context in which mixture-of-experts layers in `models` compute with `experts_forward`.

    A model keeps its implementation if the user has set one that is not in `DEFAULTS`, or if a weight is quantised.
    """
    return _with_experts(EXPERTS_NAME, filter(_is_suitable, models), original)


def copies_experts(*models: PreTrainedModel) -> bool:
    """Whether, within `capturable_experts`, any of `models` copies the experts' weights for every token."""
    return not all(_is_suitable(model) for model in models)


def capturable_experts(*models: PreTrainedModel) -> Replacements:
    """Context, within `triton_experts`, in which mixture-of-experts layers in `models` can be captured in a CUDA graph.

    "eager", and "grouped_mm" in dtypes other than bfloat16, synchronize with the device: where `experts_forward` cannot
    be used, "batched_mm" replaces them.
    """
    return _with_experts(BATCHED_NAME, models, getattr)
