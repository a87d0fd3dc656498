"""What checkpoints of drafters with decoder layers of their own have in common, whatever the family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from ..config import DraftLayersConfig
from .checkpoint import Checkpoint, StoredTensor
from .decisions import Decisions
from .detection import architectures
from .dialects import SPECULATORS
from .rope import read_rope
from .tensors import rename

_LAYER_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "vocab_size",
)

_ATTENTION = "layers.0.self_attn"


def layer_config_class(layer: Mapping[str, Any], name: str) -> type[PreTrainedConfig]:
    """transformers' configuration class of the draft layers that `layer` describes, for its defaults.

    `model_type` may be the target's: vLLM and SGLang take the layers' kind from `architectures`, and run Llama's for
    all EAGLE-3 drafters but Qwen3's and those with latent attention.
    """
    model_type = layer.get("model_type", "llama")
    if model_type in _LAYER_CONFIGS:
        return _LAYER_CONFIGS[model_type]
    if not any(part in architectures(layer) for part in (*_LAYER_CONFIGS, "eagle3", "peagle")):
        raise ValueError(
            f"{name} has draft layers of model_type {model_type!r}; expected one of {sorted(_LAYER_CONFIGS)}, or "
            "architectures that name one of them or EAGLE-3."
        )
    return LlamaConfig


def _accepted_width(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A `hidden_size` that transformers' class accepts: a multiple of the number of heads, even with a `head_dim`."""
    width, heads = stated.get("hidden_size"), stated.get("num_attention_heads")
    are_sizes = all(type(size) is int and size > 0 for size in (width, heads))
    return {"hidden_size": heads} if are_sizes and "head_dim" in stated and width % heads else {}


