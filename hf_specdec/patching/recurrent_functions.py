"""Recurrences and short convolutions of transformers' models over a `RaggedCache`.

transformers' mixers call functions that are globals of their modeling file. Inside `recurrent_functions`, replacements
of these run the engine's ops if their arguments come from a `RecurrentLayer`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import ops
from ..cache.layer_kinds import LayerKind, LayerMemory, Use, register
from ..cache.ragged_cache import RaggedCache
from ..cache.recurrent_layers import (
    UNBOUNDED,
    ConvolutionInputs,
    ConvolutionState,
    KeyedRecurrentLayer,
    RecurrentLayer,
    RecurrentState,
    StateForm,
)
from ..host.caches import RECURRENT_LAYERS, Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, given_cache
from ..host.modeling import ACT2FN, LAYER_TYPES, RECURRENCES, RECURRENT_MASK, UPDATE_CONV_STATE
from ..host.parts import any_of
from ..modules.hidden_states import modules_of
from ..modules.patch import Replacements, bound, is_unpatched, original
from ..modules.signature import files_of, names_in, replacing_functions
from .plugins.former_inputs import former_inputs

# Functions over several tokens that get no state: mixers of Mamba-1 pass it to the function for a single token only.
STATELESS = frozenset(RECURRENCES["mamba"][:1])


class _Running(threading.local):
    """The state of the running layer, for functions that get no state, and how many of them, one a head, have taken it;
    None outside of a `RaggedCache`."""

    state: RecurrentState | None = None
    calls: int = 0


_running = _Running()


@functools.cache
def _is_stateless(kind: type[nn.Module]) -> bool:
    return not STATELESS.isdisjoint(names_in(kind.forward))


def _running_layer(module: nn.Module) -> Callable[..., Any]:
    own = original(module, "forward")
    return functools.partial(_run_layer, module, type(module).forward.__get__(module) if own is None else own)


def _run_layer(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer by its own `forward`, while functions can find its state."""
    cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, RaggedCache)), None)
    if cache is None:
        return forward(*args, **kwargs)
    _running.state, _running.calls = cache.layers[module.layer_idx].recurrent_states[0], 0
    try:
        return forward(*args, **kwargs)
    finally:
        _running.state = None


