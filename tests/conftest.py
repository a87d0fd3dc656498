"""What holds for every test."""

import os

import pytest
import torch

# Without a GPU Triton kernels run in its interpreter; Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Several workers with a thread for every core each would only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Files that take longest: a worker that begins one of them last keeps the others waiting.
LONGEST = {"test_smollm2.py", "test_tensor_parallel.py"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # All classes of transformers take many minutes: they run when they are asked for by their mark.
    if "zoo" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("zoo")])
        items[:] = [item for item in items if not item.get_closest_marker("zoo")]
    items.sort(key=lambda item: item.path.name not in LONGEST)
