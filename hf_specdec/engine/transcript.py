"""The host's side of a generation: what has been said so far, and when to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..patching.patch import caller
from .prompts import Prompts

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# Criteria that are decided without calling them.
_DECIDED_HERE = (EosTokenCriteria, MaxLengthCriteria)
# transformers' own criteria that judge on any device: by the host's text a GPU does not have to be waited for.
_JUDGE_ANYWHERE = (MaxTimeCriteria, StopStringCriteria)


class Transcript:
    """Collects the rows' committed tokens and settles them step by step, as plain `generate()` would.

    Rows progress at their own pace, but stopping criteria and streamers are made for whole batches in step. So step t
    is settled once every row that goes on has its token t: criteria are called with the batch up to t, finished rows
    are padded, the streamer gets the step's tokens. What a row has beyond the settled steps waits, and is dropped if
    the row turns out to have ended.

    The text is in memory of the host, and where criteria of the caller read it on another device, once more there: a
    settled token is written once to each, and criteria are shown views. So their cost does not grow with the text.

    Args:
        prompts: `[B, P]` int64, left-padded, as given to `generate()`.
        criteria: all stopping criteria.
        pad_token: what finished rows continue with; None if no criterion knows an end-of-sequence token, in which
            case rows go on until all of them are stopped, as in plain `generate()`.
        max_new_tokens: room for new tokens.
        streamer: gets the tokens `[B]` of each settled step, on the CPU.
        keep_scores, keep_logits: whether `add` is given scores and logits to keep.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        criteria: StoppingCriteriaList,
        pad_token: int | None,
        max_new_tokens: int,
        streamer: BaseStreamer | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ):
        batch, self._width = prompts.shape
        called = [rule for rule in criteria if type(rule) not in _DECIDED_HERE]
        self._host_criteria = StoppingCriteriaList(rule for rule in called if type(rule) in _JUDGE_ANYWHERE)
        self._criteria = StoppingCriteriaList(rule for rule in called if type(rule) not in _JUDGE_ANYWHERE)
        self._ends = {
            token for rule in criteria if type(rule) is EosTokenCriteria for token in rule.eos_token_id.tolist()
        }
        lengths = [rule.max_length for rule in criteria if type(rule) is MaxLengthCriteria]
        self._max_length = min(lengths, default=self._width + max_new_tokens)
        self._pad_token = pad_token
        self._streamer = streamer
        self._device = prompts.device
        self._sequences = torch.nn.functional.pad(prompts.cpu(), (0, max_new_tokens))
        # What `self._criteria` are shown: in the memory that the prompts are in, as in plain `generate()`.
        self._shown = self._sequences.to(prompts.device) if self._criteria else self._sequences
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._records = {
            name: [[] for _ in range(batch)]
            for name, wanted in (("scores", keep_scores), ("logits", keep_logits))
            if wanted
        }
        self._settled: dict[str, list[torch.Tensor]] = {name: [] for name in self._records}
        self.stopped = [False] * batch
        self.steps = 0

    @property
    def is_complete(self) -> bool:
        return all(self.stopped)

    @property
    def pads_finished_rows(self) -> bool:
        """Whether rows that have stopped are done, and not going on until all have stopped."""
        return self._pad_token is not None

    @property
    def sequences(self) -> torch.Tensor:
        """`[B, P + steps]` int64: prompts and settled tokens."""
        return self._sequences[:, : self._width + self.steps].to(self._device)

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """One `[B, V]` a settled step, if kept; zeros for rows that had finished."""
        return self._record("scores")

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        return self._record("logits")

    def _record(self, name: str) -> tuple[torch.Tensor, ...] | None:
        return tuple(self._settled[name]) if name in self._settled else None

    def columns_run(self, prompts: Prompts) -> int:
        """Leading columns of the text of `prompts` that the target has run in all rows; the last is never one."""
        rows = zip(prompts.lengths, prompts.padding, self._rows, strict=True)
        ends = [pad + length + len(new) - 1 for length, pad, new in rows]
        return min(*ends, prompts.width + self.steps - 1) if ends else 0

    def longest_row(self) -> int:
        """New tokens of the row that is furthest ahead, settled or not."""
        return max(len(row) for row in self._rows)

    def length(self, row: int) -> int:
        """New tokens of a row, settled or not."""
        return len(self._rows[row])

    def is_done(self, row: int) -> bool:
        """Whether what a round commits to a row is no longer of interest."""
        return self.stopped[row] and self.pads_finished_rows

    def add(self, tokens: list[list[int]], committed: list[int], **records: torch.Tensor | None) -> None:
        """Take over a round's result and settle what can be settled.

        Args:
            tokens: K + 1 for each row.
            committed: how many of them each row keeps.
            records: `scores` and `logits`, `[B, K + 1, V]`; kept, in float32, where they were asked for, else any.
        """
        for row, (new, count) in enumerate(zip(tokens, committed, strict=True)):
            self._rows[row] += new[:count]
            for name, record in self._records.items():
                record[row] += records[name][row, :count].float().unbind(0)
        while not self.is_complete and self._is_next_step_known():
            self._settle()

    def finish(self) -> None:
        if self._streamer is not None:
            with caller():
                self._streamer.end()

    def _is_next_step_known(self) -> bool:
        return all(self.is_done(row) or len(new) > self.steps for row, new in enumerate(self._rows))

    def _settle(self) -> None:
        step = self.steps
        column = [self._pad_token if self.is_done(row) else new[step] for row, new in enumerate(self._rows)]
        for name, record in self._records.items():
            present = next(row for row in range(len(column)) if not self.is_done(row))
            blank = torch.zeros_like(record[present][step])
            values = [blank if self.is_done(row) else record[row][step] for row in range(len(column))]
            self._settled[name].append(torch.stack(values))
            for kept in record:
                if step < len(kept):
                    kept[step] = None  # a view that would keep a whole round in memory
        tokens = torch.tensor(column)
        for text in {self._sequences, self._shown}:
            text[:, self._width + step] = tokens
        self.steps += 1

        stops = [token in self._ends for token in column]
        if self._width + self.steps >= self._max_length:
            stops = [True] * len(column)
        verdicts = self._verdicts()
        self.stopped = [any(votes) for votes in zip(self.stopped, stops, *verdicts, strict=True)]
        if self._streamer is not None:
            with caller():
                self._streamer.put(tokens)

    def _verdicts(self) -> list[list[bool]]:
        """What the criteria that are called say of each row."""
        end = self._width + self.steps
        verdicts = []
        with caller():
            if self._host_criteria:
                verdicts.append(self._host_criteria(self._sequences[:, :end], None))
            if self._criteria:
                verdicts.append(self._criteria(self._shown[:, :end], self.scores))
        # Criteria may say it in a column, `[B, 1]`.
        return [result.reshape(len(self._rows), -1).any(dim=1).tolist() for result in verdicts]
