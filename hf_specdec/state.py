"""`DecodeState`: the device buffers of a generation."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from . import ops
from .cache.hidden_states import HiddenStates
from .cache.layer_kinds import LayerKinds
from .cache.ragged_cache import PackedCache, RaggedCache
from .kernels.types import NO_TOKEN, NO_TOP_K, Nodes, Proposal, RowRules, SamplingSettings, VerificationResult

# The int64 numbers of a row without a text, and their defaults in a row that is admitted.
NUMBERS = {
    "lengths": 1,
    "limits": 1,
    "prompt_lengths": 1,
    "seeds": 0,
    "row_top_k": NO_TOP_K,
    "row_min_lengths": 0,
    "row_padding_tokens": NO_TOKEN,
    "cached": 0,
    "draft_starts": 0,
    "position_offsets": 0,
    "prompt_length_gap": 0,
    "adapters": 0,
}
# The float32 settings of a row, likewise; their defaults are whole numbers.
SETTINGS = {
    "row_temperatures": 1.0,
    "row_tail": 0.0,
    "row_repetition_penalties": 1.0,
    "row_presence_penalties": 0.0,
    "row_frequency_penalties": 0.0,
}


class Shape(NamedTuple):
    """The sizes of the buffers of a generation, and the operations of its rounds.

    Attributes:
        slots: slots of every cache, including the dummy slot, which is the last one.
        num_draft_tokens: the largest K of a round.
        is_sampling: whether tokens are drawn; otherwise decoding is greedy.
        draft_probs: whether drafts are drawn from the drafter's distribution, which is then kept.
        num_ends: entries for end-of-sequence tokens.
        verification: see `Drafter.configure`.
        num_nodes: the largest N of a round whose drafts are a tree; 0 if all rounds draft chains.
        keeps_hidden_states: whether the hidden states of all tokens are kept, see `Drafter.rollouts`.
    """

    batch: int
    slots: int
    num_draft_tokens: int
    is_sampling: bool
    draft_probs: bool
    num_ends: int
    verification: str = "token"
    num_nodes: int = 0
    keeps_hidden_states: bool = False


class RoundShape(NamedTuple):
    """The drafts of a round: K of a chain, with N = 0; or N of a tree of depth K."""

    num_drafts: int
    num_nodes: int = 0

    @property
    def width(self) -> int:
        """Tokens of a row in the target's pass."""
        return max(self) + 1

    def __str__(self) -> str:
        return f"{self.num_drafts}/{self.num_nodes}" if self.num_nodes else str(self.num_drafts)

    @classmethod
    def parse(cls, text: str) -> RoundShape:
        """The inverse of `str`; raises `ValueError` for anything else."""
        return cls(*map(int, text.split("/", 1)))


