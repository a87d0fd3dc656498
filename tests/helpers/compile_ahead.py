"""Compiles ops for sm_90 on a machine without a GPU, in the context `compile_only`, and prints what it finds as JSON.

A process of its own, since tests interpret the kernels: `TRITON_INTERPRET=0 python tests/helpers/compile_ahead.py`.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from compile_kernels import NoGpu
from triton.runtime import driver

from hf_specdec import ops
from hf_specdec.device_policy import DEFAULT_POLICY, DEVICE_POLICIES
from hf_specdec.kernels.launch import Kernel
from hf_specdec.kernels.types import NormKind, VerificationResult


def main() -> None:
    driver.set_active(NoGpu(90))
    driver.active.launcher_cls = lambda source, metadata: threading.current_thread().name
    DEVICE_POLICIES["cpu"] = replace(DEFAULT_POLICY, triton=True)
    device, compiled = torch.device("cpu"), []

    def note(*, src: triton.compiler.ASTSource, cache_hit: bool, **_: object) -> None:
        compiled.append((src.fn.__name__, threading.current_thread() is not threading.main_thread()))

    triton.knobs.compilation.listener = note
    inputs, kind = torch.ones(2, 64, dtype=torch.bfloat16), NormKind()
    lengths, limits, finished = torch.tensor([4, 7]), torch.tensor([9, 8]), torch.tensor([False, True])
    states, written, ends = torch.ones(2, 1, 1, 64), torch.zeros(2, 2, 1, 64), torch.full((2, 1), -1)
    result = VerificationResult(torch.ones(2, 2, dtype=torch.int64), torch.tensor([1, 1]), torch.tensor([2, 2]))
    with ops.compile_only(device), ops.compile_only(device):
        for _ in range(2):
            norm = ops.rms_norm(inputs, inputs[0], 1e-6, kind)
            slots = ops.next_slots(lengths, limits, finished, 0, 2, 99)
        ops.write_kv(written, written.clone(), states, states, slots[:, :1].clamp(max=1), None)
        committed = ops.commit(torch.zeros(2, 16, dtype=torch.int64), lengths, finished, limits, ends, result, None)
        ops.rms_norm(inputs, None, 1e-6, kind)
    kernels = [one for one in gc.get_objects() if type(one) is Kernel]
    launchers = {
        one.run for kernel in kernels for cached, *_ in kernel.device_caches.values() for one in cached.values()
    }
    ops_found = {"norm": norm.tolist(), "slots": slots.tolist(), "is_compile_only": ops.is_compile_only()}
    ops_found["launchers"] = sorted(launchers)
    ops_found |= {"written": written.flatten().unique().tolist(), "committed": committed.tolist()}
    before = len(compiled)
    with ops.compile_only(device):
        ops.rms_norm(inputs, inputs[0], 1e-6, kind)
    again, wide = len(compiled) - before, inputs.double().float()
    load, utils = driver.active.utils.load_binary, driver.active.utils
    after_errors = []
    for utils.load_binary in (None, load, load):  # at first an error of the driver
        before = len(compiled)
        with ops.compile_only(device):
            ops.rms_norm(wide, None, 1e-6, kind)
        after_errors.append(len(compiled) - before)
    found = {"compiled": sorted(compiled[:-2]), "again": again, "after_errors": after_errors}
    print(json.dumps({**ops_found, **found}))


if __name__ == "__main__":
    main()
