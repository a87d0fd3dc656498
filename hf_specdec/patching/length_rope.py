"""RoPE whose frequencies depend on the length of the text: LongRoPE (arXiv 2402.13753) and dynamic NTK scaling.

transformers chooses the frequencies of a forward pass by its largest position (`dynamic_rope_update`), on the host or
for all rows at once. What `generate()` does without a drafter is a function of the token alone: a token of the prompt
is rotated as the longest prompt of the batch demands, a later one, of a pass by itself, as the length then reached by
the longest row demands, and keys stay as they were rotated. So which tokens are rotated by the long factors can be
told for each token, whatever else is in its pass.

Inside `length_rope` the position ids of such tokens are passed as their bitwise complements, which are negative.
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

from ..host.caches import OUTPUT_NAME, given_cache
from ..host.modeling import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from .hidden_states import modules_of
from .patch import Replacements, engine, runs_engine

LONGROPE, DYNAMIC = "longrope", "dynamic"
LENGTH_DEPENDENT = frozenset({LONGROPE, DYNAMIC})

NUM_PROBE_TOKENS = 3


@functools.cache
def _undecorated(kind: type[nn.Module]) -> Callable | None:
    """The `forward` of a class of rotary embeddings without `dynamic_rope_update`.

    None if it has no such decorator, or does not read the frequencies that the decorator sets.
    """
    forward = kind.forward
    while hasattr(forward, "__wrapped__") and forward.__globals__ is not dynamic_rope_update.__globals__:
        forward = forward.__wrapped__
    if not hasattr(forward, "__wrapped__"):
        return None
    forward = inspect.unwrap(forward)
    code = forward.__code__
    reads = (*code.co_names, *(one for one in code.co_consts if isinstance(one, str)))
    return forward if any(name.endswith("inv_freq") for name in reads) else None


def _types_of(module: nn.Module) -> dict[str | None, str]:
    """The kinds of RoPE that depend on length of a module, by layer type; None where all layers have the same."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layer_type: kind for layer_type, kind in kinds.items() if kind in LENGTH_DEPENDENT}


class RopeLimits(NamedTuple):
    """Up to which lengths the frequencies of a model are those of short texts; None where they never change.

    Attributes:
        long: beyond it they are those of long texts (LongRoPE).
        fixed: beyond it they change with every token (dynamic NTK scaling).
        recomputes: see `recomputes_keys`.
    """

    long: int | None = None
    fixed: int | None = None
    recomputes: bool = False

    def last_draft(self, length: int) -> int | None:
        """The longest text that a pass over drafts may reach after `length` tokens, for all to have the frequencies
        that each would have in a pass of its own; None for any.
        """
        if self.fixed is not None:
            return max(self.fixed, length)
        return self.long if self.long is not None and length <= self.long else None


def _limit_of(module: nn.Module) -> tuple[str, int] | None:
    """Kind of RoPE of a rotary embedding, and the length up to which it does not change; None if it never does.

    Raises:
        ValueError: expected the same for all types of layers.
    """
    found = set()
    for layer_type, kind in _types_of(module).items():
        limit = module.original_max_seq_len
        if kind == LONGROPE:
            parameters = module.config.rope_parameters
            limit = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
        found.add((kind, int(limit)))
    return _only(found)


def _only(limits: set[tuple[str, int]]) -> tuple[str, int] | None:
    if len(limits) > 1:
        several = ", ".join(f"{kind}: {at}" for kind, at in sorted(limits))
        raise ValueError(f"RoPE changes at several lengths ({several})")
    return next(iter(limits), None)


def rope_limits(model: PreTrainedModel) -> RopeLimits:
    """The limits of the text model of `model`.

    Raises:
        ValueError: there are several; or RoPE depends on length as its configuration says, but does not read the
            frequencies that transformers sets.
    """
    modules = [module for module in modules_of(model) if _undecorated(type(module)) is not None]
    limits = {limit for limit in map(_limit_of, modules) if limit is not None}
    only = _only(limits)
    if only is None:
        if not modules and (kinds := _configured_types(model)):
            raise ValueError(f"RoPE ({', '.join(sorted(kinds))}) changes with the length of the text")
        return RopeLimits()
    kind, limit = only
    if kind == DYNAMIC:
        return RopeLimits(fixed=limit)
    return RopeLimits(long=limit, recomputes=recomputes_keys(model, limit))


def _configured_types(model: PreTrainedModel) -> set[str]:
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {parameters.get("rope_type") for parameters in by_layer_type or [rope]} & LENGTH_DEPENDENT


class _Frequencies:
    """A rotary embedding with other frequencies: what its `forward` reads of it, and its `forward` itself.

    Args:
        module: the rotary embedding.
        frequencies: buffers that differ, by their names.
    """

    def __init__(self, module: nn.Module, frequencies: dict[str, torch.Tensor]):
        self.forward = _undecorated(type(module))
        names = {*self.forward.__code__.co_names, *module._buffers, *vars(module)} - {"forward"}
        names = (name for name in names if not name.startswith("_") and hasattr(module, name))
        vars(self).update({name: getattr(module, name) for name in names} | frequencies)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(self, *args, **kwargs)


