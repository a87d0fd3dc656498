"""Recognition of layers by running modules on a few random values: norms, gated MLPs, routers, rotary embeddings.

A module is copied without its weights, gets random ones, and runs on a CPU in bfloat16, where every rounding shows. It
is of a kind if its outputs are those of that kind's reference.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .. import ops
from ..host.modeling import apply_gate
from ..kernels.types import AnglesKind, ClampedGate, NormKind, RouterKind
from ..modules.module_hooks import has_hooks
from ..modules.patch import DTYPES
from ..modules.signature import OF_EVERY_MODULE, PLAIN_VALUES
from ..modules.weights import PLAIN_WEIGHTS
from ..ops import ACTIVATIONS

NORM_KINDS = [
    NormKind(cast_first, offset, centered)
    for centered, (cast_first, offset) in itertools.product((False, True), ((True, 0.0), (False, 0.0), (False, 1.0)))
]

# Width of the rows on which norms without weight and MLPs are probed.
_WIDTH = 64
# Magnitudes of rows: norms of small ones depend on epsilon, and MLPs that clamp change large ones.
_NORM_SCALES, _MLP_SCALES = (1e-3, 1.0, 30.0), (0.1, 1.0, 30.0, 3000.0)
# Rows of the weight of a router.
_MOST_EXPERTS = 1024
# Share of a norm's elements that may differ in the last bit: there are several ways to compute 1 / sqrt in float32.
_ROUNDED_OTHERWISE = 0.005


class Norm(NamedTuple):
    """A norm over the last dimension, with or without the parameter `weight`; see `ops.rms_norm`."""

    eps: float
    kind: NormKind


class GatedMlp(NamedTuple):
    """A module that computes `down(activation(gate(inputs)) * up(inputs))`.

    Attributes:
        gate, up, down: names of its children; gate and up are equal if one child computes both.
        activation: see `ops.gated_activation`.
        gate_first: for a child that computes both, whether the gate is the first half of its output.
    """

    gate: str
    up: str
    down: str
    activation: str
    gate_first: bool = True

    def gate_and_up(
        self, children: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up, `[..., N]` each, from the children's outputs for `inputs` `[..., H]`."""
        if self.gate != self.up:
            return children[self.gate](inputs), children[self.up](inputs)
        first, second = children[self.gate](inputs).chunk(2, dim=-1)
        return (first, second) if self.gate_first else (second, first)


class ExpertGate(NamedTuple):
    """The gated activation of experts, whose gate and up are halves of a row, or its even and odd columns.

    Attributes:
        activation, clamped: see `ops.gated_activation`.
    """

    activation: str
    clamped: ClampedGate | None
    is_interleaved: bool

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """`[..., N]` for `[..., 2 N]`."""
        halves = (both[..., ::2], both[..., 1::2]) if self.is_interleaved else both.chunk(2, dim=-1)
        return ops.gated_activation(*halves, self.activation, self.clamped)


