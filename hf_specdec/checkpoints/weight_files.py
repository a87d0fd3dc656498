"""Weight files of checkpoints: their headers, and the tensors that they hold."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .quantised import Scale


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, as its file's header describes it; a quantised weight has a `scale`."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    scale: Scale | None = None


def read_stored(places: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Load tensors as they are stored, by name, from the files that they are in."""
    by_file: dict[Path, list[str]] = {}
    for name, file in places.items():
        by_file.setdefault(file, []).append(name)
    found: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names}
        else:
            state = _load_pickle(file)
            found |= {name: state[name] for name in names}
    return found


def read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of the files by name."""
    tensors = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= _safetensors_header(file)
        else:
            for name, tensor in _load_pickle(file).items():
                tensors[name] = StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file)
    return tensors


def _safetensors_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(tuple(part.get_shape()), part.get_dtype(), file) for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}): it is truncated or of another format. "
            "Download or export it again."
        ) from error


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    """A PyTorch state dict, memory-mapped where the file allows it; code in the file is never run."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{file} cannot be read as PyTorch weights with weights_only=True "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): it is truncated, of another "
            "format, or holds more than tensors."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file} holds a {type(state).__name__}; expected a dictionary of tensors (a state dict).")
    return state
