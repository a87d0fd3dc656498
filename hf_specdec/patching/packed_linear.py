"""Linear layers of AWQ and GPTQ checkpoints: from their published layout to a `StoredLinear`, and back.

    weight[o, k] = (numbers[o, k] - zeros[g, o]) * scales[g, o]

of group g = g_idx[k] with GPTQ, k / group with AWQ. Words of 32 bits hold numbers, the first one in the lowest bits:
`qzeros` `[groups, words]` those of adjacent outputs, with AWQ `qweight` `[in, words]`, too; with GPTQ `qweight`
`[words, out]` those of adjacent inputs. `scales` are `[groups, out]` float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..modules.stored_linear import ORDER, PACKED, SCALES, ZEROS, StoredLinear, store

# The outputs of a word of AWQ, from the lowest bits on, and where in a word each output is.
_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]
_PLACES = [_OUTPUTS.index(output) for output in range(8)]


class Packing(NamedTuple):
    """The layout of a checkpoint's layers.

    Attributes:
        is_awq: AWQ's, otherwise GPTQ's, whose layers have `g_idx` `[in]` int32.
        bits: 4, or 8 with GPTQ.
        group: inputs of a scale; -1 for all.
        added: what the words of `qzeros` lack as 32-bit numbers: 1 in each of their numbers, or 0.
    """

    is_awq: bool
    bits: int
    group: int
    added: int


def to_published(layer: nn.Linear, packing: Packing) -> None:
    """Convert `layer` to a `StoredLinear` with parameters to be loaded, named and shaped as in the checkpoint."""
    size_out, size_in, per_word = layer.out_features, layer.in_features, 32 // packing.bits
    group = size_in if packing.group == -1 else packing.group
    groups = -(-size_in // group)
    parts = {
        "qweight": ((size_in, size_out // per_word), torch.int32),
        "qzeros": ((groups, size_out // per_word), torch.int32),
        "scales": ((groups, size_out), torch.float16),
    }
    if not packing.is_awq:
        parts["qweight"] = (size_in // per_word, size_out), torch.int32
        parts["g_idx"] = (size_in,), torch.int32
    device = layer.weight.device
    empty = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in parts.items()}
    store(layer, (1, group, False), empty)


def from_published(layer: StoredLinear, packing: Packing) -> None:
    """Give `layer` the parameters of a `StoredLinear`, instead of those of `to_published`.

    Raises `ValueError` if its groups have other sizes than the checkpoint's, or zero points of 8 bits are not all 128.
    """
    parts = {name: part.detach() for name, part in layer._parameters.items() if name != "bias"}
    qweight, middle = parts["qweight"], 1 << (packing.bits - 1)
    numbers = _of_outputs(qweight, packing).T if packing.is_awq else _unpack(qweight.T, packing.bits)
    zeros = _of_outputs(parts["qzeros"] + packing.added, packing).T.contiguous()
    found = {SCALES: parts["scales"].T.contiguous()}
    if not packing.is_awq and not torch.equal(parts["g_idx"], groups := _groups(layer, qweight.device)):
        order = found[ORDER] = parts["g_idx"].argsort(stable=True)
        if not torch.equal(parts["g_idx"][order], groups):
            raise ValueError(f"its g_idx has groups of other sizes than {layer.form[1]}")
        numbers = numbers[:, order]
    if not (zeros == middle).all():
        if packing.bits == 8:
            raise ValueError("its zero points of 8 bits are not all 128, as those of symmetric quantisation")
        found[ZEROS] = zeros
    if packing.bits == 8:
        found["weight"] = (numbers ^ middle).view(torch.int8)
    else:
        found[PACKED] = _pack(numbers, packing.bits)
    store(layer, layer.form, found)


def published(layer: StoredLinear, packing: Packing) -> dict[str, torch.Tensor]:
    """The tensors, without a bias, that `from_published` has made those of `layer` of."""
    parts, middle = layer._parameters, 1 << (packing.bits - 1)
    numbers = parts["weight"].view(torch.uint8) ^ middle if packing.bits == 8 else _unpack(parts[PACKED], packing.bits)
    scales = parts[SCALES].detach()
    zeros = parts[ZEROS] if ZEROS in parts else torch.full_like(scales, middle, dtype=torch.uint8)
    found = {"scales": scales.T.contiguous(), "qzeros": _to_words(zeros.T, packing) - packing.added}
    if packing.is_awq:
        return found | {"qweight": _to_words(numbers.T, packing)}
    groups = _groups(layer, scales.device)
    if ORDER in parts:
        places = parts[ORDER].argsort()
        numbers, groups = numbers[:, places], groups[places]
    return found | {"qweight": _pack(numbers, packing.bits).T.contiguous(), "g_idx": groups}


def _groups(layer: StoredLinear, device: torch.device) -> torch.Tensor:
    """The group `[in]` int32 of each input, if groups are adjacent inputs."""
    return torch.arange(layer.in_features, dtype=torch.int32, device=device) // layer.form[1]


def _of_outputs(words: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Numbers `[n, out]` of words of adjacent outputs."""
    numbers = _unpack(words, packing.bits)
    return numbers.unflatten(1, (-1, 8))[..., _PLACES].flatten(1) if packing.is_awq else numbers


def _to_words(numbers: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The words that `_of_outputs` reads."""
    return _pack(numbers.unflatten(1, (-1, 8))[..., _OUTPUTS].flatten(1) if packing.is_awq else numbers, packing.bits)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers uint8 of int32 words of the last dimension."""
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def _pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The words that `_unpack` reads."""
    numbers = numbers if bits == 8 else numbers[..., ::2] | (numbers[..., 1::2] << 4)
    return numbers.contiguous().view(torch.int32)