def _where(name: str, kind: type) -> Callable[[Callable], Callable]:
    """Decorator of a replacement: it runs if the argument `name` is of `kind`; otherwise its first argument runs."""

    def decorate(run: Callable) -> Callable:
        names = tuple(inspect.signature(run).parameters)[1:]

        @functools.wraps(run)
        def replacement(function: Callable, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            return run(function, **given) if isinstance(given.get(name), kind) else function(*args, **kwargs)

        return replacement

    return decorate


@_where("initial_state", RecurrentState)
def _delta_rule(function, query, key, value, g, beta, *, initial_state, use_qk_l2norm_in_kernel=False, **rest):
    """Gated delta rule (arXiv 2412.06464) and Kimi delta attention (arXiv 2510.26692), as in flash-linear-attention.

    Query and key `[B, n, Hk, K]`, value `[B, n, H, V]`, log decay `g` `[B, n, H]` or `[B, n, H, K]`, beta `[B, n, H]`.
    """

    def chunked(is_token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A column without decay and update leaves the state unchanged.
        is_live = is_token[..., None]
        g_of_tokens = torch.where(is_live if g.dim() == 3 else is_live[..., None], g, 0)
        options = {**rest, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "output_final_state": True}
        beta_of_tokens = torch.where(is_live, beta, 0)
        return function(query, key, value, g=g_of_tokens, beta=beta_of_tokens, initial_state=state, **options)

    options = {"delta": True, "normalize": use_qk_l2norm_in_kernel, "scale": query.shape[-1] ** -0.5}
    return initial_state.run(query, key, value, g.float(), beta, chunked, **options), initial_state


def _time_steps(
    state: RecurrentState, dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool, limits: tuple[float, float]
) -> torch.Tensor:
    """Time steps `[B, n, H]` float32 of a state-space model. They are bounded for tokens of the prompt only, as by
    transformers, which bounds them in passes over several tokens (transformers issue #48989)."""
    steps = dt.float() if bias is None else dt.float() + bias.float()
    if softplus:
        steps = F.softplus(steps)
    if limits == UNBOUNDED:
        return steps
    cache = state.cache
    is_prompt = cache.positions < cache.recurrence.prompt_lengths[:, None]
    return torch.where(is_prompt[..., None], steps.clamp(*limits), steps)


@_where("initial_states", RecurrentState)
def _mamba2_scan(
    function, hidden_states, dt, A, B, C, *, initial_states, D=None, dt_bias=None, dt_softplus=False, **rest
):
    """Mamba-2 (arXiv 2405.21060) over several tokens, as in mamba_ssm: hidden states `[B, n, H, P]`, dt `[B, n, H]`; A,
    D and bias `[H]`; B and C `[B, n, groups, N]`."""
    returns_states = rest.pop("return_final_states", False)
    initial_states.step_limits = tuple(rest.pop("dt_limit", UNBOUNDED))
    steps = _time_steps(initial_states, dt, dt_bias, dt_softplus, initial_states.step_limits)

    def chunked(is_token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A step of 0 leaves the state unchanged. transformers stores it transposed.
        inert = torch.where(is_token[..., None], steps, 0.0)
        before = state.transpose(-1, -2).contiguous()
        out, final = function(hidden_states, inert, A, B, C, initial_states=before, return_final_states=True, **rest)
        return out, final.transpose(-1, -2)

    out = _state_space(initial_states, hidden_states, steps, A, B, C, D, chunked)
    return (out, initial_states) if returns_states else out


@_where("state", RecurrentState)
def _mamba2_step(function, state, hidden_states, dt, A, B, C, D=None, *, z=None, dt_bias=None, dt_softplus=False, **_):
    """Mamba-2 over one token: hidden states, dt `[B, H, P]`, A `[H, P, N]`, B, C `[B, groups, N]`, D, bias `[H, P]`."""
    bias = None if dt_bias is None else dt_bias[:, 0]
    # An earlier pass over several tokens has set the limits: a prefill has at least two columns.
    steps = _time_steps(state, dt[:, None, :, 0], bias, dt_softplus, state.step_limits)
    out = _state_space(
        state, hidden_states[:, None], steps, A[:, 0, 0], B[:, None], C[:, None], None if D is None else D[:, 0]
    )[:, 0]
    return out if z is None else out * F.silu(z)


def _state_space(state, hidden_states, steps, A, B, C, D, chunked=None):
    """Outputs `[B, n, H, P]` of a state-space model; `steps` `[B, n, H]` float32, the others as in `_mamba2_scan`."""
    decay = steps * A.float()
    out = state.run(C, B, hidden_states, decay, steps, chunked, StateForm.VALUES_FIRST)
    return out if D is None else (out + hidden_states * D[:, None]).to(hidden_states.dtype)


def _mamba_scan(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Mamba-1 (arXiv 2312.00752) over several tokens, from the state of the running layer, as in mamba_ssm."""
    if _running.state is None:
        return function(*args, **kwargs)
    _running.calls += 1
    return _scan(_running.state[:, _running.calls - 1], *args, **kwargs)


def _scan(state, hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **rest):
    """See `_mamba_scan`: hidden states, dt, gate z `[B, P, n]`, A `[P, N]`, B, C `[B, N, n]`, D, bias `[P]`."""
    gate = None if z is None else z.transpose(1, 2)
    inputs, dt, B, C = (part.transpose(1, 2) for part in (hidden_states, dt, B, C))
    out = _selective_state_space(state, inputs, dt, A, B, C, D, gate, delta_bias, delta_softplus).transpose(1, 2)
    # Models stack the final states of heads, which are empty here, since the states were updated in place.
    return (out, out.new_empty(0)) if rest.get("return_last_state") else out


@_where("state", RecurrentState)
def _mamba_step(function, state, hidden_states, dt, A, B, C, D=None, *, z=None, dt_bias=None, dt_softplus=False, **_):
    """Mamba-1 over one token: `hidden_states`, `dt` and `z` `[B, P]`, `B` and `C` `[B, N]`; see `_scan`."""
    gate = None if z is None else z[:, None]
    inputs, dt, B, C = (part[:, None] for part in (hidden_states, dt, B, C))
    return _selective_state_space(state, inputs, dt, A, B, C, D, gate, dt_bias, dt_softplus)[:, 0]


def _selective_state_space(state, hidden_states, dt, A, B, C, D, gate, bias, softplus):
    """Outputs `[B, n, P]` of Mamba-1; `hidden_states`, `dt` and `gate` `[B, n, P]`, `B` and `C` `[B, n, N]`."""
    steps = _time_steps(state, dt, bias, softplus, state.step_limits)
    # One head; the log of a decay factor is step * A, with its own A for each element of the state.
    decay, updates, key, query = (part[:, :, None] for part in (steps, steps * hidden_states.float(), B, C))
    rates = A.float().t().contiguous()[None]
    out = state.run(query, key, updates, decay, None, form=StateForm.CHANNELS, rates=rates)[:, :, 0]
    if D is not None:
        out = out + hidden_states * D
    return (out if gate is None else out * F.silu(gate)).to(hidden_states.dtype)


@_where("hidden_states", ConvolutionInputs)
def _convolution(function, hidden_states, weight, bias=None, activation=None, **_):
    """Depthwise causal convolution, as in causal_conv1d, of `[B, C, n]` with weight `[C, W]` and bias `[C]`."""
    cache, ring, is_silu = hidden_states.cache, hidden_states.ring, activation in ("silu", "swish")
    inputs = hidden_states.inputs.transpose(1, 2)
    out = ops.short_conv(inputs, ring, cache.positions, cache.dummy_slot, weight, bias, is_silu).transpose(1, 2)
    return out if activation is None or is_silu else ACT2FN[activation](out)


@_where("conv_state", ConvolutionState)
def _convolution_step(function, hidden_states, conv_state, weight, bias=None, activation=None, **_):
    """Depthwise causal convolution of one token, `hidden_states` `[B, C, 1]`; the others as in `_convolution`."""
    inputs = conv_state.layer.update_conv_state(hidden_states, conv_state.index, weight.shape[-1])
    return _convolution(function, inputs, weight, bias, activation)


class _ExtendedInputs(NamedTuple):
    """The cache for a convolution that is not a function of its file: it returns tensors."""

    cache: Cache

    def update_conv_state(
        self, inputs: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        return self.cache.layers[layer_idx].extended(inputs, state_idx, conv_kernel_size)


def _own_convolution(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module that reads the inputs of a convolution from the cache and convolves them itself."""
    index = getattr(module, "layer_idx", None)
    cache = given_cache(kwargs)
    if cache is not None and isinstance(cache.layers[index], RecurrentLayer):
        kwargs = {name: _ExtendedInputs(cache) if one is cache else one for name, one in kwargs.items()}
    return type(module).forward(module, *args, **kwargs)


def _convolves_itself(module: nn.Module) -> bool:
    names = names_in(type(module).forward)
    is_one = UPDATE_CONV_STATE in names and _REPLACEMENTS.keys().isdisjoint(names) and hasattr(module, "layer_idx")
    return is_one and is_unpatched(module, _own_convolution)


_REPLACEMENTS: dict[str, Callable] = {
    **dict.fromkeys(RECURRENCES["delta rule"], _delta_rule),
    **dict(zip(RECURRENCES["mamba2"], (_mamba2_scan, _mamba2_step), strict=True)),
    **dict(zip(RECURRENCES["mamba"], (_mamba_scan, _mamba_step), strict=True)),
    **dict(zip(RECURRENCES["convolution"], (_convolution, _convolution_step), strict=True)),
}


def _token_mask(function: Callable, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The columns that recurrent layers read, `[B, n]` bool, None for all; `function` reads the mask on the host."""
    cache, mask = given_cache(kwargs), kwargs.get("attention_mask")
    if not isinstance(cache, RaggedCache) or mask is None or mask.dim() != 2:
        return function(*args, **kwargs)
    return cache.positions < cache.dummy_slot


_FUNCTIONS = _REPLACEMENTS | {RECURRENT_MASK: _token_mask}


def recurrent_functions(*models: nn.Module) -> Replacements:
    """Context in which recurrent layers of `models` run on a `RaggedCache`; other models are not affected."""
    modules = modules_of(*models)
    replaced, methods = replacing_functions(_FUNCTIONS, _over_original, *models), former_inputs(_FUNCTIONS, *models)
    forwards = methods.pop("forward", [])
    taken = {id(module) for module, _ in forwards}
    forwards += [(module, _running_layer) for module in modules if _is_stateless(type(module))]
    others = (module for module in modules if id(module) not in taken and _convolves_itself(module))
    forwards += [(module, bound(_own_convolution)) for module in others]
    return Replacements(replaced | methods | {"forward": forwards})


def _over_original(name: str, file: ModuleType) -> Callable:
    return _over(_FUNCTIONS[name], original(file, name))


@functools.cache
def _over(replacement: Callable, function: Callable) -> Callable:
    """`replacement` of `function`; the same object for the same arguments, since compiled code depends on it."""
    return functools.partial(replacement, function)


@register
@dataclass(frozen=True, kw_only=True)
class Recurrent(LayerKind):
    """States of linear attention and state-space models, and inputs of short convolutions; perhaps keys, too.

    Attributes:
        num_states: number of recurrent states, and of convolutions.
        stores_keys: see `LayerKind`.
    """

    num_states: int = 1
    stores_keys: bool = False

    layer_types = frozenset(LAYER_TYPES["recurrent"])
    sources = RECURRENT_LAYERS
    keeps_states = True
    is_by_slot = False
    obstacles = {
        Use.PACKING: "recurrent states, which are not stored by slot",
        Use.PREFIX_REUSE: "recurrent states, which are of the last position only",
        Use.BATCH_INVARIANCE: "recurrent layers, whose sums depend on how many drafts were accepted; expected "
        "attention",
        Use.REPEATED_POSITIONS: "recurrent states, but modules run positions more than once; expected layers of "
        "attention",
        Use.UNROLLED_STEPS: "recurrent layers, whose states do not follow the steps before; expected num_steps=1, or a "
        "draft model of attention layers",
        Use.OTHER_INPUTS_CONTINUED: "recurrent states",
        Use.TREES: "recurrent layers, whose states follow one text; expected attention",
    }
    patches = staticmethod(recurrent_functions)

    @classmethod
    def detect(cls, layer: Any) -> Recurrent | None:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            return None
        return cls(num_states=layer.number_of_states, stores_keys=isinstance(layer, CacheLayerMixin))

    @property
    def layer_class(self) -> type[LayerMemory]:
        return KeyedRecurrentLayer if self.stores_keys else RecurrentLayer

    @classmethod
    def forgets_states(cls, model: PreTrainedModel) -> bool:
        return any(_is_stateless(type(module)) for module in modules_of(model))

    @classmethod
    def why_not_hosted(cls, model: PreTrainedModel) -> str | None:
        if all(_REPLACEMENTS.keys().isdisjoint(vars(file)) for file in files_of(map(type, modules_of(model)))):
            names = (name for names in RECURRENCES.values() for name in names)
            return f"recurrent layers call no function that the engine can replace ({any_of(tuple(names))})"
        return None