class DraftLayersReader:
    """Reads one checkpoint once, and records what it decides in `decisions`.

    Args:
        checkpoint: as published.
        dialect: the publisher whose layout it has.
        nested: the part of config.json in which the publishers have settings of the family; empty if it has none.
        target: the target's text configuration; without it, what depends on the target stays open.
        overrides: see `Overrides`.
    """

    config_class: type[DraftLayersConfig]

    def __init__(
        self,
        checkpoint: Checkpoint,
        dialect: str,
        nested: Mapping[str, Any],
        target: PreTrainedConfig | None,
        overrides: Mapping[str, Any],
    ):
        self.name = checkpoint.name
        self.dialect = dialect
        self.top = checkpoint.config
        self.nested = nested
        self.layer = self._layer_settings()
        self.tensors: dict[str, StoredTensor] = {rename(key): value for key, value in checkpoint.tensors.items()}
        self.target = target
        self.decisions = Decisions(overrides)
        self._decide = self.decisions.decide

    def _layer_settings(self) -> Mapping[str, Any]:
        """The part of config.json that describes the draft layers."""
        nested = self.top.get("transformer_layer_config") or {}
        return nested if self.dialect == SPECULATORS else {**self.top, **nested}

    def _setting(self, name: str, default: Any = None) -> Any:
        """A setting outside of the layers' own: inside of the nested settings or at top level."""
        for source in (self.nested, self.top):
            if source.get(name) is not None:
                return source[name]
        return default

    def _flag(self, name: str) -> bool | None:
        """A boolean setting, None if it is not stated; a string is refused, since any string is true."""
        stated = self._setting(name)
        if not isinstance(stated, bool | None):
            raise ValueError(f"{self.name} has {name} {stated!r} in its config.json; expected true or false.")
        return stated

    def _agreed(self, field: str, stated: bool | None, tensor: str) -> bool:
        """Whether a part exists: decided by its tensor, with which config.json must agree if it states `field`."""
        present = tensor in self.tensors
        if stated is not None and stated != present:
            raise ValueError(
                f"{self.name} contradicts itself: {field} is {stated} by config.json, but its weights have "
                f"{'a' if present else 'no'} tensor {tensor}."
            )
        return present

    def _layer_class(self) -> type[PreTrainedConfig]:
        """transformers' configuration class of the draft layers, for its defaults."""
        return layer_config_class(self.layer, self.name)

    def _has_qk_norm(self) -> bool:
        """Whether the publishers' layers have norms of queries and keys."""
        kind = self.layer.get("model_type", "llama")
        if kind not in _LAYER_CONFIGS or (kind == "qwen3" and "llama" in architectures(self.top)):
            return f"{_ATTENTION}.q_norm.weight" in self.tensors
        return self._layer_class() is Qwen3Config

    def _layers(self) -> dict[str, Any]:
        """The fields of `DraftLayersConfig` that describe the decoder layers."""
        config_class = self._layer_class()
        stated = {key: self.layer[key] for key in _LAYER_FIELDS if self.layer.get(key) is not None}
        if "intermediate_size_mlp" in self.layer:  # Llama 4's name of the width of its MLPs without experts
            stated["intermediate_size"] = self.layer["intermediate_size_mlp"]
        # speculators' files hold only the differences to the defaults of the class.
        complete = config_class(**stated | _accepted_width(stated))
        fields = {key: stated.get(key, getattr(complete, key)) for key in _LAYER_FIELDS}
        fields["num_hidden_layers"] = self._num_layers()
        bias, mlp_bias = self.layer.get("attention_bias"), self.layer.get("mlp_bias")
        fields["attention_bias"] = self._agreed("attention_bias", bias, f"{_ATTENTION}.q_proj.bias")
        fields["mlp_bias"] = self._agreed("mlp_bias", mlp_bias, "layers.0.mlp.gate_proj.bias")
        fields["qk_norm"] = self._agreed("q_norm (of qwen3)", self._has_qk_norm(), f"{_ATTENTION}.q_norm.weight")
        return fields | self._windows(fields["num_hidden_layers"])

    def _num_layers(self) -> int:
        found = {int(match[1]) for name in self.tensors if (match := re.match(r"layers\.(\d+)\.", name))}
        stated = self.layer.get("num_hidden_layers", len(found) or 1)
        if found and found != set(range(stated)):
            raise ValueError(
                f"{self.name} contradicts itself: num_hidden_layers is {stated} by config.json, but its weights hold "
                f"the draft layers {sorted(found)}."
            )
        return stated

    def _windows(self, num_layers: int) -> dict[str, Any]:
        types = self.layer.get("layer_types")
        window = self.layer.get("sliding_window")
        if types is None:
            return {"layer_types": None, "sliding_window": None}
        if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f'{self.name} has layer_types {types}; expected "full_attention" or "sliding_attention" for each of '
                f"its {num_layers} draft layers."
            )
        if "sliding_attention" in types and not window:
            raise ValueError(f"{self.name} has layer_types {types} but sliding_window {window}; expected a size.")
        return {"layer_types": list(types), "sliding_window": window}

    def _sizes(self, layers: dict[str, Any], layer_ids: list[int] | None) -> dict[str, Any]:
        """Sizes of the draft vocabulary and of the auxiliary hidden states, from tensors where config.json has none."""
        head, table = self.tensors.get("lm_head.weight"), self.tensors.get("d2t")
        draft_vocab_size = self.top.get("draft_vocab_size")
        if draft_vocab_size is None:
            source, tensor = ("lm_head.weight", head) if head else ("d2t", table)
            draft_vocab_size = tensor.shape[0] if tensor else layers["vocab_size"]
            rule = f"rows of {source}" if tensor else "the target's vocabulary, since the file has no head and no d2t"
            self._decide("draft_vocab_size", draft_vocab_size, f"not in config.json; {rule}")
        width = self._setting("target_hidden_size")
        if width is None and self.target is not None and self.target.hidden_size == layers["hidden_size"]:
            width = layers["hidden_size"]
        if "fc.weight" not in self.tensors:
            return {"draft_vocab_size": draft_vocab_size, "target_hidden_size": width, "num_aux_hidden_states": None}
        total = self.tensors["fc.weight"].shape[1]
        num_aux_hidden_states = self._num_aux_hidden_states(total, width, layer_ids)
        if total % num_aux_hidden_states or (width is not None and total != num_aux_hidden_states * width):
            raise ValueError(
                f"{self.name}: fc.weight reads {total} values, which is not {num_aux_hidden_states} auxiliary hidden "
                f"states (layer ids {layer_ids}) of target_hidden_size "
                f"{width or 'any size'}. Pass `aux_hidden_state_layer_ids=` if the target's default does not apply."
            )
        return {
            "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": width or total // num_aux_hidden_states,
            "num_aux_hidden_states": num_aux_hidden_states,
        }

    def _num_aux_hidden_states(self, total: int, width: int | None, layer_ids: list[int] | None) -> int:
        if layer_ids is not None:
            return len(layer_ids)
        stated = self._setting("num_aux_hidden_states") or self._setting("num_aux_layers")
        return stated or (total // width if width else 3)

    def _rope(self) -> dict[str, Any]:
        if "rope_parameters" in self.decisions.overrides:
            return self._decide("rope_parameters", None, "")
        return self._trained_rope(read_rope(self.layer, self.dialect, self.name, self.decisions))

    def _trained_rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        """The RoPE parameters that the drafter was trained with, given those that config.json states."""
        return rope

    def _has_own(self, keyword: str, tensor: str) -> bool:
        """Whether the checkpoint has an embedding or head of its own, which the override `keyword` may require."""
        present = tensor in self.tensors
        rule = f"{tensor} is in the checkpoint" if present else f"{tensor} is not in the checkpoint"
        shared = self._decide(keyword, not present, rule)
        if not shared and not present:
            raise ValueError(f"{keyword} is False, but {self.name} has no tensor {tensor} to use instead.")
        return present
