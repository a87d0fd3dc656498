"""Weights of linear layers: parameters, their shards, and the kinds of quantised weights that the kernels know.

A kind is recognised by the class that a library gives a layer or its weight, and is read from its tensors: the memory
stays the library's, without a copy. If no kind reads a layer, the library's own `forward` computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig

from ..host.quantised import FP8_BLOCK, FP8_EXPERTS, FP8_INPUTS, FP8_LINEAR, FP8_SCALES
from ..kernels.types import SCALES_OF_NUMBERS, SCALES_OF_OUTER, StoredWeight

# Types of weights that are neither quantised nor sharded: parameters, and the local shards that `local_linears` sets.
PLAIN_WEIGHTS = frozenset({nn.Parameter, torch.Tensor})

# Names in configurations: number of experts of a layer, and number of experts of a token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `tensor`, sharing its memory; `tensor` itself if it is not a `DTensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_weight(module: nn.Module | None) -> torch.Tensor | None:
    """The `weight` of a module; None if it has none (that of layers which torch has quantised is a method)."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of `tensors` on this rank; each tensor counts once."""
    return sum(one.numel() * one.element_size() for one in map(local_shard, dict.fromkeys(tensors)))


def num_experts(config: PreTrainedConfig) -> int:
    """Number of experts of a layer; 0 if it has none."""
    return _first_number(config, _EXPERTS)


def share_of_experts(config: PreTrainedConfig) -> float:
    """The share of a layer's experts that a token goes to; 1 if unknown."""
    experts, chosen = num_experts(config), _first_number(config, _EXPERTS_OF_TOKEN)
    return min(chosen / experts, 1.0) if experts and chosen else 1.0


def _first_number(config: PreTrainedConfig, names: Iterable[str]) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if isinstance(one, int)), 0)


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of `layer` by name; the parts of a parameter that is a tensor subclass."""
    found = {}
    for name, one in layer._parameters.items():  # `Module.__getattr__` is slow
        if type(one) not in PLAIN_WEIGHTS and is_traceable_wrapper_subclass(one):
            found |= {f"{name}.{inner}": getattr(one, inner) for inner in one.__tensor_flatten__()[0]}
        elif one is not None:
            found[name] = one
    return found


# For each tensor of zero points: the versions when it was checked, of the weight and its own, and whether some zero
# point was not zero. The weight itself must have no weak reference: `Module.to` exchanges it by `swap_tensors`.
_zeros: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_Reader = Callable[..., StoredWeight | None]
_readers: dict[str, _Reader] = {}


def register_weight_kind(name: str) -> Callable[[_Reader], _Reader]:
    """Decorator that lets linear layers of a kind, or mixtures of experts, run the project's kernels.

    Args:
        name: package and class, e.g. `torchao.Int8Tensor`: that of the layer if it is no `nn.Linear`, else that of its
            weight; or a class that experts are of, also a base class.

    The decorated function returns the weight of a layer, or None if it has another form. For experts it also takes the
    weight's name, such as `down_proj`, and returns it for all experts. It may run during a capture; it must have read
    before whatever it reads on the host.
    """

    def register(read: _Reader) -> _Reader:
        _readers[name] = read
        return read

    return register


def quantised_class(module: nn.Module) -> str | None:
    """Package and class of a quantised linear layer or of its weight; None for plain weights and other modules."""
    weight = tensor_weight(module)
    if weight is None or not isinstance(module, nn.Linear):
        return None
    if isinstance(weight, DTensor) or (
        type(weight) in PLAIN_WEIGHTS and weight.is_floating_point() and weight.itemsize > 1
    ):
        return None
    return _full_name(type(weight) if type(module) is nn.Linear else type(module))


def _full_name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def weight_of(module: nn.Module) -> torch.Tensor | StoredWeight | None:
    """The weight of a linear layer as the kernels take it; None if they do not."""
    kind = quantised_class(module)
    if kind is None:
        return module.weight if type(module) is nn.Linear and type(module.weight) in PLAIN_WEIGHTS else None
    read = _readers.get(kind)
    stored = None if read is None else read(module)
    return stored if stored is not None and is_known(stored) else None


def stored_experts(module: nn.Module, name: str) -> StoredWeight | None:
    """The weight `name` of a mixture of experts, `[experts, out, in]`; None if it is plain, or not known."""
    read = next((_readers[one] for one in map(_full_name, type(module).__mro__) if one in _readers), None)
    stored = None if read is None else read(module, name)
    return stored if stored is not None and is_known(stored) else None


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is of a class decorated with transformers' `use_experts_implementation`."""
    return "is_transposed" in vars(module)