class Router(NamedTuple):
    """A router of a mixture of experts, a linear layer and `ops.choose_experts`; it returns `(logits, weights,
    experts)`.

    Attributes:
        bias, correction: names of the parameter or buffer that is each of them; None for none.
        in_float: whether logits are computed in float32.
        rounds: whether weights have the dtype of the inputs, else float32.
        flattens: whether it returns rows for inputs `[B, n, H]`, too.
    """

    bias: str | None
    correction: str | None
    top_k: int
    kind: RouterKind
    in_float: bool
    rounds: bool
    flattens: bool

    def logits(self, module: nn.Module, inputs: torch.Tensor, linear: Callable[..., torch.Tensor]) -> torch.Tensor:
        """`[n, E]` for `[n, H]`; `linear` computes those that are not computed in float32."""
        bias = None if self.bias is None else getattr(module, self.bias)
        if not self.in_float:
            return linear(inputs, module.weight, bias)
        return F.linear(inputs.float(), module.weight.float(), None if bias is None else bias.float())

    def choose(self, module: nn.Module, logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts, `[n, k]` each, for inputs of `dtype`."""
        correction = None if self.correction is None else getattr(module, self.correction)
        return ops.choose_experts(logits, correction, self.top_k, dtype if self.rounds else torch.float32, self.kind)


class Angles(NamedTuple):
    """A rotary embedding with frequencies in a buffer; see `ops.rotary_angles`."""

    buffer: str
    kind: AnglesKind


class Probes:
    """Probes modules, each kind once; kinds differ in class, shapes or values of attributes."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def norm(self, module: nn.Module) -> Norm | None:
        parameters = {name: one for name, one in module._parameters.items() if one is not None}
        if module._modules or module._buffers or not parameters.keys() <= {"weight"}:
            return None
        weight = parameters.get("weight")
        if weight is not None and (
            type(weight) not in PLAIN_WEIGHTS or weight.dim() != 1 or not weight.is_floating_point()
        ):
            return None
        size = None if weight is None else len(weight)
        return self._try(module, (size,), lambda: _find_norm(module, size))

    def gated_mlp(self, module: nn.Module) -> GatedMlp | None:
        children = {name: one for name, one in module._modules.items() if one is not None}
        linears = {name: one for name, one in children.items() if _is_linear(one)}
        others = [one for name, one in children.items() if name not in linears]
        has_own = any(one is not None for one in (*module._parameters.values(), *module._buffers.values()))
        if len(linears) not in (2, 3) or has_own or not all(map(_is_function, others)):
            return None
        sizes = {name: (one.in_features, one.out_features) for name, one in linears.items()}
        settings = itertools.chain.from_iterable(map(_settings, others))
        return self._try(module, (*sizes.items(), *children, *settings), lambda: _find_gated_mlp(module, sizes))

    def expert_gate(self, module: nn.Module) -> ExpertGate | None:
        children = [one for one in module._modules.values() if one is not None]
        if not module.has_gate or not all(map(_is_function, children)):
            return None
        settings = itertools.chain.from_iterable(map(_settings, children))
        return self._try(module, ("gate", *settings), lambda: _find_expert_gate(module))

    def router(self, module: nn.Module) -> Router | None:
        tensors = {**module._parameters, **module._buffers}
        tensors = {name: one for name, one in tensors.items() if one is not None}
        weight, others = tensors.get("weight"), {name: one for name, one in tensors.items() if name != "weight"}
        is_plain = all(type(one) in (*PLAIN_WEIGHTS, nn.Buffer) for one in tensors.values())
        if weight is None or weight.dim() != 2 or not is_plain or module._modules or _is_linear(module):
            return None
        if len(weight) > _MOST_EXPERTS:  # such as embeddings, for which so many random values take seconds
            return None
        num_experts, numbers = len(weight), [one for one in vars(module).values() if type(one) is int]
        if any(one.shape != (num_experts,) for one in others.values()) or num_experts not in numbers:
            return None
        sizes = {name: (one.shape, one.dtype) for name, one in tensors.items()}
        return self._try(module, ("router", *sizes.items()), lambda: _find_router(module, sizes))

    def angles(self, module: nn.Module) -> dict[str | None, Angles]:
        """The rotary embeddings that `module` is, by the `layer_type` argument of a call; None if it has no such
        argument. Those whose frequencies depend on positions are left out."""
        buffers = {name: one for name, one in module._buffers.items() if one is not None}
        has_others = module._modules or any(one is not None for one in module._parameters.values())
        is_plain = all(one.dim() == 1 and one.dtype in DTYPES for one in buffers.values())
        if has_others or not buffers or not is_plain:
            return {}
        sizes = {name: (len(one), one.dtype) for name, one in buffers.items()}
        found = {}
        for layer_type in (None, *_layer_types(module)):
            key = ("angles", layer_type, *sizes.items())
            one = self._try(module, key, lambda given=layer_type: _find_angles(module, sizes, given))
            if one is not None:
                found[layer_type] = one
        return found

    def _try(self, module: nn.Module, others: tuple[Hashable, ...], find: Callable[[], Any]) -> Any:
        """The result of `find` for the first module like it."""
        return tried(self._found, (*_settings(module), *others), find)


def tried(found: dict[Hashable, Any], key: Hashable, find: Callable[[], Any]) -> Any:
    """The entry `key` of `found`. If missing, it is set to the result of `find` without gradients and kernels; to None
    if that fails, since a module may raise anything, for example on a CPU."""
    if key not in found:
        try:
            with torch.no_grad(), ops.references():
                found[key] = find()
        except Exception:
            found[key] = None
    return found[key]


def _is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer of any kind, quantised or with adapters."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes)


def _is_function(module: nn.Module) -> bool:
    """Whether `module`, e.g. an activation, has no parameters, buffers, children, hooks or `forward` of its own."""
    has_content = module._parameters or module._buffers or module._modules
    return not (has_content or "forward" in vars(module) or has_hooks([module]))


def _settings(module: nn.Module) -> tuple[Hashable, ...]:
    """Everything that outputs of `module` may depend on besides parameters and children; objects by identity."""
    names = sorted(vars(module).keys() - OF_EVERY_MODULE)
    return type(module), type(module).forward, *((name, _stand_in(vars(module)[name])) for name in names)


def _stand_in(value: Any) -> Hashable:
    if isinstance(value, functools.partial):  # e.g. the functions of activations
        named = ((name, _stand_in(one)) for name, one in value.keywords.items())
        return value.func, *map(_stand_in, value.args), *named
    return value if type(value) in PLAIN_VALUES else id(value)


def copied(module: nn.Module, **changes: dict[str, Any]) -> nn.Module:
    """A copy of `module` itself, with the same children, and with `changes` of parameters or children."""
    clone = copy.copy(module)
    vars(clone).update(changes)
    return clone


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(dtype)


def _column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")[:, None]


def _find_expert_gate(module: nn.Module) -> ExpertGate | None:
    numbers = sorted({float(one) for one in vars(module).values() if type(one) in (int, float) and one > 0})
    forms = [ClampedGate(limit, alpha, add) for limit in numbers for alpha in (None, *numbers) for add in (0.0, 1.0)]
    candidates = [
        ExpertGate(activation, clamped, is_interleaved)
        for clamped in (None, *forms)
        for activation in (ACTIVATIONS if clamped is None or clamped.alpha is None else ("silu",))
        for is_interleaved in (False, True)
    ]
    inputs = _draw(len(_MLP_SCALES), 2 * _WIDTH, seed=0) * _column(_MLP_SCALES, torch.bfloat16)
    found = apply_gate(module, inputs)
    return next((one for one in candidates if same_bits(found, one(inputs))), None)


class _RouterRun(NamedTuple):
    """A router with random weights, its inputs, and what it returns."""

    router: nn.Module
    inputs: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor

    def is_of(self, one: Router, logits: torch.Tensor) -> bool:
        """Whether `one` chooses the same by `logits`, up to roundings, and in some order of a token's experts."""
        weights, experts = one.choose(self.router, logits, self.inputs.dtype)
        rtol = 1e-5 if weights.dtype == torch.float32 else 2 * torch.finfo(weights.dtype).eps
        scores = [logits.float().gather(1, chosen) for chosen in (self.experts, experts)]
        pairs = (self.weights.float(), weights.float()), scores
        same = [torch.allclose(some.sort(-1).values, others.sort(-1).values, rtol=rtol) for some, others in pairs]
        return weights.dtype == self.weights.dtype and all(same)


def _run_router(
    module: nn.Module, sizes: Mapping[str, tuple[torch.Size, torch.dtype]], dtypes: Sequence[torch.dtype]
) -> _RouterRun | None:
    """A run of `module` with tensors of `sizes`, for inputs of the first of `dtypes` that it takes; None if it returns
    something else than a router does."""
    tensors = {name: _draw(*shape, seed=seed, dtype=dtype) for seed, (name, (shape, dtype)) in enumerate(sizes.items())}
    width = tensors["weight"].shape[1]
    tensors["weight"] *= width**-0.5
    parameters = {name: nn.Parameter(one, requires_grad=False) for name, one in tensors.items()}
    clone = copied(
        module,
        _parameters={name: one for name, one in parameters.items() if name in module._parameters},
        _buffers={name: one for name, one in tensors.items() if name in module._buffers},
    )
    for dtype in dtypes:
        inputs = _draw(16, width, seed=9, dtype=dtype)
        with contextlib.suppress(RuntimeError):
            found = clone(inputs)
            is_router = isinstance(found, tuple) and len(found) == 3 and found[1].dim() == 2
            return _RouterRun(clone, inputs, *found) if is_router and found[2].dtype == torch.int64 else None
    return None


def _find_router(module: nn.Module, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Router | None:
    # Some routers cast their inputs. In float32 what a rounding to bfloat16 hides shows.
    run = _run_router(module, sizes, (torch.bfloat16, sizes["weight"][1]))
    exact = _run_router(module, {name: (one, torch.float32) for name, (one, _) in sizes.items()}, (torch.float32,))
    if run is None or exact is None:
        return None
    flattens = False
    with contextlib.suppress(Exception):
        flattens = all(map(same_bits, run.router(run.inputs.view(4, 4, -1)), run[2:]))
    values = {one for one in vars(module).values() if type(one) is float}
    kinds = [
        RouterKind(scores, *normalises, scaling)
        for scores in ("chosen", "softmax", "sigmoid")
        for normalises in ((False, 0.0), *((True, eps) for eps in sorted({1e-20, 1e-6, *values})))
        for scaling in sorted({1.0, *values})
    ]
    rounds, others = run.weights.dtype == run.inputs.dtype, (None, *(name for name in sizes if name != "weight"))
    for bias, correction, in_float in itertools.product(others, others, (False, True)):
        uses_all = sorted(filter(None, (bias, correction))) == sorted(others[1:])
        if not uses_all or not (in_float or sizes["weight"][1] == run.inputs.dtype):
            continue
        router = Router(bias, correction, run.experts.shape[1], kinds[0], in_float, rounds, flattens)
        logits = [router.logits(one.router, one.inputs, F.linear) for one in (run, exact)]
        if not torch.equal(logits[0].float(), run.logits.float()):
            continue
        for kind in kinds:
            one = router._replace(kind=kind)
            if run.is_of(one, logits[0]) and exact.is_of(one, logits[1]):
                return one
    return None


def _find_norm(module: nn.Module, size: int | None) -> Norm | None:
    values = {value for value in vars(module).values() if type(value) is float and 0 < value < 0.1}
    candidates = [Norm(eps, kind) for eps in sorted(values) for kind in NORM_KINDS]
    for dtype in (torch.bfloat16, torch.float32):
        weight = None if size is None else _draw(size, seed=0, dtype=dtype)
        inputs = _draw(len(_NORM_SCALES), size or _WIDTH, seed=1, dtype=dtype)
        inputs *= _column(_NORM_SCALES, dtype)
        found = copied(module, _parameters={} if weight is None else {"weight": weight})(inputs)
        candidates = [one for one in candidates if _are_rounded_alike(found, ops.rms_norm(inputs, weight, *one))]
    return candidates[0] if candidates else None


def _are_rounded_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of a norm differ by roundings of float32 only."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    is_close = torch.allclose(found, expected, rtol=2 * torch.finfo(found.dtype).eps, atol=0)
    most = 1.0 if found.dtype == torch.float32 else _ROUNDED_OTHERWISE
    return is_close and float((found != expected).float().mean()) <= most


def _layer_types(module: nn.Module) -> list[str]:
    types = getattr(module, "layer_types", ())
    return sorted(one for one in set(types) if isinstance(one, str)) if isinstance(types, (list, tuple, set)) else []


# Positions of tokens; a rotary embedding that depends on the length of a text does so at the last ones.
_POSITIONS = ((0, 1, 5), (7, 300, 2**20))


def _find_angles(module: nn.Module, sizes: dict[str, tuple[int, torch.dtype]], layer_type: str | None) -> Angles | None:
    buffers = {name: _draw(size, seed=seed, dtype=dtype) for seed, (name, (size, dtype)) in enumerate(sizes.items())}
    positions = torch.tensor(_POSITIONS, device="cpu")
    options = {} if layer_type is None else {"layer_type": layer_type}
    scalings = {1.0, *(value for value in vars(module).values() if type(value) is float)}
    candidates = [
        Angles(name, AnglesKind(repeats, scaling))
        for name, repeats, scaling in itertools.product(buffers, ("halves", "pairs", "once"), sorted(scalings))
    ]
    for dtype in (torch.bfloat16, torch.float32):
        # Clones, since a module may write to its buffers, or register others.
        clone = copied(module, _buffers={name: one.clone() for name, one in buffers.items()})
        found = clone(_draw(2, 3, 8, seed=9, dtype=dtype), positions, **options)
        if not isinstance(found, tuple) or len(found) != 2:
            return None
        candidates = [
            one
            for one in candidates
            if all(map(same_bits, found, ops.rotary_angles(buffers[one.buffer], positions, dtype, one.kind)))
        ]
    return candidates[0] if candidates else None


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def linear_with(weight: torch.Tensor) -> nn.Linear:
    """A linear layer with random numbers `[out, in]`, scaled by their width, as its weight."""
    size_out, size_in = weight.shape
    layer = nn.Linear(size_in, size_out, bias=False, device="meta")
    layer.weight = nn.Parameter(weight * size_in**-0.5, requires_grad=False)
    return layer


def _find_gated_mlp(module: nn.Module, sizes: dict[str, tuple[int, int]]) -> GatedMlp | None:
    stubs = {}
    for seed, name in enumerate(sizes, start=1):
        size = 2 * _WIDTH if _computes_both(name, sizes) else _WIDTH
        stubs[name] = linear_with(_draw(size, _WIDTH, seed=seed))
    inputs = _draw(len(_MLP_SCALES), _WIDTH, seed=0) * _column(_MLP_SCALES, torch.bfloat16)
    found = copied(module, _modules={**module._modules, **stubs})(inputs)
    if not isinstance(found, torch.Tensor):
        return None
    for candidate in _candidates(sizes):
        gate, up = candidate.gate_and_up(stubs, inputs)
        expected = stubs[candidate.down](ops.gated_activation(gate, up, candidate.activation))
        if same_bits(found, expected):
            return candidate
    return None


def _computes_both(name: str, sizes: dict[str, tuple[int, int]]) -> bool:
    """Whether layer `name` of two, with these input and output features, may compute gate and up."""
    others = [size_in for other, (size_in, _) in sizes.items() if other != name]
    return len(others) == 1 and sizes[name][1] == 2 * others[0]


def _candidates(sizes: dict[str, tuple[int, int]]) -> Iterator[GatedMlp]:
    for names, activation in itertools.product(itertools.permutations(sizes), ACTIVATIONS):
        if len(names) == 3:
            yield GatedMlp(*names, activation)
        elif _computes_both(names[0], sizes):
            both, down = names
            yield from (GatedMlp(both, both, down, activation, is_first) for is_first in (True, False))
