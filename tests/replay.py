"""A stand-in for the CUDA graph on a CPU: what was captured is run again."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hf_specdec import decoding, graphs
from hf_specdec.attention import ATTENTION_NAME, submodel_configs

_hosted = decoding.hosted


def in_place(result, new):
    """Copy the tensors of `new` into those of `result`, as a replay overwrites what was captured."""
    if isinstance(result, torch.Tensor):
        result.copy_(new)
    elif isinstance(result, tuple):
        for pair in zip(result, new, strict=True):
            in_place(*pair)


class Replay:
    """Runs a function again and again, with its results in one place.

    A graph needs no modules, but this does: it hosts the target that it was made on while it runs, unless the call does
    so already.

    Attributes:
        count: how many were made.
        hostings: how often a call hosted its target; those that only replay do not.
        host: target and drafter as the call hosts them at the moment, and what ran on them; None if it does not.
    """

    count = 0
    hostings = 0
    host = None

    def __init__(self, function, memory=None):
        assert Replay.host is not None, "what is captured needs a host: see `replay_on_cpu`"
        type(self).count += 1
        for _ in range(graphs.WARM_UPS):
            function()
        self._function, self._host = function, Replay.host
        self.result = function()

    def __call__(self):
        if Replay.host is self._host:
            in_place(self.result, self._function())
            return self.result
        model, drafter, target = self._host
        if Replay.host is None:
            assert_untouched(model, drafter)
        with _hosted(model, drafter, False) as again:
            target.recorder = again.recorder
            in_place(self.result, self._function())
        return self.result


def assert_untouched(model, drafter):
    """No module of `model` or `drafter` is patched or listened to, and attention is the model's own."""
    assert not decoding.has_hooks(model, drafter)
    assert all(config._attn_implementation != ATTENTION_NAME for config in submodel_configs(model))
    for module in (*model.modules(), *drafter.modules()):
        assert not (isinstance(module, nn.Linear) and "forward" in vars(module)), module


@contextmanager
def _watched(model, drafter, keep_hidden_states):
    with _hosted(model, drafter, keep_hidden_states) as target:
        Replay.hostings += 1
        before, Replay.host = Replay.host, (model, drafter, target)
        try:
            yield target
        finally:
            Replay.host = before


def replay_on_cpu(monkeypatch: pytest.MonkeyPatch, stand_in=Replay) -> type[Replay]:
    """Let calls on a CPU capture and replay; returns `Replay`, whose counts begin anew."""
    monkeypatch.setitem(graphs.CAPTURE, "cpu", stand_in)
    monkeypatch.setattr(decoding, "hosted", _watched)
    monkeypatch.setattr(Replay, "count", 0)
    monkeypatch.setattr(Replay, "hostings", 0)
    return Replay
