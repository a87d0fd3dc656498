"""Rounds that run as they are while their compiled form is made, and are replaced by it."""

import functools
import gc
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from decoding_modes import MODES
from graph_stand_ins import tape_on_cpu
from oracle import copy_of
from regex import _regex
from targets import padded_prompts, set_policy, tiny_target

from hf_specdec.engine import background, compile_process
from hf_specdec.engine.background import BackgroundCompiler, Compilation, compile_later, job_of, load
from hf_specdec.engine.capture import is_compiled_first
from hf_specdec.engine.compile_process import Reply, compile_job
from hf_specdec.engine.recorded_pieces import fake_values
from hf_specdec.engine.recording import record

CPU = torch.device("cpu")


class Gate:
    """Takes the place of the process that compiles: does it here, when the test lets it.

    Attributes:
        asked: how many jobs there were.
        error: what the next replies say has gone wrong.
    """

    def __init__(self):
        self._is_open = threading.Event()
        self.asked, self.error = 0, None

    def open(self):
        self._is_open.set()

    def __call__(self, compiler, job):
        self.asked += 1
        assert self._is_open.wait(60)
        if self.error is not None:
            return Reply([], [], (), self.error)
        return pickle.loads(pickle.dumps(compile_job(pickle.loads(pickle.dumps(job)))))


@pytest.fixture
def gate(monkeypatch):
    tape_on_cpu(monkeypatch)
    set_policy(monkeypatch, "cpu", compiler="eager")
    made = Gate()
    monkeypatch.setattr(BackgroundCompiler, "_ask", lambda compiler, job: made(compiler, job))
    monkeypatch.setattr(background, "_compiler", BackgroundCompiler())
    yield made
    made.open()


def wait_for(drafter):
    """Wait until what is compiled for `drafter` is there."""
    wait_until_done(
        [
            one._compilation
            for _, session in drafter.sessions._idle
            for one in session.rounds._captured.values()
            if one._compilation is not None
        ]
    )


def wait_until_done(compilations):
    for _ in range(600):
        if all(one.is_done for one in compilations):
            return
        time.sleep(0.1)
    raise AssertionError("nothing was compiled")


class OpenedMeanwhile:
    """A streamer that opens `gate` after the first round, and waits for what comes through."""

    def __init__(self, gate, compilations):
        self._gate, self._compilations, self._count = gate, compilations, 0

    def put(self, tokens):
        self._count += 1
        if self._count == 3:
            self._gate.open()
            wait_until_done(self._compilations)

    def end(self):
        pass


@pytest.mark.parametrize("mode", ["greedy", "hot sampling"])
def test_rounds_are_replaced_when_they_are_compiled(gate, monkeypatch, mode):
    """At the next call of a shape, or in the call that is running; texts do not change."""
    target = tiny_target("llama", num_layers=2)
    made = []
    monkeypatch.setattr(Compilation, "__init__", _noting(Compilation.__init__, made))
    options = {**padded_prompts([9]), **MODES[mode], "max_new_tokens": 12, "num_assistant_tokens": 2}
    options |= {"seeds": 5} if MODES[mode]["do_sample"] else {}
    first, second = (copy_of(target, noise=0.02).configure(compile_rounds="background") for _ in range(2))
    expected = target.generate(**options, assistant_model=first)
    assert first.stats.execution == "captured in one graph, not compiled yet"
    streamed = target.generate(**options, assistant_model=second, streamer=OpenedMeanwhile(gate, made))
    assert second.stats.execution == "captured in one graph, compiled" and torch.equal(streamed, expected)
    wait_for(first)
    assert torch.equal(target.generate(**options, assistant_model=first), expected)
    assert first.stats.execution == "captured in one graph, compiled" and gate.asked == 2
    assert len(made) == 2 and all(one.plan is not None for one in made)


def _noting(init, made):
    def noting(self, *args):
        init(self, *args)
        made.append(self)

    return noting


def test_rounds_stay_as_they_are_if_the_compiler_fails(gate, caplog):
    gate.error = "OutOfMemoryError: no"
    gate.open()
    target = tiny_target("llama", num_layers=1)
    drafter = copy_of(target).configure(1, compile_rounds="background")
    options = {**padded_prompts([5]), "do_sample": False, "max_new_tokens": 4, "assistant_model": drafter}
    expected = target.generate(**options)
    wait_for(drafter)
    assert torch.equal(target.generate(**options), expected)
    assert drafter.stats.execution == "captured in one graph, not compiled"
    assert caplog.text.count("cannot be compiled in the background (OutOfMemoryError: no)") == 1


def test_rounds_that_cannot_be_recorded_stay_as_they_are(gate, monkeypatch, caplog):
    target = tiny_target("llama", num_layers=1)
    forward = target.model.norm.forward
    monkeypatch.setattr(target.model.norm, "forward", lambda hidden: _regex.fold_case(0, "a") and forward(hidden))
    drafter = copy_of(target).configure(1, compile_rounds="background")
    target.generate(**padded_prompts([5]), do_sample=False, max_new_tokens=4, assistant_model=drafter)
    assert drafter.stats.execution == "captured in one graph, not compiled" and gate.asked == 0
    assert "regex._regex.fold_case cannot be recorded: it is no operator of torch" in caplog.text


