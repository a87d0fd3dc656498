"""The static engine: the loop of speculative decoding, in the order of the algorithm."""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..drafters.base import Drafter
from ..parallel.tensor_parallel import from_first_rank
from ..patching.hidden_states import modules_of
from ..patching.patch import caller
from ..patching.support import num_cache_layers
from ..sampling.processors import BlockProcessor, row_temperatures
from ..sampling.randomness import Randomness
from ..state import DecodeState, Shape
from ..stats import Counters
from .buckets import captured_width, next_power_of_two, slots_for, useful_drafts
from .capture import capture_prefill, capture_round, why_not_captured
from .cuda_graphs import start_compiler
from .fingerprint import fingerprint, weights_of
from .kv_transfer import DeferredCache, FinishedCall, read_cache
from .output import SpeculativeOutput
from .prompts import Prompts
from .request import draws_draft_probs, padding_token, remaining_tokens, sampling_temperature
from .rounds import RoundLoop, prefill, prefill_drafter, run_round
from .sessions import Session, SessionKey, sessions_of
from .target import Target, patched_target
from .transcript import Transcript

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

PREFILL_CHUNK_SIZE = 2048


@torch.inference_mode(False)  # whatever the caller's: buffers and weights that are moved outlive the call
@torch.no_grad()
def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Prompts,
    continued: Cache | None,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    num_draft_tokens: int,
    reason: str,
    randomness: Randomness,
    streamer: BaseStreamer | None = None,
) -> SpeculativeOutput | torch.Tensor:
    """Generate on the static engine.

    Args:
        model: the target, on one device, in evaluation mode.
        drafter: bound to it.
        prompts: of the call.
        continued: the caller's cache, which holds the first `prompts.cached` columns and shall hold the text; or None.
        processors, criteria, config, streamer: as prepared by `generate()`.
        num_draft_tokens: K.
        reason: why this engine runs, for the statistics.
        randomness: where random numbers come from.

    Returns:
        what `generate()` returns: sequences `[B, P + new]`, or a `SpeculativeOutput`.
    """
    wants = {
        name: bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))
        for name in ("scores", "logits", "hidden_states")
    }
    temperature = sampling_temperature(config)
    input_ids = prompts.input_ids
    batch, max_new_tokens = len(input_ids), config.max_length - input_ids.shape[1]
    factors = row_temperatures(processors, batch)
    seeds = from_first_rank(randomness.row_seeds(batch, temperature), model)
    transcript = Transcript(
        input_ids,
        criteria,
        padding_token(criteria, config),
        max_new_tokens,
        streamer,
        keep_scores=wants["scores"],
        keep_logits=wants["logits"],
    )
    process = BlockProcessor(processors, input_ids, [pad - prompts.hidden for pad in prompts.padding], temperature)
    longest, longest_uncached = prompts.longest, prompts.longest_uncached
    reads_aux_hidden_states = bool(drafter.aux_hidden_state_layer_ids) or drafter.reads_last_hidden_state
    remaining = remaining_tokens(model, prompts, max_new_tokens)
    chunk_size = config.prefill_chunk_size or PREFILL_CHUNK_SIZE
    modules = modules_of(model, drafter)
    obstacle = why_not_captured(model, modules, wants)
    is_kept = obstacle is None
    shape = Shape(
        next_power_of_two(batch) if is_kept and process.key is not None else batch,
        slots_for(longest + max_new_tokens, is_kept),
        useful_drafts(num_draft_tokens, max_new_tokens, is_kept),
        temperature is not None,
        draws_draft_probs(drafter, temperature, factors),
        next_power_of_two(max(0 if config._eos_token_tensor is None else config._eos_token_tensor.numel(), 8)),
        drafter.verification,
    )

    width = captured_width(longest_uncached, shape.batch, chunk_size) if is_kept else None
    stack, pool = ExitStack(), sessions_of(drafter)

    @functools.cache
    def host() -> Target:
        """What runs eagerly or is captured runs on this; modules are left alone in calls that only replay."""
        return stack.enter_context(patched_target(model, drafter, wants["hidden_states"]))

    def session_key() -> SessionKey | None:
        if not is_kept:
            return None
        key = SessionKey(shape, drafter.compile_rounds, fingerprint(modules, model.device))
        if key not in pool:
            host()  # which may move weights
            key = key._replace(fingerprint=key.fingerprint._replace(weights=weights_of(modules)))
        return key

    def allocate() -> DecodeState:
        return drafter.new_state(shape, num_cache_layers(model), model.device)

    def fill(session: Session) -> None:
        session.give_up_buffers()
        session.state.begin(
            prompts.rows(model.device),
            remaining,
            config._eos_token_tensor,
            seeds,
            temperature,
            factors,
            prompts.cached_lengths,
            prompts.draft_starts(reads_aux_hidden_states),
        )
        lacks_round = is_kept and process.key not in session.rounds
        if lacks_round and drafter.compile_rounds:
            start_compiler(model.device)
        prefill_session(session)
        if lacks_round:
            session.rounds.add(process.key, capture_round(session, host(), drafter, process))
        if width is not None and width not in session.prefills and session.rounds.get(process.key) is not None:
            session.prefills.add(width, capture_prefill(session, host(), drafter, width))
            prefill_session(session)

    def prefill_session(session: Session) -> None:
        state = session.state
        if prompts.cached:
            read_cache(continued, state.cache, prompts, shape.batch, model.device)
            if not (reads_aux_hidden_states or prompts.hidden):
                host()
                prefill_drafter(state, drafter, max(prompts.cached_lengths), chunk_size)
        replay = session.prefills.get(width)
        if replay is None:
            prefill(state, host(), drafter, max(longest_uncached - 1, 1), chunk_size)
        else:
            replay()

    with stack:
        session = stack.enter_context(pool.session(session_key(), allocate, fill))
        state, captured = session.state, session.rounds.get(process.key)
        if captured is None:
            next_round = functools.partial(run_round, state, host(), drafter, process)
        else:
            next_round = functools.partial(captured, process)
        start = time.perf_counter()
        counters = Counters(batch, num_draft_tokens)
        rounds = RoundLoop(state, next_round, transcript, counters, longest, remaining)
        rounds.run()
        seconds = time.perf_counter() - start
        sequences = transcript.sequences
        call = FinishedCall(model, state.cache, prompts, sequences, transcript.columns_run(prompts))
        if continued is not None:
            with caller():
                call.write_to(continued)
        past_key_values = continued
        if past_key_values is None and config.return_dict_in_generate:
            past_key_values = session.lend_buffers(DeferredCache(call))
    if continued is not None:
        with caller():
            call.complete(continued)
    transcript.finish()
    drafter._last_stats = rounds.counters.summary(
        num_assistant_tokens=num_draft_tokens,
        engine="static",
        reason=reason,
        execution=captured.execution if captured else f"eager: {obstacle or 'a round cannot be captured'}",
        draft_probs=state.draft_probs,
        num_rounds=rounds.num_rounds,
        seconds=seconds,
    )
    if not config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences,
        scores=transcript.scores,
        logits=transcript.logits,
        hidden_states=(host().hidden_states.steps(prompts, transcript.steps) if wants["hidden_states"] else None),
        past_key_values=past_key_values,
        speculation=drafter.stats,
    )
