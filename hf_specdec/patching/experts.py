"""Mixture-of-experts layers for few tokens, registered with transformers as an experts implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .. import ops
from ..host.modeling import ALL_EXPERTS_FUNCTIONS, EXPERTS_ENTRY, apply_gate
from ..host.quantised import ALL_FP8_EXPERTS_FUNCTIONS
from ..kernels.types import StoredWeight
from ..modules.hidden_states import modules_of
from ..modules.patch import DTYPES, EXPERT_GATE, Replacements, constant, original, runs_engine, uses_layer_kernels
from ..modules.signature import signature_of
from ..modules.weights import PLAIN_WEIGHTS, is_experts, stored_experts
from .layer_probes import ExpertGate

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


def projections(module: nn.Module) -> tuple[str, str]:
    """Names of the two weights of `module`, see `experts_forward`."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface: outputs of the routed experts for every token, weighted and summed.

    Of transformers' implementations "eager" synchronizes with the device, "batched_mm" copies weights for every token,
    and "grouped_mm" sorts tokens in a dozen launches. This one reads the weights of the routed experts once, in five
    launches where the activation is known.

    Args:
        module: of a class decorated with transformers' `use_experts_implementation`.
        hidden_states: `[n, H]`.
        top_k_index: `[n, k]` int64, the experts of each token; numbers from the number of experts on add nothing.
        top_k_weights: `[n, k]`.

    Returns:
        `[n, H]` in the dtype of `hidden_states`.
    """
    names = projections(module)
    first, second = (stored_experts(module, name) or getattr(module, name) for name in names)
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

    inner = linear(hidden_states, first, names[0])
    gate: ExpertGate | None = vars(module).get(EXPERT_GATE)
    if gate is not None and uses_layer_kernels(inner) and inner.dtype in DTYPES:
        inner = gate(inner)
    else:
        inner = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
    outputs = linear(inner, second, names[1])
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    return ops.sum_experts(outputs, top_k_weights).to(hidden_states.dtype)


def _for_engines(interface: Any, implementation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`implementation` if an engine runs the experts; that of `interface` that they had before if other code does."""

    def forward(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        if runs_engine():
            return implementation(module, *args)
        # "eager" is the forward of the class itself, which transformers' decorator wraps: of FP8 once for each layer.
        forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
        eager = inspect.unwrap(next(one for one in forwards if hasattr(one, "__wrapped__")))
        return interface.get_interface(original(module.config, EXPERTS_ENTRY), eager)(module, *args)

    return forward


for _interface in filter(None, (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)):
    _interface.register(EXPERTS_NAME, _for_engines(_interface, experts_forward))
    _interface.register(BATCHED_NAME, _for_engines(_interface, _interface["batched_mm"]))


def _is_suitable(model: PreTrainedModel) -> bool:
    """Whether `experts_forward` can compute with the experts' weights in `model`: plain and known ones."""
    names = ((module, name) for module in filter(is_experts, modules_of(model)) for name in projections(module))
    # Not those that torch's parametrizations compute when they are read.
    others = (module._parameters.get(name) for module, name in names if stored_experts(module, name) is None)
    plain = (one for one in others if one is not None)
    return all(type(one) in (*PLAIN_WEIGHTS, DTensor) and one.dtype in DTYPES for one in plain)


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
