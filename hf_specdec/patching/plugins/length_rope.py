"""RoPE whose frequencies depend on the length of the text: LongRoPE (arXiv 2402.13753) and dynamic NTK scaling.

transformers chooses the frequencies of a pass by its largest position (`dynamic_rope_update`). In `generate()` without
a drafter, a token of the prompt is rotated for the longest prompt of the batch, and a later token for the length that
the longest row has reached then. So it is known for each token whether the long factors rotate it, whatever else is in
its pass. Inside `length_rope` the position ids of such tokens are bitwise complements, which are negative.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...cache.layer_kinds import PlugIn, PositionMarker, Use, register
from ...host.caches import OUTPUT_NAME, given_cache
from ...host.modeling import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from ...modules.hidden_states import modules_of
from ...modules.patch import Replacements, engine, runs_engine
from ...modules.signature import fact, keep, places_of, signature_of
from ..support import difference_of_logits

LONGROPE, DYNAMIC = "longrope", "dynamic"
LENGTH_DEPENDENT = frozenset({LONGROPE, DYNAMIC})

NUM_PROBE_TOKENS = 3


@functools.cache
def _undecorated(kind: type[nn.Module]) -> Callable | None:
    """`forward` of a class without `dynamic_rope_update`; None if not decorated, or if it does not read frequencies."""
    forward = inspect.unwrap(kind.forward, stop=lambda one: one.__globals__ is dynamic_rope_update.__globals__)
    if not hasattr(forward, "__wrapped__"):
        return None
    forward = inspect.unwrap(forward)
    code = forward.__code__
    reads = (*code.co_names, *(one for one in code.co_consts if isinstance(one, str)))
    return forward if any(name.endswith("inv_freq") for name in reads) else None


def _types_of(module: nn.Module) -> dict[str | None, str]:
    """The kinds of length-dependent RoPE of a module, by layer type; the key is None if all layers have the same."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layer_type: kind for layer_type, kind in kinds.items() if kind in LENGTH_DEPENDENT}


class RopeLimits(NamedTuple):
    """Lengths up to which a model has the frequencies of short texts; None if they never change.

    Attributes:
        long: beyond it the frequencies are those of long texts (LongRoPE).
        fixed: beyond it they change with every token (dynamic NTK scaling).
        recomputes: see `recomputes_keys`.
    """

    long: int | None = None
    fixed: int | None = None
    recomputes: bool = False


def _limit(module: nn.Module, layer_type: str | None, kind: str) -> int:
    """The length up to which RoPE of a rotary embedding does not change."""
    if kind == DYNAMIC:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])


def _rope_limits(model: PreTrainedModel) -> RopeLimits | str:
    """The limits of the text model of `model`, or the reason why they are unknown."""
    modules = [one for one in signature_of(model).having("rope_type") if _undecorated(type(one)) is not None]
    limits = {(kind, _limit(module, layer, kind)) for module in modules for layer, kind in _types_of(module).items()}
    if len(limits) > 1:
        return f"RoPE changes at several lengths ({', '.join(f'{kind}: {at}' for kind, at in sorted(limits))})"
    if not limits:
        kinds = () if modules else _configured_types(model)
        return f"RoPE ({', '.join(sorted(kinds))}) changes with the length of the text" if kinds else RopeLimits()
    kind, limit = limits.pop()
    if kind == DYNAMIC:
        return RopeLimits(fixed=limit)
    return RopeLimits(long=limit, recomputes=recomputes_keys(model, limit))


def length_limits(model: PreTrainedModel) -> RopeLimits:
    """The lengths at which RoPE of `model` changes; none if unknown."""
    limits = _rope_limits(model)
    return RopeLimits() if isinstance(limits, str) else limits


def _configured_types(model: PreTrainedModel) -> set[str]:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {parameters.get("rope_type") for parameters in by_layer_type or [rope]} & LENGTH_DEPENDENT


