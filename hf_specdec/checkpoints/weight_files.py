"""Weight files of checkpoints: headers and tensors, quantised ones included.

Weights in 8 or 4 bits are read as they are, or dequantised; other quantised forms are refused. Names and layouts are
those of DeepSeek and transformers (`weight_scale_inv`, by blocks), of compressed-tensors (`weight_scale`, for a tensor,
its rows, groups or blocks; packed numbers of 4 bits), and of NVIDIA ModelOpt's FP8.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..modules.stored_linear import KINDS, PACKED, SCALES, layout_of, scales_shape, stored_weight
from ..modules.weights import is_known
from ..ops import dequantise_weight

# Dtypes in headers and pickled files by torch's names. Exponents of e8m0 are bytes.
_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "uint8", "float8_e8m0fnu": "uint8"}
_DTYPES |= {"I8": "int8", "I32": "int32", "U8": "uint8"}
# What follows the name of a quantised weight in those of its parts.
_SUFFIXES = ("", "_packed", "_scale", "_scale_inv", "_global_scale")

# Scales of activations and of quantised caches, which bfloat16 weights do not need.
_UNUSED = re.compile(r"(.*\.)?((input|output|[qkv]|prob)_scale|input_global_scale)")


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, from its file's header, or a quantised weight.

    Attributes:
        shape: of a quantised weight that of the numbers, unpacked.
        dtype: as in the header; of packed numbers their kind.
        layout: of a quantised weight, see `layout_of`: kind, and outputs and inputs of a scale.
        parts: the names in the files, and these, of the parts of a quantised weight.
        can_stay: whether a linear layer can hold it as it is, since the kernels know its layout.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    layout: tuple[str, int, int] | None = None
    parts: Mapping[str, tuple[str, Path]] | None = None
    can_stay: bool = False


def read_stored(
    tensors: Mapping[str, StoredTensor], kept: Collection[str] = ()
) -> dict[str, torch.Tensor | dict[str, torch.Tensor]]:
    """Load tensors, by name, from their files. Quantised weights are dequantised to bfloat16, except those that are
    `kept`: of these the parts are returned, as of a `StoredLinear`."""
    by_file: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        for part, file in [(name, tensor.file)] if tensor.parts is None else tensor.parts.values():
            by_file.setdefault(file, []).append(part)
    found: dict[str, Any] = {}
    for file, names in by_file.items():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names}
        else:
            state = _load_pickle(file)
            found |= {name: state[name] for name in names}
    for name, tensor in tensors.items():
        if tensor.parts is None:
            continue
        kind, rows, group = tensor.layout
        parts = {part: found.pop(published) for part, (published, _) in tensor.parts.items()}
        shape, scales, dtype = scales_shape(tensor.shape, rows, group), parts[SCALES], KINDS[kind][SCALES]
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        scales = scales.float() if dtype == torch.float32 else scales.view(dtype)
        parts[SCALES] = scales.flatten().expand(math.prod(shape)).reshape(shape)
        stored = stored_weight(parts, rows, group)
        found[name] = parts if name in kept else dequantise_weight(stored, torch.float32).bfloat16()
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a weight file by name."""
    if file.suffix != ".safetensors":
        return {
            name: StoredTensor(tuple(one.shape), str(one.dtype).removeprefix("torch."), file)
            for name, one in _load_pickle(file).items()
        }
    try:
        with safe_open(file, framework="pt") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118
            return {name: StoredTensor(tuple(one.get_shape()), one.get_dtype(), file) for name, one in slices}
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}): it is truncated or of another format. "
            "Download or export it again."
        ) from error


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    """A PyTorch state dict, memory-mapped if the file allows it. Code in the file is never run."""
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


def _quantised(name: str, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> StoredTensor | None:
    """The weight whose numbers are called `name`; None unless it is quantised in a form that is read here."""
    numbers, stem = tensors[name], name.removesuffix("_packed")
    names = {f"weight{end}".removesuffix("_inv"): stem + end for end in _SUFFIXES if stem + end in tensors}
    if SCALES not in names or len(numbers.shape) < 2 or 0 in numbers.shape:
        return None
    dtypes = {part: _DTYPES.get(tensors[one].dtype, tensors[one].dtype) for part, one in names.items()}
    parts = {
        part: torch.empty(tensors[one].shape, dtype=getattr(torch, dtypes[part], torch.float32), device="meta")
        for part, one in names.items()
    }
    found = layout_of(parts, _stated_blocks(config, stem.removesuffix(".weight")))
    if found is None:
        return None
    shape, kind, *block = found
    can_stay = len(shape) == 2 and is_known(stored_weight(parts, *block))
    places = {part: (one, tensors[one].file) for part, one in names.items()}
    dtype = kind if PACKED in parts else numbers.dtype
    return StoredTensor(shape, dtype, numbers.file, (kind, *block), places, can_stay)


def _stated_blocks(config: Mapping[str, Any], layer: str) -> list[list[int]]:
    """Rows and columns of blocks and groups that config.json states: its entry in `DrafterConfig.stored_layers`, or
    the sizes in `quantization_config`."""
    stored, found = config.get("stored_layers"), []
    if isinstance(stored, Mapping) and isinstance(stored.get(layer), list):
        found.append(stored[layer][1:])
    for source in (config, config.get("text_config")):
        settings = source.get("quantization_config") if isinstance(source, Mapping) else None
        if not isinstance(settings, Mapping):
            continue
        groups = settings.get("config_groups")
        named = [one for one in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(one, Mapping)]
        weights = [one["weights"] for one in named if isinstance(one.get("weights"), Mapping)]
        for one in (settings, *weights):
            found += [one.get("weight_block_size"), one.get("block_structure"), [1, one.get("group_size")]]
    return [
        block
        for block in found
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ]


def with_parts(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """`tensors`, where quantised weights include their parts and are called `weight`, without the tensors of parts."""
    weights = {name.removesuffix("_packed"): _quantised(name, tensors, config) for name in tensors}
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    parts = {part for weight in weights.values() for part, _ in weight.parts.values()}
    parts |= {f"{name}_shape" for name in weights}
    others = {name: one for name, one in tensors.items() if name not in parts and not _UNUSED.fullmatch(name)}
    return others | weights
