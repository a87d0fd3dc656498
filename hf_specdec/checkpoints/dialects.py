"""Published dialects of EAGLE-3 and P-EAGLE, read into the one normal form: `Eagle3Config`, `PEagleConfig`.

What a checkpoint leaves open is settled here by a stated rule, kept as a `Decision`, and can be overridden. The rules
follow the publishers' own code: SafeAILab/EAGLE (cnets.py), sgl-project/SpecForge (llama3_eagle.py, peagle.py),
vllm-project/speculators (models/eagle3, models/peagle), NVIDIA/Model-Optimizer (export/plugins/hf_spec_export.py),
NVIDIA-NeMo/Automodel (speculative/eagle) and vLLM's readers of them (llama_eagle3.py, configs/speculators/algos.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from ..config import (
    DEFAULT_ROPE_THETA,
    DrafterConfig,
    Eagle3Config,
    PEagleConfig,
    default_aux_layer_ids,
)
from .checkpoint import Checkpoint, StoredTensor
from .detection import architectures, eagle_settings, speculators_type
from .tensors import rename

SAFEAILAB, SPECFORGE, SPECULATORS, MODELOPT = "SafeAILab", "SpecForge", "speculators", "NVIDIA ModelOpt"
AMAZON, AUTOMODEL = "Amazon", "NeMo Automodel"

# Trained depth of speculators' and Automodel's P-EAGLE drafters that do not say theirs (`num_depths`).
PEAGLE_DEPTH = 8

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
# Keys that only ModelOpt's export writes into `eagle_config`.
_MODELOPT_MARKS = {
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
    "norm_before_fc",
    "layer_ids",
}

# Keys of config.json that name the tapped layers: at top level, and inside `eagle_config`.
_TOP_TAPS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_NESTED_TAPS = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "aux_hidden_state_layer_ids")

# Model types of targets whose drafters' ids inside `eagle_config` count boundaries, whatever the first is (the
# published ones of gpt-oss; sgl-project/sglang pull request 32334).
_COUNTED_BY_BOUNDARIES = frozenset({"gpt_oss"})

# Where the mask token of a drafter may stand, in the order of vLLM's look-up (llm_base_proposer.py).
_MASK_TOKEN_KEYS = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


@dataclass(frozen=True)
class Decision:
    """One thing that a checkpoint leaves open, and how it was settled.

    Attributes:
        name: what was decided; a keyword of `AutoDrafter.from_pretrained` where that is one.
        value: the outcome.
        rule: why.
        doubtful: whether published checkpoints are known for which the rule would be wrong.
    """

    name: str
    value: Any
    rule: str
    doubtful: bool = False

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.rule}"


class Decisions:
    """The decisions of one reading, noted as questions are settled.

    Args:
        overrides: by their keywords in `AutoDrafter.from_pretrained`; a value of None leaves it to the rule.
    """

    def __init__(self, overrides: Mapping[str, Any]):
        self.overrides = {name: value for name, value in overrides.items() if value is not None}
        self.made: list[Decision] = []

    def settle(self, name: str, value: Any, rule: str, doubtful: bool = False) -> Any:
        """Note the decision, unless the caller overrides it, and return its outcome."""
        if name in self.overrides:
            value, rule, doubtful = self.overrides[name], "given by the caller", False
        self.made.append(Decision(name, value, rule, doubtful))
        return value


@dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint's configuration in normal form, and the decisions that led to it."""

    config: DrafterConfig
    decisions: tuple[Decision, ...]


def detect_dialect(config: Mapping[str, Any]) -> str:
    """The publisher whose layout the `config.json` of an EAGLE-3 or P-EAGLE drafter has."""
    if speculators_type(config) is not None:
        return SPECULATORS
    names, nested = architectures(config), eagle_settings(config)
    if "peagledraftmodel" in names.split():
        return SPECFORGE
    if {"llamaeagle3draftmodel", "llamapeagledraftmodel"} & set(names.split()) or "parallel_drafting" in config:
        return AUTOMODEL
    if config.get("ptd_token_id") is not None:
        return AMAZON
    if _MODELOPT_MARKS & set(nested):
        return MODELOPT
    return SPECFORGE if nested or "eagle3" in names else SAFEAILAB