class _Frequencies:
    """A rotary embedding with other `frequencies` (buffers by name): its `forward` and the attributes that it reads."""

    def __init__(self, module: nn.Module, frequencies: dict[str, torch.Tensor]):
        self.forward = _undecorated(type(module))
        names = {*self.forward.__code__.co_names, *module._buffers, *vars(module)} - {"forward"}
        names = (name for name in names if not name.startswith("_") and hasattr(module, name))
        vars(self).update({name: getattr(module, name) for name in names} | frequencies)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(self, *args, **kwargs)


# Frequencies of rotary embeddings, by what they are computed from. Captured graphs read them at the same addresses in
# later calls.
_frequencies: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[_Frequencies, _Frequencies | None]]]
_frequencies = weakref.WeakKeyDictionary()


@torch.no_grad()
def _frequencies_of(module: nn.Module) -> tuple[_Frequencies, _Frequencies | None]:
    """The frequencies of a module for short texts, and for long ones, or None if it has none."""
    kinds = _types_of(module)
    prefixes = {layer_type: "" if layer_type is None else f"{layer_type}_" for layer_type in kinds}
    device = getattr(module, f"{next(iter(prefixes.values()))}inv_freq").device
    originals = [getattr(module, f"{prefix}original_inv_freq") for prefix in prefixes.values()]
    known, key = _frequencies.setdefault(module, {}), repr((device, places_of(originals)))
    if key in known:
        return known[key]
    short, long = {}, {}
    for (layer_type, kind), original in zip(kinds.items(), originals, strict=True):
        name = f"{prefixes[layer_type]}inv_freq"
        short[name] = original.to(device, copy=True)
        if kind == LONGROPE:
            limit = _limit(module, layer_type, kind)
            options = {} if layer_type is None else {"layer_type": layer_type}
            long[name], _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=limit + 1, **options)
    return keep(known, key, (_Frequencies(module, short), _Frequencies(module, short | long) if long else None))


def _rotating(module: nn.Module) -> Callable[..., Any]:
    return functools.partial(_rotate, module, *_frequencies_of(module))


def _rotate(module, short, long, x, position_ids, *args, **kwargs):
    """`forward` with the frequencies `short`, or `long`, if any, where `position_ids` `[..., B, n]` are complements."""
    if not runs_engine():
        return type(module).forward(module, x, position_ids, *args, **kwargs)
    is_long = position_ids < 0
    position_ids = torch.where(is_long, ~position_ids, position_ids)
    found = short(x, position_ids, *args, **kwargs)
    if long is None:
        return found
    others = long(x, position_ids, *args, **kwargs)
    if isinstance(found, torch.Tensor):
        return _chosen(is_long, others, found)
    return tuple(_chosen(is_long, other, one) for other, one in zip(others, found, strict=True))


