"""Weight files of checkpoints: headers and tensors, quantised ones included.

8-bit weights with scales are read as they are, or dequantised; other quantised forms are refused. Names and layouts are
those of DeepSeek and transformers (`weight_scale_inv`, by blocks), and of compressed-tensors and NVIDIA ModelOpt
(`weight_scale`, for a tensor, its rows or its blocks).
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..kernels.types import StoredWeight
from ..ops import dequantise_weight

# Dtypes that the kernels compute with, by their names in headers and in pickled files.
_STORED_KINDS = {"F8_E4M3": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "I8": "int8", "int8": "int8"}
_EIGHT_BITS = {*_STORED_KINDS, "F8_E5M2", "float8_e5m2"}
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
# The published size of blocks, if config.json does not state it.
BLOCK = 128

# Scales of activations and of quantised caches, which bfloat16 weights do not need.
_UNUSED = re.compile(r"(.*\.)?((input|output|[qkv]|prob)_scale|input_global_scale)")
# Parts of quantised weights, by the last parts of their names.
_PARTS = re.compile(
    r"(.*[._])?(scale|scales|scale_inv|scale_2|global_scale|zero_point|weight_packed|weight_shape|qweight|qzeros|g_idx"
    r"|SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map|blocks|bitsandbytes__\w+)"
)


class Scale(NamedTuple):
    """The tensor that multiplies a quantised weight, with one entry for each block of `rows` outputs and `group`
    inputs."""

    name: str
    file: Path
    rows: int
    group: int

    def shape_for(self, weight: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a weight of shape `weight`."""
        *outer, size_out, size_in = weight
        return *outer, -(-size_out // self.rows), -(-size_in // self.group)


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, from its file's header. A quantised weight has a `scale`."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    scale: Scale | None = None

    @property
    def stored_form(self) -> list[Any] | None:
        """Its entry of `DrafterConfig.stored_layers`; None if a linear layer cannot hold it as it is, since the kernels
        do not know its dtype, or a saved drafter does not tell its block."""
        kind = _STORED_KINDS.get(self.dtype)
        if self.scale is None or kind is None or len(self.shape) != 2:
            return None
        block, (size_out, size_in) = [self.scale.rows, self.scale.group], self.shape
        is_told = block in ([size_out, size_in], [1, size_in], [BLOCK, BLOCK])
        return [kind, *block] if is_told else None


def read_stored(
    tensors: Mapping[str, StoredTensor], kept: Collection[str] = ()
) -> dict[str, torch.Tensor | StoredWeight]:
    """Load tensors, by name, from their files. Quantised tensors are dequantised to bfloat16, except those that are
    `kept`."""
    scales = {name: tensor.scale for name, tensor in tensors.items() if tensor.scale is not None}
    by_file: dict[Path, list[str]] = {}
    places = {name: tensor.file for name, tensor in tensors.items()} | {one.name: one.file for one in scales.values()}
    for name, file in places.items():
        by_file.setdefault(file, []).append(name)
    found: dict[str, Any] = {}
    for file, names in by_file.items():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names}
        else:
            state = _load_pickle(file)
            found |= {name: state[name] for name in names}
    for name, scale in scales.items():
        shape, factors = scale.shape_for(tensors[name].shape), found.pop(scale.name).float().flatten()
        factors = factors.expand(math.prod(shape)).reshape(shape)
        stored = StoredWeight(found[name], factors, None, scale.rows, scale.group)
        found[name] = stored if name in kept else dequantise_weight(stored, torch.float32).bfloat16()
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


def _find_scale(name: str, tensors: Mapping[str, Any], block: tuple[int, int] | None) -> Scale | None:
    """The scale of the weight called `name`; None unless it is quantised in a form that is read here."""
    weight = tensors[name]
    scale_name = next((name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in tensors), None)
    is_matrix = weight.dtype in _EIGHT_BITS and len(weight.shape) > 1 and 0 not in weight.shape
    if not is_matrix or scale_name is None or f"{name}_zero_point" in tensors:
        return None
    found, (size_out, size_in) = tensors[scale_name], weight.shape[-2:]
    stated = [] if block is None else [block]
    for rows, group in ((size_out, size_in), (1, size_in), *stated, (BLOCK, BLOCK)):
        scale = Scale(scale_name, found.file, rows, group)
        if _stripped(found.shape) in ((), _stripped(scale.shape_for(weight.shape))):
            return scale
    return None


def _stripped(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` without trailing dimensions of size 1, which exporters leave out."""
    return tuple(shape[: max((end for end, size in enumerate(shape, start=1) if size != 1), default=0)])


def _stated_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block in the `quantization_config` of config.json; None if it states none."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, Mapping) else {}):
        settings = source.get("quantization_config")
        if not isinstance(settings, Mapping):
            continue
        groups = settings.get("config_groups")
        weights = [one.get("weights") for one in (groups.values() if isinstance(groups, Mapping) else ()) if one]
        blocks = [one.get("block_structure") for one in weights if isinstance(one, Mapping)]
        for block in (settings.get("weight_block_size"), *blocks):
            if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
                return block[0], block[1]
    return None


def check_not_quantised(names: Collection[str], checkpoint: str, what: str = "weights") -> None:
    """Raise `ValueError` if one of the tensor `names` of a checkpoint belongs to a quantised weight for which
    `_find_scale` found no scale."""
    parts = [name for name in names if _PARTS.fullmatch(name)]
    if parts:
        raise ValueError(
            f"The {what} of {checkpoint} are quantised in a form that is not read here (they have {parts[0]}); "
            "expected bfloat16, float16 or float32, or 8 bits with a scale for a tensor, its rows or its blocks. Use a "
            f"checkpoint whose {what} are not quantised."
        )


def with_scales(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """`tensors`, where quantised weights include their scales, without the tensors of scales."""
    block = _stated_block(config)
    scales = {name: _find_scale(name, tensors, block) for name in tensors}
    parts = {scale.name for scale in scales.values() if scale is not None}
    return {
        name: tensor._replace(scale=scales[name])
        for name, tensor in tensors.items()
        if name not in parts and not _UNUSED.fullmatch(name)
    }
