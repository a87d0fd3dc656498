"""Recurrences and short convolutions of transformers' models over a `RaggedCache`.

transformers' mixers call functions that are globals of their modeling file, so that kernels can take the place of the
PyTorch code. Inside `recurrent_functions` they are replaced by ones that run the engine's ops where they are given what
a `RecurrentLayer` hands out, and the original function otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .hidden_states import modules_of
from .patch import Replacements, original
from .recurrent_layers import ConvolutionInputs, ConvolutionState, RecurrentState
from .variants import files_of


def _delta_rule(
    function: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: RecurrentState | torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Gated delta rule (arXiv 2412.06464) and Kimi delta attention (arXiv 2510.26692).

    Args:
        function: the model's own, with the arguments of flash-linear-attention.
        query, key: `[B, n, Hk, K]`.
        value: `[B, n, H, V]`.
        g: log decay, `[B, n, H]` or `[B, n, H, K]`.
        beta: `[B, n, H]`.
    """
    if not isinstance(initial_state, RecurrentState):
        return function(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )

    def chunked(is_token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A column without decay and without update leaves the state as it is.
        is_live = is_token[..., None]
        return function(
            query,
            key,
            value,
            g=torch.where(is_live if g.dim() == 3 else is_live[..., None], g, 0),
            beta=torch.where(is_live, beta, 0),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )

    out = initial_state.run(
        query,
        key,
        value,
        g.float(),
        beta,
        chunked,
        delta=True,
        normalize=use_qk_l2norm_in_kernel,
        scale=query.shape[-1] ** -0.5,
    )
    return out, initial_state


def _time_steps(
    state: RecurrentState, dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool, limits: tuple[float, float]
) -> torch.Tensor:
    """Time steps `[B, n, H]` float32 of a state-space model, from `dt` `[B, n, H]`.

    transformers bounds them by `limits` in passes over several tokens only. In plain `generate()` these are the prompt,
    so it is done for tokens of the prompt (transformers issue #48989).
    """
    steps = dt.float() if bias is None else dt.float() + bias.float()
    if softplus:
        steps = F.softplus(steps)
    if limits == (0.0, float("inf")):
        return steps
    cache = state.cache
    is_prompt = cache.positions < cache.recurrence.prompt_lengths[:, None]
    return torch.where(is_prompt[..., None], steps.clamp(*limits), steps)


def _mamba2_scan(
    function: Callable,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: RecurrentState | torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba-2 (arXiv 2405.21060) over several tokens.

    Args:
        function: the model's own, with the arguments of mamba_ssm.
        hidden_states: `[B, n, H, P]`.
        dt: `[B, n, H]`.
        A: `[H]`.
        B, C: `[B, n, groups, N]`.
        D, dt_bias: `[H]`.
    """
    options = {"chunk_size": chunk_size, "return_final_states": return_final_states, **kwargs}
    if not isinstance(initial_states, RecurrentState):
        return function(
            hidden_states,
            dt,
            A,
            B,
            C,
            D=D,
            dt_bias=dt_bias,
            initial_states=initial_states,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            **options,
        )
    initial_states.step_limits = tuple(dt_limit)
    steps = _time_steps(initial_states, dt, dt_bias, dt_softplus, initial_states.step_limits)

    def chunked(is_token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A step of 0 leaves the state as it is. transformers keeps it transposed.
        inert = torch.where(is_token[..., None], steps, 0.0)
        before = state.transpose(-1, -2).contiguous()
        out, final = function(
            hidden_states, inert, A, B, C, initial_states=before, **{**options, "return_final_states": True}
        )
        return out, final.transpose(-1, -2)

    out = _state_space(initial_states, hidden_states, steps, A, B, C, D, chunked)
    return (out, initial_states) if return_final_states else out


def _mamba2_step(
    function: Callable,
    state: RecurrentState | torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    *,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Mamba-2 over a single token.

    Args:
        function: the model's own, with the arguments of mamba_ssm.
        hidden_states, dt: `[B, H, P]`.
        A: `[H, P, N]`.
        B, C: `[B, groups, N]`.
        D, dt_bias: `[H, P]`.
    """
    if not isinstance(state, RecurrentState):
        return function(state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)
    bias = None if dt_bias is None else dt_bias[:, 0]
    # A pass over several tokens, which names the limits, has come before: a prefill has two columns at least.
    steps = _time_steps(state, dt[:, None, :, 0], bias, dt_softplus, state.step_limits)
    out = _state_space(
        state, hidden_states[:, None], steps, A[:, 0, 0], B[:, None], C[:, None], None if D is None else D[:, 0]
    )[:, 0]
    return out if z is None else out * F.silu(z)


def _state_space(
    state: RecurrentState,
    hidden_states: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    chunked: Callable | None = None,
) -> torch.Tensor:
    """Outputs `[B, n, H, P]` of a state-space model; `steps` `[B, n, H]` float32, the others as of `_mamba2_scan`."""
    decay = steps * A.float()
    out = state.run(C, B, hidden_states, decay, steps, chunked, delta=False, normalize=False, scale=1.0)
    return out if D is None else (out + hidden_states * D[:, None]).to(hidden_states.dtype)


def _convolution(
    function: Callable,
    hidden_states: ConvolutionInputs | torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Depthwise causal convolution.

    Args:
        function: the model's own, with the arguments of causal_conv1d.
        hidden_states: `[B, C, n]`.
        weight: `[C, W]`.
        bias: `[C]`.
    """
    if not isinstance(hidden_states, ConvolutionInputs):
        return function(hidden_states, weight, bias, activation=activation, **kwargs)
    is_silu = activation in ("silu", "swish")
    out = hidden_states.convolve(weight, bias, is_silu)
    return out if activation is None or is_silu else ACT2FN[activation](out)


def _convolution_step(
    function: Callable,
    hidden_states: torch.Tensor,
    conv_state: ConvolutionState | torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Depthwise causal convolution of a single token, `hidden_states` `[B, C, 1]`; the others as of `_convolution`."""
    if not isinstance(conv_state, ConvolutionState):
        return function(hidden_states, conv_state, weight, bias, activation=activation, **kwargs)
    inputs = conv_state.followed_by(hidden_states, weight.shape[-1])
    return _convolution(function, inputs, weight, bias, activation)


# By the names that transformers' modeling files use.
_REPLACEMENTS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_selective_state_update": _mamba2_step,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
}


# Those that cannot be replaced, with the reason.
_NOT_REPLACED = {"mamba_selective_scan": "Mamba-1, whose functions are given no state over several tokens"}


def why_not_replaced(model: nn.Module) -> str | None:
    """The reason why recurrent layers of `model` cannot run on a `RaggedCache`, as far as it is known beforehand."""
    found = {name for file in files_of(map(type, modules_of(model))) for name in vars(file)}
    reasons = [reason for name, reason in _NOT_REPLACED.items() if name in found]
    if reasons:
        return f"recurrent layers are {reasons[0]}"
    if found.isdisjoint(_REPLACEMENTS):
        return "recurrent layers call no function that the engine can replace"
    return None


def recurrent_functions(*models: nn.Module) -> Replacements:
    """Context in which recurrent layers of `models` run on a `RaggedCache`; other models are not affected."""
    files = files_of(map(type, modules_of(*models)))
    return Replacements(
        {
            name: [(file, functools.partial(_over_original, name)) for file in files if name in vars(file)]
            for name in _REPLACEMENTS
        }
    )


def _over_original(name: str, file: ModuleType) -> Callable:
    return _over(_REPLACEMENTS[name], original(file, name))


@functools.cache
def _over(replacement: Callable, function: Callable) -> Callable:
    """`replacement` of `function`; the same object for the same two, since compiled code depends on it."""
    return functools.partial(replacement, function)
