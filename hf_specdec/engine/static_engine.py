"""The static engine: batched speculative decoding on a static KV cache; on a GPU a round is one CUDA graph.

A call of `generate()` gets a `Session`, i.e. buffers and CUDA graphs: a new one, or that of an earlier call of the same
shape. Its rows are admitted together and run in lockstep: a `Run` passes all tokens to a `Transcript`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..auto_k.auto_drafts import Workload
from ..calls.call import Call, SpeculativeOutput
from ..calls.first_pass import FirstPass
from ..calls.kv_transfer import DeferredCache, FinishedCall, has_other_dtypes, holds_all_keys, read_cache
from ..calls.prompts import PromptSpan
from ..calls.request import Arrived, ContinuousBatching, Request
from ..calls.transcript import Transcript
from ..graphs.buckets import next_power_of_two
from ..host.caches import OUTPUT_NAME
from ..modules.patch import user_code
from ..sampling.processors import BlockProcessor
from ..state import upload
from . import prefix_cache
from .alone import choose, without_drafter
from .groups import Groups
from .hosted_target import HostedTarget
from .lease import SessionLease, shape_of
from .prefill import prefill_drafter, run_to_ends
from .prefix_cache import Prefix, can_copy_rows, copy_prefixes, margin_of
from .rounds import RoundReport
from .run import Run
from .runner import Runner
from .session_prefill import can_pack
from .sessions import sessions_of, settled_on_error

# Of the tokens in a user's cache, whose hidden states a drafter lacks, the target runs the last ones again: the first
# number times the new tokens that the call may generate, but at most the second number.
REREAD_PER_NEW_TOKEN, MOST_REREAD = 8, 2048


@torch.inference_mode(False)  # whatever the user's mode: buffers and moved weights outlive the call
@torch.no_grad()
def decode(call: Call) -> SpeculativeOutput | torch.Tensor:
    """Generate on the static engine. Returns what `generate()` does: sequences `[B, P + new]` or `SpeculativeOutput`.

    The target of `call` must be on one device, in evaluation mode, and supported by the engine (see
    `hosting.eligibility`).
    """
    # The target is patched inside this context at most, and only when it is needed.
    with HostedTarget(call.model, call.drafter, call.kept, call.runs_once) as target:
        num_rows = next_power_of_two(call.batch) if target.is_captured else call.batch
        work = Workload(call.max_new_tokens, call.max_new_tokens, call.prompts.longest)
        choice = choose(call, target, num_rows, work)
        if choice is None or not choice.is_alone:
            rows = Lockstep(call, target)
            run = rows.open()
            with settled_on_error(rows.session):
                rows.run_rounds(run)
            output = rows.complete(run)
            if choice is not None:
                choice.note(call.drafter.stats)
            return output
    with without_drafter(call, choice) as alone:
        return decode(alone)


class Lockstep(Runner):
    """The rows of a call of `generate()`, admitted together to a session with as many rows."""

    def __init__(self, call: Call, target: HostedTarget):
        # For prompts that the target itself runs; kept until the drafter has read its results.
        self._first_pass = None if call.inputs is None else FirstPass(call)
        call = _with_reread(call, target)
        prompts = call.prompts
        padding = [pad - prompts.hidden for pad in prompts.padding]
        texts = prompts.input_ids.to(call.device)
        process = BlockProcessor(call.processors, texts, padding, call.temperature, call.ends)
        super().__init__(call, target, process)
        # A captured session may have more rows than the call; they stay finished.
        is_shared = target.is_captured and process.key is not None
        batch = next_power_of_two(call.batch) if is_shared else call.batch
        self._shape = shape_of(call, batch, prompts.longest + call.max_new_tokens, target.is_captured)
        self._requests = call.requests(prompts.rows(call.device), call.seeds)
        for one in self._requests:
            if one.error is not None:
                raise ValueError(one.error)
            if process.row_rules:
                one.processors = process.row_rules[one.index]
        self._numbers = {
            "cached": prompts.cached_lengths,
            "draft_starts": prompts.draft_starts(target.reads_hidden_states),
            "prompt_length_gap": [prompts.longest - length for length in prompts.lengths],
        }
        if call.position_offsets is not None:
            self._numbers["position_offsets"] = call.position_offsets

    def _plan_reuse(self) -> None:
        """Choose what rows reuse of each other: prefixes if prompts are packed, else whole prompts."""
        call, target, prompts = self._call, self.target, self._call.prompts
        has_others = call.inputs is not None or any(call.position_offsets or ())  # inputs besides tokens
        if prompts.cached or has_others or (call.batch - 1) * prompts.longest < prefix_cache.FEWEST_SAVED:
            return
        if can_pack(target):
            self.prefix_margin = margin_of(target, self._shape)
            if self.prefix_margin is None:
                return
        # Hooks may treat rows with equal prompts differently.
        elif not can_copy_rows(call.drafter) or target.keeps_hidden_states or target.has_hooks:
            return
        ids = [row.tolist() for row in prompts.rows(torch.device("cpu"))]
        for one, tokens in zip(self._requests, ids, strict=True):
            one.prompt_ids = tokens
        if self.prefix_margin is None:
            different = {tuple(tokens) for tokens in ids}
            saved = sum(map(len, ids)) - sum(map(len, different))
            groups = Groups(call, target, is_continuous=False)
            if saved >= prefix_cache.FEWEST_SAVED and groups.size(len(different)) < groups.size(call.batch):
                self.merges_equal, self._groups = True, groups

    def open(self) -> Run:
        """Take a session, capture what it lacks, and admit and prefill all rows."""
        is_any_kept = len(sessions_of(self._call.drafter)) > 0
        return self._first_that_fits([self._admit] * (1 + is_any_kept))

    def _free_kept(self) -> None:
        self.lease = self.session = self.state = self._groups = None
        super()._free_kept()

    def _admit(self) -> Run:
        call, shape = self._call, self._shape
        self._plan_reuse()
        if self._first_pass is not None:
            self._first_pass.run(shape.slots, shape.num_draft_tokens)
        lease = SessionLease(call, self.target, shape, self._process)
        with settled_on_error(lease.take()):
            self._use(lease)
            self.state.set_temperature(call.temperature)
            self.state.live = call.prompts.longest
            drafted = self.drafts.current
            needs_rounds = call.max_new_tokens > 1
            # A pass allocates, in the target's dtypes, what is captured or copied to, and tells the form of states.
            has_states = self.state.cache.recurrence is not None
            is_read = call.prompts.cached and (has_states or has_other_dtypes(call.cache, call.model.dtype))
            if self.target.is_captured:
                lengths = (len(one.prompt) for one in self._requests)
                spans = [PromptSpan(row, 0, length) for row, length in enumerate(lengths)]
                lease.allocate(drafted if needs_rounds else None, spans)
            elif is_read or self._groups is not None:
                lease.allocate()
            if needs_rounds and lease.lacks_round(drafted):
                lease.capture_round(drafted)
            # If rounds cannot be captured, a prefill cannot, either.
            self._captures_prefill = not needs_rounds or lease.captured_round(drafted) is not None
            counters = self.counters(call.batch)
            if call.prompts.cached:
                for counts, start in zip(counters.rows, self._numbers["draft_starts"], strict=True):
                    counts.unread_tokens = start
            arrived = Arrived(self._requests, is_open=False)
            run = Run(self, arrived, counters, ContinuousBatching(), self._call.transcript())
            run.admit()
        return run

    def prefill(self, prefixes: Sequence[Prefix], requests: Sequence[Request], running: Sequence[Request]) -> None:
        state, prefill, margin = self.state, self.lease.prefill, self.prefix_margin or 0
        rows = [one.row for one in prefixes]
        self._num_entering = len(rows)
        self._entering = slice(None) if len(rows) == len(self._requests) else upload(rows, state.lengths)
        if not running and len(rows) < self.num_rows:
            state.clear()
        if self._groups is not None:
            self._groups.prefill(state, prefixes, margin, requests, self._fill)
            while not self._groups.prefill_next():
                pass
            self._groups.keep()
            return
        self._fill(requests, state, rows)
        cached = self._numbers["cached"]
        spans = [
            PromptSpan(one.row, max(one.length, cached[one.row]), len(request.prompt))
            for one, request in zip(prefixes, requests, strict=True)
        ]
        if self._captures_prefill and self._first_pass is None:
            prefill.capture(spans)
        if running:
            copy_prefixes(state, self._call.drafter, prefixes, margin)
        else:
            prefill.restart()
            if self._first_pass is not None or self._call.prompts.cached:
                self._bring_cached()
        if self._first_pass is not None:
            prefill.run_first_pass(spans, self._first_pass)
            return
        prefill.start(spans, self._entering)
        prefill.run_rest()

    def prefill_next(self) -> tuple[int, RoundReport]:
        self._first_pass = None
        return self._num_entering, self._commit_first_tokens(self._entering)

    def _bring_cached(self) -> None:
        call, prompts, state = self._call, self._call.prompts, self.state
        if self._first_pass is not None:
            self.target()
            self._first_pass.bring(state, self.target.hidden_states)
            if not prompts.cached:
                return
        else:
            given = call.cache, state.cache, prompts, self.num_rows, call.device
            read_cache(*given)
            if prompts.reread:
                self.lease.prefill.reread(prompts.reread_spans)
                read_cache(*given)
        if not (self.target.reads_hidden_states or prompts.hidden):
            self.target()  # patches the drafter, too
            prefill_drafter(state, call.drafter, max(prompts.cached_lengths), self.lease.prefill.chunk_size)

    def run_rounds(self, run: Run) -> None:
        """Run rounds until every row has ended. Then end the streamer, which may raise, fill the user's cache, and
        return the session to the pool."""
        with settled_on_error(self.session):
            run.run()
            run.transcript.finish()
            if run.rounds_by_shape:
                self.execution = self.lease.execution(next(iter(run.rounds_by_shape)))
            self._hand_over_cache(run.transcript)
        self.lease.keep()

    def _hand_over_cache(self, transcript: Transcript) -> None:
        """Copy keys and values to the user's cache; without one, the output copies them when it is read."""
        call, cache = self._call, self.state.cache
        self._sequences, self._cache = transcript.sequences, call.cache
        if call.cache is None and not call.config.return_dict_in_generate:
            return
        columns = transcript.columns_run(call.prompts)
        if call.cache is not None and cache.recurrence is not None:
            columns = self._run_to_ends(columns)
        self._finished = FinishedCall(call, cache, self._sequences, columns)
        if call.cache is not None:
            with user_code():
                self._finished.write_to(call.cache)
        else:
            self._cache = self.session.lend_buffers(DeferredCache(self._finished))

    def _run_to_ends(self, columns: int) -> int:
        """Bring recurrent states of all rows to the last token but one; returns how many columns have then been run."""
        state, call, prompts, sequences = self.state, self._call, self._call.prompts, self._sequences
        most = prompts.hidden + sequences.shape[1] - 1
        ends = prompts.ends(most)
        if columns == most and state.cache.replay(ends):
            return most
        bases = state.cache.state_positions(len(ends))
        if any(base > end for base, end in zip(bases, ends, strict=True)):
            # States include tokens that the text lacks, so they are computed anew from where the call began.
            if call.inputs is not None:
                return columns
            state.lengths[: len(ends)] = upload(prompts.lengths, state.lengths)
            state.cache.restart()
            if prompts.cached:
                read_cache(call.cache, state.cache, prompts, self.num_rows, call.device)
        # Tokens that were not given (columns before `input_ids`) are in the cache already.
        columns_of_all = torch.nn.functional.pad(sequences, (prompts.hidden, 0))
        texts = [row[pad:] for row, pad in zip(columns_of_all, prompts.padding, strict=True)]
        run_to_ends(state, self.target(), texts, ends, self.lease.prefill.chunk_size)
        return most

    def complete(self, run: Run) -> SpeculativeOutput | torch.Tensor:
        """End the call: complete the user's cache and the statistics. Returns what `generate()` does."""
        call, transcript = self._call, run.transcript
        if call.cache is not None:
            with user_code():
                self._finished.complete(call.cache)
        stats = run.stats(call)
        if not call.config.return_dict_in_generate:
            return self._sequences
        kept, prompts = self.target.hidden_states, call.prompts
        given = prompts.lengths, prompts.cached_lengths, prompts.width - prompts.cached
        logprobs = {name: torch.stack(transcript.record(name), dim=1).to(call.device) for name in call.logprobs}
        return SpeculativeOutput(
            sequences=self._sequences,
            scores=transcript.record("scores"),
            logits=transcript.record("logits"),
            hidden_states=None if kept is None else kept.steps(*given, transcript.num_tokens),
            **{OUTPUT_NAME: self._cache},
            speculation=stats,
            logprobs=logprobs.get("processed"),
            raw_logprobs=logprobs.get("raw"),
        )


def _with_reread(call: Call, target: HostedTarget) -> Call:
    """`call` with the number of cached columns that the target should run again for the drafter."""
    prompts = call.prompts
    is_known = prompts.cached and not prompts.hidden and call.inputs is None and not target.has_hooks
    if not is_known or call.cache is None or not target.reads_hidden_states:
        return call
    if not holds_all_keys(call.cache, prompts.cached):
        return call
    most = min(MOST_REREAD, REREAD_PER_NEW_TOKEN * call.max_new_tokens)
    return replace(call, prompts=replace(prompts, reread=min(prompts.cached, most)))
