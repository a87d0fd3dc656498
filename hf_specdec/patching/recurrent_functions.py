"""Recurrences and short convolutions of transformers' models over a `RaggedCache`.

transformers' mixers call functions that are globals of their modeling file, so that kernels can take the place of the
PyTorch code. Inside `recurrent_functions` they are replaced by ones that run the engine's ops where they are given what
a `RecurrentLayer` hands out, and the original function otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..host.caches import Cache, given_cache, given_cache_name
from ..host.modeling import ACT2FN, RECURRENCES, RECURRENT_MASK, UPDATE_CONV_STATE
from ..host.parts import any_of
from .cache import RaggedCache
from .former_inputs import former_inputs
from .hidden_states import modules_of
from .patch import Replacements, original
from .recurrent_layers import UNBOUNDED, ConvolutionInputs, ConvolutionState, RecurrentLayer, RecurrentState
from .running_layer import next_state, running_layer_forwards
from .signature import files_of
from .state_forms import StateForm


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
    if limits == UNBOUNDED:
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
    dt_limit: tuple[float, float] = UNBOUNDED,
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
    options = {"form": StateForm.VALUES_FIRST, "delta": False, "normalize": False, "scale": 1.0}
    out = state.run(C, B, hidden_states, decay, steps, chunked, **options)
    return out if D is None else (out + hidden_states * D[:, None]).to(hidden_states.dtype)


def _mamba_scan(
    function: Callable,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """Mamba-1 (arXiv 2312.00752) over several tokens, from the state of the layer that runs.

    Args:
        function: the model's own, with the arguments of mamba_ssm.
        hidden_states, dt: `[B, P, n]`.
        A: `[P, N]`.
        B, C: `[B, N, n]`.
        D, delta_bias: `[P]`.
        z: `[B, P, n]`, the gate.
    """
    state = next_state()
    if state is None:
        options = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, "return_last_state": return_last_state}
        return function(hidden_states, dt, A, B, C, D=D, z=z, **options, **kwargs)
    gate = None if z is None else z.transpose(1, 2)
    inputs, dt, B, C = (part.transpose(1, 2) for part in (hidden_states, dt, B, C))
    out = _selective_state_space(state, inputs, dt, A, B, C, D, gate, delta_bias, delta_softplus).transpose(1, 2)
    # Models stack what they are given for the final states of heads: nothing, as these are in their place.
    return (out, out.new_empty(0)) if return_last_state else out


def _mamba_step(
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
    """Mamba-1 over a single token: `hidden_states`, `dt` and `z` `[B, P]`, `B` and `C` `[B, N]`; see `_mamba_scan`."""
    if not isinstance(state, RecurrentState):
        return function(state, hidden_states, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)
    gate = None if z is None else z[:, None]
    inputs, dt, B, C = (part[:, None] for part in (hidden_states, dt, B, C))
    return _selective_state_space(state, inputs, dt, A, B, C, D, gate, dt_bias, dt_softplus)[:, 0]


def _selective_state_space(
    state: RecurrentState,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
) -> torch.Tensor:
    """Outputs `[B, n, P]` of Mamba-1: `hidden_states`, `dt` and `gate` likewise, `B` and `C` `[B, n, N]`."""
    steps = _time_steps(state, dt, bias, softplus, state.step_limits)
    # One head; the logarithm of a factor is step * A, of another A for each element of the state.
    decay, updates, key, query = (part[:, :, None] for part in (steps, steps * hidden_states.float(), B, C))
    rates = A.float().t().contiguous()[None]
    options = {"form": StateForm.CHANNELS, "delta": False, "normalize": False, "scale": 1.0, "rates": rates}
    out = state.run(query, key, updates, decay, None, **options)[:, :, 0]
    if D is not None:
        out = out + hidden_states * D
    return (out if gate is None else out * F.silu(gate)).to(hidden_states.dtype)


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


class _ExtendedInputs:
    """What a convolution that is no function of its file is given as a cache: one that hands out tensors.

    Args:
        cache: a `RaggedCache`.
    """

    def __init__(self, cache: Cache):
        self._cache = cache

    def update_conv_state(
        self, inputs: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """See `RecurrentLayer.extended`."""
        return self._cache.layers[layer_idx].extended(inputs, state_idx, conv_kernel_size)


def _own_convolution(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module that takes the inputs of a convolution from the cache and convolves them itself."""
    index = getattr(module, "layer_idx", None)
    cache = given_cache(kwargs)
    if cache is not None and isinstance(cache.layers[index], RecurrentLayer):
        kwargs[given_cache_name(kwargs)] = _ExtendedInputs(cache)
    return type(module).forward(module, *args, **kwargs)


