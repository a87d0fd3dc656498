"""The generated text on the host: committed tokens, stopping criteria and the streamer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from ..host.generation import BaseStreamer
from ..kernels.types import NO_TOKEN
from ..modules.patch import user_code
from .prompts import Prompts

# Criteria that are decided by the generated tokens, without calling them.
DECIDED_BY_TOKENS = (EosTokenCriteria, MaxLengthCriteria)
# transformers' own criteria that work on any device; with the text on the host they do not synchronise with a GPU.
_JUDGE_ANYWHERE = (MaxTimeCriteria, StopStringCriteria)


def end_tokens_of(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The tokens that end a row by `criteria`."""
    rules = [rule for rule in criteria if type(rule) is EosTokenCriteria]
    return frozenset(token for rule in rules for token in rule.eos_token_id.flatten().tolist())


def no_distribution(text: str, step: int) -> str:
    """The error of a `NO_TOKEN`: why `text` has no new token number `step`, counted from 0."""
    return (
        f"{text} has no token {step} after its prompt: the target's processed scores are NaN, infinite, or -inf for "
        "all tokens, so that none can be drawn; expected a distribution over the vocabulary. Look for NaN in the "
        "target's weights and for a logits processor that rules out every token (a grammar without a way to go on), or "
        "decode greedily (do_sample=False)."
    )


class CallersStreamer(BaseStreamer):
    """A streamer that runs as the caller's code."""

    def __init__(self, streamer: BaseStreamer):
        self.put, self.end = user_code()(streamer.put), user_code()(streamer.end)


