"""Forward hooks of modules: code of the caller that may depend on the row of a batch."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import nn
from torch.nn.modules import module as all_modules

from ..host.modeling import output_capturing
from .hidden_states import modules_of

_PACKAGE = __name__.partition(".")[0]

_M = TypeVar("_M", bound=nn.Module)

# Attributes of a module that hold its forward hooks and how they are called.
_HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward_")]


def has_hooks(modules: Iterable[nn.Module], of_engines: bool = True) -> bool:
    """Whether `modules` have forward hooks, see `hooks_of`."""
    return bool(hooks_of(modules, of_engines))


def hooks_of(modules: Iterable[nn.Module], of_engines: bool = False) -> tuple[int, ...]:
    """The ids that torch has given to the forward hooks of `modules`, and to those of all modules, at registration.

    Some do nothing in an engine's passes and are left out: hooks of transformers that record hidden states, those of a
    drafter that learns, and those that ask for gradients. Hooks that engines register for a call count if `of_engines`.
    """
    harmless = (output_capturing.__name__, f"{_PACKAGE}.training." if of_engines else f"{_PACKAGE}.")
    hooks = [
        number
        for module in modules
        if module._forward_hooks or module._forward_pre_hooks
        for number, hook in (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
        if not (getattr(hook, "__module__", None) or "").startswith(harmless) and not asks_for_gradients(hook)
    ]
    return *all_modules._global_forward_hooks, *all_modules._global_forward_pre_hooks, *hooks


def _ask(module, args, output):
    output.requires_grad_(True)


def asks_for_gradients(hook: Callable) -> bool:
    """Whether `hook` only sets `requires_grad` of an output, as transformers' does for gradient checkpointing."""
    code, asking = getattr(hook, "__code__", None), _ask.__code__
    names = ("co_code", "co_consts", "co_names")
    return code is not None and all(getattr(code, name) == getattr(asking, name) for name in names)


def without_hooks(model: _M) -> _M:
    """`model` without the forward hooks of its modules, with the same weights and configurations.

    It is `model` itself if there are no hooks, or if a module has a `forward` attribute that may call other modules.
    """
    modules = modules_of(model)
    if not any(has_hooks([module]) for module in modules):
        return model
    clones = {module: _clone(module) for module in modules}
    for clone in clones.values():
        children = clone._modules.items()
        vars(clone)["_modules"] = {name: clones.get(child) for name, child in children}
        forward = vars(clone).get("forward")
        if forward is None:
            continue
        if not isinstance(forward, types.MethodType) or forward.__self__ not in clones:
            return model
        vars(clone)["forward"] = types.MethodType(forward.__func__, clones[forward.__self__])
    return clones[model]


def _clone(module: _M) -> _M:
    """`module` with the same children, and without hooks."""
    clone = type(module).__new__(type(module))
    # A compiled call (`Module.compile`) would run the module itself.
    no_hooks = {name: type(vars(module)[name])() for name in _HOOKS}
    vars(clone).update(vars(module) | no_hooks, _buffers=dict(module._buffers), _compiled_call_impl=None)
    return clone
