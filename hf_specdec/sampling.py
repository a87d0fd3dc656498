"""From logits to committed tokens: greedy verification and rejection sampling."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from . import ops

if TYPE_CHECKING:
    from .state import DecodeState


class Stream(IntEnum):
    """Purposes of random numbers; numbers of different streams are independent (see `ops.uniform`)."""

    ACCEPT = 0
    TARGET = 1
    DRAFT = 2


class Verdict(NamedTuple):
    """Outcome of one round.

    Attributes:
        tokens: `[B, K + 1]` int64: the accepted draft tokens, then the recovered or bonus token; the rest is undefined.
        accepted: `[B]` int64, number of accepted draft tokens, 0 to K.
        committed: `[B]` int64, number of leading `tokens` that the row commits: `accepted + 1`, less what lies after
            an end-of-sequence token or the length limit, and 0 for finished rows.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> Verdict:
    """Accept the longest prefix of the drafts that greedy decoding would have produced.

    Args:
        scores: `[B, K + 1, V]` processed logits of the target.
        drafts: `[B, K]` int64.
    """
    tokens = scores.argmax(dim=-1)
    accepted = (drafts == tokens[:, :-1]).cumprod(dim=1).sum(dim=1)
    return Verdict(tokens, accepted, accepted + 1)


def verify_sampling(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> Verdict:
    """Lossless rejection sampling (arXiv 2211.17192, algorithm 1): committed tokens are distributed as the target's.

    Draft d is accepted if `u * q(d) < p(d)`; on rejection the recovered token is drawn from max(p - q, 0), normalised;
    after K acceptances the bonus token is drawn from p. Without `draft_probs` q is the point mass on d. The strict
    inequality never accepts a token of probability 0.

    Args:
        scores: `[B, K + 1, V]` float32 processed logits of the target; p is their softmax.
        drafts: `[B, K]` int64.
        draft_probs: `[B, K, V]` float32 distributions that the drafts were drawn from, or None.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft would take.
    """
    batch, num_drafts = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    steps = torch.arange(num_drafts, device=drafts.device)
    probs = scores.softmax(dim=-1)

    chosen = drafts.unsqueeze(-1)
    p_draft = probs[:, :-1].gather(-1, chosen).squeeze(-1)
    q_draft = torch.ones_like(p_draft) if draft_probs is None else draft_probs.gather(-1, chosen).squeeze(-1)
    numbers = ops.uniform(seeds[:, None], lengths[:, None] + steps, torch.zeros_like(drafts), Stream.ACCEPT)
    accepted = (numbers * q_draft < p_draft).cumprod(dim=1).sum(dim=1)

    p_next = probs[rows, accepted]
    tokens = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=1)
    if draft_probs is None:
        residual = p_next.scatter(1, tokens.gather(1, accepted.unsqueeze(1)), 0.0)
    else:
        residual = (p_next - draft_probs[rows, accepted.clamp(max=num_drafts - 1)]).clamp_(min=0.0)
    is_bonus = (accepted == num_drafts).unsqueeze(1)
    is_empty = residual.sum(dim=1, keepdim=True) <= 0.0
    following = ops.race(torch.where(is_bonus | is_empty, p_next, residual), seeds, lengths + accepted, Stream.TARGET)

    tokens = tokens.scatter(1, accepted.unsqueeze(1), following.unsqueeze(1))
    return Verdict(tokens, accepted, accepted + 1)


