"""Compiles the Triton kernels for GPUs on a machine without one: `python tests/helpers/compile_kernels.py`.

Triton's interpreter, which tests of kernels use there, accepts code that the compiler refuses. So the tests of kernels
run once more, with a launch that compiles to PTX and launches nothing; their results are ignored. For each kernel, and
each set of given arguments and set flags, the first few variants are compiled (`--most`), for sm_90 (`--arch`). The
exit code is 1 if any is refused, or needs more shared memory than an H100 has.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TESTS = Path(__file__).parent.parent / "kernels_"
MOST_SHARED = 232448  # bytes of a program on an H100 or H200


class NoGpu:
    """Stand-in for Triton's driver of a GPU of `arch`; it loads and launches nothing."""

    def __init__(self, arch: int):
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.launcher_cls = lambda source, metadata: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": MOST_SHARED},
            load_binary=lambda name, binary, shared, device: (1, 1, 32, 0, 1024),
            unload_module=lambda module: None,
        )


def _kinds(args: Any) -> Any:
    """The dtypes of tensors among arguments, and which are None; also inside of tuples."""
    if isinstance(args, tuple):
        return tuple(map(_kinds, args))
    return args.dtype if isinstance(args, torch.Tensor) else args is None


def _given(args: Any) -> Any:
    """Which arguments are None, also inside of tuples."""
    return tuple(map(_given, args)) if isinstance(args, tuple) else args is None


class Compiling:
    """A pytest plugin that makes launches compile.

    Args:
        most: variants of each kernel with the same branches: arguments that are None, and flags.

    Attributes:
        refused: the compiler's errors, by kernel.
        variants: compiled ones, by kernel.
    """

    def __init__(self, most: int):
        self.refused: dict[str, str] = {}
        self.variants: Counter[str] = Counter()
        self._seen: set[tuple] = set()
        self._branches: Counter[tuple] = Counter()
        run = JITFunction.run

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> None:
            name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
            kinds = _kinds(args)
            variant = name, kinds, tuple(sorted((key, str(value)) for key, value in options.items()))
            flags = tuple(sorted((key, min(value, 2)) for key, value in options.items() if isinstance(value, int)))
            branches = name, _given(args), flags
            if variant in self._seen or self._branches[branches] >= most or kernel.fn.__module__.startswith("test"):
                return
            self._seen.add(variant)
            self._branches[branches] += 1
            self.variants[name] += 1
            options.pop("launch_pdl", None)
            try:
                shared = run(kernel, *args, grid=grid, warmup=True, **options).metadata.shared
                if shared > MOST_SHARED:
                    raise ValueError(f"{shared} bytes of shared memory, at most {MOST_SHARED}")
            except Exception as error:  # whatever the compiler raises
                self.refused[name] = str(error)

        JITFunction.run = compile_only

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Any:
        report = yield
        if call.when == "call":
            report.outcome, report.longrepr = "passed", None
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=3, help="variants of each kernel")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, such as 80 or 90")
    args = parser.parse_args()
    driver.set_active(NoGpu(args.arch))
    plugin = Compiling(args.most)
    os.environ["TRITON_INTERPRET"] = "0"  # which tests choose where torch sees no GPU
    code = pytest.main([str(TESTS), "-q", "-p", "no:cacheprovider", "--no-header", "-W", "ignore"], [plugin])
    for name, count in sorted(plugin.variants.items()):
        print(f"{name}: {plugin.refused.get(name) or f'{count} variants'}")
    return 1 if plugin.refused or code not in (0, 5) else 0


if __name__ == "__main__":
    sys.exit(main())
