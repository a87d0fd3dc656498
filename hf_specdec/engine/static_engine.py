"""The static engine: batched speculative decoding on a static KV cache, one CUDA graph a round on a GPU.

A call is a `Request`. It gets a `Session`: buffers and CUDA graphs, its own or those of an earlier call of the same
shape. A `StaticRun` runs the request on the session: prefill, rounds, output.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ..patching.hidden_states import modules_of
from ..patching.patch import caller
from ..patching.support import num_cache_layers
from ..sampling.processors import BlockProcessor
from ..state import Shape
from ..stats import Counters
from .buckets import captured_width, next_power_of_two, slots_for, useful_drafts
from .capture import capture_prefill, capture_round, why_not_captured
from .cuda_graphs import start_compiler
from .fingerprint import fingerprint, weights_of
from .kv_transfer import DeferredCache, FinishedCall, read_cache
from .output import SpeculativeOutput
from .request import Request
from .rounds import RoundLoop, prefill, prefill_drafter, run_round
from .sessions import Session, SessionKey, sessions_of, settled_on_error
from .target import Target, patched_target
from .transcript import Transcript

PREFILL_CHUNK_SIZE = 2048


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
        self._request = request
        self._modules = modules_of(request.model, request.drafter)
        kept = [name for name in ("scores", "logits", "hidden_states") if request.keeps(name)]
        self._eager_reason = why_not_captured(request.model, self._modules, kept)
        prompts = request.prompts
        self._process = BlockProcessor(
            request.processors,
            prompts.input_ids,
            [pad - prompts.hidden for pad in prompts.padding],
            request.temperature,
        )
        self._shape = _shape_of(request, is_captured=self._is_captured, is_padded=self._process.key is not None)
        self._chunk_size = request.config.prefill_chunk_size or PREFILL_CHUNK_SIZE
        self._prefill_width = (
            captured_width(prompts.longest_uncached, self._shape.batch, self._chunk_size) if self._is_captured else None
        )
        self._transcript = Transcript(
            prompts.input_ids,
            request.criteria,
            request.pad_token_id,
            request.max_new_tokens,
            request.streamer,
            keep_scores="scores" in kept,
            keep_logits="logits" in kept,
        )
        self._remaining, self._seeds = request.remaining, request.seeds
        self._pool = sessions_of(request.drafter)
        self._contexts = ExitStack()
        self._patched: Target | None = None
        self._key: SessionKey | None = None  # of a session that is kept

    @property
    def _is_captured(self) -> bool:
        """Whether rounds are to be captured; then the session is kept for other calls."""
        return self._eager_reason is None

    @property
    def _reads_aux_hidden_states(self) -> bool:
        drafter = self._request.drafter
        return bool(drafter.aux_hidden_state_layer_ids) or drafter.reads_last_hidden_state

    def __enter__(self) -> StaticRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._contexts.close()

    def _target(self) -> Target:
        """The target, patched from the first use on: a call that only replays graphs leaves its modules alone."""
        if self._patched is None:
            request = self._request
            self._patched = self._contexts.enter_context(
                patched_target(request.model, request.drafter, request.keeps("hidden_states"))
            )
        return self._patched

    def prepare(self) -> None:
        """Get a session, prefill it and capture what it lacks.

        Where memory does not suffice, what is kept for other calls is freed, and it is tried once more.
        """
        try:
            self._session = self._prepared_session()
            return
        except torch.OutOfMemoryError:
            if not len(self._pool):
                raise
        # The error, which held what was allocated, is gone.
        self._pool.clear()
        torch.cuda.empty_cache()
        self._session = self._prepared_session()

    def _prepared_session(self) -> Session:
        request = self._request
        # A second try has a key, as modules may be patched by then, and finds nothing that is kept.
        session = self._kept_session() if self._is_captured and self._key is None else None
        if session is None:
            num_layers = num_cache_layers(request.model)
            session = Session(request.drafter.new_state(self._shape, num_layers, request.model.device))
        with settled_on_error(session):
            session.acquire()
            self._begin(session)
            lacks_round = self._is_captured and self._process.key not in session.rounds
            if lacks_round and request.drafter.compile_rounds:
                start_compiler(request.model.device)
            self._prefill(session)
            if lacks_round:
                self._capture_round(session)
            if self._lacks_prefill(session):
                self._capture_prefill(session)
                self._prefill(session)
        return session

    def _kept_session(self) -> Session | None:
        """A session that earlier calls have left for calls such as this one; None if there is none."""
        request = self._request
        key = SessionKey(self._shape, request.drafter.compile_rounds, fingerprint(self._modules, request.model.device))
        session = self._pool.take(key)
        if session is None:
            self._target()  # patching may move weights
            key = key._replace(fingerprint=key.fingerprint._replace(weights=weights_of(self._modules)))
        self._key = key
        return session

    def _begin(self, session: Session) -> None:
        request, prompts = self._request, self._request.prompts
        session.state.begin(
            prompts.rows(request.model.device),
            self._remaining,
            request.eos_token_ids,
            self._seeds,
            request.temperature,
            request.row_temperatures,
            prompts.cached_lengths,
            prompts.draft_starts(self._reads_aux_hidden_states),
        )

    def _prefill(self, session: Session) -> None:
        """Bring the caller's cache and the prompts into the session, captured if that was done before, and draft."""
        request, prompts, state = self._request, self._request.prompts, session.state
        if prompts.cached:
            read_cache(request.cache, state.cache, prompts, self._shape.batch, request.model.device)
            if not (self._reads_aux_hidden_states or prompts.hidden):
                self._target()  # which patches the drafter, too
                prefill_drafter(state, request.drafter, max(prompts.cached_lengths), self._chunk_size)
        replay = session.prefills.get(self._prefill_width)
        if replay is None:
            width = max(prompts.longest_uncached - 1, 1)
            prefill(state, self._target(), request.drafter, width, self._chunk_size)
        else:
            replay()

    def _capture_round(self, session: Session) -> None:
        captured = capture_round(session, self._target(), self._request.drafter, self._process)
        session.rounds.add(self._process.key, captured)

    def _lacks_prefill(self, session: Session) -> bool:
        """Whether a prefill of this width is to be captured: where that cannot be, nor are the rounds."""
        has_round = session.rounds.get(self._process.key) is not None
        return self._prefill_width is not None and self._prefill_width not in session.prefills and has_round

    def _capture_prefill(self, session: Session) -> None:
        width = self._prefill_width
        session.prefills.add(width, capture_prefill(session, self._target(), self._request.drafter, width))

    def run_rounds(self) -> None:
        """Run rounds until every row has ended; then fill the caller's cache, and keep the session for other calls."""
        request, session = self._request, self._session
        with settled_on_error(session):
            self._captured = session.rounds.get(self._process.key)
            self._counters = Counters(request.batch, request.num_draft_tokens)
            self._loop = RoundLoop(
                session.state,
                self._next_round(),
                self._transcript,
                self._counters,
                request.prompts.longest,
                self._remaining,
            )
            start = time.perf_counter()
            self._loop.run()
            self._seconds = time.perf_counter() - start
            self._hand_over_cache()
        if self._key is not None:
            self._pool.keep(self._key, session)

    def _next_round(self) -> Callable[[], tuple]:
        if self._captured is not None:
            return functools.partial(self._captured, self._process)
        return functools.partial(run_round, self._session.state, self._target(), self._request.drafter, self._process)

    def _hand_over_cache(self) -> None:
        """Copy keys and values to the caller's cache; if there is none, let the output copy them when it is asked."""
        request, session = self._request, self._session
        self._sequences = self._transcript.sequences
        columns = self._transcript.columns_run(request.prompts)
        self._finished = FinishedCall(request.model, session.state.cache, request.prompts, self._sequences, columns)
        self._past_key_values = request.cache
        if request.cache is not None:
            with caller():
                self._finished.write_to(request.cache)
        elif request.config.return_dict_in_generate:
            self._past_key_values = session.lend_buffers(DeferredCache(self._finished))

    def finish(self) -> SpeculativeOutput | torch.Tensor:
        """End the call: the rest of the caller's cache, the streamer, statistics. Returns what `generate()` does."""
        request, transcript = self._request, self._transcript
        if request.cache is not None:
            with caller():
                self._finished.complete(request.cache)
        transcript.finish()
        captured = self._captured
        stats = self._counters.summary(
            num_assistant_tokens=request.num_draft_tokens,
            engine="static",
            reason=request.reason,
            execution=captured.execution
            if captured
            else f"eager: {self._eager_reason or 'a round cannot be captured'}",
            draft_probs=self._shape.draft_probs,
            num_rounds=self._loop.num_rounds,
            seconds=self._seconds,
        )
        request.drafter._last_stats = stats
        if not request.config.return_dict_in_generate:
            return self._sequences
        kept = self._patched.hidden_states if request.keeps("hidden_states") else None
        return SpeculativeOutput(
            sequences=self._sequences,
            scores=transcript.scores,
            logits=transcript.logits,
            hidden_states=None if kept is None else kept.steps(request.prompts, transcript.steps),
            past_key_values=self._past_key_values,
            speculation=stats,
        )


def _shape_of(request: Request, is_captured: bool, is_padded: bool) -> Shape:
    """The shape of the buffers that `request` needs.

    Args:
        is_captured: whether they are kept for other calls, and therefore of a few sizes only.
        is_padded: whether the batch may have more rows than the call, which then take no part in it.
    """
    batch, max_new_tokens = request.batch, request.max_new_tokens
    ends = request.eos_token_ids
    return Shape(
        batch=next_power_of_two(batch) if is_captured and is_padded else batch,
        slots=slots_for(request.prompts.longest + max_new_tokens, is_captured),
        num_draft_tokens=useful_drafts(request.num_draft_tokens, max_new_tokens, is_captured),
        is_sampling=request.temperature is not None,
        draft_probs=request.draft_probs,
        num_ends=next_power_of_two(max(0 if ends is None else ends.numel(), 8)),
        verification=request.drafter.verification,
    )