def draw_draft(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one draft token a row from softmax(logits / temperature).

    Args:
        logits: `[B, V_d]` of the draft head.
        temperature: above 0.
        seeds: `[B]` int64 row seeds.
        positions: `[B]` int64, the position that the draft would take.

    Returns:
        indices `[B]` int64 into the draft vocabulary, and the distribution `[B, V_d]` float32.
    """
    probs = (logits.float() / temperature).softmax(dim=-1)
    return ops.race(probs, seeds, positions, Stream.DRAFT), probs


# Processors whose result for a token does not depend on the tokens before it, so that all K + 1 positions of a block
# can be processed as independent rows. Exact types: a subclass may do something else.
POINTWISE_PROCESSORS = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)

# Processors that remember earlier calls, so they cannot be asked about drafts that may be rejected.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def check_processors(processors: LogitsProcessorList) -> None:
    """Raise `ValueError` if a processor is known to keep state between calls."""
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state from one token to the next and cannot judge draft tokens; "
                "expected processors that are functions of their arguments. Generate without a drafter, or "
                "without the option that adds it."
            )


def _frozen(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


class BlockProcessor:
    """Applies `generate()`'s logits processors to every position of a round's block.

    A processor sees what plain `generate()` would show it: the whole batch, prompts with their padding, and at each
    position the tokens before it, drafts included. It must be a function of what it is shown. A row asks only about
    texts that plain `generate()` might reach: not past the length limit, nor after a draft that the processors rule
    out or that ends the row. Rows of the batch that do not ask are shown too, at another point of their text, and the
    answer for them is not used; `prefix_allowed_tokens_fn` is not asked about them.

    Args:
        processors: as prepared by `generate()`.
        prompts: `[B, P]` int64, left-padded.
        padding: padding tokens of each row.
    """

    def __init__(self, processors: LogitsProcessorList, prompts: torch.Tensor, padding: list[int]):
        self._processors = LogitsProcessorList(map(self._asking_rows_only, processors))
        self._asking: set[int] = set()
        self._prompts = prompts
        self._padding = torch.tensor(padding, device=prompts.device)
        self._is_pointwise = all(type(processor) in POINTWISE_PROCESSORS for processor in processors)

    @property
    def key(self) -> tuple | None:
        """What the processing depends on, hashable; None if on the text."""
        if not self._is_pointwise:
            return None
        return tuple(
            (type(one), *((name, _frozen(value)) for name, value in vars(one).items())) for one in self._processors
        )

    def __call__(self, logits: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        """Scores `[B, K + 1, V]` float32 of `logits` `[B, K + 1, V]` at the tokens `block` `[B, K + 1]`."""
        scores = logits.float()
        if not self._processors:
            return scores
        if self._is_pointwise:
            tokens = block.reshape(-1, 1)
            return self._processors(tokens, scores.flatten(0, 1).clone()).view_as(scores)
        return self._one_length_at_a_time(scores.clone(), block, state)

    def _asking_rows_only(self, processor: LogitsProcessor) -> LogitsProcessor:
        # A constraint may know nothing of texts outside its grammar, such as those of rows shown out of turn.
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed_tokens = processor._prefix_allowed_tokens_fn

        def allowed(row: int, tokens: torch.Tensor) -> list[int]:
            return allowed_tokens(row, tokens) if row in self._asking else [0]

        return PrefixConstrainedLogitsProcessor(allowed, num_beams=1)

    def _one_length_at_a_time(self, scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        # Rows stand at different lengths, but a processor is shown a rectangle: one call for each length that occurs
        # somewhere in the batch, of which every row uses the calls that match its own positions. This path reads the
        # lengths on the host, so it is not part of a captured round.
        width = block.shape[1]
        shown, asks = self._texts(block, state)
        for length in range(min(asks.values(), default=0), max(asks.values(), default=-width) + width):
            steps = {row: length - first for row, first in asks.items() if 0 <= length - first < width}
            if not steps:
                continue
            self._asking = set(steps)
            rows = torch.tensor(list(steps), device=scores.device)
            at = torch.tensor(list(steps.values()), device=scores.device)
            batch_scores = scores[:, 0].clone()
            batch_scores[rows] = scores[rows, at]
            scores[rows, at] = self._processors(shown[:, :length], batch_scores)[rows]

            draft = block[rows, (at + 1).clamp(max=width - 1)]
            is_over = torch.isin(draft, state.eos) | scores[rows, at, draft].isneginf()
            is_over |= self._padding[rows] + state.limits[rows] <= length + 1
            for row in rows[is_over].tolist():
                del asks[row]
        return scores

    def _texts(self, block: torch.Tensor, state: DecodeState) -> tuple[torch.Tensor, dict[int, int]]:
        """What processors are shown, `[B, longest]`, and for each unfinished row the length of its committed text."""
        batch, width = block.shape
        shown = self._prompts.new_zeros(batch, self._prompts.shape[1] + state.slots + width)
        first = {}
        finished = state.finished.tolist()
        for row, (length, pad) in enumerate(zip(state.lengths.tolist(), self._padding.tolist(), strict=True)):
            shown[row, :pad] = self._prompts[row, :pad]
            shown[row, pad : pad + length] = state.tokens[row, :length]
            shown[row, pad + length : pad + length + width - 1] = block[row, 1:]
            if not finished[row]:
                first[row] = pad + length
        return shown, first
