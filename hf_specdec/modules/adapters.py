"""PEFT's LoRA adapters on a model: which layers have them, which are active, and which each row of a call has.

This file names all that we touch of PEFT's internals.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .hidden_states import modules_of
from .patch import replaced
from .weights import PLAIN_WEIGHTS

# Attributes of a layer that tell which of its adapters are active.
ACTIVE_ATTRIBUTES = frozenset({"_active_adapter", "_disable_adapters"})

# Most adapters that the bits of a row can distinguish.
MOST_ADAPTERS = 63

# Stands for an adapter's name: no adapter.
NO_ADAPTER = "__base__"


def _of_peft(module: str, name: str) -> Any:
    """A part of PEFT; None if PEFT has not been imported, in which case no model has its layers."""
    return getattr(sys.modules.get(f"peft.tuners.{module}"), name, None)


def is_lora_linear(kind: type) -> bool:
    """Whether `kind` is PEFT's class of LoRA on a linear layer whose weight is not quantised."""
    return kind is _of_peft("lora.layer", "Linear")


def base_layer(module: nn.Module) -> nn.Module:
    """The layer inside a LoRA layer; `module` itself if it is not one."""
    return module._modules["base_layer"] if is_lora_linear(type(module)) else module


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model as they are now.

    Attributes:
        layers: PEFT's layers with LoRA on a linear layer.
        names: names of their adapters, sorted; the adapter at place a has bit a.
        active: bits of the active adapters.
        why_not_by_row: why rows cannot have their own adapters, so that PEFT's layers run themselves; None if they can.
        state: the active adapters of each layer, for comparison.
    """

    layers: Sequence[nn.Module] = ()
    names: tuple[str, ...] = ()
    active: int = 0
    why_not_by_row: str | None = None
    state: Hashable = ()

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Adapters:
        """The adapters of the model that is the first of `modules`, which are all its modules."""
        tuner = _of_peft("tuners_utils", "BaseTunerLayer")
        if tuner is None or not any(map(issubclass, kinds := set(map(type, modules)), repeat(tuner))):
            return _NONE
        kinds = {kind for kind in kinds if issubclass(kind, tuner)}
        lora = next(filter(is_lora_linear, kinds), None)
        layers = [module for module in modules if type(module) is lora]
        others = sorted(f"{kind.__module__}.{kind.__name__}" for kind in kinds if not is_lora_linear(kind))
        active = [layer._active_adapter for layer in layers]
        active = [one if isinstance(one, str) else tuple(one) for one in active]
        state = tuple([(one, layer._disable_adapters) for one, layer in zip(active, layers, strict=True)])
        names = tuple(sorted(set(chain.from_iterable(layer._modules["lora_A"]._modules for layer in layers))))
        reason = f"it has layers of the class {others[0]}" if others else None
        head = getattr(modules[0], "get_output_embeddings", lambda: None)()
        if len(names) > MOST_ADAPTERS:
            reason = f"it has {len(names)} adapters, more than {MOST_ADAPTERS}"
        elif len(set(state)) > 1:
            reason = "other adapters are active in some layers than in others"
        elif any([layer is head for layer in layers]):
            reason = "an adapter is on its language model head, which runs some tokens of a pass only"
        reason = reason or next(filter(None, map(_why_not_plain, layers)), None) or _why_not_weights(layers)
        found = cls(layers, names, 0, reason, state)
        return found if reason is not None else replace(found, active=found.bits(layers[0].active_adapters))

    def bits(self, names: Sequence[str]) -> int:
        """The bits of adapters, 0 if they are disabled; names that no layer has are ignored."""
        if self.layers and self.layers[0]._disable_adapters:
            return 0
        return sum(1 << self.names.index(name) for name in set(names) if name in self.names)

    def why_no_rows(self, names: Sequence[str]) -> str | None:
        """Why rows of a call cannot have the adapters `names`, one each; None if they can."""
        unknown = sorted({*names} - {*self.names, NO_ADAPTER}, key=str)
        if unknown:
            found = ", ".join(map(repr, (*self.names, NO_ADAPTER)))
            return f"There is no LoRA adapter {', '.join(map(repr, unknown))}; expected one of {found}."
        if self.why_not_by_row is None:
            return None
        return (
            f"Rows of the target cannot have adapters of their own: {self.why_not_by_row}; expected plain LoRA of "
            "linear layers, not merged."
        )


_NONE = Adapters()


def _why_not_plain(layer: nn.Module) -> str | None:
    """Why a layer computes more than its base layer and low-rank updates; None if it does not."""
    attributes = vars(layer)
    if not {"lora_variant", "lora_bias", "cast_input_dtype_enabled"} <= attributes.keys():
        return "this version of PEFT has LoRA layers of another kind"
    for name, variant in layer.lora_variant.items():
        return f"the adapter {name!r} is a {type(variant).__name__}, no plain LoRA"
    if layer.merged_adapters:
        return f"{', '.join(map(repr, layer.merged_adapters))} is merged"
    if any(layer.lora_bias.values()):
        return "an adapter has a bias (lora_bias)"
    if any([isinstance(one, torch.Tensor) for one in layer.scaling.values()]):
        return "the scale of an adapter is a tensor (prepare_model_for_compiled_hotswap)"
    parts = layer._modules
    if any([one.training and getattr(one, "p", 0) for one in parts["lora_dropout"]._modules.values()]):
        return "the dropout of an adapter is active"
    if "forward" in attributes or not layer.cast_input_dtype_enabled:
        return "a layer with adapters has a forward of its own"
    if isinstance(parts["base_layer"]._parameters.get("weight"), DTensor):
        return "its weights are split over processes"
    return None


def _why_not_weights(layers: Sequence[nn.Module]) -> str | None:
    """Why the kernel cannot read the weights of the adapters of `layers`; None if it can."""
    parts = [layer._modules[name]._modules.values() for layer in layers for name in ("lora_A", "lora_B")]
    inner = list(chain.from_iterable(parts))
    if {nn.Linear}.issuperset(map(type, inner)):
        weights = [one._parameters.get("weight") for one in inner]  # a pruned layer has none
        own = any([one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in inner])
        if not own and PLAIN_WEIGHTS.issuperset(map(type, weights)) and all(map(torch.Tensor.is_contiguous, weights)):
            kinds = {(one.dtype, one.device) for one in weights}
            if len(kinds) <= 1:
                return None
            return f"weights of adapters differ in dtype or device ({', '.join(sorted(map(str, kinds)))})"
    return "a part of an adapter is no plain linear layer, or has hooks"


def _names_of(hook: Any) -> Sequence[str] | None:
    """The adapters that PEFT's `hook` gives to each row; None if it is not such a hook."""
    is_of_rows = isinstance(hook, functools.partial) and hook.func is _of_peft(
        "lora.model", "_adapter_names_pre_forward_hook"
    )
    return hook.keywords.get("adapter_names") if is_of_rows else None