class DecodeState:
    """Device buffers and settings of generations over B rows, of one shape; slot == position throughout.

    Args:
        layers: kinds of the layers of the target's cache; empty if the target runs on a cache of transformers.

    Attributes:
        tokens: `[B, slots]` int64, committed tokens; the prompt, without padding, comes first.
        numbers: the `NUMBERS` of each row. `lengths` and the other `[B]` int64 buffers are views of it.
        settings: the `SETTINGS` of each row. `row_temperatures` and the other `[B]` float32 buffers are views of it.
        lengths: `[B]` int64, committed tokens of each row. The target has processed all of them but the last.
        limits: `[B]` int64, length at which a row ends.
        finished: `[B]` bool; a finished row computes on the dummy slot and commits nothing.
        eos: `[B, E]` int64, tokens that end each row, padded with `NO_TOKEN`.
        seeds: `[B]` int64, keys of the rows' random numbers.
        temperature: `[]` float32, sampling temperature of all rows; 1 for greedy decoding.
        row_temperatures: `[B]` float32, factors on `temperature`; 1 without a `RowTemperature` or `RowSampling`.
        row_top_k: `[B]` int64, for `RowSampling`: number of tokens that each row is drawn from; 0 for greedy decoding.
        row_tail: `[B]` float32, for `RowSampling`: 1 - `top_p`, the share of probability that is left out.
        row_min_lengths, row_padding_tokens: `[B]` int64, and
        row_repetition_penalties, row_presence_penalties, row_frequency_penalties: `[B]` float32, see `RowRules`.
        slots, is_sampling, draft_probs, verification: see `Shape`.
        most_draft_tokens, most_nodes: the largest K and N of a round, which determine the sizes of buffers.
        num_draft_tokens, num_nodes: K and N of the next round, see `RoundShape`.
        logprobs: the log-probabilities that a round computes of its tokens: `"processed"`, `"raw"`, both or none.
        cached: `[B]` int64, positions of each row that are in the target's cache before the prefill.
        draft_starts: `[B]` int64, the first position of each row that the drafter reads.
        position_offsets: `[B]` int64, position ids of each row minus its positions, from the end of the prompt on.
        prompt_lengths: `[B]` int64, tokens of each prompt.
        prompt_length_gap: `[B]` int64, how many more tokens than the row's prompt the longest prompt of its batch has,
            for RoPE that depends on length.
        adapters: `[B]` int64, the LoRA adapters of the target for each row: bit a is set for entry a of
            `Adapters.names`.
        aux_hidden_states: `[B, most_draft_tokens + 1, width]`, the target's auxiliary hidden states at the tokens of
            the last block; None before the first prefill, and for a drafter that reads none.
        result: the last round's verification, with room for `most_draft_tokens` drafts; after a prefill see
            `first_block_width`.
        prompt_logits: `[B, V]`, the target's logits after the prompts; None before the first prefill.
        block_width: number of columns of `aux_hidden_states` and `result` in use: tokens of the last block.
        records: the `calls.first_pass.FirstPass` that has run the prompts, while the drafter reads its inputs; else
            None.
        cache: the target's cache; None if the target runs on a cache of transformers.
        live: upper bound of the slots that the next round uses, its drafts included, known without a synchronization.
        num_before: see `RaggedCache`; set for chunks of a prefill that are not captured.
        dummy_slot: the slot for keys and values that no query reads: of padding and of finished rows.
        row_slots: slots of a row of the call; fewer than `slots` if all rows are packed in one.
        memory: buffers of the drafter; set from `Drafter.new_memory`.
    """

    def __init__(self, shape: Shape, layers: LayerKinds, device: torch.device):
        batch = shape.batch
        self.tokens = torch.zeros(batch, shape.slots, dtype=torch.int64, device=device)
        # Kernels take `[batch]` views; for an address that 16 does not divide, Triton would compile another variant.
        self.numbers = torch.empty(len(NUMBERS), batch + batch % 2, dtype=torch.int64, device=device)[:, :batch]
        self.settings = torch.empty(len(SETTINGS), batch + -batch % 4, dtype=torch.float32, device=device)[:, :batch]
        vars(self).update(zip((*NUMBERS, *SETTINGS), (*self.numbers, *self.settings), strict=True))
        self.finished = torch.empty(batch, dtype=torch.bool, device=device)
        self.eos = torch.empty(batch, shape.num_ends, dtype=torch.int64, device=device)
        self.temperature = torch.ones((), dtype=torch.float32, device=device)
        self.result = VerificationResult(
            tokens=torch.zeros(batch, shape.num_draft_tokens + 1, dtype=torch.int64, device=device),
            accepted=torch.zeros(batch, dtype=torch.int64, device=device),
            committed=torch.zeros(batch, dtype=torch.int64, device=device),
        )
        self.slots = self.row_slots = shape.slots
        self.dummy_slot = shape.slots - 1
        self.most_draft_tokens = self.num_draft_tokens = shape.num_draft_tokens
        self.most_nodes = self.num_nodes = shape.num_nodes
        self.is_sampling, self.draft_probs, self.verification = shape.is_sampling, shape.draft_probs, shape.verification
        self.cache: RaggedCache | None = None
        if layers:
            self.cache = RaggedCache(layers, shape.slots, self.lengths, None, shape.num_draft_tokens)
        if shape.keeps_hidden_states:
            self.cache.hidden_states = HiddenStates()
        self.logprobs: tuple[str, ...] = ()
        self.aux_hidden_states: torch.Tensor | None = None
        self.prompt_logits: torch.Tensor | None = None
        self.records: Any = None
        self.memory: Any = None
        self.num_before: int | None = None
        self.clear()
        self.live = shape.slots

    def admit(
        self,
        rows: Sequence[int],
        prompts: Sequence[torch.Tensor],
        max_new_tokens: Sequence[int],
        seeds: Sequence[int],
        ends: Sequence[Collection[int]] = (),
        **numbers: Sequence[int],
    ) -> None:
        """Put prompts into `rows`, replacing their contents; they are to be prefilled.

        Args:
            rows: of the state; other rows stay as they are, see `clear`.
            prompts: `[length]` int64 each, without padding.
            ends: the end-of-sequence tokens of each row; empty for none.
            numbers: `cached`, `draft_starts`, `position_offsets`, `prompt_length_gap` and `adapters` of each row, 0 by
                default; `prompt_lengths` if the texts continue after their prompts.
        """
        lengths = list(map(len, prompts))
        limits = [length + new for length, new in zip(lengths, max_new_tokens, strict=True)]
        given = {"lengths": lengths, "limits": limits, "seeds": seeds, "prompt_lengths": lengths, **numbers}
        at, *columns = self._new_rows(rows, ends, **given)
        self.numbers[:, at], self.settings[:, at], self.eos[at] = columns
        set_rows(self.finished, at, False)
        texts = upload(torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True), self.tokens)
        self.tokens[at, : texts.shape[1]] = texts
        self.live = max([self.live, *lengths])

    def as_one_row(self, memory: Any) -> DecodeState:
        """This state with its rows one after the other as a single row, for packed prefills.

        `memory` is the drafter's memory in the same form.
        """
        batch = len(self.tokens)
        packed = copy.copy(self)
        packed.tokens, packed.slots = self.tokens.view(1, -1), batch * self.slots
        packed.dummy_slot = packed.slots - 1
        packed.cache, packed.memory = PackedCache(self.cache, batch), memory
        return packed

    def clear(self) -> None:
        """Mark all rows as finished, with a text of one token."""
        self.result.committed.zero_()
        self.finished.fill_(True)
        _, self.numbers[:], self.settings[:], self.eos[:] = self._new_rows(range(len(self.eos)))
        self.block_width = self.live = 1

    def _new_rows(
        self, rows: Sequence[int], ends: Sequence[Collection[int]] = (), **given: Sequence[int]
    ) -> tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`rows` on the device, a slice if they are all rows in their order; and their columns of `numbers` and
        `settings` and rows of `eos`: `given` or the defaults. All of it is one copy to the device."""
        numbers = [given.get(name, [default] * len(rows)) for name, default in NUMBERS.items()]
        settings = [[default] * len(rows) for default in SETTINGS.values()]
        width = self.eos.shape[1]
        padded = [[*some, *[NO_TOKEN] * (width - len(some))] for some in ends or [()] * len(rows)]
        columns = upload([list(rows), *numbers, *settings, *zip(*padded, strict=True)], self.lengths)
        at, numbers, settings, eos = columns.split([1, len(NUMBERS), len(SETTINGS), width])
        is_all = list(rows) == list(range(len(self.eos)))
        return slice(None) if is_all else at[0], numbers, settings.to(self.settings.dtype), eos.T

    def set_temperature(self, temperature: float | None) -> None:
        """Set the temperature of all rows; None for greedy decoding."""
        self.temperature.fill_(1.0 if temperature is None else temperature)

    def set_row_sampling(self, rows: Sequence[int], settings: Sequence[SamplingSettings]) -> None:
        """Set the sampling settings of `rows`, which `RowSampling` applies to the scores."""
        at = upload(rows, self.lengths)
        self.row_temperatures[at] = upload([one.temperature for one in settings], self.row_temperatures)
        self.row_top_k[at] = upload([one.top_k for one in settings], self.row_top_k)
        # At least one token is left in any case; `draft_temperatures` must be above 0.
        self.row_tail[at] = upload([1 - max(one.top_p, 1e-6) for one in settings], self.row_tail)

    def set_row_rules(self, rows: Sequence[int], rules: Sequence[RowRules]) -> None:
        """Set how the scores of `rows` follow from their texts, which `sampling.text_rules` applies."""
        at = upload(rows, self.lengths)
        penalties = self.row_repetition_penalties, self.row_presence_penalties, self.row_frequency_penalties
        buffers = self.row_min_lengths, self.row_padding_tokens, *penalties
        for buffer, values in zip(buffers, zip(*rules, strict=True), strict=True):
            buffer[at] = upload(values, buffer)

    def copy_rows(self, rows: torch.Tensor, source: DecodeState, slots: int, source_rows: torch.Tensor) -> None:
        """Copy rows of another state, between two rounds, to rows of this one, which continue them.

        `Drafter.copy_rows` copies the drafter's memory.

        Args:
            rows: `[n]` int64, the rows to copy to.
            source: a state with the same `most_draft_tokens`, and any numbers of rows and slots.
            slots: number of leading slots to copy, without a dummy slot: at least the tokens of each row.
            source_rows: `[n]` int64, rows of `source`.
        """
        self.tokens[rows, :slots] = source.tokens[source_rows, :slots]
        self.numbers[:, rows] = source.numbers[:, source_rows]
        self.settings[:, rows] = source.settings[:, source_rows]
        self.finished[rows], self.eos[rows] = source.finished[source_rows], source.eos[source_rows]
        self.cache.copy_rows(rows, source.cache, slots, source_rows)
        for ours, theirs in zip(self.result, source.result, strict=True):
            ours[rows] = theirs[source_rows]
        if self.aux_hidden_states is not None:
            self.aux_hidden_states[rows] = source.aux_hidden_states[source_rows]
        if source.prompt_logits is not None:
            self.prompt_logits[rows] = source.prompt_logits[source_rows]
        self.block_width = max(self.block_width, source.block_width)

    @property
    def caches(self) -> list[RaggedCache]:
        """The caches of target and drafter."""
        return [self.cache, *(() if self.memory is None else self.memory.caches)]

    @contextmanager
    def spanning(self, span: int) -> Iterator[None]:
        """Context in which kernels get `span` leading slots of the caches."""
        for cache in self.caches:
            cache.kernel_span = span
        try:
            yield
        finally:
            for cache in self.caches:
                cache.kernel_span = cache.slots

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Context for rounds that warm up kernels and memory pools: all rows are finished, so nothing is committed, and
        drafters find no committed tokens."""
        kept = [self.finished, *self.result, *([] if self.aux_hidden_states is None else [self.aux_hidden_states])]
        before = [buffer.clone() for buffer in kept]
        self.finished.fill_(True)
        self.result.committed.zero_()
        try:
            yield
        finally:
            for buffer, content in zip(kept, before, strict=True):
                buffer.copy_(content)

    @property
    def first_block_width(self) -> int:
        """Tokens of the last block after the first new token: the prompt's last token, as if it had been a draft, and
        the new one; only the new one if rounds have no drafts."""
        return min(2, self.most_draft_tokens + 1)

    def next_slots(self, first: int) -> torch.Tensor:
        """Slots `[B, 1]` int64 of the positions `lengths + first`; the dummy slot for finished rows, and for positions
        after which the length limit leaves no token."""
        return ops.next_slots(self.lengths, self.limits, self.finished, first, 1, self.dummy_slot)

    def text_positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Positions of `slots` in their texts; 0 for the dummy slot, whose number may exceed a position embedding."""
        if self.row_slots == self.slots:
            return ops.position_ids(slots, None, self.dummy_slot)
        return torch.where(slots < self.dummy_slot, slots % self.row_slots, 0)

    def position_ids(self, slots: torch.Tensor, sections: bool = False) -> torch.Tensor:
        """Position ids of the target at `slots` `[B, n]` int64; 0 for the dummy slot. With M-RoPE a token of a prompt
        may have several: with `sections` the result may be `[sections, B, n]`, otherwise it is the first section."""
        if self.records is not None:
            return self.records.position_ids(self, slots, sections)
        if self.row_slots == self.slots:
            return ops.position_ids(slots, self.position_offsets, self.dummy_slot)
        offsets = self.position_offsets[slots // self.row_slots]  # rows packed in one
        return torch.where(slots < self.dummy_slot, slots % self.row_slots + offsets, 0)

    def adapters_at(self, slots: torch.Tensor) -> torch.Tensor:
        """`adapters` of the rows of the tokens at `slots` `[B, n]` int64; `[B, n]` int64, contiguous."""
        if self.row_slots == self.slots:
            return self.adapters[:, None].expand(slots.shape).contiguous()
        return self.adapters[slots // self.row_slots]  # rows packed in one

    @property
    def draft_temperatures(self) -> torch.Tensor:
        """`[B]` float32, the temperatures at which drafts are drawn: those of the rows times `top_p`.

        Top-p leaves the likelier tokens, as a lower temperature does. Acceptance lengths of SmolLM2 with EAGLE-3 on 32
        prompts, two seeds, without and with `top_p`: 2.19 / 2.28 and 2.23 / 2.32 at temperature 0.7 and `top_p` 0.8.
        """
        temperatures = self.temperature * self.row_temperatures
        return torch.addcmul(temperatures, temperatures, self.row_tail, value=-1)

    def last_tokens(self) -> torch.Tensor:
        """The last committed token of each row, `[B, 1]`."""
        return self.tokens.gather(1, (self.lengths - 1)[:, None])

    def block(self, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to verify (the last committed one and the `drafts` `[B, K]`) and their slots, both `[B, K + 1]`."""
        return ops.block(self.tokens, self.lengths, self.limits, self.finished, drafts, self.dummy_slot)

    def tree_block(self, proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor, Nodes]:
        """`block` of a tree, `[B, N + 1]`, and its nodes; the root is the last committed token."""
        given = self.tokens, self.lengths, self.limits, self.finished, proposal.tokens
        block, slots, positions = ops.tree_block(*given, *proposal.tree[:2], self.dummy_slot)
        return block, slots, Nodes(positions, proposal.tree.ancestors)

    def last_block(self, width: int) -> tuple[torch.Tensor | None, VerificationResult]:
        """What the last round leaves for drafting, in its first `width` columns (at least `block_width`): auxiliary
        hidden states `[B, width, ...]` or None, and the result, with tokens `[B, width]`."""
        hidden = None if self.aux_hidden_states is None else self.aux_hidden_states[:, :width]
        result = self.result
        return hidden, VerificationResult(result.tokens[:, :width], result.accepted, result.committed)

    def narrow_block(self) -> None:
        """Drop what the last round leaves for drafting, except at each row's last committed token."""
        last = (self.result.committed - 1).clamp(min=0)
        if self.aux_hidden_states is not None:
            rows = torch.arange(len(last), device=last.device)
            self.aux_hidden_states[:, 0] = self.aux_hidden_states[rows, last]
        self.result.tokens[:, :1] = self.result.tokens.gather(1, last[:, None])
        self.result.accepted.zero_()
        self.result.committed.clamp_(max=1)

    def commit(self, result: VerificationResult, keeps: bool = False) -> VerificationResult:
        """Append the result's tokens `[B, n]` to the rows, up to an end-of-sequence token or the length limit. Returns
        the result with `committed` reduced accordingly. With `keeps` it is also kept for drafting, see `last_block`, in
        memory that stays the same.

        A row also ends at `NO_TOKEN`, the last token that it commits; 0 is stored in its place.
        """
        kept = self.result if keeps else None
        rows = self.tokens, self.lengths, self.finished
        committed = ops.commit(*rows, self.limits, self.eos, result, kept)
        return VerificationResult(result.tokens, result.accepted, committed)


def set_rows(buffer: torch.Tensor, rows: torch.Tensor | slice, value: float | bool) -> None:
    """Set `rows` of `buffer`, `[n]` int64 or a slice of all, to a number.

    `buffer[rows] = value` would copy the number from pageable memory, and the host would wait until a GPU has done all
    its earlier work.
    """
    if isinstance(rows, slice):
        buffer[rows].fill_(value)
    else:
        buffer.index_fill_(0, rows, value)


def upload(values: int | Sequence | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values` in the dtype and on the device of `like`, without waiting for a GPU."""
    if isinstance(values, torch.Tensor) and values.device == like.device:
        return values.to(like.dtype)
    if isinstance(values, torch.Tensor):
        host = values.to(like.dtype)
        host = host.pin_memory() if like.is_cuda else host
    else:
        host = torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)
