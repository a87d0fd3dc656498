"""Mixtures of experts with few tokens, registered with transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .. import ops
from .attention import submodel_configs
from .linear import PLAIN_WEIGHTS
from .patch import original, replaced, runs_engine

EXPERTS_NAME = "hf_specdec"
BATCHED_NAME = "hf_specdec_batched"
_ENTRY = "_experts_implementation_internal"

# Tokens an expert has on average up to which a block of them has few rows, and up to which our products are taken for
# bfloat16; above, torch's grouped ones. One H200, microseconds of both products with 128 experts of Qwen3-MoE's width,
# 8 for each token: at 4 tokens 76 (grouped, with what they need around them, 133), at 128 288 (933), at 512 313 in
# blocks of 64 and 417 in blocks of 16 (488).
FEW_TOKENS = 8
MOST_TOKENS = 64

# transformers' choices where nobody has made one.
DEFAULTS = ("eager", "grouped_mm")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def choose_rows(num_pairs: int, num_experts: int) -> int:
    """Tokens of a block, for which an expert's weights are read once."""
    return 16 if num_pairs <= FEW_TOKENS * num_experts else 64


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' interface of experts: the chosen ones' answers to every token, weighted and added up.

    Of its own implementations, the loop over experts reads on the host which of them have tokens, products batched over
    tokens copy the weights for each of them, and grouped ones (bfloat16 only, when compiled) sort tokens and results
    by a dozen launches. This one reads the weights of the chosen experts once, in three launches besides the activation
    and the sum.

    Args:
        module: whose class has transformers' `use_experts_implementation`.
        hidden_states: `[n, H]`.
        top_k_index: `[n, k]` int64, the experts of each token; those beyond the module's own answer nothing.
        top_k_weights: `[n, k]`.

    Returns:
        `[n, H]` in the dtype of `hidden_states`.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    first, second = getattr(module, name), module.down_proj
    num_experts, num_pairs = len(second), top_k_index.numel()
    if num_pairs > MOST_TOKENS * num_experts and first.dtype == torch.bfloat16:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    rows = choose_rows(num_pairs, num_experts)
    plan = ops.plan_experts(top_k_index, num_experts, rows)

    def product(inputs: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return ops.expert_linear(inputs.to(weight.dtype), weight, bias, plan, rows, module.is_transposed)

    inner = product(hidden_states, first, name)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    answers = product(inner, second, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        answers = module.post_expert_norm(answers)
    answers = answers.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
    return answers.sum(1).to(hidden_states.dtype)


def _for_engines(implementation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`implementation` where an engine runs the experts, and what they ran before for everybody else."""

    def forward(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        return (implementation if runs_engine() else _original_experts(module))(module, *args)

    return forward


def _original_experts(module: nn.Module) -> Callable[..., torch.Tensor]:
    # "eager" is the forward of the class itself, around which transformers has put the choice.
    own = next(vars(cls)["forward"] for cls in type(module).__mro__ if hasattr(vars(cls).get("forward"), "__wrapped__"))
    return ALL_EXPERTS_FUNCTIONS.get_interface(original(module.config, _ENTRY), own.__wrapped__)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _for_engines(experts_forward))
ALL_EXPERTS_FUNCTIONS.register(BATCHED_NAME, _for_engines(ALL_EXPERTS_FUNCTIONS["batched_mm"]))


def _is_suitable(model: PreTrainedModel) -> bool:
    """Whether `experts_forward` can compute with the weights of experts in `model`: none is quantised."""
    # Weights of experts are stacked, [experts, out, in]; a mask's hidden state, [1, 1, width], is none.
    stacked = (parameter for parameter in model.parameters() if parameter.dim() == 3 and len(parameter) > 1)
    return all(type(weight) in (*PLAIN_WEIGHTS, DTensor) and weight.dtype in _DTYPES for weight in stacked)


def original_experts_implementation(model: PreTrainedModel) -> str | None:
    """What `model` computes mixtures of experts by, also while it runs by ours."""
    return original(model.config.get_text_config(), _ENTRY)


def triton_experts(*models: PreTrainedModel) -> AbstractContextManager[None]:
    """Context in which mixtures of experts in `models` compute by `experts_forward`.

    Those whose user has made another choice than `DEFAULTS` do not, nor those that cannot.
    """
    configs = [config for model in models if _is_suitable(model) for config in submodel_configs(model)]
    return replaced(_ENTRY, [(config, EXPERTS_NAME) for config in configs if original(config, _ENTRY) in DEFAULTS])


def copies_experts(*models: PreTrainedModel) -> bool:
    """Whether, within `experts_without_host`, `models` copy weights of experts for every token."""
    return not all(_is_suitable(model) for model in models)


def capturable_experts(*models: PreTrainedModel) -> AbstractContextManager[None]:
    """Context, within `own_experts`, in which mixtures of experts in `models` compute in a way that a graph can hold.

    transformers' loop over experts reads on the host which of them have tokens, and so do grouped products of anything
    but bfloat16. Where `experts_forward` cannot be taken, products batched over tokens are.
    """
    configs = [config for model in models for config in submodel_configs(model)]
    return replaced(_ENTRY, [(config, BATCHED_NAME) for config in configs if getattr(config, _ENTRY) in DEFAULTS])