def names_in_hooks(modules: Sequence[nn.Module]) -> list[str] | None:
    """The adapter of each row that PEFT's hooks (`adapter_names=` of `generate()`) give to `modules`; None if none."""
    for module in modules:
        # PEFT does not remove its hooks if a call fails; the last hook counts.
        found = [names for hook in module._forward_pre_hooks.values() if (names := _names_of(hook)) is not None]
        if found:
            return list(found[-1])
    return None


def check_adapters(model: nn.Module, names: Sequence[str] | None) -> None:
    """Raise `ValueError` unless all of `names` are adapters of `model`, or `NO_ADAPTER`."""
    if names is not None:
        layers = (module for module in modules_of(model) if is_lora_linear(type(module)))
        known = Adapters(names=tuple(sorted(set(chain.from_iterable(layer.lora_A for layer in layers)))))
        if (reason := known.why_no_rows(names)) is not None:
            raise ValueError(reason)


def names_of_rows(
    adapters: Adapters, hooked: Sequence[nn.Module], names: Sequence[str] | None, count: int
) -> list[str] | None:
    """The adapter of each of `count` rows of a call, for the engine's state.

    None for the active adapters, and where PEFT's own hooks must be called, as with other `hooked` modules. `names` are
    those that the call was given; None for those in PEFT's hooks.

    Raises:
        ValueError: the number of names is not that of rows, an adapter is unknown, or rows cannot have their own.
    """
    is_of_call = names is not None
    names = list(names) if is_of_call else names_in_hooks(hooked)
    if names is None:
        return None
    if len(names) != count:
        raise ValueError(f"adapter_names has {len(names)} names for {count} rows; expected one for each row.")
    others = {type(one).__name__ for one in hooked if not is_lora_linear(type(one)) and names_in_hooks([one])}
    reason = adapters.why_no_rows(names)
    if is_of_call and reason is not None:
        raise ValueError(f"adapter_names is {names!r:.200}, but: {reason}")
    return None if reason is not None or others else names


def without_row_hooks(layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Context in which `layers` lack PEFT's hooks that give each row its adapter: the engine's state does that."""
    hooks = [(layer, layer._forward_pre_hooks.items()) for layer in layers if layer._forward_pre_hooks]
    others = [(layer, OrderedDict(one for one in own if _names_of(one[1]) is None)) for layer, own in hooks]
    return replaced("_forward_pre_hooks", others)


@contextmanager
def with_row_hooks(layers: Sequence[nn.Module], names: Sequence[str] | None) -> Iterator[None]:
    """Context in which PEFT's hooks give each row of `layers` its adapter in `names`; None for the active adapters."""
    with ExitStack() as handles:
        if names is not None:
            hook = _of_peft("lora.model", "_adapter_names_pre_forward_hook")
            hook = functools.partial(hook, adapter_names=list(names))
            for one in layers:
                handles.enter_context(one.register_forward_pre_hook(hook, with_kwargs=True))
        yield