def read_eagle3(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> CheckpointReader:
    """Read an EAGLE-3 checkpoint of any dialect.

    Args:
        checkpoint: what was published.
        target: the target's text configuration; what depends on it stays open without.
        overrides: by their keywords in `AutoDrafter.from_pretrained`; a value of None leaves it to the rule.

    Raises:
        ValueError: config.json contradicts itself or the tensors.
    """
    return _Eagle3Reader(checkpoint, target, overrides).read()


def refuse_masks(name: str, overrides: Mapping[str, Any]) -> None:
    """Raise `ValueError` if `overrides` ask an EAGLE-3 drafter called `name` for what only P-EAGLE can do."""
    if overrides.get("parallel_drafting"):
        raise ValueError(
            f"{name} is to draft in parallel, but it is an EAGLE-3 drafter: it has no tensor mask_hidden for the "
            "places without a token. Expected a P-EAGLE drafter, or no `parallel_drafting=True`."
        )
    if overrides.get("mask_token_id") is not None:
        raise ValueError(
            f"{name} was given mask_token_id {overrides['mask_token_id']}, but it is an EAGLE-3 drafter, which drafts "
            "token by token and has no mask token. Drop `mask_token_id=`."
        )


def read_peagle(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> CheckpointReader:
    """Read a P-EAGLE checkpoint of any dialect; as `read_eagle3`."""
    return _PEagleReader(checkpoint, target, overrides).read()


class _Eagle3Reader:
    """One reading of one checkpoint; `decisions` fills up as questions are settled."""

    def __init__(self, checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]):
        self.name = checkpoint.name
        self.dialect = detect_dialect(checkpoint.config)
        self.top = checkpoint.config
        self.nested = eagle_settings(checkpoint.config)
        self.layer = self._layer_settings()
        self.tensors: dict[str, StoredTensor] = {rename(key): value for key, value in checkpoint.tensors.items()}
        self.target = target
        self.decisions = Decisions(overrides)
        self.overrides = self.decisions.overrides
        self._settle = self.decisions.settle

    config_class: type[Eagle3Config] = Eagle3Config

    def _layer_settings(self) -> Mapping[str, Any]:
        """The part of config.json that describes the draft layers."""
        nested = self.top.get("transformer_layer_config") or {}
        return nested if self.dialect == SPECULATORS else {**self.top, **nested}

    def read(self) -> CheckpointReader:
        drafting = self._drafting()
        layers = self._layers()
        aux_hidden_state_layer_ids = self._layer_ids()
        config = self.config_class(
            **drafting,
            **layers,
            **self._sizes(layers, aux_hidden_state_layer_ids),
            aux_hidden_state_layer_ids=aux_hidden_state_layer_ids,
            rope_parameters=self._rope(),
            norm_before_residual=self._norm_before_residual(),
            norm_output=self._norm_output(),
            final_norm=self._final_norm(),
            own_embedding=self._owns("share_embedding", "embed_tokens.weight"),
            own_head=self._owns("share_head", "lm_head.weight"),
            use_aux_hidden_state=self._agreed("use_aux_hidden_state", self._use_aux, "fc.weight"),
            norm_before_fc=self._agreed("norm_before_fc", self._flag("norm_before_fc"), "input_norm.weight"),
            fc_norm=self._fc_norm(),
            fc_bias="fc.bias" in self.tensors,
            logit_scale=float(self._setting("logit_scale", 1.0)),
            num_assistant_tokens=self._num_assistant_tokens(),
            dialect=self.dialect,
            target_name_or_path=(self.top.get("speculators_config") or {}).get("verifier", {}).get("name_or_path"),
        )
        return CheckpointReader(config, tuple(self.decisions.made))

    @property
    def _use_aux(self) -> bool:
        stated = self._flag("use_aux_hidden_state")
        return True if stated is None else stated

    def _setting(self, name: str, default: Any = None) -> Any:
        """A setting beside the layers' own: inside `eagle_config` or at top level."""
        for source in (self.nested, self.top):
            if source.get(name) is not None:
                return source[name]
        return default

    def _flag(self, name: str) -> bool | None:
        """A setting that is true or false, None if it is not stated; as a string, both would be true."""
        stated = self._setting(name)
        if not isinstance(stated, bool | None):
            raise ValueError(f"{self.name} has {name} {stated!r} in its config.json; expected true or false.")
        return stated

    def _agreed(self, field: str, stated: bool | None, tensor: str) -> bool:
        """Whether a part exists: its tensor tells, and what config.json states must agree."""
        present = tensor in self.tensors
        if stated is not None and stated != present:
            raise ValueError(
                f"{self.name} contradicts itself: {field} is {stated} by config.json, but its weights have "
                f"{'a' if present else 'no'} tensor {tensor}."
            )
        return present

    def _drafting(self) -> dict[str, Any]:
        """The fields of the configuration that say how tokens are drafted."""
        refuse_masks(self.name, self.overrides)
        return {}

    def _layers(self) -> dict[str, Any]:
        """The fields of `Eagle3Config` that describe the decoder layers."""
        layer_class = _layer_class(self.layer, self.name)
        stated = {key: self.layer[key] for key in _LAYER_FIELDS if self.layer.get(key) is not None}
        # The class fills in what speculators leaves out: its files hold the difference to the class defaults.
        filled = layer_class(**stated)
        fields = {key: getattr(filled, key) for key in _LAYER_FIELDS}
        fields["num_hidden_layers"] = self._num_layers()
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        bias, mlp_bias = self.layer.get("attention_bias"), self.layer.get("mlp_bias")
        fields["attention_bias"] = self._agreed("attention_bias", bias, f"{attention}.q_proj.bias")
        fields["mlp_bias"] = self._agreed("mlp_bias", mlp_bias, f"{mlp}.gate_proj.bias")
        fields["qk_norm"] = self._agreed("q_norm (of qwen3)", layer_class is Qwen3Config, f"{attention}.q_norm.weight")
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

    def _sizes(self, layers: dict[str, Any], aux_hidden_state_layer_ids: list[int] | None) -> dict[str, Any]:
        """Vocabulary and tap sizes, from the shapes where config.json omits them."""
        head, table = self.tensors.get("lm_head.weight"), self.tensors.get("d2t")
        draft_vocab_size = self.top.get("draft_vocab_size")
        if draft_vocab_size is None:
            source, tensor = ("lm_head.weight", head) if head else ("d2t", table)
            draft_vocab_size = tensor.shape[0] if tensor else layers["vocab_size"]
            rule = f"rows of {source}" if tensor else "the target's vocabulary, since the file has no head and no d2t"
            self._settle("draft_vocab_size", draft_vocab_size, f"not in config.json; {rule}")
        width = self._setting("target_hidden_size")
        if width is None and self.target is not None and self.target.hidden_size == layers["hidden_size"]:
            width = layers["hidden_size"]
        if "fc.weight" not in self.tensors:
            return {"draft_vocab_size": draft_vocab_size, "target_hidden_size": width, "num_aux_hidden_states": None}
        total = self.tensors["fc.weight"].shape[1]
        num_aux_hidden_states = self._num_aux_hidden_states(total, width, aux_hidden_state_layer_ids)
        if total % num_aux_hidden_states or (width is not None and total != num_aux_hidden_states * width):
            raise ValueError(
                f"{self.name}: fc.weight reads {total} values, which is not {num_aux_hidden_states} auxiliary hidden "
                f"states (layer ids {aux_hidden_state_layer_ids}) of target_hidden_size "
                f"{width or 'any size'}. Pass `aux_hidden_state_layer_ids=` if the target's default does not apply."
            )
        return {
            "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": width or total // num_aux_hidden_states,
            "num_aux_hidden_states": num_aux_hidden_states,
        }

    def _num_aux_hidden_states(
        self, total: int, width: int | None, aux_hidden_state_layer_ids: list[int] | None
    ) -> int:
        if aux_hidden_state_layer_ids is not None:
            return len(aux_hidden_state_layer_ids)
        stated = self._setting("num_aux_hidden_states") or self._setting("num_aux_layers")
        return stated or (total // width if width else 3)

    def _layer_ids(self) -> list[int] | None:
        """Tapped boundaries. What an id in config.json counts differs between publishers."""
        if not self._use_aux:
            return None
        if "aux_hidden_state_layer_ids" in self.overrides:
            return self._settle("aux_hidden_state_layer_ids", None, "")
        key, stated = self._stated_taps(self.top, _TOP_TAPS)
        if stated is not None:
            return self._settle(
                "aux_hidden_state_layer_ids",
                sorted(set(stated)),
                f"{key} at top level counts boundaries (vLLM, speculators)",
            )
        key, stated = self._stated_taps(self.nested, _NESTED_TAPS)
        if stated is not None:
            return self._nested_taps(key, stated)
        if self.target is None:
            rule = "not in config.json; 2, n // 2, n - 3 of a target with n layers, every publisher's default"
            return self._settle("aux_hidden_state_layer_ids", None, rule)
        num_layers = self.target.num_hidden_layers
        rule = f"not in config.json; 2, n // 2, n - 3 with n = {num_layers} layers, every publisher's default"
        return self._settle("aux_hidden_state_layer_ids", default_aux_layer_ids(num_layers), rule)

    def _stated_taps(self, source: Mapping[str, Any], keys: Sequence[str]) -> tuple[str | None, list[int] | None]:
        """The key of `source` that names the tapped layers, and their ids; None and None if there is none."""
        found = {key: source[key] for key in keys if source.get(key) not in (None, [])}
        for key, ids in found.items():
            if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
                raise ValueError(f"{self.name} has {key} {ids!r}; expected a list of layers' numbers.")
        if len({tuple(ids) for ids in found.values()}) > 1:
            stated = ", ".join(f"{key} {ids}" for key, ids in found.items())
            raise ValueError(
                f"{self.name} contradicts itself about the layers whose hidden states it reads: {stated}. Pass "
                "`aux_hidden_state_layer_ids=`."
            )
        return next(iter(found.items()), (None, None))

    def _nested_taps(self, key: str, stated: list[int]) -> list[int]:
        """Ids inside `eagle_config`: outputs of layers for trainers that hook layers, boundaries for others.

        SGLang's rule: those that begin with 1 are outputs, since the output of the first layer is the lowest that such
        trainers tap, but for targets whose drafters have been published with boundaries.
        """
        ids, where = sorted(set(stated)), f"{key} in eagle_config"
        if self.target is not None and self.target.model_type in _COUNTED_BY_BOUNDARIES:
            rule = f"{where} counts boundaries in drafters for {self.target.model_type} (SGLang)"
            return self._settle("aux_hidden_state_layer_ids", ids, rule, doubtful=True)
        if ids[0] == 1:
            rule = f"{where} begins with 1, so it counts outputs of layers: output i is boundary i + 1 (SGLang)"
            return self._settle("aux_hidden_state_layer_ids", [i + 1 for i in ids], rule, doubtful=True)
        rule = f"{where} begins with {ids[0]}, not with 1, so it counts boundaries (SGLang, vLLM)"
        return self._settle("aux_hidden_state_layer_ids", ids, rule, doubtful=True)

    def _rope(self) -> dict[str, Any]:
        """RoPE in transformers 5's form, from `rope_parameters`, `rope_scaling` and `rope_theta`."""
        if "rope_parameters" in self.overrides:
            return self._settle("rope_parameters", None, "")
        nested = self._stated_rope()
        kind, rest = _scaling_of(nested)
        inner, outer = nested.get("rope_theta"), self.layer.get("rope_theta")
        if inner is None and outer is None:
            theta, rule, doubtful = DEFAULT_ROPE_THETA, "not in config.json; the default of every publisher", False
        elif inner is not None and outer is not None and inner != outer:
            rule = f"config.json has {inner} inside rope_parameters or rope_scaling and {outer} at top level; the inner"
            theta, rule, doubtful = inner, rule + " one is transformers 5's", True
        else:
            theta, rule, doubtful = inner if inner is not None else outer, "config.json", False
        theta = self._settle("rope_theta", float(theta), rule, doubtful)
        return self._scaling(rest | {"rope_type": kind, "rope_theta": theta})

    def _stated_rope(self) -> Mapping[str, Any]:
        """`rope_parameters` or `rope_scaling` of config.json; empty if it has neither."""
        given = {key: self.layer[key] for key in ("rope_parameters", "rope_scaling") if self.layer.get(key)}
        for key, rope in given.items():
            if not isinstance(rope, Mapping):
                raise ValueError(f"{self.name} has {key} {rope!r}; expected an object, or null.")
        ropes = [self._rope_of_layers(rope) for rope in given.values()]
        if len(ropes) == 2 and _scaling_of(ropes[0]) != _scaling_of(ropes[1]):
            raise ValueError(
                f"{self.name} contradicts itself: rope_parameters is {given['rope_parameters']} and rope_scaling is "
                f"{given['rope_scaling']}. Pass `rope_parameters=` with what it was trained with."
            )
        return ropes[0] if ropes else {}

    def _rope_of_layers(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        """The RoPE of the draft layers, of one that config.json may give by the type of the target's layers."""
        entries = rope_by_layer_type(nested)
        if not entries:
            return nested
        kind = "sliding_attention" if "sliding_attention" in entries else next(iter(entries))
        if self.dialect == SPECULATORS and kind == "sliding_attention":
            rule = "rope_parameters has RoPE by type of layer; speculators' draft layers all have the sliding one's"
        elif all(entry == entries[kind] for entry in entries.values()):
            rule = "rope_parameters has the same RoPE for each type of layer"
        else:
            raise ValueError(
                f"{self.name} has rope_parameters by type of layer ({', '.join(sorted(entries))}), but its draft "
                "layers share one RoPE. Pass `rope_parameters=` with the one that they were trained with."
            )
        return self._settle("rope_parameters", dict(entries[kind]), rule)

    def _scaling(self, rope: dict[str, Any]) -> dict[str, Any]:
        """RoPE as it was trained, of the RoPE that config.json describes."""
        return rope

    def _fc_norm(self) -> bool:
        return self._agreed("fc_norm", self._flag("fc_norm"), "fc_norm.0.weight")

    def _norm_before_residual(self) -> bool:
        stated = self._flag("norm_before_residual")
        if stated is not None:
            return self._settle("norm_before_residual", stated, "config.json")
        return self._default_norm_before_residual()

    def _default_norm_before_residual(self) -> bool:
        if self.dialect == SPECULATORS:
            rule = "not in config.json; vLLM reads a speculators EAGLE-3 config without it as True"
            return self._settle("norm_before_residual", True, rule, doubtful=True)
        return self._settle("norm_before_residual", False, f"not in config.json; the default of {self.dialect}")

    def _norm_output(self) -> bool:
        """Whether the feedback is taken after the final norm (EAGLE 3.1).

        In SpecForge before its pull request 879, True meant that a final norm exists, which says nothing of this.
        """
        stated = self._flag("norm_output")
        if stated is None:
            return self._settle("norm_output", False, "not in config.json; EAGLE-3 feeds back the stream before norm")
        if self.dialect != SPECFORGE or not stated:
            return self._settle("norm_output", stated, "config.json")
        is_31 = "fc_norm.0.weight" in self.tensors
        rule = "SpecForge's norm_output has two meanings; with fc_norm it is EAGLE 3.1's, without it a final norm"
        return self._settle("norm_output", is_31, rule, doubtful=True)

    def _final_norm(self) -> bool:
        present, stated = "norm.weight" in self.tensors, self._flag("use_last_layernorm")
        if self.dialect == SPECFORGE and self._flag("norm_output") is False:
            rule = "SpecForge's norm_output False meant no final norm before its pull request 879; norm.weight is "
            return self._settle("final_norm", present, rule + ("there" if present else "absent"), doubtful=present)
        if self.dialect == MODELOPT and stated is None and not present:
            return self._settle("final_norm", False, "config.json does not say, and norm.weight is absent")
        if self.dialect == MODELOPT and stated is not None:
            return self._settle("final_norm", self._agreed("use_last_layernorm", stated, "norm.weight"), "config.json")
        return self._settle("final_norm", True, "EAGLE-3 has a norm before its head")

    def _owns(self, keyword: str, tensor: str) -> bool:
        """Whether the checkpoint's own embedding or head is used instead of the target's."""
        present = tensor in self.tensors
        rule = f"{tensor} is in the checkpoint" if present else f"{tensor} is not in the checkpoint"
        shared = self._settle(keyword, not present, rule)
        if not shared and not present:
            raise ValueError(f"{keyword} is False, but {self.name} has no tensor {tensor} to use instead.")
        return present

    def _num_assistant_tokens(self) -> int:
        return self._stated_depth() or Eagle3Config.num_assistant_tokens

    def _stated_depth(self) -> int | None:
        methods = (self.top.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return methods[0].get("speculative_tokens")


def _scaling_of(rope: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The type of RoPE parameters in transformers' form of any version, and what they hold beside it and the base."""
    rest = {key: value for key, value in rope.items() if key not in ("type", "rope_type", "rope_theta")}
    return rope.get("rope_type", rope.get("type", "default")), rest


def rope_by_layer_type(rope: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The entries of RoPE parameters that are given by type of layer; empty if they are not."""
    return {kind: entry for kind, entry in rope.items() if kind.endswith("_attention") and isinstance(entry, Mapping)}


def _layer_class(layer: Mapping[str, Any], name: str) -> type[PreTrainedConfig]:
    """transformers' configuration of the draft layers that `layer` describes, for its defaults."""
    model_type = layer.get("model_type", "llama")
    if model_type not in _LAYER_CONFIGS:
        raise ValueError(
            f"{name} has draft layers of model_type {model_type!r}; expected one of {sorted(_LAYER_CONFIGS)}."
        )
    return _LAYER_CONFIGS[model_type]


class _PEagleReader(_Eagle3Reader):
    """A reading of a P-EAGLE checkpoint: EAGLE-3's questions, and what stands where there is no token yet."""

    config_class = PEagleConfig

    def _drafting(self) -> dict[str, Any]:
        self.parallel = self._settle("parallel_drafting", True, "the checkpoint is a P-EAGLE drafter")
        return {"parallel_drafting": self.parallel, "mask_token_id": self._mask_token()}

    def _mask_token(self) -> int | None:
        for key in _MASK_TOKEN_KEYS:
            value = look_up(self.top, key)
            if value is not None:
                return self._checked_token(self._settle("mask_token_id", value, f"{key} of config.json"))
        if "mask_token_id" in self.overrides:
            return self._checked_token(self._settle("mask_token_id", None, ""))
        if not self.parallel:
            return self._settle("mask_token_id", None, "not in config.json, and not needed token by token")
        raise ValueError(
            f"{self.name} is a P-EAGLE drafter, but its config.json names no mask token; looked for "
            f"{', '.join(_MASK_TOKEN_KEYS)}. Pass `mask_token_id=` with the id that it was trained with, or "
            "`parallel_drafting=False`."
        )

    def _checked_token(self, token: Any) -> int:
        return check_mask_token(token, self._embedded_tokens(), self.name)

    def _embedded_tokens(self) -> int:
        return self.layer.get("vocab_size") or _layer_class(self.layer, self.name)().vocab_size

    def _sizes(self, layers: dict[str, Any], aux_hidden_state_layer_ids: list[int] | None) -> dict[str, Any]:
        sizes = super()._sizes(layers, aux_hidden_state_layer_ids)
        mask = self.tensors.get("mask_hidden")
        if mask is None:
            return sizes
        width = (
            sizes["num_aux_hidden_states"] * sizes["target_hidden_size"]
            if sizes["num_aux_hidden_states"]
            else layers["hidden_size"]
        )
        return sizes | {"mask_hidden_shape": [1] * (len(mask.shape) - 1) + [width]}

    def _scaling(self, rope: dict[str, Any]) -> dict[str, Any]:
        if self.dialect != SPECFORGE or rope["rope_type"] == "default":
            return rope
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        rule = f"SpecForge's P-EAGLE trainer leaves out the {rope['rope_type']} scaling that config.json has"
        return self._settle("rope_parameters", plain, rule, doubtful=True)

    def _fc_norm(self) -> bool:
        used = super()._fc_norm()
        if used and self.dialect == SPECULATORS:
            rule = "fc_norm.0.weight is in the checkpoint, and its trainer applies it; vLLM leaves it out for peagle"
            return self._settle("fc_norm", used, rule)
        return used

    def _default_norm_before_residual(self) -> bool:
        return self._settle("norm_before_residual", False, "not in config.json; the default of P-EAGLE's publishers")

    def _norm_output(self) -> bool:
        stated = bool(self._flag("norm_output")) and self.dialect != SPECFORGE
        rule = "config.json" if stated else "the stream before norm, as in EAGLE-3"
        return self._settle("norm_output", stated, f"{rule}; read only when drafting token by token")

    def _final_norm(self) -> bool:
        return self._settle("final_norm", True, "P-EAGLE has a norm before its head")

    def _num_assistant_tokens(self) -> int:
        default = PEAGLE_DEPTH if self.parallel else Eagle3Config.num_assistant_tokens
        return self._stated_depth() or self._setting("num_depths") or default


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted `path` of `config`; None if there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_mask_token(token: Any, num_embeddings: int, name: str) -> int:
    """`token` as an integer, if it is a token that the drafter called `name` can embed.

    Raises:
        ValueError: it is not.
    """
    number = int(token) if str(token).lstrip("-").isdigit() else None
    if number is None or not 0 <= number < num_embeddings:
        raise ValueError(
            f"{name} has the mask token {token!r}; expected one of the {num_embeddings} tokens that it embeds. Pass "
            "`mask_token_id=` with the id that it was trained with."
        )
    return number
