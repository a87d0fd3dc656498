"""`drafter.score(...)`: log-probabilities of given texts, from the static engine's own passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_type_hints

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..config import check_positive, check_types
from ..drafters.base import Drafter
from ..drafters.none import NoDrafter
from ..drafters.target_checks import generating_model
from ..engine.hosted_target import HostedTarget
from ..engine.session_prefill import FEWEST_PADDED_COLUMNS
from ..graphs.cuda_graphs import on_device
from ..host.generation import default_settings
from ..modules.locks import lock_of
from ..modules.patch import engine, on_host
from ..ops import token_logprobs
from ..patching.support import cache_layers
from ..state import Shape
from .continuous import call_of
from .dispatch import on_static_engine
from .validation import check_prompts, check_tokens

# Tokens of a pass; their logits are in memory at the same time.
TOKENS_OF_PASS = 2048


@torch.no_grad()
def score(
    drafter: Drafter,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities that `model` gives to the tokens of texts, computed by the passes that generate.

    With `batch_invariant=True` they are the same bits as in calls with this drafter (`return_logprobs="raw"`, at a
    temperature of 1), whatever the batch and the pass of a token.

    Args:
        model: the target. It runs without gradients, on the static engine.
        input_ids: `[B, n]` int64, padded before or after the texts.
        attention_mask: `[B, n]`, 0 for padding; None for texts without padding.
        temperature: the number that logits are divided by.

    Returns:
        `[B, n]` float32 on the model's device: the log-probability of each token given the tokens before it; 0 for the
        first token of a text and for padding.

    Raises:
        ValueError: the static engine cannot run the model, or an argument is wrong.
    """
    model = generating_model(model)
    check_types({"input_ids": input_ids, "attention_mask": attention_mask}, get_type_hints(score))
    ids, mask = input_ids.cpu(), None if attention_mask is None else attention_mask.cpu()
    texts = _texts(ids, mask)
    check_positive(temperature=temperature)
    out = torch.zeros(input_ids.shape, dtype=torch.float32, device=model.device)
    longest = max(len(columns) for _, columns in texts)
    if longest < 2:
        return out
    scorer = NoDrafter(model, drafter.batch_invariant, drafter.kv_cache_dtype)
    with lock_of(model), on_device(model.device), engine():
        with on_host():
            check_tokens(model, ids, mask)
            prompt = next(one for one, columns in texts if len(columns) == longest)
            config = GenerationConfig(**default_settings(GenerationConfig) | {"max_new_tokens": 1})
            call, model_kwargs = call_of(model, scorer, config, [prompt])
        on_static_engine(call, model_kwargs, [tokens for tokens, _ in texts])
        with HostedTarget(model, scorer) as target:
            # Longest first: texts of a pass have similar lengths.
            order = sorted(range(len(texts)), key=lambda row: -len(texts[row][1]))
            rows_of_pass = max(1, TOKENS_OF_PASS // longest)
            for first in range(0, len(order), rows_of_pass):
                rows = [row for row in order[first : first + rows_of_pass] if len(texts[row][1]) > 1]
                if rows:
                    tokens = [texts[row][0].to(model.device) for row in rows]
                    for row, found in zip(rows, _logprobs(target, scorer, tokens, temperature), strict=True):
                        out[row, texts[row][1][1:].to(out.device)] = found
    return out


Drafter.score = score


def _texts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and columns of the text in each row, `[length]` int64 each; all on the host."""
    check_prompts(input_ids, attention_mask, None, {})
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    found = []
    for row, (tokens, is_text) in enumerate(zip(input_ids.long(), mask.bool(), strict=True)):
        columns = is_text.nonzero()[:, 0]
        if len(columns) and int(columns[-1] - columns[0]) + 1 != len(columns):
            raise ValueError(f"attention_mask has a gap in row {row}; expected padding before or after the text only.")
        found.append((tokens[columns], columns))
    return found


def _logprobs(
    target: HostedTarget, scorer: Drafter, texts: Sequence[torch.Tensor], temperature: float
) -> Iterator[torch.Tensor]:
    """Log-probabilities `[length - 1]` of all tokens but the first, for each of `texts` `[length]`."""
    width = max(max(map(len, texts)), FEWEST_PADDED_COLUMNS)
    shape = Shape(len(texts), width + 1, 0, is_sampling=False, draft_probs=False, num_ends=0)
    state = scorer.new_state(shape, cache_layers(target.model), texts[0].device)
    adapters = [target.adapters.active] * len(texts)
    state.admit(range(len(texts)), texts, [1] * len(texts), [0] * len(texts), adapters=adapters)
    state.cache.restart()
    state.live = width
    starts = state.lengths[:, None] - width
    size, found = max(TOKENS_OF_PASS // len(texts), FEWEST_PADDED_COLUMNS), []
    for first in range(0, width, size):
        positions = starts + torch.arange(first, min(first + size, width), device=starts.device)
        slots = torch.where(positions >= 0, positions, state.dummy_slot)
        logits, _ = target()(state, state.tokens.gather(1, slots), slots)
        following = state.tokens.gather(1, (slots + 1).clamp(max=state.dummy_slot))
        scores = logits if temperature == 1.0 else logits.float() / temperature
        found.append(token_logprobs(scores, following))
    columns = torch.cat(found, dim=1)
    return (row[width - len(text) : -1] for row, text in zip(columns, texts, strict=True))