class Transcript:
    """Collects the committed tokens of all rows and finalises them step by step, as plain `generate()` would.

    Rows progress at different speeds, but stopping criteria and streamers expect whole batches, one token a step. So
    step t is finalised once every unfinished row has its token t: finished rows are padded, criteria are called with
    the batch up to t, and the streamer gets the tokens of the step. Later tokens wait, and are dropped
    if their row turns out to have ended.

    The text is in host memory, and also on the device of the prompts if criteria of the user read it there. Every token
    is written once to each, and criteria get views, so their cost does not grow with the length of the text.

    Args:
        prompts: `[B, P]` int64, left-padded, as given to `generate()`.
        pad_token: what finished rows continue with; None if no criterion has an end-of-sequence token: then rows go on
            until all of them are stopped, as in plain `generate()`.
        max_new_tokens: all rows end after so many new tokens, whatever length `criteria` state.
        streamer: gets the tokens `[B]` of each finalised step, on the CPU.
        kept: names of the records that `add` gets and keeps.
        device: where `sequences` and criteria of the user get the text; None for that of `prompts`.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        criteria: StoppingCriteriaList,
        pad_token: int | None,
        max_new_tokens: int,
        streamer: BaseStreamer | None = None,
        kept: Sequence[str] = (),
        device: torch.device | None = None,
    ):
        batch, self._width = prompts.shape
        called = [rule for rule in criteria if type(rule) not in DECIDED_BY_TOKENS]
        self._host_criteria = StoppingCriteriaList(rule for rule in called if type(rule) in _JUDGE_ANYWHERE)
        self._criteria = StoppingCriteriaList(rule for rule in called if type(rule) not in _JUDGE_ANYWHERE)
        self._ends = end_tokens_of(criteria)
        self._max_new_tokens = max_new_tokens
        self._pad_token = pad_token
        self._streamer = None if streamer is None else CallersStreamer(streamer)
        self._device = device or prompts.device
        self._sequences = torch.nn.functional.pad(prompts.cpu(), (0, max_new_tokens))
        # The text for `self._criteria`: on the device of the caller's prompts, as in plain `generate()`.
        self._shown = self._sequences.to(self._device) if self._criteria else self._sequences
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._records = {name: [[] for _ in range(batch)] for name in kept}
        self._finalised: dict[str, list[torch.Tensor]] = {name: [] for name in self._records}
        self.stopped = [False] * batch
        # Rows that have stopped and are padded: their further tokens are ignored.
        self.done = self.stopped
        self.steps, self.is_complete = 0, False
        self.num_tokens = [0] * batch  # new tokens of each row so far, without padding

    @property
    def sequences(self) -> torch.Tensor:
        """`[B, P + steps]` int64: prompts and finalised tokens."""
        return self._sequences[:, : self._width + self.steps].to(self._device)

    def record(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """The record `name` of all finalised steps; None if not kept. A step has `[B, V]` of `"scores"` or `"logits"`,
        `[B]` of log-probabilities; zeros for rows that had finished."""
        return tuple(self._finalised[name]) if name in self._finalised else None

    def columns_run(self, prompts: Prompts) -> int:
        """Leading columns of the text of `prompts` that the target has run in all rows; never the last column."""
        rows = zip(prompts.lengths, prompts.padding, self._rows, strict=True)
        ends = [pad + length + len(new) - 1 for length, pad, new in rows]
        return min(*ends, prompts.width + self.steps - 1) if ends else 0

    def add(self, tokens: list[list[int]], committed: list[int], **records: torch.Tensor | None) -> None:
        """Append the result of a round and finalise the steps that are complete.

        Args:
            tokens: K + 1 for each row; the first `committed` of them are kept.
            records: `scores` and `logits`, `[B, K + 1, V]`, and log-probabilities, `[B, K + 1]`. Those in `kept` are
                stored as float32, others are ignored.
        """
        for row, (new, count) in enumerate(zip(tokens, committed, strict=True)):
            self._rows[row] += new[:count]
            for name, record in self._records.items():
                record[row] += records[name][row, :count].float().unbind(0)
        while not self.is_complete:
            if not all([done or len(new) > self.steps for done, new in zip(self.done, self._rows, strict=True)]):
                break
            self._finalise()

    def finish(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    def _finalise(self) -> None:
        step = self.steps
        column = [self._pad_token if done else new[step] for done, new in zip(self.done, self._rows, strict=True)]
        if NO_TOKEN in column:  # the pad token may have the same value
            failed = [row for row, new in enumerate(self._rows) if not self.done[row] and new[step] == NO_TOKEN]
            if failed:  # plain `generate()` raises as well
                raise RuntimeError(no_distribution(f"Row {failed[0]} of the batch", step))
        for name, record in self._records.items():
            present = self.done.index(False)
            blank = torch.zeros_like(record[present][step])
            values = [blank if self.done[row] else record[row][step] for row in range(len(column))]
            self._finalised[name].append(torch.stack(values))
            for kept in record:
                if step < len(kept):
                    kept[step] = None  # a view would keep the scores of the whole round in memory
        self.num_tokens = [count + (not done) for count, done in zip(self.num_tokens, self.done, strict=True)]
        tokens = torch.tensor(column)
        for text in {self._sequences, self._shown}:
            text[:, self._width + step] = tokens
        self.steps += 1

        is_last = self.steps >= self._max_new_tokens
        self.stopped = [is_last or one or token in self._ends for one, token in zip(self.stopped, column, strict=True)]
        if self._host_criteria or self._criteria:
            self.stopped = [any(one) for one in zip(self.stopped, *self._stops_by_criteria(), strict=True)]
        self.is_complete = all(self.stopped)
        if self._pad_token is not None:
            self.done = self.stopped
        if self._streamer is not None:
            self._streamer.put(tokens)

    def _stops_by_criteria(self) -> list[list[bool]]:
        """Whether each row stops, for each group of criteria that has to be called."""
        end, stops = self._width + self.steps, []
        with user_code():
            if self._host_criteria:
                stops.append(self._host_criteria(self._sequences[:, :end], None))
            if self._criteria:
                stops.append(self._criteria(self._shown[:, :end], self.record("scores")))
        # Criteria may return `[B, 1]`.
        return [result.reshape(len(self._rows), -1).any(dim=1).tolist() for result in stops]
