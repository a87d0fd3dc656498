"""Checkpoints that stay as they are in the file, where transformers would need kernels of others or convert them.

A configuration of a user's has the name of transformers' own class, which is compared with the checkpoint's.
transformers goes on with the checkpoint's, with the loading attributes of the user's.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..host.quantised import (
    AWQ_SCALED_ACTIVATIONS,
    IS_INITIALIZED,
    HfQuantizer,
    QuantizationMethod,
    register_quantizer,
    should_convert_module,
)
from ..modules.hidden_states import decoder_layers
from ..modules.stored_linear import StoredLinear
from ..modules.weights import is_experts
from .packed_linear import Packing, from_published, published, to_published
from .stored_experts import store_experts

# Of the names of our quantizers, before those of transformers' methods.
_PREFIX = "hf_specdec_"

# What words of zero points lack, by method, format and bits.
_ADDED = {
    ("awq", "gemm", 4): 0,
    ("gptq", "gptq", 4): 0x11111111,
    ("gptq", "gptq", 8): 0x01010101,
    ("gptq", "gptq_v2", 4): 0,
    ("gptq", "gptq_v2", 8): 0,
}


class Mxfp4Config(transformers.Mxfp4Config):
    """`quantization_config` of `from_pretrained` for MXFP4 checkpoints, such as gpt-oss, on any device and without
    kernels from the Hub: experts keep the numbers of the file."""

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"dequantize": False, "quant_method": f"{_PREFIX}mxfp4"}


class AwqConfig(transformers.AwqConfig):
    """`quantization_config` of `from_pretrained` for AWQ checkpoints of 4 bits in format `gemm`, on any device and
    without gptqmodel: linear layers keep the numbers of the file. Everything else is the checkpoint's to say.

    `from_pretrained` raises `ValueError` if the checkpoint has another format, quantised experts or heads, or lacks
    tensors, and if a layer is to be offloaded.
    """

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"quant_method": f"{_PREFIX}awq"}


class GPTQConfig(transformers.GPTQConfig):
    """As `AwqConfig`, for GPTQ checkpoints of 4 bits, or of 8 bits with symmetric quantisation, in format `gptq` or
    `gptq_v2`, with any order of inputs (`desc_act`)."""

    def __init__(self, bits: int = 4, **options: Any):
        super().__init__(bits, **options)

    def get_loading_attributes(self) -> dict[str, Any]:
        return {"quant_method": f"{_PREFIX}gptq"}


_CONFIGS = {"mxfp4": Mxfp4Config, "awq": AwqConfig, "gptq": GPTQConfig}


def stored_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of `from_pretrained` that keep a checkpoint with the config.json `settings` as it is: one of the
    configurations above, or none."""
    method = (settings.get("quantization_config") or {}).get("quant_method")
    return {"quantization_config": _CONFIGS[method]()} if method in _CONFIGS else {}


class _StoredQuantizer(HfQuantizer):
    is_trainable = False

    def __init__(self, quantization_config: Any, **options: Any):
        method = QuantizationMethod(quantization_config.quant_method.removeprefix(_PREFIX))
        quantization_config.quant_method = method  # the name that is saved with the model
        super().__init__(quantization_config, **options)

    def is_serializable(self) -> bool:
        return True


@register_quantizer(f"{_PREFIX}mxfp4")
class _Mxfp4Quantizer(_StoredQuantizer):
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **options: Any) -> None:
        excluded = self.get_modules_to_not_convert(model, self.quantization_config.modules_to_not_convert)
        for name, module in list(model.named_modules()):
            if is_experts(module) and should_convert_module(name, excluded):
                store_experts(module)


@register_quantizer(f"{_PREFIX}awq")
@register_quantizer(f"{_PREFIX}gptq")
class _PackedQuantizer(_StoredQuantizer):
    def __init__(self, quantization_config: transformers.AwqConfig | transformers.GPTQConfig, **options: Any):
        super().__init__(quantization_config, **options)
        method, bits = self.quantization_config.quant_method.value, quantization_config.bits
        kind = method, str(getattr(quantization_config.format, "value", quantization_config.format)), bits
        if kind not in _ADDED:
            found, *known = (f"{form} with {number} bits" for one, form, number in (kind, *_ADDED) if one == method)
            raise ValueError(
                f"The checkpoint is quantised by {method} in format {found}, but hf_specdec reads {', '.join(known)}. "
                "Load it by gptqmodel, without a configuration of hf_specdec."
            )
        self._packing = Packing(method == "awq", bits, quantization_config.group_size, _ADDED[kind])

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **options: Any) -> None:
        if self._packing.is_awq and model.config.model_type in AWQ_SCALED_ACTIVATIONS():
            raise ValueError(
                f"AWQ scales activations of {model.config.model_type}, which hf_specdec does not. Load it by gptqmodel."
            )
        excluded = getattr(self.quantization_config, "modules_to_not_convert", None) or []
        layers = set(decoder_layers(model).modules())  # AWQ and GPTQ quantise no others
        for name, module in model.named_modules():
            is_excluded = not should_convert_module(name, excluded) or not set(name.split(".")).isdisjoint(excluded)
            if is_excluded or module not in layers:
                continue
            if is_experts(module):
                raise ValueError(
                    f"{name} are experts, but of AWQ and GPTQ checkpoints hf_specdec reads linear layers only."
                )
            if type(module) is nn.Linear:
                to_published(module, self._packing)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> None:
        if model.device.type == "meta":
            return
        head = model.get_output_embeddings()
        for name, module in model.named_modules():
            is_packed = isinstance(module, StoredLinear)
            if is_packed and module.qweight.is_meta:
                raise ValueError(f"{name} is offloaded. Choose a device_map that keeps quantised layers on devices.")
            for part, tensor in module._parameters.items() if is_packed or module is head else ():
                if tensor is not None and not getattr(tensor, IS_INITIALIZED, False):
                    raise ValueError(
                        f"The checkpoint has no {name}.{part}, though by its config.json {name} is "
                        f"{'' if is_packed else 'not '}quantised."
                    )
            if is_packed:
                try:
                    from_published(module, self._packing)
                except ValueError as error:
                    raise ValueError(f"{name} cannot be read: {error}.") from None

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict]:
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, StoredLinear):
                for part in module._parameters.keys() - {"bias"}:
                    del state[f"{name}.{part}"]
                state |= {f"{name}.{part}": one for part, one in published(module, self._packing).items()}
        return state, {}
