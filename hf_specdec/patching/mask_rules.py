"""Rules about which keys a query sees in each attention layer, found from the masks that transformers makes for it.

A layer may state its sliding window when it calls attention; other windows, and chunks, are in its mask only. So a pass
over a few tokens, with an attention that does nothing, finds which mask each layer gets, and how it was made.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..errors import failure_of
from ..host.modeling import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from ..modules.signature import fact
from .support import cache_windows, registered_attention

# Lengths of prompts, unequal so that wrong handling of padding shows.
PROMPT_LENGTHS = (7, 4)
PROBE_NAME = "hf_specdec_probe"
# A position beyond every sliding window, and distances from it at which visibility is tested.
_FAR = 1 << 30
_DISTANCES = tuple(distance for power in range(20) for distance in (1 << power, (1 << power) + 1))


class MaskRule(NamedTuple):
    """Which keys s a query at position t sees: s <= t; with a sliding window t - s < window; with chunks of positions
    s // chunk == t // chunk."""

    window: int | None = None
    chunk: int | None = None

    def sees(self, query: int, key: int) -> bool:
        is_near = self.window is None or key > query - self.window
        return key <= query and is_near and (self.chunk is None or key // self.chunk == query // self.chunk)

    def edges(self, query: int) -> tuple[int, ...]:
        """The first position that a query sees, and the one before it; empty without a window or chunk."""
        if self.window is None and self.chunk is None:
            return ()
        first = query - self.window + 1 if self.chunk is None else query // self.chunk * self.chunk
        return first, first - 1


def ordinary_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """`count` tokens of the vocabulary of `model`, none of them special, since embeddings of those may be zero."""
    size = model.config.get_text_config().vocab_size
    special = {
        value
        for config in (model.config, model.config.get_text_config(), model.generation_config)
        for name, value in vars(config).items()
        if "token" in name and isinstance(value, int)
    }
    if special.issuperset(range(size)):  # in a vocabulary of a few tokens
        special = set()
    # Neighbours in a vocabulary are often alike, so tokens are spread over it.
    spread = (number * 7919 % size for number in range(1, 10 * (size + count)))
    return list(itertools.islice((token for token in spread if token not in special), count))


def ordinary_prompts(model: PreTrainedModel, lengths: Sequence[int] = PROMPT_LENGTHS) -> dict[str, torch.Tensor]:
    """Left-padded prompts of ordinary tokens, with their `attention_mask`: both `[rows, longest]` int64."""
    texts = torch.tensor(ordinary_tokens(model, sum(lengths)), device=model.device).split(list(lengths))
    masks = [torch.ones_like(one) for one in texts]
    rows = {"input_ids": texts, "attention_mask": masks}
    return {name: pad_sequence(some, batch_first=True, padding_side="left") for name, some in rows.items()}


class _Mask(NamedTuple):
    """A mask, its mask function of (row, head, query, key), and the window that transformers made it for."""

    tensor: torch.Tensor
    function: Callable[..., Any]
    window: int | None


class _Attention(NamedTuple):
    """A call of attention: the layer, its stated sliding window, and its mask: transformers', or whether another."""

    module: nn.Module
    window: int | None
    mask: _Mask | None
    has_own_mask: bool


# Calls of attention and masks during this thread's probing pass.
_probe = threading.local()


def _probing_attention(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
    made = next((mask for mask in _probe.masks if mask.tensor is attention_mask), None)
    _probe.calls.append(_Attention(module, sliding_window, made, attention_mask is not None and made is None))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _probing_mask(*args, mask_function=None, local_size=None, **kwargs):
    mask = eager_mask(*args, mask_function=mask_function, **kwargs)
    _probe.masks.append(_Mask(mask, mask_function, local_size))
    return mask


ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probing_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probing_mask)


def _rule_of(mask: _Mask, is_causal: bool) -> MaskRule | None:
    """The rule of `mask`, if `is_causal` also among the tokens of the prompt; None if unknown."""
    size = mask.window
    known = [MaskRule()] if size is None else [MaskRule(window=size), MaskRule(chunk=size), MaskRule()]
    return next((rule for rule in known if _follows(mask, rule, is_causal)), None)


def _follows(mask: _Mask, rule: MaskRule, is_causal: bool) -> bool:

    def is_as_expected(query: int, key: int) -> bool:
        return bool(mask.function(0, 0, torch.tensor(query), torch.tensor(key))) == rule.sees(query, key)

    near = range(min(PROMPT_LENGTHS))
    if is_causal and not all(is_as_expected(query, key) for query in near for key in near):
        return False
    try:
        far = (_FAR + 1, _FAR, 0, *(_FAR - distance for distance in _DISTANCES))
        return all(is_as_expected(_FAR, key) for key in (*far, *rule.edges(_FAR)))
    except IndexError:  # a mask function that looks up tokens, e.g. image tokens, knows only those of the call
        return rule == MaskRule(window=mask.window)


class _Rules(NamedTuple):
    """What is known of the attention layers of a model.

    Attributes:
        by_name: rules that differ from the windows that layers state, by the layers' names.
        kept: the smallest number of keys, the query's own included, that transformers' cache keeps of a layer whose
            queries would see more; None if there is no such layer.
    """

    by_name: dict[str, MaskRule]
    kept: int | None


@fact
def _rules(model: PreTrainedModel) -> tuple[_Rules | str, _Rules | str]:
    """Rules of attention layers, or why they are unknown: for causal masks, and for masks causal after the prompt."""
    _probe.calls, _probe.masks = [], []
    try:
        with torch.no_grad(), registered_attention(model, PROBE_NAME):
            model(**ordinary_prompts(model), use_cache=False)
        calls = _probe.calls
    except Exception as error:
        return (f"its masks cannot be told ({failure_of(error)})",) * 2
    finally:
        vars(_probe).clear()
    return _rules_of(model, calls, is_causal=True), _rules_of(model, calls, is_causal=False)


def _rules_of(model: PreTrainedModel, calls: Sequence[_Attention], is_causal: bool) -> _Rules | str:
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, tuple[MaskRule, MaskRule]] = {}
    rule_of = functools.cache(functools.partial(_rule_of, is_causal=is_causal))
    for number, call in enumerate(calls):
        stated = MaskRule(window=call.window)
        rule = stated if call.mask is None else rule_of(call.mask)
        is_new = found.setdefault(call.module, (rule, stated)) == (rule, stated)
        if rule is None or not is_new or (rule != stated and call.module not in names):
            handed = "no window" if call.window is None else f"a window of {call.window}"
            return f"the mask of attention {number} is of no kind that is known (it is called with {handed})"
    unknown = {call.module for call in calls if call.has_own_mask}
    windows, kept = cache_windows(model), []
    for module, (rule, _) in found.items():
        layer_idx = getattr(module, "layer_idx", None)
        if module not in unknown and layer_idx is not None and layer_idx < len(windows):  # it stores keys
            window, seen = windows[layer_idx], rule.window or rule.chunk
            if window is not None and (seen is None or seen > window):
                kept.append(window)
    by_name = {names[module]: rule for module, (rule, stated) in found.items() if rule != stated}
    return _Rules(by_name, min(kept, default=None))