# Frequencies of rotary embeddings by device: captured graphs read them at the same addresses in later calls.
_frequencies: weakref.WeakKeyDictionary[nn.Module, tuple[torch.device, _Frequencies, _Frequencies | None]]
_frequencies = weakref.WeakKeyDictionary()


@torch.no_grad()
def _frequencies_of(module: nn.Module) -> tuple[torch.device, _Frequencies, _Frequencies | None]:
    """The device of a module; its frequencies for short texts; those for long ones, None if none are used."""
    kinds = _types_of(module)
    prefixes = {layer_type: "" if layer_type is None else f"{layer_type}_" for layer_type in kinds}
    device = getattr(module, f"{next(iter(prefixes.values()))}inv_freq").device
    known = _frequencies.get(module)
    if known is not None and known[0] == device:
        return known
    short, long = {}, {}
    for layer_type, kind in kinds.items():
        name = f"{prefixes[layer_type]}inv_freq"
        short[name] = getattr(module, f"{prefixes[layer_type]}original_inv_freq").to(device, copy=True)
        if kind == LONGROPE:
            _, limit = _limit_of(module)
            options = {} if layer_type is None else {"layer_type": layer_type}
            long[name], _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=limit + 1, **options)
    found = device, _Frequencies(module, short), _Frequencies(module, short | long) if long else None
    _frequencies[module] = found
    return found


def _rotate(
    module: nn.Module,
    short: _Frequencies,
    long: _Frequencies | None,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`forward` of a rotary embedding: the factors of the rotation of each token.

    Args:
        module: the rotary embedding.
        short, long: its frequencies; without `long` it has those for short texts only.
        x: whose dtype the factors have.
        position_ids: `[..., B, n]` int64, complemented where a token is rotated by the long factors.
        args, kwargs: others of the module.
    """
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
    """`long` `[..., B, n, D]` for the tokens that `is_long` `[..., B, n]` tells, elsewhere `short`."""
    while is_long.dim() >= short.dim():  # sections of M-RoPE, which are merged
        is_long = is_long[0]
    return torch.where(is_long[..., None], long, short)


def length_rope(*models: nn.Module) -> Replacements:
    """Context in which RoPE of `models` that depends on length takes position ids of `mark_long`."""
    chosen = (module for module in modules_of(*models) if _undecorated(type(module)) is not None and _types_of(module))
    return Replacements({"forward": [(module, _make_forward) for module in chosen]})


def _make_forward(module: nn.Module) -> Callable[..., Any]:
    _, short, long = _frequencies_of(module)
    return functools.partial(_rotate, module, short, long)


def mark_long(
    position_ids: torch.Tensor, limit: int, prompt_lengths: torch.Tensor, prompt_length_gap: torch.Tensor
) -> torch.Tensor:
    """`position_ids` for a model inside `length_rope`.

    Args:
        position_ids: `[B, n]` int64.
        limit: the longest text that is rotated by the short factors.
        prompt_lengths: `[B]` int64.
        prompt_length_gap: `[B]` int64, how many more tokens than a row's the longest prompt of the batch has.

    Returns:
        `[B, n]` int64, complemented where the long factors rotate.
    """
    # The length reached by the longest row in the pass in which plain `generate()` runs a token.
    lengths = torch.maximum(position_ids + 1, prompt_lengths[:, None])
    return torch.where(lengths + prompt_length_gap[:, None] > limit, ~position_ids, position_ids)


class _FilledCache(DynamicCache):
    """A cache that claims to hold keys of `length` tokens."""

    def __init__(self, model: PreTrainedModel, length: int):
        super().__init__(config=model.config.get_text_config())
        self._length = length

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self._length


def recomputes_keys(model: PreTrainedModel, limit: int) -> bool:
    """Whether plain `generate()` drops the keys of a text of `limit` tokens, to rotate them anew by the long factors.

    `prepare_inputs_for_generation` of Phi-3 does so with the first pass over more than `limit` columns.
    """
    tokens = torch.zeros(1, limit + 1, dtype=torch.int64, device=model.device)
    cache = _FilledCache(model, limit)
    inputs = model.prepare_inputs_for_generation(
        tokens, **{OUTPUT_NAME: cache}, attention_mask=torch.ones_like(tokens), next_sequence_length=1, use_cache=True
    )
    return given_cache(inputs) is not cache


@torch.no_grad()
def why_not_marked(model: PreTrainedModel, longest_short: int, limit: float) -> str | None:
    """The reason why `model` does not take position ids of `mark_long`; None if it does.

    Runs the model, which must not be patched yet, on a few tokens twice.

    Args:
        model: whose RoPE depends on length.
        longest_short: the longest text that is rotated by the short factors.
        limit: largest difference of logits, relative to their spread.
    """
    tokens = torch.arange(1, 1 + NUM_PROBE_TOKENS, device=model.device)[None]
    positions = tokens - 1 + longest_short
    # Without a mask transformers would take position ids that do not ascend for those of several texts.
    options = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
    expected = model(input_ids=tokens, position_ids=positions, **options).logits.double()
    with engine(), length_rope(model):
        found = model(input_ids=tokens, position_ids=~positions, **options).logits.double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-12)
    difference = float(((found - expected).norm(dim=-1) / spread).max())
    if difference <= limit:
        return None
    return f"its logits for a text of more than {longest_short} tokens differ there by {difference:.2g}"