def _convolves_itself(module: nn.Module) -> bool:
    names = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    forward = vars(module).get("forward")
    return (
        UPDATE_CONV_STATE in names
        and _REPLACEMENTS.keys().isdisjoint(names)
        and hasattr(module, "layer_idx")
        and (forward is None or getattr(forward, "func", None) is _own_convolution)
    )


def _own_convolution_of(module: nn.Module) -> Callable:
    return functools.partial(_own_convolution, module)


_REPLACEMENTS: dict[str, Callable] = {
    **dict.fromkeys(RECURRENCES["delta rule"], _delta_rule),
    **dict(zip(RECURRENCES["mamba2"], (_mamba2_scan, _mamba2_step), strict=True)),
    **dict(zip(RECURRENCES["mamba"], (_mamba_scan, _mamba_step), strict=True)),
    **dict(zip(RECURRENCES["convolution"], (_convolution, _convolution_step), strict=True)),
}


def _token_mask(function: Callable, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Which columns recurrent layers are to read, `[B, n]` bool; None for all.

    transformers cuts it out of a mask of as many columns as there are keys, after it has looked whether all are ones,
    for which the host waits.

    Args:
        function: the model's own, with transformers' arguments.
    """
    cache, mask = given_cache(kwargs), kwargs.get("attention_mask")
    if not isinstance(cache, RaggedCache) or mask is None or mask.dim() != 2:
        return function(*args, **kwargs)
    return cache.positions < cache.dummy_slot


_MASKS: dict[str, Callable] = {RECURRENT_MASK: _token_mask}


def why_not_replaced(model: nn.Module) -> str | None:
    """The reason why recurrent layers of `model` cannot run on a `RaggedCache`, as far as it is known beforehand."""
    if all(_REPLACEMENTS.keys().isdisjoint(vars(file)) for file in files_of(map(type, modules_of(model)))):
        names = (name for names in RECURRENCES.values() for name in names)
        return f"recurrent layers call no function that the engine can replace ({any_of(tuple(names))})"
    return None


def recurrent_functions(*models: nn.Module) -> Replacements:
    """Context in which recurrent layers of `models` run on a `RaggedCache`; other models are not affected."""
    files, functions = files_of(map(type, modules_of(*models))), _REPLACEMENTS | _MASKS
    replaced = {
        name: [(file, functools.partial(_over_original, name)) for file in files if name in vars(file)]
        for name in functions
    }
    methods = former_inputs(functions, *models)
    forwards = methods.pop("forward", [])
    taken = {id(module) for module, _ in forwards}
    others = (module for module in modules_of(*models) if id(module) not in taken and _convolves_itself(module))
    forwards += [*running_layer_forwards(*models), *((module, _own_convolution_of) for module in others)]
    return Replacements(replaced | methods | {"forward": forwards})


def _over_original(name: str, file: ModuleType) -> Callable:
    return _over((_REPLACEMENTS | _MASKS)[name], original(file, name))


@functools.cache
def _over(replacement: Callable, function: Callable) -> Callable:
    """`replacement` of `function`; the same object for the same two, since compiled code depends on it."""
    return functools.partial(replacement, function)