def why_not_rules(model: PreTrainedModel, is_causal: bool = True) -> str | None:
    """The reason why it is unknown which keys the queries of `model` see; None if it is known. With `is_causal` tokens
    of a prompt must not see later ones, either, which does not matter if the target itself runs prompts."""
    rules = _rules(model)[0 if is_causal else 1]
    return rules if isinstance(rules, str) else None


def rules_by_module(model: PreTrainedModel) -> list[tuple[nn.Module, MaskRule]]:
    """The attention layers of `model` whose rule differs from the window that they state; empty if that is unknown."""
    rules = "there are no weights" if model.device.type == "meta" else _rules(model)[1]
    if isinstance(rules, str):
        return []
    return [(model.get_submodule(name), rule) for name, rule in rules.by_name.items()]


def why_not_kept(model: PreTrainedModel, columns: int | None) -> str | None:
    """The reason why texts of `model` of up to `columns` (None: any number) depend on how many tokens run at once.

    In some classes the cache obeys a window of the configuration and attention does not. A prompt then sees all of
    itself, and later passes see what the cache has kept, which is more for the last tokens of a block.
    """
    if not any(cache_windows(model)):
        return None
    rules = _rules(model)[1]
    kept = None if isinstance(rules, str) else rules.kept
    if kept is None or (columns is not None and columns <= kept):
        return None
    what = "a text of any length" if columns is None else f"a text of up to {columns + 1} tokens"
    return (
        f"its cache keeps {kept} keys of layers whose attention would read more, so that {what} depends on how many "
        "tokens are run at once (sliding_window in its configuration)"
    )
