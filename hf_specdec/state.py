"""`DecodeState`: the device buffers of a generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .kernels.types import VerificationResult
from .patching.cache import LayerKind, RaggedCache

# Fills `DecodeState.eos` where a call has fewer end-of-sequence tokens than there are entries.
NO_TOKEN = -1
# Buffers with an entry for each row, which a row takes along.
_OF_ROWS = (
    "lengths",
    "limits",
    "seeds",
    "row_temperatures",
    "cached",
    "draft_starts",
    "prompt_lengths",
    "ahead",
    "finished",
)


class Shape(NamedTuple):
    """What determines the sizes of the buffers of a generation and the operations of its rounds.

    Attributes:
        batch: rows.
        slots: slots of every cache, the dummy slot, which is the last one, included.
        num_draft_tokens: the largest K of a round.
        is_sampling: whether tokens are drawn; decoding is greedy otherwise.
        draft_probs: whether drafts are drawn from the drafter's distribution, which is then kept.
        num_ends: entries for end-of-sequence tokens.
        verification: see `Drafter.configure`.
    """

    batch: int
    slots: int
    num_draft_tokens: int
    is_sampling: bool
    draft_probs: bool
    num_ends: int
    verification: str = "token"


@dataclass
class DecodeState:
    """Device buffers and settings of one `generate()` call over B rows; slot == position throughout.

    Attributes:
        tokens: `[B, slots]` int64, committed tokens; the prompt without padding comes first.
        lengths: `[B]` int64, committed tokens of each row. The target has processed all of them but the last.
        limits: `[B]` int64, length at which a row ends.
        finished: `[B]` bool; a finished row computes on the dummy slot and commits nothing.
        eos: `[E]` int64, tokens that end a row, filled up with `NO_TOKEN`.
        seeds: `[B]` int64, keys of the rows' random numbers.
        temperature: `[]` float32, of sampling, for all rows; 1 when decoding is greedy.
        row_temperatures: `[B]` float32, factors on `temperature`; 1 without a `RowTemperature` processor.
        slots: slots of every cache, the dummy slot, which is the last one, included.
        most_draft_tokens: the largest K of a round, for which buffers are made.
        num_draft_tokens: K of the next round.
        is_sampling: whether tokens are drawn; decoding is greedy otherwise.
        draft_probs: whether drafts are drawn from the drafter's distribution, which is then kept.
        verification: see `Drafter.configure`.
        cached: `[B]` int64, positions of each row that are in the target's cache before prefill.
        draft_starts: `[B]` int64, the first position of each row that the drafter reads.
        prompt_lengths: `[B]` int64, tokens of each prompt.
        ahead: `[B]` int64, how many more tokens than a row's the longest prompt of its batch has, for RoPE that depends
            on length.
        num_prefilled: `[]` int64, positions of each row after `cached` that are prefilled.
        aux_hidden_states: `[B, most_draft_tokens + 1, width]`, auxiliary hidden states of the target at the tokens of
            the last block; None before the first prefill, and for a drafter that reads none.
        result: of the last round's verification, for `most_draft_tokens` drafts; after prefill as if a round had
            committed the last token of each prompt.
        block_width: how many columns of the two may be in use: tokens of the last block.
        cache: the target's cache; None if the target runs on a cache of transformers.
        live: upper bound of the slots that the next round uses, its drafts included, known without a synchronization.
        memory: buffers of the drafter; set from `Drafter.new_memory`.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    finished: torch.Tensor
    eos: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    row_temperatures: torch.Tensor
    slots: int
    most_draft_tokens: int
    num_draft_tokens: int
    is_sampling: bool
    draft_probs: bool
    verification: str
    cached: torch.Tensor
    draft_starts: torch.Tensor
    prompt_lengths: torch.Tensor
    ahead: torch.Tensor
    num_prefilled: torch.Tensor
    cache: RaggedCache | None
    live: int
    result: VerificationResult
    block_width: int = 1
    aux_hidden_states: torch.Tensor | None = None
    memory: Any = None

    @classmethod
    def allocate(cls, shape: Shape, layers: Sequence[LayerKind], device: torch.device) -> DecodeState:
        """Buffers for generations of one shape.

        Args:
            shape: of the generations.
            layers: of the target's cache; none if the target runs on a cache of transformers.
            device: of all buffers.
        """
        batch = shape.batch
        lengths = torch.ones(batch, dtype=torch.int64, device=device)
        return cls(
            tokens=torch.zeros(batch, shape.slots, dtype=torch.int64, device=device),
            lengths=lengths,
            limits=torch.ones(batch, dtype=torch.int64, device=device),
            finished=torch.ones(batch, dtype=torch.bool, device=device),
            eos=torch.full((shape.num_ends,), NO_TOKEN, dtype=torch.int64, device=device),
            seeds=torch.zeros(batch, dtype=torch.int64, device=device),
            temperature=torch.ones((), dtype=torch.float32, device=device),
            row_temperatures=torch.ones(batch, dtype=torch.float32, device=device),
            slots=shape.slots,
            most_draft_tokens=shape.num_draft_tokens,
            num_draft_tokens=shape.num_draft_tokens,
            is_sampling=shape.is_sampling,
            draft_probs=shape.draft_probs,
            verification=shape.verification,
            cached=torch.zeros(batch, dtype=torch.int64, device=device),
            draft_starts=torch.zeros(batch, dtype=torch.int64, device=device),
            prompt_lengths=torch.ones(batch, dtype=torch.int64, device=device),
            ahead=torch.zeros(batch, dtype=torch.int64, device=device),
            num_prefilled=torch.zeros((), dtype=torch.int64, device=device),
            cache=RaggedCache(layers, shape.slots, None, lengths, shape.num_draft_tokens) if layers else None,
            live=shape.slots,
            result=VerificationResult(
                tokens=torch.zeros(batch, shape.num_draft_tokens + 1, dtype=torch.int64, device=device),
                accepted=torch.zeros(batch, dtype=torch.int64, device=device),
                committed=torch.zeros(batch, dtype=torch.int64, device=device),
            ),
        )

    def begin(
        self,
        prompts: list[torch.Tensor],
        max_new_tokens: int | Sequence[int],
        eos: torch.Tensor | None,
        seeds: torch.Tensor,
        temperature: float | None = None,
        row_temperatures: torch.Tensor | None = None,
        cached: Sequence[int] | None = None,
        draft_starts: Sequence[int] | None = None,
        ahead: Sequence[int] | None = None,
    ) -> None:
        """Fill the buffers for a batch before prefill.

        Args:
            prompts: `[length]` int64 each, without padding; rows of the buffers beyond them are finished.
            max_new_tokens: of all rows, or one number for each.
            eos: `[E]` int64 or None.
            seeds: `[len(prompts)]` int64.
            temperature: of sampling; None when decoding is greedy.
            row_temperatures: `[len(prompts)]` float32; 1 for all if None.
            cached, draft_starts, ahead: of each prompt; 0 for all if None.
        """
        self.clear()
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = prompt
        count = len(prompts)
        self.lengths[:count] = upload(list(map(len, prompts)), self.lengths)
        self.limits[:count] = self.lengths[:count] + upload(max_new_tokens, self.limits)
        self.finished[:count] = False
        self.set_sampling(eos, temperature)
        self.seeds[:count] = seeds
        if row_temperatures is not None:
            self.row_temperatures[:count] = row_temperatures
        self.prompt_lengths.copy_(self.lengths)
        given = ((self.cached, cached), (self.draft_starts, draft_starts), (self.ahead, ahead))
        for buffer, values in given:
            if values is not None:
                buffer[:count] = upload(values, buffer)
        self.live = max(map(len, prompts))

    def clear(self) -> None:
        """Make all rows finished ones, of one token."""
        for buffer in (self.tokens, self.cached, self.draft_starts, self.ahead):
            buffer.zero_()
        for buffer in (self.lengths, self.limits, self.prompt_lengths, self.row_temperatures):
            buffer.fill_(1)
        self.finished.fill_(True)
        self.block_width = 1

    def set_sampling(self, eos: torch.Tensor | None, temperature: float | None) -> None:
        """Set what all rows share: tokens that end them, `[E]` int64 or None; the temperature, None if greedy."""
        self.eos.fill_(NO_TOKEN)
        if eos is not None:
            self.eos[: len(eos)] = eos
        self.temperature.fill_(1.0 if temperature is None else temperature)

    def copy_rows(
        self, rows: torch.Tensor, source: DecodeState, slots: int, source_rows: torch.Tensor | None = None
    ) -> None:
        """Continue rows of another state between two rounds, in rows of this one.

        The drafter's memory is copied by `Drafter.copy_rows`.

        Args:
            rows: `[n]` int64, which rows of this state they become.
            source: of the same `most_draft_tokens`, with any numbers of rows and of slots.
            slots: how many leading slots are copied, none of them a dummy slot: at least the tokens of each row.
            source_rows: `[n]` int64, which rows of `source`; the first n if None.
        """
        taken = slice(len(rows)) if source_rows is None else source_rows
        self.tokens[rows, :slots] = source.tokens[taken, :slots]
        for name in _OF_ROWS:
            getattr(self, name)[rows] = getattr(source, name)[taken]
        self.cache.copy_rows(rows, source.cache, slots, source_rows)
        for ours, theirs in zip(self.result, source.result, strict=True):
            ours[rows] = theirs[taken]
        if self.aux_hidden_states is not None:
            self.aux_hidden_states[rows] = source.aux_hidden_states[taken]
        self.block_width = max(self.block_width, source.block_width)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Context for rounds that warm up kernels and memory pools: all rows are finished, so nothing is committed."""
        kept = [self.finished, *self.result, *([] if self.aux_hidden_states is None else [self.aux_hidden_states])]
        before = [buffer.clone() for buffer in kept]
        self.finished.fill_(True)
        try:
            yield
        finally:
            for buffer, content in zip(kept, before, strict=True):
                buffer.copy_(content)

    @property
    def dummy_slot(self) -> int:
        """The slot to which keys and values are written that no query reads: of padding and of finished rows."""
        return self.slots - 1

    def slot_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of `positions`, `[B]` or `[B, n]` int64.

        The dummy slot for finished rows, and for positions that the length limit leaves without a next token.
        """
        finished, limits = self.finished, self.limits
        if positions.dim() == 2:
            finished, limits = finished[:, None], limits[:, None]
        return torch.where(finished | (positions > limits - 2), self.dummy_slot, positions)

    def position_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """Position ids of `slots`; 0 for the dummy slot, whose number may exceed the model's position embedding."""
        return torch.where(slots < self.dummy_slot, slots, 0)

    def block(self, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to verify, the last committed one and the `drafts` `[B, K]`, and their slots; both `[B, K + 1]`."""
        last = self.tokens.gather(1, (self.lengths - 1)[:, None])
        steps = torch.arange(drafts.shape[1] + 1, device=last.device)
        return torch.cat([last, drafts], dim=1), self.slot_of((self.lengths - 1)[:, None] + steps)

    def last_block(self, width: int) -> tuple[torch.Tensor | None, VerificationResult]:
        """The first `width` columns of what the last round leaves for drafting, at least `block_width`.

        Returns:
            its auxiliary hidden states `[B, width, ...]` or None, and its result, with tokens `[B, width]`.
        """
        hidden = None if self.aux_hidden_states is None else self.aux_hidden_states[:, :width]
        result = self.result
        return hidden, VerificationResult(result.tokens[:, :width], result.accepted, result.committed)

    def keep_block(self, aux_hidden_states: torch.Tensor | None, result: VerificationResult) -> None:
        """Copy what drafting needs of a round, see `last_block`, into memory that is always the same.

        Args:
            aux_hidden_states: `[B, K + 1, width]` or None.
            result: what the round accepted and committed.
        """
        width = result.tokens.shape[1]
        if aux_hidden_states is not None:
            self.aux_hidden_states[:, :width].copy_(aux_hidden_states)
        self.result.tokens[:, :width].copy_(result.tokens)
        self.result.accepted.copy_(result.accepted)
        self.result.committed.copy_(result.committed)

    def narrow_block(self) -> None:
        """Forget what the last round leaves for drafting, except of each row's last committed token."""
        last = (self.result.committed - 1).clamp(min=0)
        if self.aux_hidden_states is not None:
            rows = torch.arange(len(last), device=last.device)
            self.aux_hidden_states[:, 0] = self.aux_hidden_states[rows, last]
        self.result.tokens[:, :1] = self.result.tokens.gather(1, last[:, None])
        self.result.accepted.zero_()
        self.result.committed.clamp_(max=1)

    def commit(self, result: VerificationResult) -> VerificationResult:
        """Append the result's tokens to the rows, up to an end-of-sequence token or the length limit.

        Returns:
            the result with `committed` reduced accordingly.
        """
        steps = torch.arange(result.tokens.shape[1], device=result.tokens.device)
        remaining = torch.where(self.finished, 0, self.limits - self.lengths)
        committed = torch.minimum(result.committed, remaining)
        ends = (result.tokens[..., None] == self.eos).any(dim=-1) & (steps < committed[:, None])
        has_ended = ends.any(dim=1)
        committed = torch.where(has_ended, ends.int().argmax(dim=1) + 1, committed)

        slots = torch.where(steps < committed[:, None], self.lengths[:, None] + steps, self.dummy_slot)
        self.tokens.scatter_(1, slots, result.tokens)
        self.lengths += committed
        self.finished |= has_ended | (self.lengths >= self.limits)
        return VerificationResult(result.tokens, result.accepted, committed)


def upload(values: int | Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """`values` in the dtype and on the device of `like`; a GPU is not waited for."""
    host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)