def test_what_nobody_waits_for_is_not_compiled(gate):
    """Nor does it keep memory alive."""
    tensor = torch.ones(3)
    function = functools.partial(torch.split, tensor, 3)
    first, second, third = (compile_later(function, CPU) for _ in range(3))
    del second
    gc.collect()
    gate.open()
    wait_until_done([first, third])
    assert gate.asked == 2 and first.function()()[0].tolist() == [1, 1, 1]
    del tensor, function
    gc.collect()
    assert first.function() is None


def test_modes(monkeypatch):
    drafter = copy_of(tiny_target("llama", num_layers=1)).configure(compile_rounds="background")
    target = tiny_target("llama", num_layers=1)
    assert not is_compiled_first(target, drafter)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert is_compiled_first(target, drafter)
    assert drafter.compile_mode == "background" and drafter.configure(compile_rounds=True).compile_mode is True
    assert drafter.configure(batch_invariant=True).compile_mode is False
    with pytest.raises(ValueError, match="compile_rounds is 'later'; expected True, False or"):
        drafter.configure(compile_rounds="later")


def layers(hidden, weights, positions, kept):
    """Three layers alike, with views, constants and writes in place, which are split after their attention."""
    assert torch.promote_types(hidden.dtype, torch.float16) == torch.float32
    for weight in weights:
        query = (hidden @ weight).view(2, 3, 1, 4)
        kept[:, 1:].mul_(0.5).add_(query[:, :, 0])
        key = kept.view(2, 1, 4, 4)
        hidden = torch.ops.hf_specdec.attention(
            query.transpose(1, 2), key, key.clone(), positions, 0.5, None, None, None, None, None, None, None
        ).view(2, 3, 4)
        hidden = hidden + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return hidden, kept


def test_recordings_do_what_was_recorded():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    start, positions = torch.randn(2, 3, 4, generator=generator), torch.tensor([[0, 1, 2], [1, 2, 3]])
    kept = torch.zeros(2, 4, 4)
    recording, addresses = record(lambda: layers(start, weights, positions, kept))
    _, fakes = fake_values(recording)
    reply = compile_job(job_of(recording, CPU))
    assert [step.piece for step in reply.steps] == [0, 1, 1, 2]
    plan = load(pickle.loads(pickle.dumps(reply)))
    for _ in range(2):
        start.normal_(generator=generator)
        before = kept.clone()
        expected = [one.clone() for one in layers(start, weights, positions, kept)]
        kept.copy_(before)
        results = plan.run(addresses.tensors(recording.inputs))
        assert all(map(torch.equal, results, expected)) and results[1].data_ptr() == kept.data_ptr()
        for number, one in zip(recording.outputs, results, strict=True):
            assert (fakes[number].shape, fakes[number].stride()) == (one.shape, one.stride())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda ones: (ones * ones.sum().item(),), "_local_scalar_dense.default cannot be recorded: it reads values"),
        (lambda ones: (_regex.fold_case(0, "a") and ones * 2,), "regex._regex.fold_case cannot be recorded"),
    ],
)
def test_what_torch_does_not_dispatch_is_not_recorded(function, reason):
    ones = torch.ones(2)
    with pytest.raises(RuntimeError, match=reason):
        record(lambda: function(ones))
    sys.setprofile(lambda *args: None)
    try:
        with pytest.raises(RuntimeError, match="a profiler is set"):
            record(lambda: (ones + 1,))
    finally:
        sys.setprofile(None)


SCRIPT = """
import sys, time, torch
from hf_specdec.device_policy import DEVICE_POLICIES, DevicePolicy
from hf_specdec.engine import background
DEVICE_POLICIES["cpu"] = DevicePolicy(compiler=sys.argv[1])
numbers = torch.ones(4)
made = background.compile_later(lambda: (numbers.add_(1), numbers * 3), torch.device("cpu"))
while not made.is_done and sys.argv[2] == "wait":
    time.sleep(0.05)
if sys.argv[2] == "wait":
    print([one.tolist() for one in made.function()()])
while background._compiler._process is None:
    time.sleep(0.05)
print(background._compiler._process.pid)
"""


def test_another_process_compiles(monkeypatch):
    set_policy(monkeypatch, "cpu", compiler="eager")
    compiler, numbers = BackgroundCompiler(), torch.ones(4)
    made = Compilation(*record(lambda: (numbers.add_(1), numbers * 3)), CPU)
    compiler.submit(made)
    wait_until_done([made])
    assert [one.tolist() for one in made.function()()] == [[3.0] * 4, [9.0] * 4]
    process = compiler._process.pid
    compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.slow  # imports the package twice
@pytest.mark.parametrize(("backend", "waits"), [("inductor", True), ("eager", False)])
def test_the_process_that_compiles_ends_with_the_one_that_asks(backend, waits):
    command = [sys.executable, "-c", SCRIPT, backend, "wait" if waits else "leave"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    *results, process = out.stdout.split("\n")[:-1]
    assert results == (["[[3.0, 3.0, 3.0, 3.0], [9.0, 9.0, 9.0, 9.0]]"] if waits else []) and not out.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_a_process_that_fails_says_why(monkeypatch, caplog):
    monkeypatch.setattr(compile_process.main, "__module__", "nothing_of_this_name", raising=False)
    compiler, ones = BackgroundCompiler(), torch.ones(2)
    made = Compilation(*record(lambda: (ones + 1,)), CPU)
    compiler.submit(made)
    wait_until_done([made])
    assert made.plan is None and "has ended: ModuleNotFoundError: No module named 'nothing_of_this_name'" in caplog.text
