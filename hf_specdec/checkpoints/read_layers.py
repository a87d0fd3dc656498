"""Base of the readers of drafters that have decoder layers of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from ..config import DraftLayersConfig, check_windows
from .checkpoint import Checkpoint
from .detection import architectures
from .dialects import MASK_TOKEN_KEYS, SPECULATORS, speculators_target, stated_mask_token
from .interpretation import Decisions
from .limits import check_mask_token
from .rope import read_rope
from .tensors import rename

IDS = "aux_hidden_state_layer_ids"

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


class LayersReader:
    """Reads the configuration of a checkpoint.

    A family implements `_layer_ids`, the ascending ids of the auxiliary hidden states, or None if they depend on an
    unknown target; and `_fields`, the fields that it adds to, or changes in, the fields of all families.

    Without weight files (`Checkpoint.tensors` is None) `config.json` is trusted, and what it does not state is as most
    publishers have it: the drafter shares the target's embedding.
    """

    config_class: type[DraftLayersConfig]
    # The publisher of a config.json, and its nested object with settings of the family.
    detect_dialect: Callable[[Mapping[str, Any]], str]
    nested_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def __init__(self, checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions):
        self.checkpoint, self.name = checkpoint, checkpoint.name
        self.top = checkpoint.config
        self.dialect = type(self).detect_dialect(self.top)
        self.nested = type(self).nested_settings(self.top)
        self.layer = self._layer_settings()
        self.is_planned = checkpoint.tensors is None
        self.tensors = {rename(key): value for key, value in (checkpoint.tensors or {}).items()}
        self.target = target
        self.given = decisions.given
        self.decisions = decisions
        self._decide = decisions.decide

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions) -> DraftLayersConfig:
        """Read a published checkpoint of any dialect. Fields that depend on the target stay open without `target`, its
        text configuration.

        `decisions` have the caller's overrides and record what is decided. Raises `ValueError` for a config.json that
        contradicts itself or the tensors.
        """
        return cls(checkpoint, target, decisions)._config()

    def _config(self) -> DraftLayersConfig:
        layers = self._layers()
        layer_ids = self._unless_given(IDS, self._layer_ids) if self._reads_aux_hidden_states() else None
        sizes = self._sizes(layers, layer_ids)
        has_small_head = sizes["draft_vocab_size"] < layers["vocab_size"]
        fields = {
            **layers,
            **sizes,
            "aux_hidden_state_layer_ids": layer_ids,
            "rope_parameters": self._unless_given("rope_parameters", self._rope),
            "own_embedding": self._has_own("share_embedding", "embed_tokens.weight", False),
            "own_head": self._has_own("share_head", "lm_head.weight", self.config_class.own_head or has_small_head),
            "fc_bias": "fc.bias" in self.tensors,
            "logit_scale": float(self._setting("logit_scale", 1.0)),
            "dialect": self.dialect,
            "target_name_or_path": speculators_target(self.top),
        }
        return self.config_class(**fields | self._fields(fields))

    def _unless_given(self, keyword: str, read: Callable[[], Any]) -> Any:
        """The caller's override `keyword` if given, else the result of `read`, which records its own decision."""
        return self._decide(keyword, None, "") if keyword in self.given else read()

    def _layer_settings(self) -> Mapping[str, Any]:
        nested = self.top.get("transformer_layer_config") or {}
        return nested if self.dialect == SPECULATORS else {**self.top, **nested}

    def _setting(self, name: str, default: Any = None) -> Any:
        """A setting that is not of the layers, from the nested object or from top level."""
        for source in (self.nested, self.top):
            if source.get(name) is not None:
                return source[name]
        return default

    def _flag(self, name: str) -> bool | None:
        """A boolean setting, or None. Raises `ValueError` for other types, such as strings, which would all be true."""
        stated = self._setting(name)
        if not isinstance(stated, bool | None):
            raise ValueError(f"{self.name} has {name} {stated!r} in its config.json; expected true or false.")
        return stated

    def _has(self, tensor: str, planned: Any) -> bool:
        return bool(planned) if self.is_planned else tensor in self.tensors

    def _agreed(self, field: str, stated: bool | None, tensor: str) -> bool:
        """Whether a part exists, by its `tensor`. Raises `ValueError` if config.json states the `field` otherwise."""
        present = self._has(tensor, stated)
        if stated is not None and stated != present:
            raise ValueError(
                f"{self.name} contradicts itself: {field} is {stated} by config.json, but its weights have "
                f"{'a' if present else 'no'} tensor {tensor}."
            )
        return present

    def _layer_class(self) -> type[PreTrainedConfig]:
        """transformers' configuration class, for its defaults; `model_type` may be the target's, as in vLLM."""
        model_type = self.layer.get("model_type", "llama")
        if model_type in _LAYER_CONFIGS:
            return _LAYER_CONFIGS[model_type]
        if not any(part in architectures(self.layer) for part in (*_LAYER_CONFIGS, "eagle3", "peagle")):
            raise ValueError(
                f"{self.name} has draft layers of model_type {model_type!r}; expected one of {sorted(_LAYER_CONFIGS)}, "
                "or architectures that name one of them or EAGLE-3."
            )
        return LlamaConfig

    def _has_qk_norm(self) -> bool:
        """Whether the publisher's layers have norms of queries and keys."""
        kind = self.layer.get("model_type", "llama")
        if kind not in _LAYER_CONFIGS or (kind == "qwen3" and "llama" in architectures(self.top)):
            return self._has(f"{_ATTENTION}.q_norm.weight", kind == "qwen3")
        return self._layer_class() is Qwen3Config

    def _layers(self) -> dict[str, Any]:
        """The fields of `DraftLayersConfig` that describe the decoder layers."""
        config_class = self._layer_class()
        stated = {key: self.layer[key] for key in _LAYER_FIELDS if self.layer.get(key) is not None}
        if "intermediate_size_mlp" in self.layer:  # Llama 4's name of the width of MLPs without experts
            stated["intermediate_size"] = self.layer["intermediate_size_mlp"]
        width, heads = (stated.get(key) for key in ("hidden_size", "num_attention_heads"))
        accepted = dict(stated)
        if "head_dim" in stated and all(type(one) is int and one > 0 for one in (width, heads)) and width % heads:
            accepted["hidden_size"] = heads  # transformers' classes need a multiple, even with a `head_dim`
        complete = config_class(**accepted)
        # speculators' files have only the differences from the defaults of the class.
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
        types, window = self.layer.get("layer_types"), self.layer.get("sliding_window")
        if types is None:
            return {"layer_types": None, "sliding_window": None}
        check_windows(f"{self.name} has layer_types", types, num_layers, window or None)
        return {"layer_types": list(types), "sliding_window": window}

    def _sizes(self, layers: Mapping[str, Any], layer_ids: list[int] | None) -> dict[str, Any]:
        """Sizes of the draft vocabulary and of the auxiliary hidden states, from config.json or else from tensors."""
        head, table = self.tensors.get("lm_head.weight"), self.tensors.get("d2t")
        draft_vocab_size = self.top.get("draft_vocab_size")
        if draft_vocab_size is None:
            source, tensor = ("lm_head.weight", head) if head else ("d2t", table)
            draft_vocab_size = tensor.shape[0] if tensor else layers["vocab_size"]
            rule = f"rows of {source}" if tensor else "the target's vocabulary, since the file has no head and no d2t"
            self._decide("draft_vocab_size", draft_vocab_size, f"not in config.json; {rule}")
        width = self._setting("target_hidden_size")
        has_width = self.is_planned or (self.target is not None and self.target.hidden_size == layers["hidden_size"])
        if width is None and has_width:
            width = self.target.hidden_size
        sizes = {"draft_vocab_size": draft_vocab_size, "target_hidden_size": width, "num_aux_hidden_states": None}
        if not self._has("fc.weight", self._reads_aux_hidden_states()):
            return sizes
        total = None if self.is_planned else self.tensors["fc.weight"].shape[1]
        count = len(layer_ids) if layer_ids is not None else self._num_aux_hidden_states(total, width)
        if total is not None and (total % count or (width is not None and total != count * width)):
            raise ValueError(
                f"{self.name}: fc.weight reads {total} values, which is not {count} auxiliary hidden "
                f"states (layer ids {layer_ids}) of target_hidden_size "
                f"{width or 'any size'}. Pass `aux_hidden_state_layer_ids=` if the target's default does not apply."
            )
        return sizes | {"target_hidden_size": width or total // count, "num_aux_hidden_states": count}

    def _reads_aux_hidden_states(self) -> bool:
        return True

    def _num_aux_hidden_states(self, total: int | None, width: int | None) -> int:
        """The number of auxiliary hidden states without ids, given the width of all and of one, if known."""
        stated = self._setting("num_aux_hidden_states") or self._setting("num_aux_layers")
        return stated or (total // width if total and width else 3)

    def _stated_ids(
        self, places: Iterable[tuple[Mapping[str, Any], Sequence[str], int]]
    ) -> tuple[str, list[int], int] | None:
        """The first key with layer ids, the ids, and the offset to add to them; None if there is none. `places` has
        parts of config.json, their keys, which must agree with each other, and the offset of ids there."""
        for source, keys, offset in places:
            found = {key: source[key] for key in keys if source.get(key) not in (None, [])}
            for key, ids in found.items():
                if not isinstance(ids, list) or not all(type(one) is int and one >= -offset for one in ids):
                    raise ValueError(f"{self.name} has {key} {ids!r}; expected a list of layer numbers.")
            if len({tuple(ids) for ids in found.values()}) > 1:
                stated = ", ".join(f"{key} {ids}" for key, ids in found.items())
                raise ValueError(
                    f"{self.name} contradicts itself about the layers whose hidden states it reads: {stated}. Pass "
                    "`aux_hidden_state_layer_ids=`."
                )
            for key, ids in found.items():
                return key, ids, offset
        return None

    def _mask_token(self, vocab_size: int, is_needed: bool = True) -> int | None:
        """The mask token; None if it is neither stated nor needed."""
        key, value = stated_mask_token(self.top) or (None, None)
        if key is None and "mask_token_id" not in self.given:
            if not is_needed:
                return self._decide("mask_token_id", None, "not in config.json, and not needed to draft token by token")
            otherwise = ", or `parallel_drafting=False`" if "parallel_drafting" in self.config_class.keywords else ""
            raise ValueError(
                f"{self.name} is a {self.config_class.family} drafter, but its config.json names no mask token; looked "
                f"for {', '.join(MASK_TOKEN_KEYS)}. Pass `mask_token_id=` with the id that it was trained "
                f"with{otherwise}."
            )
        return check_mask_token(self._decide("mask_token_id", value, f"{key} of config.json"), vocab_size, self.name)

    def _rope(self) -> dict[str, Any]:
        return read_rope(self.layer, self.dialect, self.name, self.decisions)

    def _has_own(self, keyword: str, tensor: str, planned: bool) -> bool:
        """Whether the checkpoint has an embedding or head of its own, unless the override `keyword` says otherwise."""
        present = self._has(tensor, planned)
        rule = f"{tensor} is in the checkpoint" if present else f"{tensor} is not in the checkpoint"
        shared = self._decide(keyword, not present, rule)
        if not shared and not present:
            raise ValueError(f"{keyword} is False, but {self.name} has no tensor {tensor} to use instead.")
        return present
