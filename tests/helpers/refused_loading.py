"""Checks of errors while a checkpoint is loaded."""

from pathlib import Path

import pytest
import torch

from hf_specdec import AutoDrafter


def refuse(folder: Path, target, *parts: str, error: type[Exception] = ValueError, **options) -> None:
    """Assert that loading fails with all of `parts` in the message, and leaves the target as it was."""
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in target.modules()]
    with pytest.raises(error) as caught:
        AutoDrafter.from_pretrained(folder, target, **options)
    for part in parts:
        assert part in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert hooks == [len(module._forward_hooks) for module in target.modules()]
