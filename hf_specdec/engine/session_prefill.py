"""The prefill of a session: it splits the positions of prompts into chunks, which run eagerly or captured."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..cache.layer_kinds import Use
from ..calls.first_pass import FirstPass
from ..calls.prompts import PromptSpan
from ..graphs import buckets
from ..patching.experts import copies_experts
from ..patching.support import why_not_used
from ..state import upload
from .capture import capture_prefill
from .hosted_target import HostedTarget
from .prefill import PromptBuffers, finish_prefill, prefill_chunk
from .sessions import Session

# Most tokens of an eager forward pass: of a call's single row, which plain `generate()` runs at once; of rows packed in
# one; and columns of padded rows, or of a single row between two rounds.
EAGER_ROW_TOKENS, EAGER_PACKED_TOKENS, EAGER_COLUMNS = 32768, 8192, 2048
# Recurrent layers must run the first pass over a text as one over several tokens, as transformers does.
FEWEST_PADDED_COLUMNS = 2


def can_pack(target: HostedTarget) -> bool:
    """Whether prompts of several rows are prefilled as one row.

    They are not if modules have hooks, which may treat each row of the batch in its own way.
    """
    if target.has_hooks or target.keeps_hidden_states:
        return False
    return target.drafter.packs_prompts and why_not_used(target.model, Use.PACKING) is None


class SessionPrefill:
    """The prefill of a session, in passes of at most `chunk_size` columns.

    With `is_continuous` many groups of prompts of different lengths are prefilled, so captured chunks have a few sizes
    only.
    """

    def __init__(self, session: Session, target: HostedTarget, chunk_size: int | None, is_continuous: bool):
        self._session, self._target, self._is_continuous = session, target, is_continuous
        self._batch = len(session.state.tokens)
        self._goes_on = False
        self._is_packed = self._batch > 1 and can_pack(target)
        if self._is_packed:
            # Between rounds a pass has at most the tokens of a captured chunk.
            most = buckets.PACKED_TOKENS[0] if is_continuous else EAGER_PACKED_TOKENS
            self.chunk_size = most if chunk_size is None else self._batch * chunk_size
        else:
            is_call = self._batch == 1 and not is_continuous
            self.chunk_size = chunk_size or (EAGER_ROW_TOKENS if is_call else EAGER_COLUMNS)

    def restart(self) -> None:
        """Begin with no text in any row. The caller may then copy cached parts of prompts, before `start`."""
        state = self._session.state
        state.cache.restart()
        self._target.drafter.start_prefill(state)
        state.block_width = 1

    def start(self, spans: Sequence[PromptSpan], rows: torch.Tensor | slice = slice(None)) -> None:
        """Begin a prefill of `rows`, `[n]` int64 or a slice of all, which `run_next` runs; others may be between two
        rounds."""
        if isinstance(rows, torch.Tensor) and not self._is_packed:
            state = self._session.state
            state.cached[rows] = upload([span.begin for span in spans], state.cached)
        self._spans, self._rows = spans, rows
        self._left, self._done, self._num_finished = deque(self._chunks(spans)), 0, 0
        self._fill(spans, sum(self._left))

    def run_first_pass(self, spans: Sequence[PromptSpan], first_pass: FirstPass) -> None:
        """Prefill the drafter, padded, after the target itself has run the prompts."""
        state, drafter = self._session.state, self._target.drafter
        self._target()  # patches the drafter, too
        prompts = PromptBuffers(state)
        chunks = self._eager_chunks(max(span.end - span.begin for span in spans))
        prompts.fill(spans, sum(chunks))
        state.records = first_pass
        try:
            for chunk in chunks:
                prefill_chunk(state, first_pass, drafter, chunk, prompts)
        finally:
            state.records = None
        finish_prefill(state, prompts, slice(None))

    def reread(self, spans: Sequence[PromptSpan]) -> None:
        """Run the last positions of the user's cache again, so that the drafter gets their hidden states. The keys and
        values that this leaves may differ from those of that cache."""
        state = self._session.state
        rows = upload([span.row for span in spans], state.lengths)
        state.cached[rows] = upload([span.begin for span in spans], state.cached)
        self.start(spans)
        while self._left:
            self._run_chunk(self._left.popleft())
        state.cached[rows] = upload([span.end for span in spans], state.cached)
        self._goes_on = True

    def run_next(self) -> slice:
        """Run the next chunk of the prefill; returns which of the spans it completes. Those of some packed rows are
        complete one after the other, others all at the end."""
        self._run_chunk(self._left.popleft())
        first, end, is_by_row = self._num_finished, 0, self._is_packed and isinstance(self._rows, torch.Tensor)
        if not self._left:
            end = len(self._spans)
        elif is_by_row:
            end = bisect_right(list(accumulate(span.end - span.begin for span in self._spans)), self._done)
        if first < end or not self._left:
            rows = self._rows[first:end] if is_by_row else self._rows
            finish_prefill(self._session.state, self._session.prompts, rows)
        self._num_finished = end
        return slice(first, end)

    def run_rest(self) -> slice:
        """Run all chunks that are left; returns which of the spans they complete."""
        first = self._num_finished
        while self._left:
            self.run_next()
        return slice(first, self._num_finished)

    def _fill(self, spans: Sequence[PromptSpan], steps: int) -> None:
        prompts = self._session.prompts
        if self._is_packed and prompts.packed is None:
            prompts.pack(self._session.state, self._target.drafter)
        prompts.fill(spans, steps, self._goes_on)
        self._goes_on = False

    def _run_chunk(self, chunk: int) -> None:
        session, state, spans = self._session, self._session.state, self._spans
        self._done, done = self._done + chunk, self._done
        replay = session.prefills.get(chunk)
        if replay is not None:
            replay()
            return
        if self._batch == 1 and spans and done + chunk <= spans[0].end - spans[0].begin:
            state.num_before = spans[0].begin + done
        try:
            prefill_chunk(state, self._target(), self._target.drafter, chunk, session.prompts)
        finally:
            state.num_before = None

    def run_captured(self, spans: Sequence[PromptSpan]) -> None:
        """Run the chunks that `capture` would capture for `spans`, without capturing them; they prefill no position."""
        if copies_experts(self._target.model, self._target.drafter):
            return
        for chunk in dict.fromkeys(self._captured_chunks(spans)):
            self._fill((), chunk)
            prefill_chunk(self._session.state, self._target(), self._target.drafter, chunk, self._session.prompts)

    def capture(self, spans: Sequence[PromptSpan]) -> None:
        """Capture the chunks that a prefill of `spans` lacks. The prefill must begin after that."""
        session = self._session
        for chunk in dict.fromkeys(self._captured_chunks(spans)):
            if chunk not in session.prefills:
                self._fill((), chunk)  # warm-ups and the capture prefill no position
                session.prefills.add(chunk, capture_prefill(session, self._target, chunk))

    def _columns(self, spans: Sequence[PromptSpan]) -> int:
        """Columns of the prefill: the tokens of all prompts if they are packed, else those of the longest."""
        lengths = [span.end - span.begin for span in spans]
        return sum(lengths) if self._is_packed else max(lengths, default=0)

    def _captured_chunks(self, spans: Sequence[PromptSpan]) -> list[int]:
        """The widths of the chunks of a captured prefill; none if it is not captured."""
        if not self._target.is_captured:
            return []
        columns = self._columns(spans)
        if self._is_continuous:
            if not self._is_packed:
                return buckets.group_chunks(columns)
            return buckets.packed_chunks(columns, max((span.end for span in spans), default=0))
        width = buckets.captured_width(columns, 1 if self._is_packed else self._batch, self.chunk_size)
        return [] if width is None else [width]

    def _chunks(self, spans: Sequence[PromptSpan]) -> list[int]:
        captured, prefills = self._captured_chunks(spans), self._session.prefills
        if captured and not any(chunk in prefills and prefills.get(chunk) is None for chunk in captured):
            return captured
        return self._eager_chunks(self._columns(spans))

    def _eager_chunks(self, columns: int) -> list[int]:
        width = max(columns, 1 if self._is_packed else FEWEST_PADDED_COLUMNS)
        return [min(self.chunk_size, width - first) for first in range(0, width, self.chunk_size)]
