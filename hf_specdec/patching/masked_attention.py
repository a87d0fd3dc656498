"""Whether attention of a modeling file, outside of transformers' attention interface, can run on a `RaggedCache`.

Such attention gets a mask over slots (`attention.slot_mask`), but may also have a rule of its own that depends on the
numbers of queries and keys: in GPT-Neo queries are the last of the keys. A pass with many more slots than tokens, and
tokens in another order, shows that.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from ..cache.layer_kinds import patches_of
from ..cache.ragged_cache import RaggedCache
from ..errors import failure_of
from ..modules.evaluation import Evaluation
from .attention import ragged_attention
from .mask_rules import ordinary_tokens
from .support import cache_layers, cache_name, difference_of_logits, parts, stated_positions

# Slots of the pass: as many as the model states positions, which exceeds any window, but at most the second number,
# since the keys and values of a layer take memory; the first number if it states none.
FEWEST_SLOTS, MOST_SLOTS = 512, 4096
# Most tokens of a row, enough to show differences that grow with the distance of tokens, e.g. of wrong ALiBi.
NUM_TOKENS = 64


@torch.no_grad()
def why_not_masked(model: PreTrainedModel, limit: float) -> str | None:
    """The reason why the attention of the unpatched `model` does not follow a mask over slots; None if it does. Logits
    of a few tokens may differ by `limit`, relative to their spread."""
    try:
        with Evaluation(model):
            return _compare(model, limit)
    except Exception as error:
        return f"its own attention does not take a mask over slots ({failure_of(error)})"


def _compare(model: PreTrainedModel, limit: float) -> str | None:
    device = model.device
    span = min(stated_positions(model) or FEWEST_SLOTS, MOST_SLOTS)
    # One row at the end of the slots, one at their beginning; windows of tokens count from slot 0.
    kinds = cache_layers(model)
    count = min(NUM_TOKENS + kinds.longest_window, span - 1)
    starts = torch.tensor([0, 0] if kinds.longest_window else [span - count, 1], device=device)
    steps = torch.arange(count, device=device).expand(len(starts), -1)
    tokens = torch.tensor(ordinary_tokens(model, steps.numel()), device=device).view_as(steps)
    mask = torch.ones_like(tokens)
    expected = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.double()

    # The order of tokens in a pass matters to windows and recurrences, not where slots determine what a token sees.
    order = slice(None) if not kinds.is_by_slot else torch.arange(count - 1, -1, -1, device=device)
    tokens, steps = tokens[:, order], steps[:, order]
    slots = starts[:, None] + steps
    cache = RaggedCache(kinds, span + 1, starts + count, starts)
    cache.keeps_keys = False  # so that only one layer's take memory at a time
    cache.restart()
    cache.advance(slots, span)
    with ExitStack() as stack:
        stack.enter_context(ragged_attention(model))
        for patch in patches_of(parts(model), model):
            stack.enter_context(patch)
        found = model(
            input_ids=tokens,
            attention_mask=cache.attention_mask(slots),
            position_ids=steps,
            **{cache_name(model): cache},
            use_cache=True,
        ).logits.double()
    difference = difference_of_logits(found, expected[:, order])
    if difference <= limit:
        return None
    return f"its own attention does not do what a mask over {span} slots says (its logits differ by {difference:.2g})"
