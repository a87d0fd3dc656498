"""The static engine: batched speculative decoding on a static KV cache, one CUDA graph a round on a GPU.

A call is a `Request`. It gets a `Session`: buffers and CUDA graphs, its own or those of an earlier call of the same
shape. A `StaticRun` runs the request on the session: prefill, rounds, output.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import torch

from ..host.caches import OUTPUT_NAME
from ..patching.patch import caller
from ..row_buffers import upload
from ..sampling.processors import BlockProcessor
from ..state import DecodeState
from ..stats import Counters
from .auto_drafts import Acceptance
from .buckets import next_power_of_two
from .equal_prompts import EqualPrompts
from .first_pass import FirstPass
from .hosted_target import HostedTarget
from .kv_transfer import DeferredCache, FinishedCall, holds_all_keys, read_cache
from .last_states import positions_of_states, replay_states, run_to_ends
from .lease import SessionLease, first_k, shape_of
from .output import SpeculativeOutput
from .prefill import prefill_drafter
from .prefix_reuse import margin_of, waves_of_call
from .prompts import Prompts
from .request import Request
from .rounds import CallRows, RoundLoop, RoundReport, commit_first_token
from .session_prefill import can_pack
from .sessions import Session, sessions_of, settled_on_error
from .transcript import Transcript

# Of the tokens in a cache of the caller, whose hidden states a drafter lacks, the target runs as many again as these
# times the new tokens that the call may generate, at most the second.
REREAD_PER_NEW_TOKEN, MOST_REREAD = 8, 2048


@torch.inference_mode(False)  # whatever the caller's: buffers and weights that are moved outlive the call
@torch.no_grad()
def decode(request: Request) -> SpeculativeOutput | torch.Tensor:
    """Generate on the static engine: what `generate()` returns, sequences `[B, P + new]` or a `SpeculativeOutput`.

    The target of `request` is on one device, in evaluation mode, and of the kinds that the engine supports (see
    `integration.eligibility`).
    """
    run = StaticRun(request)
    with run:
        run.prepare()
        run.run_rounds()
    return run.finish()


class StaticRun:
    """One request on the static engine. A context: the target is patched inside at most, and only if need be.

    Args:
        request: to run.
    """

    def __init__(self, request: Request):
        kept = [name for name in ("scores", "logits", "hidden_states") if request.keeps(name)]
        self._first_pass = None if request.inputs is None else FirstPass(request, "hidden_states" in kept)
        self._target = HostedTarget(request.model, request.drafter, kept)
        request = replace(request, prompts=self._with_reread(request))
        self._request, prompts = request, request.prompts
        self._process = BlockProcessor(
            request.processors,
            prompts.input_ids,
            [pad - prompts.hidden for pad in prompts.padding],
            request.temperature,
        )
        is_captured = self._target.is_captured
        # Rows beyond those of the call take no part in it.
        batch = next_power_of_two(request.batch) if is_captured and self._process.key is not None else request.batch
        shape = shape_of(request, batch, prompts.longest + request.max_new_tokens, is_captured)
        self._lease = SessionLease(self._target, shape, request.config.prefill_chunk_size)
        self._transcript = Transcript(
            prompts.input_ids,
            request.criteria,
            request.pad_token_id,
            request.max_new_tokens,
            request.streamer,
            keep_scores="scores" in kept,
            keep_logits="logits" in kept,
        )
        # K of the first rounds.
        self._num_drafts = first_k(request, shape)
        self._remaining, self._seeds = request.remaining, request.seeds
        is_packed = request.batch == 1 or can_pack(self._target)
        margin = margin_of(self._target, shape.num_draft_tokens) if is_packed and request.batch > 1 else None
        self._waves = waves_of_call(request, margin)
        self._equal = None if is_packed else EqualPrompts.of(request, self._target)

    def _with_reread(self, request: Request) -> Prompts:
        """The prompts of `request`, with what the target runs again of them where the drafter lacks its hidden states.

        That is as much as pays for itself by what more of the drafts are accepted: a prefill runs tokens in a small
        part of the time that a round takes for each.
        """
        prompts = request.prompts
        is_known = prompts.cached and not prompts.hidden and request.inputs is None and not self._target.has_hooks
        if not is_known or request.cache is None or not self._target.reads_hidden_states:
            return prompts
        if not holds_all_keys(request.cache, prompts.cached):
            return prompts
        most = min(MOST_REREAD, REREAD_PER_NEW_TOKEN * request.max_new_tokens)
        return replace(prompts, reread=min(prompts.cached, most))

    def __enter__(self) -> StaticRun:
        self._target.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._target.__exit__(*exception)

    def prepare(self) -> None:
        """Get a session, prefill it and capture what it lacks.

        Where memory does not suffice, what is kept for other calls is freed, and it is tried once more.
        """
        pool = sessions_of(self._request.drafter)
        try:
            self._prepare_session()
            return
        except torch.OutOfMemoryError:
            if not len(pool):
                raise
        # The error, which held what was allocated, is gone.
        self._lease.drop()
        if self._equal is not None:
            self._equal.drop()
        pool.clear()
        torch.cuda.empty_cache()
        self._prepare_session()

    def _prepare_session(self) -> None:
        lease, process, waves = self._lease, self._process, self._waves
        if self._first_pass is not None:
            self._first_pass.run(lease.shape.slots, lease.shape.num_draft_tokens)
        session = lease.take()
        with settled_on_error(session):
            self._begin(session.state, self._request.prompts, list(range(self._request.batch)))
            num_drafts = self._num_drafts
            lacks_round = max(self._remaining) > 1 and lease.lacks_round(process, num_drafts)
            if lacks_round:
                lease.start_compiler()
            self._prefill(session)
            if lacks_round:
                lease.capture_round(process, num_drafts)
            # Where rounds cannot be captured, nor can a prefill. A call for one token has none.
            can_capture = (
                lease.lacks_round(process, num_drafts) or lease.captured_round(process, num_drafts) is not None
            )
            is_by_engine = self._first_pass is None and can_capture
            if is_by_engine and self._equal is not None and self._equal.lacks():
                self._equal.capture()
                self._prefill(session)
            elif is_by_engine and self._equal is None and lease.prefill.lacks(waves):
                lease.prefill.capture(waves)
                self._prefill(session)

    def _begin(self, state: DecodeState, prompts: Prompts, rows: list[int]) -> None:
        """Fill `state` with `prompts`, those of `rows` of the call."""
        request, offsets = self._request, self._request.position_offsets
        temperatures = request.row_temperatures
        state.begin(
            prompts.rows(request.device),
            [self._remaining[row] for row in rows],
            request.eos_token_ids,
            self._seeds[rows],
            request.temperature,
            None if temperatures is None else temperatures[rows],
            prompts.cached_lengths,
            prompts.draft_starts(self._target.reads_hidden_states),
            None if offsets is None else [offsets[row] for row in rows],
            prompts.ahead,
        )

    def _prefill(self, session: Session) -> None:
        """Bring the caller's cache and the prompts into the session."""
        if self._equal is not None:
            self._lease.allocate()
            self._equal.prefill(session.state, self._begin)
            return
        prompts = self._request.prompts
        is_there = prompts.cached or self._first_pass is not None
        if prompts.cached and session.state.cache.recurrence is not None:
            self._lease.allocate()  # by a pass, which tells how the target's layers hold states
        bring_cached = functools.partial(self._bring_cached, session) if is_there else None
        self._lease.prefill.run(self._waves, bring_cached, self._first_pass)

    def _bring_cached(self, session: Session) -> None:
        request, prompts, state = self._request, self._request.prompts, session.state
        if self._first_pass is not None:
            self._target()
            self._first_pass.bring(state, self._target.hidden_states)
            if not prompts.cached:
                return
        else:
            batch, device = self._lease.shape.batch, request.device
            read = functools.partial(read_cache, request.cache, state.cache, prompts, batch, device)
            read()
            if prompts.reread:
                self._lease.prefill.reread(prompts.reread_spans, read)
        if not (self._target.reads_hidden_states or prompts.hidden):
            self._target()  # which patches the drafter, too
            prefill_drafter(state, request.drafter, max(prompts.cached_lengths), self._lease.prefill.chunk_size)

    def run_rounds(self) -> None:
        """Run rounds until every row has ended; then fill the caller's cache, and keep the session for other calls."""
        request, session = self._request, self._lease.session
        acceptance = Acceptance(request.num_draft_tokens)
        with settled_on_error(session):
            self._rows = CallRows(
                self._transcript,
                Counters(request.batch, request.num_draft_tokens, acceptance.observe if request.is_auto else None),
                request.prompts.longest,
                self._remaining,
                session.state.finished,
            )
            starts = request.prompts.draft_starts(self._target.reads_hidden_states)
            for row, start in enumerate(starts):
                self._rows.counters.rows[row].unread_tokens = start if request.prompts.cached else 0
            for prefix in self._equal.prefixes if self._equal is not None else self._waves[-1].prefixes:
                self._rows.counters.count_cached(prefix.row, prefix.length)
            stage = self._lease.stage(self._process, request, acceptance, self._rows.tokens_left)
            self._commit_first_token(session)
            loop = RoundLoop(stage, self._rows)
            start = time.perf_counter()
            loop.run()
            self._seconds = time.perf_counter() - start
            self._hand_over_cache(session)
        self._lease.keep()
        if self._equal is not None:
            self._equal.keep()

    def _commit_first_token(self, session: Session) -> None:
        self._first_pass = None
        result, scores, logits = commit_first_token(session.state, self._process, slice(None))
        self._rows.take_first(None, *RoundReport(result).read(), scores=scores, logits=logits)

    def _hand_over_cache(self, session: Session) -> None:
        """Copy keys and values to the caller's cache; if there is none, let the output copy them when it is asked."""
        request, transcript = self._request, self._transcript
        self._sequences = transcript.sequences
        columns = transcript.columns_run(request.prompts)
        if request.cache is not None and session.state.cache.recurrence is not None:
            columns = self._run_to_ends(session.state, columns)
        self._finished = FinishedCall.of(request, session.state.cache, self._sequences, columns)
        self._cache = request.cache
        if request.cache is not None:
            with caller():
                self._finished.write_to(request.cache)
        elif request.config.return_dict_in_generate:
            self._cache = session.lend_buffers(DeferredCache(self._finished))

    def _run_to_ends(self, state: DecodeState, columns: int) -> int:
        """Bring recurrent states to the last token but one of all rows; returns how many columns were run then.

        Args:
            state: of the session.
            columns: that the target has run in all rows.
        """
        request, prompts, sequences = self._request, self._request.prompts, self._sequences
        most = prompts.hidden + sequences.shape[1] - 1
        ends = prompts.ends(most)
        if columns == most and replay_states(state.cache, ends):
            return most
        bases = positions_of_states(state.cache, len(ends))
        if any(base > end for base, end in zip(bases, ends, strict=True)):
            # States have tokens in them that the text does not have: they are made anew from where the call began.
            if request.inputs is not None:
                return columns
            state.lengths[: len(ends)] = upload(prompts.lengths, state.lengths)
            state.cache.restart()
            if prompts.cached:
                read_cache(request.cache, state.cache, prompts, self._lease.shape.batch, request.device)
        # Tokens that were not given are in the cache already.
        columns_of_all = torch.nn.functional.pad(sequences, (prompts.hidden, 0))
        texts = [row[pad:] for row, pad in zip(columns_of_all, prompts.padding, strict=True)]
        run_to_ends(state, self._target(), texts, ends, self._lease.prefill.chunk_size)
        return most

    def finish(self) -> SpeculativeOutput | torch.Tensor:
        """End the call: the rest of the caller's cache, the streamer, statistics. Returns what `generate()` does."""
        request, transcript = self._request, self._transcript
        if request.cache is not None:
            with caller():
                self._finished.complete(request.cache)
        transcript.finish()
        rounds = self._rows.rounds_by_k
        stats = self._rows.counters.summary(
            num_assistant_tokens=request.num_draft_tokens,
            engine="static",
            reason=request.reason,
            execution=self._lease.execution(self._process, self._num_drafts) if rounds else "no rounds",
            batch_invariant=request.drafter.batch_invariant,
            draft_probs=self._lease.shape.draft_probs,
            num_rounds=rounds.total(),
            rounds_by_k=dict(rounds),
            seconds=self._seconds,
        )
        request.drafter._last_stats = stats
        if not request.config.return_dict_in_generate:
            return self._sequences
        kept = self._target.hidden_states
        return SpeculativeOutput(
            sequences=self._sequences,
            scores=transcript.scores,
            logits=transcript.logits,
            hidden_states=None if kept is None else kept.steps(request.prompts, transcript.steps),
            **{OUTPUT_NAME: self._cache},
            speculation=stats,
        )