def may_round_inputs(module: nn.Module) -> bool:
    """Whether `module` has quantised weights, and rounds its inputs or is not known by the kernels."""
    if is_experts(module):
        stored, weight = stored_experts(module, "down_proj"), module._parameters.get("down_proj")
        is_plain = stored is None and (weight is None or weight.itemsize > 1)
    else:
        is_plain = quantised_class(module) is None
        stored = None if is_plain else weight_of(module)
    return not is_plain and (stored is None or stored.rounds_inputs)


def is_known(stored: StoredWeight) -> bool:
    """Whether the parts of `stored` have dtypes, shapes and strides that the kernels take."""
    values, scales, (*experts, size_out, size_in) = stored.values, stored.scales, stored.shape
    shape = (*experts, -(-size_out // stored.rows), -(-size_in // stored.group))
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if stored.codes is not None:
        dtypes += SCALES_OF_NUMBERS if stored.scale_codes is None else [torch.uint8]
    elif values.dtype == torch.float8_e4m3fn:
        dtypes.append(torch.float8_e8m0fnu)
    least = 16 if stored.codes is not None and scales.dtype in SCALES_OF_NUMBERS else 32
    return (
        values.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
        and scales.dtype in dtypes
        and tuple(scales.shape) == shape
        and values.stride(-1) == 1
        and (scales.stride(-1) == 1 or shape[-1] == 1)
        and (stored.group >= size_in or (stored.group & (stored.group - 1) == 0 and stored.group >= least))
        and (not stored.rounds_inputs or stored.group >= size_in or values.dtype == torch.float8_e4m3fn)
        and not (stored.rounds_inputs and values.dtype == torch.uint8)
    )


def _of_torchao(quantises_inputs: tuple[str, ...], module: nn.Linear) -> StoredWeight | None:
    """torchao's weight, unless one of the attributes tells that inputs are quantised, too."""
    weight = module.weight
    if any(getattr(weight, name) is not None for name in quantises_inputs) or has_zeros(weight):
        return None
    return StoredWeight(weight.qdata, weight.scale, None, *weight.block_size)


for _name, _inputs in {
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "Float8Tensor": ("act_quant_kwargs",),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}.items():
    register_weight_kind(f"torchao.{_name}")(functools.partial(_of_torchao, _inputs))


def has_zeros(weight: torch.Tensor) -> bool:
    """Whether a torchao weight has zero points other than 0; with symmetric quantisation all are 0."""
    zeros = getattr(weight, "zero_point", None)
    if zeros is None:
        return False
    # Writes to a weight are not counted in the versions of its parts.
    versions = [None if one.is_inference() else one._version for one in (weight, zeros)]
    known = _zeros.get(zeros)
    if known is None or known[0] != versions:
        known = _zeros[zeros] = versions, bool(zeros.any())
    return known[1]


@register_weight_kind(f"transformers.{FP8_LINEAR}")
@register_weight_kind(f"transformers.{FP8_EXPERTS}")
def _fine_grained(module: nn.Module, name: str = "weight") -> StoredWeight | None:
    values, scales = getattr(module, name), getattr(module, FP8_SCALES.replace("weight", name))
    block = getattr(module, FP8_BLOCK)
    if values.dtype != torch.float8_e4m3fn or block is None or getattr(module, FP8_INPUTS) != "dynamic":
        return None
    return StoredWeight(values, scales, None, *block, rounds_inputs=True)


@register_weight_kind("bitsandbytes.Linear4bit")
def _of_bitsandbytes(module: nn.Linear) -> StoredWeight | None:
    """nf4, whose scales may be stored quantised, too ("double quantisation")."""
    state = getattr(module.weight, "quant_state", None)
    is_other = state is None or state.quant_type != "nf4" or getattr(state, "packing_format_for_cpu", False)
    if is_other or module.in_features % state.blocksize or (state.nested and state.state2.blocksize != SCALES_OF_OUTER):
        return None
    values, scales = module.weight.detach().as_subclass(torch.Tensor).view(torch.uint8), state.absmax
    if 2 * values.numel() != module.out_features * module.in_features:
        return None
    values, scales = (one.view(module.out_features, -1) for one in (values, scales))
    outer = (state.state2.absmax, state.state2.code, state.offset) if state.nested else (None, None, None)
    return StoredWeight(values, scales, None, 1, state.blocksize, False, "nf4", *outer)
