"""Norms and gated MLPs whose small operations run as one kernel each, see `layer_ops`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import layer_ops
from ..device_policy import policy_of
from .hidden_states import modules_of
from .layer_probes import GatedMlp, Norm, Probes
from .module_hooks import has_hooks
from .patch import Replacements, runs_engine

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_layer_kernels(states: torch.Tensor) -> bool:
    """Whether the layers that compute with `states` run the ops of `layer_ops`.

    Not in code that is to be compiled: the compiler fuses small operations with their neighbours, residual sums, too.
    """
    return not torch.compiler.is_compiling() and runs_engine() and has_layer_kernels(states.device)


def has_layer_kernels(device: torch.device) -> bool:
    """Whether layers on `device` may run the ops of `layer_ops`."""
    return policy_of(device).layer_kernels


def _norm_forward(module: nn.Module, norm: Norm, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and uses_layer_kernels(args[0]):
        weight, inputs = module._parameters.get("weight"), args[0]
        if inputs.dtype in DTYPES and (weight is None or weight.dtype == inputs.dtype):
            return layer_ops.rms_norm(inputs, weight, norm.eps, norm.kind)
    return type(module).forward(module, *args, **kwargs)


def _mlp_forward(module: nn.Module, mlp: GatedMlp, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and uses_layer_kernels(args[0]) and args[0].dtype in DTYPES:
        gate, up = mlp.gate_and_up(module._modules, args[0])
        return module._modules[mlp.down](layer_ops.gated_activation(gate, up, mlp.activation))
    return type(module).forward(module, *args, **kwargs)


def _is_unchanged(module: nn.Module) -> bool:
    """Whether `module` has neither hooks nor a `forward` attribute but one that another call's context has set."""
    forward = vars(module).get("forward")
    return not has_hooks([module]) and (
        forward is None or getattr(forward, "func", None) in (_norm_forward, _mlp_forward)
    )


def layer_kernels(*models: nn.Module) -> Replacements:
    """Context in which norms and gated MLPs of `models` run the ops of `layer_ops`, on devices whose policy says so.

    A module is recognised by what it computes, see `layer_probes`. Modules with hooks or a `forward` attribute, and
    norms whose weight is quantised or sharded, are left as they are; children of MLPs are called as before.
    """
    modules = modules_of(*models)
    if not any_has_layer_kernels(modules):
        return Replacements({})
    probes, chosen = Probes(), []
    for module in filter(_is_unchanged, modules):
        norm = probes.norm(module)
        mlp = probes.gated_mlp(module) if norm is None else None
        if norm is not None:
            chosen.append((module, _maker(_norm_forward, norm)))
        elif mlp is not None:
            chosen.append((module, _maker(_mlp_forward, mlp)))
    return Replacements({"forward": chosen})


def any_has_layer_kernels(modules: list[nn.Module]) -> bool:
    """Whether any of `modules` has a weight on a device where layers may run the ops of `layer_ops`."""
    devices = {one.device for module in modules for one in module._parameters.values() if one is not None}
    return any(map(has_layer_kernels, devices))


def _maker(forward: Callable, found: Norm | GatedMlp) -> Callable[[nn.Module], Callable]:
    return lambda module: functools.partial(forward, module, found)
