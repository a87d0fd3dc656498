"""Which auxiliary hidden states of the target an EAGLE-3 checkpoint reads.

Layer id b is the residual stream that enters layer b of the target, `hidden_states[b]` in transformers; id n, of n
layers, leaves the last. What an id in `config.json` counts differs between publishers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..config import default_aux_layer_ids
from .decisions import Decisions

# Keys of config.json that list the ids: at top level, so that count outputs of layers, and inside `eagle_config`.
_TOP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_TOP_OUTPUT_KEYS = ("target_layer_ids",)
_NESTED_KEYS = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "aux_hidden_state_layer_ids")

# Model types of targets whose drafters' ids inside `eagle_config` count inputs of layers, whatever the first id is (the
# published drafters of gpt-oss; sgl-project/sglang pull request 32334).
_COUNTED_BY_INPUTS = frozenset({"gpt_oss"})

_NAME = "aux_hidden_state_layer_ids"


def read_layer_ids(
    top: Mapping[str, Any],
    nested: Mapping[str, Any],
    target: PreTrainedConfig | None,
    name: str,
    decisions: Decisions,
) -> list[int] | None:
    """Layer ids in ascending order; None if they are the default ones and there is no target.

    Args:
        top: content of config.json.
        nested: its `eagle_config`; empty if it has none.
        target: the target's text configuration, if there is a target.
        name: of the checkpoint.
        decisions: where the ids are decided.

    Raises:
        ValueError: expected lists of layer ids, and the same one under each key.
    """
    if _NAME in decisions.overrides:
        return decisions.decide(_NAME, None, "")
    key, stated = _stated_ids(top, _TOP_KEYS, name)
    if stated is not None:
        rule = f"{key} at top level counts inputs of layers (vLLM, speculators)"
        return decisions.decide(_NAME, sorted(set(stated)), rule)
    key, stated = _stated_ids(top, _TOP_OUTPUT_KEYS, name)
    if stated is not None:
        rule = f"{key} at top level counts outputs of layers (DeepSpec)"
        return decisions.decide(_NAME, [one + 1 for one in sorted(set(stated))], rule)
    key, stated = _stated_ids(nested, _NESTED_KEYS, name)
    if stated is not None:
        return _decide_nested(key, stated, target, decisions)
    if target is None:
        rule = "not in config.json; 2, n // 2, n - 3 of a target with n layers, every publisher's default"
        return decisions.decide(_NAME, None, rule)
    num_layers = target.num_hidden_layers
    rule = f"not in config.json; 2, n // 2, n - 3 with n = {num_layers} layers, every publisher's default"
    return decisions.decide(_NAME, default_aux_layer_ids(num_layers), rule)


def _stated_ids(source: Mapping[str, Any], keys: Sequence[str], name: str) -> tuple[str, list[int]] | tuple[None, None]:
    """The key of `source` that lists layer ids, and the ids; None and None if there is none."""
    found = {key: source[key] for key in keys if source.get(key) not in (None, [])}
    for key, ids in found.items():
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise ValueError(f"{name} has {key} {ids!r}; expected a list of layer numbers.")
    if len({tuple(ids) for ids in found.values()}) > 1:
        stated = ", ".join(f"{key} {ids}" for key, ids in found.items())
        raise ValueError(
            f"{name} contradicts itself about the layers whose hidden states it reads: {stated}. Pass "
            "`aux_hidden_state_layer_ids=`."
        )
    return next(iter(found.items()), (None, None))


def _decide_nested(key: str, stated: list[int], target: PreTrainedConfig | None, decisions: Decisions) -> list[int]:
    """Decide on ids inside `eagle_config`: trainers that hook layers count outputs, others inputs of layers.

    SGLang's rule: ids that begin with 1 count outputs, since the default of trainers that count outputs begins with
    output 1, the input of layer 2. Excepted are targets whose published drafters begin with 1 and count inputs.
    """
    ids, where = sorted(set(stated)), f"{key} in eagle_config"
    if target is not None and target.model_type in _COUNTED_BY_INPUTS:
        rule = f"{where} counts inputs of layers in drafters for {target.model_type} (SGLang)"
        return decisions.decide(_NAME, ids, rule, doubtful=True)
    if ids[0] == 1:
        rule = f"{where} begins with 1, so it counts outputs of layers: output i is the input of layer i + 1 (SGLang)"
        return decisions.decide(_NAME, [i + 1 for i in ids], rule, doubtful=True)
    rule = f"{where} begins with {ids[0]}, not with 1, so it counts inputs of layers (SGLang, vLLM)"
    return decisions.decide(_NAME, ids, rule, doubtful=True)
