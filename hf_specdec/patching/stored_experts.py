"""Mixtures of experts in MXFP4 that keep the format of the file, where transformers would convert them to bfloat16."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..host.quantised import (
    IS_INITIALIZED,
    HfQuantizer,
    QuantizationMethod,
    register_quantizer,
    should_convert_module,
)
from .experts import BLOCKS, GROUP, SCALES, experts_forward

_QUANTIZER = "hf_specdec_mxfp4"


class Mxfp4Config(transformers.Mxfp4Config):
    """`quantization_config` of `from_pretrained` for MXFP4 checkpoints, such as gpt-oss, on any device and without
    kernels from the Hub: experts keep the numbers of the file.

    The class has the name of transformers' own, which is compared with the checkpoint's configuration.
    """

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"dequantize": False, "quant_method": _QUANTIZER}


class StoredExperts(nn.Module):
    """Experts of a class decorated with transformers' `use_experts_implementation`, computed by `experts_forward`.

    Instead of `gate_up_proj` they have `gate_up_proj_blocks`, `[experts, out, in / 32, 16]` uint8 with two e2m1 numbers
    each, the first one in the low half, and `gate_up_proj_scales`, `[experts, out, in / 32]` uint8, exponents of 2 plus
    127. `down_proj` is stored alike.
    """

    forward = experts_forward


@functools.cache
def _stored_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (StoredExperts, cls), {"__module__": cls.__module__})


def _store(experts: nn.Module) -> None:
    """Convert experts without numbers yet to `StoredExperts`."""
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        weight = experts._parameters.pop(name)
        count, size_out, size_in = (weight.mT if experts.is_transposed else weight).shape
        shape = (count, size_out, size_in // GROUP)
        for suffix, one in {BLOCKS: (*shape, GROUP // 2), SCALES: shape}.items():
            part = torch.empty(one, dtype=torch.uint8, device=weight.device)
            experts.register_parameter(f"{name}{suffix}", nn.Parameter(part, requires_grad=False))
    experts.__class__ = _stored_class(type(experts))
    setattr(experts, IS_INITIALIZED, True)  # their class would initialise parameters that they no longer have


@register_quantizer(_QUANTIZER)
class _StoredMxfp4Quantizer(HfQuantizer):
    is_trainable = False

    def __init__(self, quantization_config: transformers.Mxfp4Config, **kwargs: Any):
        quantization_config.quant_method = QuantizationMethod.MXFP4  # the name that is saved with the model
        super().__init__(quantization_config, **kwargs)

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        excluded = self.get_modules_to_not_convert(model, self.quantization_config.modules_to_not_convert)
        for name, module in list(model.named_modules()):
            if all(hasattr(module, one) for one in ("down_proj", "is_transposed", "has_gate")) and (
                should_convert_module(name, excluded)
            ):
                _store(module)