def _chosen(is_long: torch.Tensor, long: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
    """`long` `[..., B, n, D]` for the tokens where `is_long` `[..., B, n]`, elsewhere `short`."""
    while is_long.dim() >= short.dim():  # merged sections of M-RoPE
        is_long = is_long[0]
    return torch.where(is_long[..., None], long, short)


def length_rope(*models: nn.Module) -> Replacements:
    """Context in which length-dependent RoPE of `models` takes position ids from `mark_long`."""
    chosen = (module for module in modules_of(*models) if _undecorated(type(module)) is not None and _types_of(module))
    return Replacements({"forward": [(module, _rotating) for module in chosen]})


def mark_long(
    position_ids: torch.Tensor, prompt_lengths: torch.Tensor, prompt_length_gap: torch.Tensor, limit: int
) -> torch.Tensor:
    """See `PositionMarker`: complements position ids if a text is longer than `limit`, so that long factors rotate."""
    # The length of the longest row in the pass in which plain `generate()` runs a token.
    lengths = torch.maximum(position_ids + 1, prompt_lengths[:, None])
    return torch.where(lengths + prompt_length_gap[:, None] > limit, ~position_ids, position_ids)


@fact
def recomputes_keys(model: PreTrainedModel, limit: int) -> bool:
    """Whether plain `generate()` drops the keys of a text of `limit` tokens, in order to rotate them again with the
    long factors, as Phi-3's `prepare_inputs_for_generation` does at the first pass over more than `limit` columns."""
    tokens = torch.zeros(1, limit + 1, dtype=torch.int64, device=model.device)
    cache = DynamicCache(config=model.config.get_text_config())
    cache.get_seq_length = lambda *args, **kwargs: limit  # it claims to hold keys
    inputs = model.prepare_inputs_for_generation(
        tokens, **{OUTPUT_NAME: cache}, attention_mask=torch.ones_like(tokens), next_sequence_length=1, use_cache=True
    )
    return given_cache(inputs) is not cache


@torch.no_grad()
def why_not_marked(model: PreTrainedModel, longest_short: int, limit: float) -> str | None:
    """The reason why `model` does not take position ids of `mark_long` beyond `longest_short`; see
    `PlugIn.why_not_same`."""
    tokens = torch.arange(1, 1 + NUM_PROBE_TOKENS, device=model.device)[None]
    positions = tokens - 1 + longest_short
    # Without a mask transformers would take position ids that do not ascend for several packed texts.
    options = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
    expected = model(input_ids=tokens, position_ids=positions, **options).logits.double()
    with engine(), length_rope(model):
        found = model(input_ids=tokens, position_ids=~positions, **options).logits.double()
    difference = difference_of_logits(found, expected)
    if difference <= limit:
        return None
    return f"its logits for a text of more than {longest_short} tokens differ there by {difference:.2g}"


@register
class LengthRope(PlugIn):
    """RoPE that depends on length."""

    patches = staticmethod(length_rope)

    @classmethod
    def why_not_hosted(cls, model: PreTrainedModel) -> str | None:
        limits = _rope_limits(model)
        return limits if isinstance(limits, str) else None

    @classmethod
    def why_not_same(cls, model: PreTrainedModel, limit: float) -> str | None:
        long = length_limits(model).long
        return None if long is None else why_not_marked(model, long, limit)

    @classmethod
    def why_not_used(cls, model: PreTrainedModel, use: Use) -> str | None:
        limits = length_limits(model)
        changes = limits.long is not None and use in (Use.PACKING, Use.PREFIX_REUSE)
        changes |= limits.fixed is not None and use is Use.PREFIX_REUSE
        return "RoPE that depends on the length of the whole prompt" if changes else None

    @classmethod
    def why_not_texts(
        cls, model: PreTrainedModel, width: int, longest: int, cached: int, is_chunked: bool
    ) -> str | None:
        # Lengths in columns, which plain `generate()` counts when it recomputes keys; never fewer than tokens.
        limits = length_limits(model)
        if limits.fixed is not None and longest > limits.fixed:
            outgrown = f"outgrows {limits.fixed}, from where on RoPE changes with every token"
            return f"a sequence of up to {longest + 1} tokens {outgrown}"
        if limits.long is None or longest <= limits.long:
            return None
        if limits.recomputes and (width <= limits.long or cached):
            return (
                f"a sequence that begins with {width} tokens and may have {longest + 1} outgrows {limits.long}, where "
                "the keys of all tokens are computed again with other factors of RoPE"
            )
        if is_chunked and width > limits.long:
            return f"RoPE changes inside of the prompt, after {limits.long} tokens, and the prompt is read in chunks"
        return None

    @classmethod
    def why_not_alone(cls, model: PreTrainedModel, longest: int) -> str | None:
        limits = length_limits(model)
        limit = limits.long or limits.fixed
        if limit is None or longest <= limit:
            return None
        return (
            f"a sequence of up to {longest + 1} tokens outgrows {limit}, and plain generate() chooses RoPE of all rows "
            "by the longest one"
        )

    @classmethod
    def longest_with_drafts(cls, model: PreTrainedModel, length: int) -> int | None:
        limits = length_limits(model)
        if limits.fixed is not None:
            return max(limits.fixed, length)
        return limits.long if limits.long is not None and length <= limits.long else None

    @classmethod
    def position_marker(cls, model: PreTrainedModel) -> PositionMarker | None:
        long = length_limits(model).long
        return None if long is None else functools.partial(mark_long, limit=long)
