"""Norms and gated MLPs whose small operations run as one kernel, an op of layers; so do sums before norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import ops
from ..device_policy import policy_of
from ..modules.deferred import joined_norms, normed, residual_stream
from ..modules.hidden_states import modules_of
from ..modules.module_hooks import has_hooks
from ..modules.patch import DTYPES, EXPERT_GATE, Replacements, bound, constant, is_unpatched, uses_layer_kernels
from ..modules.weights import PLAIN_WEIGHTS, is_experts
from .fused_linear import fused_parameters
from .layer_probes import Angles, GatedMlp, Norm, Probes, Router
from .linear import computes, gated_linear, linear


def _norm_forward(module: nn.Module, norm: Norm, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and _takes(module, args[0]):
        return normed(args[0], module._parameters.get("weight"), *norm)
    return type(module).forward(module, *args, **kwargs)


def _takes(module: nn.Module, inputs: torch.Tensor) -> bool:
    """Whether the norm `module` runs an op over `inputs`."""
    weight = module._parameters.get("weight")
    is_taken = inputs.dtype in DTYPES and (weight is None or weight.dtype == inputs.dtype)
    return is_taken and inputs.shape[-1] <= ops.MAX_NORM_WIDTH and uses_layer_kernels(inputs)


def norms_side_by_side(
    first: nn.Module, first_inputs: torch.Tensor, second: nn.Module, second_inputs: torch.Tensor
) -> torch.Tensor:
    """The outputs of two norms with weights, `[B, n, 2 D]`, for inputs `[B, n, D]` each; of one op if it can."""
    forward, other = vars(first).get("forward"), vars(second).get("forward")
    is_norm = getattr(forward, "func", None) is _norm_forward and getattr(other, "func", None) is _norm_forward
    if is_norm and forward.args[1] == other.args[1] and _takes(first, first_inputs) and _takes(second, second_inputs):
        return joined_norms((first_inputs, second_inputs), (first.weight, second.weight), *forward.args[1])
    return torch.cat([first(first_inputs), second(second_inputs)], dim=-1)


def _mlp_forward(module: nn.Module, mlp: GatedMlp, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and uses_layer_kernels(args[0]) and args[0].dtype in DTYPES:
        return residual_stream(module._modules[mlp.down](_activated(module._modules, mlp, args[0])))
    return type(module).forward(module, *args, **kwargs)


def _activated(children: dict[str, nn.Module], mlp: GatedMlp, inputs: torch.Tensor) -> torch.Tensor:
    parameters = fused_parameters(children[mlp.gate], children[mlp.up]) if mlp.gate_first else None
    if parameters is not None and computes(inputs, parameters[0]):
        return gated_linear(inputs, *parameters, mlp.activation)
    return ops.gated_activation(*mlp.gate_and_up(children, inputs), mlp.activation)


def _router_forward(module: nn.Module, router: Router, *args: torch.Tensor, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and args[0].dtype in DTYPES and uses_layer_kernels(args[0]):
        inputs = args[0].reshape(-1, args[0].shape[-1]) if router.flattens else args[0]
        if inputs.dim() == 2 and (router.in_float or inputs.dtype == module.weight.dtype):
            logits = router.logits(module, inputs, linear)
            return logits, *router.choose(module, logits, inputs.dtype)
    return type(module).forward(module, *args, **kwargs)


def _embedding_forward(module: nn.Embedding, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    weight = module.weight
    is_plain = type(module) is nn.Embedding and type(weight) in PLAIN_WEIGHTS and module.max_norm is None
    if is_plain and len(args) == 1 and not kwargs and uses_layer_kernels(weight) and weight.is_contiguous():
        tokens = args[0]
        if tokens.dim() == 2 and tokens.dtype == torch.int64 and tokens.device == weight.device:
            return residual_stream(ops.gather_rows(weight[None], tokens, None))
    return residual_stream(type(module).forward(module, *args, **kwargs))


def _angles_forward(
    module: nn.Module, found: dict[str | None, Angles], *args: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(args) + len(kwargs) in (2, 3) and (given := _given_to_angles(*args, **kwargs)) is not None:
        states, positions, layer_type = given
        angles = found.get(layer_type)
        frequencies = None if angles is None else module._buffers.get(angles.buffer)
        if frequencies is not None and uses_layer_kernels(states) and _fit(frequencies, states, positions):
            return ops.rotary_angles(frequencies, positions, states.dtype, angles.kind)
    return type(module).forward(module, *args, **kwargs)


def _given_to_angles(
    x: torch.Tensor, position_ids: torch.Tensor | None = None, layer_type: str | None = None, **others: Any
) -> tuple[torch.Tensor, torch.Tensor, str | None] | None:
    """The arguments of a rotary embedding; None if there are others."""
    return None if others or position_ids is None else (x, position_ids, layer_type)


def _fit(frequencies: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> bool:
    is_on_device = frequencies.device == states.device == positions.device
    is_known = states.dtype in DTYPES and frequencies.dtype in DTYPES and frequencies.is_contiguous()
    return is_on_device and is_known and positions.dim() == 2 and positions.dtype == torch.int64


_FORWARDS = (_norm_forward, _mlp_forward, _router_forward, _embedding_forward, _angles_forward)


def layer_kernels(*models: nn.Module) -> Replacements:
    """Context in which norms and gated MLPs of `models` run ops of layers, on devices whose policy says so.

    Norms also compute the sums of the residual stream that they read, i.e. of outputs of embeddings and MLPs with other
    tensors. Modules are recognised by what they compute, see `layer_probes`. Modules with hooks, those but experts with
    a `forward` attribute, and norms whose weight is quantised or sharded, are left as they are.
    """
    modules = modules_of(*models)
    if not any_has_layer_kernels(modules):
        return Replacements({})
    probes, chosen, gates = Probes(), [], []
    for module in modules:
        if has_hooks([module]):
            continue
        if is_experts(module):  # also split ones, whose `forward` wraps that of the class
            gate = probes.expert_gate(module)
            if gate is not None:
                gates.append((module, constant(gate)))
            continue
        if not is_unpatched(module, *_FORWARDS):
            continue
        norm = probes.norm(module)
        mlp = probes.gated_mlp(module) if norm is None else None
        if norm is not None:
            chosen.append((module, bound(_norm_forward, norm)))
        elif mlp is not None:
            chosen.append((module, bound(_mlp_forward, mlp)))
        elif router := probes.router(module):
            chosen.append((module, bound(_router_forward, router)))
        elif angles := probes.angles(module):
            chosen.append((module, bound(_angles_forward, angles)))
        elif isinstance(module, nn.Embedding):
            chosen.append((module, bound(_embedding_forward)))
    return Replacements({"forward": chosen, EXPERT_GATE: gates})


def any_has_layer_kernels(modules: list[nn.Module]) -> bool:
    """Whether any of `modules` has a weight on a device where layers may run ops of layers."""
    devices = {one.device for module in modules for one in module._parameters.values() if one is not None}
    return any(policy_of(one).layer_kernels for one in devices)
