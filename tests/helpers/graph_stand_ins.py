"""Stand-ins for CUDA graphs on a CPU: they run the function again, or the operations that it ran."""

from contextlib import contextmanager

import pytest
import torch
from targets import set_policy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specdec import ops
from hf_specdec.cache.ragged_cache import RaggedCache
from hf_specdec.engine import hosted_target
from hf_specdec.graphs import cuda_graphs
from hf_specdec.hosting.equivalence import ScriptedDrafter
from hf_specdec.modules.module_hooks import asks_for_gradients
from hf_specdec.modules.signature import signature_of

_hosted = hosted_target.patched_target


def in_place(result, new):
    """Copy the tensors of `new` into those of `result`, as a replay overwrites what was captured."""
    if isinstance(result, torch.Tensor):
        result.copy_(new)
    elif isinstance(result, tuple):
        for pair in zip(result, new, strict=True):
            in_place(*pair)


class Replay:
    """Runs a function again and again, with its results in one place.

    Unlike a graph it needs modules: while it runs it hosts the target of its capture, unless the call does so already.
    It also runs without autocast's cache, as at its capture; otherwise compiled code would be compiled again.

    Attributes:
        count: how many were made.
        hostings: how often a call hosted its target; calls that only replay do not.
        host: target and drafter that the call hosts now, as what, and their `traces` before; or None.
    """

    count = 0
    hostings = 0
    host = None

    def __init__(self, function, memory=None):
        assert Replay.host is not None, "what is captured needs a host: see `replay_on_cpu`"
        type(self).count += 1
        function()  # as a CUDA graph is captured after warm-ups
        self._function, self._host = function, Replay.host
        self.result = function()

    def __call__(self):
        with cuda_graphs.without_autocast_cache("cpu"):
            return self._replay()

    def _replay(self):
        if Replay.host is self._host:
            in_place(self.result, self._function())
            return self.result
        model, drafter, target, before = self._host
        assert Replay.host is not None or traces(model, drafter) == before, "modules were changed for a replay"
        with _hosted(model, drafter, False) as again:
            for name in ("recorder", "rollouts_recorder", "adapters"):
                setattr(target, name, getattr(again, name))
            in_place(self.result, self._function())
        return self.result


class Recorder(TorchDispatchMode):
    """Context that records every operation, with the tensors that it reads and makes."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out


def tensors(values):
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storages(values):
    return {one.untyped_storage().data_ptr() for one in tensors(values)}


class Tape:
    """Repeats the operations of a captured function on the tensors of the capture, as a CUDA graph does.

    Modules are not called again: changes of them since have no effect, except values written into their weights.

    Attributes:
        count: how many were made.
        made: all that were made since `tape_on_cpu`.
    """

    count = 0
    made = []

    def __init__(self, function, memory=None):
        type(self).count += 1
        self.made.append(self)
        function()  # as a CUDA graph is captured after warm-ups
        with Recorder() as recorder:
            self.result = function()
        # What is to be done again, with the tensors that it makes anew; and storages that are read and not made here.
        self._operations, self._reads = [], []
        own = set()
        for function, args, kwargs, out in recorder.operations:
            for one in (read := tensors((args, kwargs))):
                storage = one.untyped_storage()
                if storage.data_ptr() not in own and function != torch.ops.aten.lift_fresh.default:
                    self._reads.append((f"{function} of {one.dtype} {list(one.shape)}", StorageWeakRef(storage)))
            own |= storages(out)
            is_shared = not storages(out).isdisjoint(storages(read))
            if function._schema.is_mutable or not is_shared:  # else a view, which stays one
                self._operations.append((function, args, kwargs, [] if is_shared else tensors(out)))

    def forget(self):
        """Drop the tensors that it reads, as a CUDA graph keeps none; it cannot be called any more."""
        self._operations = self.result = None

    def dangling(self):
        """The operations that read freed memory."""
        return [name for name, one in self._reads if one.expired()]

    def __call__(self):
        for function, args, kwargs, made in self._operations:
            again = function(*args, **kwargs)
            for old, new in zip(made, tensors(again) if made else made, strict=True):
                old.copy_(new)
        return self.result


def traces(*models):
    """What hosting changes of `models`: forwards, hooks, and implementations of attention and experts."""
    modules = [module for model in models for module in model.modules()]
    asking = [[key for key, hook in module._forward_hooks.items() if asks_for_gradients(hook)] for module in modules]
    listening = [
        (list(module._forward_hooks.keys() - set(keys)), list(module._forward_pre_hooks))
        for module, keys in zip(modules, asking, strict=True)
    ]
    configs = [config for model in models for config in signature_of(model).configs]
    chosen = [(config._attn_implementation, config._experts_implementation) for config in configs]
    return [vars(module).get("forward") for module in modules], listening, chosen


@contextmanager
def _watched(model, drafter, keep_hidden_states, known):
    untouched = traces(model, drafter)
    with _hosted(model, drafter, keep_hidden_states, known) as target:
        Replay.hostings += not isinstance(drafter, ScriptedDrafter)
        before, Replay.host = Replay.host, (model, drafter, target, untouched)
        try:
            yield target
        finally:
            Replay.host = before


def replay_on_cpu(monkeypatch: pytest.MonkeyPatch, stand_in=Replay) -> type[Replay]:
    """Let calls on a CPU capture and replay; returns `Replay`, whose counts begin anew."""
    set_policy(monkeypatch, "cpu", cuda_graphs=True)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", stand_in)
    monkeypatch.setattr(hosted_target, "patched_target", _watched)
    monkeypatch.setattr(Replay, "count", 0)
    monkeypatch.setattr(Replay, "hostings", 0)
    return Replay


def show_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make launches independent of the host's bound, as with kernels; else each round is compiled anew."""
    advance = RaggedCache.advance
    monkeypatch.setattr(RaggedCache, "advance", lambda cache, positions, live, _=None: advance(cache, positions, live))
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)


def tape_on_cpu(monkeypatch: pytest.MonkeyPatch) -> type[Tape]:
    """Let calls on a CPU capture and replay what was captured; returns `Tape`, whose count begins anew."""
    show_all_slots(monkeypatch)
    set_policy(monkeypatch, "cpu", cuda_graphs=True)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Tape)
    monkeypatch.setattr(Tape, "count", 0)
    monkeypatch.setattr(Tape, "made", [])
    return Tape
