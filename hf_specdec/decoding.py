"""The static engine: the loop of speculative decoding, in the order of the algorithm."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing

from . import ops
from .attention import ragged_attention
from .continuation import DeferredCache, FinishedCall, Prompts, read_cache
from .drafters.base import Drafter
from .experts import copies_experts, experts_without_host, own_experts
from .fingerprint import behaviour_of, fingerprint, weights_of
from .fusing import fused_products
from .graphs import CAPTURE, Capture, first_line, start_compiler
from .hosting import num_cache_layers, num_positions
from .patching import caller, current_engine, engine
from .peers import sums_over_peers
from .ranks import from_first_rank, local_products, tensor_parallel_group
from .sampling import (
    BlockProcessor,
    Randomness,
    Verdict,
    row_temperatures,
    verify_block,
    verify_greedy,
    verify_sampling,
)
from .sessions import Session, SessionKey
from .state import DecodeState, Shape
from .stats import Counters, SpeculationStats
from .taps import TapRecorder, modules_of
from .transcript import Transcript

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PREFILL_CHUNK_SIZE = 2048

# Captured prefills have a power of two of columns, at least the first; rows times columns are at most the second. Of so
# few tokens a GPU is done before the host has launched them one operation after the other (one H200, 128 tokens of an
# 8B target: 15 of 52 ms); with more it is the columns beyond the prompts that cost time.
FEWEST_COLUMNS, MOST_CAPTURED_TOKENS = 16, 1024

# Buffers that are kept for other calls have a power of two of slots between these two, or a multiple of the second.
FEWEST_SLOTS, SLOT_STEP = 512, 4096

# Draft tokens a round up to which such buffers are as asked for, however few tokens there is room for.
FEWEST_DRAFTS = 16

# Rounds that a device may run ahead of what the host has read; none where host and device are one.
LAG = {"cuda": 1}

# Drafts are drawn from the drafter's distribution from this temperature up, unless `draft_probs` says otherwise. It is
# the lowest at which that was measured to pay: SmolLM2 with its drafters, K = 5, one H200, 2 % more tokens a second at
# 0.3, 6 to 13 % at 0.7, 21 to 33 % at 1.0. At lower temperatures the two ways hardly differ.
DRAFT_PROBS_TEMPERATURE = 0.3


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    `past_key_values` is a cache that plain `generate()` can continue: the caller's, or on the static engine one that is
    made when somebody looks at it. `attentions` there are those of a target that computes no weights: empty.
    """

    speculation: SpeculationStats | None = None


class HiddenStates:
    """Keeps the target's hidden states at every slot, for `output_hidden_states=True`."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def store(self, layers: tuple[torch.Tensor, ...], slots: torch.Tensor, num_slots: int) -> None:
        if not self._buffers:
            self._buffers = [layer.new_zeros(layer.shape[0], num_slots, layer.shape[2]) for layer in layers]
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        for buffer, layer in zip(self._buffers, layers, strict=True):
            buffer[rows, slots] = layer

    def steps(self, prompts: Prompts, num_steps: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """As `generate()` returns them: the padded prompt but for cached columns first, then one position a step."""
        prompt_lengths, width = prompts.lengths, prompts.width - prompts.cached

        def gather(buffer: torch.Tensor, step: int) -> torch.Tensor:
            if step > 0:
                rows = torch.arange(buffer.shape[0], device=buffer.device)
                return buffer[rows, torch.tensor(prompt_lengths, device=buffer.device) - 1 + step][:, None]
            out = buffer.new_zeros(buffer.shape[0], width, buffer.shape[2])
            for row, (length, cached) in enumerate(zip(prompt_lengths, prompts.cached_lengths, strict=True)):
                out[row, width - (length - cached) :] = buffer[row, cached:length]
            return out

        return tuple(tuple(gather(buffer, step) for buffer in self._buffers) for step in range(num_steps))


@dataclass
class Target:
    """The target as the round sees it: tokens and slots in, logits and taps out.

    Attributes:
        model: the target.
        recorder: listens for the drafter's taps.
        hidden_states: keeps all hidden states if the caller wants them.
    """

    model: PreTrainedModel
    recorder: TapRecorder
    hidden_states: HiddenStates | None = None

    def __call__(
        self, state: DecodeState, tokens: torch.Tensor, slots: torch.Tensor, logits_to_keep: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `[B, n]` tokens at `[B, n]` slots: logits `[B, n, V]` (or the last `logits_to_keep`) and taps."""
        state.cache.advance(slots, state.live)
        out = self.model(
            input_ids=tokens,
            attention_mask=state.cache.attention_mask(slots),
            position_ids=state.position_ids(slots),
            past_key_values=state.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=self.hidden_states is not None,
            return_dict=True,
        )
        if self.hidden_states is not None:
            self.hidden_states.store(out.hidden_states, slots, state.slots)
        return out.logits, self.recorder.taps


def prefill(state: DecodeState, target: Target, drafter: Drafter, width: int, chunk_size: int) -> None:
    """Run what the cache lacks of the prompts but for their last tokens, in `width` columns, and draft.

    There may be more columns than they need. Afterwards the state is as if a round had just committed the last token of
    each prompt: that token has not passed through the target, and the drafter has proposed what follows it. It is the
    same if prefill is run again.
    """
    batch = state.tokens.shape[0]
    prompt_end = state.lengths - 1
    rows = torch.arange(batch, device=state.tokens.device)
    columns = torch.arange(width, device=state.tokens.device)
    last_taps = None
    for chunk in columns.split(chunk_size):
        positions = state.cached[:, None] + chunk
        slots = torch.where(positions < prompt_end[:, None], positions, state.scrap)
        _, taps = target(state, state.tokens.gather(1, slots), slots, logits_to_keep=1)
        if taps is not None:
            drafter.prefill(state, taps, slots)
            last = prompt_end - 1 - positions[:, 0]
            here = taps[rows, last.clamp(0, len(chunk) - 1)]
            is_here = ((last >= 0) & (last < len(chunk)))[:, None]
            last_taps = torch.where(is_here, here, torch.zeros_like(here) if last_taps is None else last_taps)
        else:
            drafter.prefill(state, None, slots)
    blank = state.tokens.new_zeros(batch, state.num_draft_tokens + 1)
    verdict = Verdict(blank, state.lengths.new_zeros(batch), state.lengths.new_ones(batch))
    window = None
    if last_taps is not None:
        window = last_taps.new_zeros(batch, state.num_draft_tokens + 1, last_taps.shape[-1])
        window[:, 0] = last_taps
    state.adopt(drafter.propose(state, window, verdict))


def prefill_drafter(state: DecodeState, drafter: Drafter, width: int, chunk_size: int) -> None:
    """Let a drafter that reads tokens alone read the `width` leading positions that the target's cache holds."""
    for chunk in torch.arange(width, device=state.tokens.device).split(chunk_size):
        drafter.prefill(state, None, torch.where(chunk < state.cached[:, None], chunk, state.scrap))


def step(
    state: DecodeState, target: Target, drafter: Drafter, process: BlockProcessor
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """One round: verify the drafts, commit what holds, draft again. Returns the verdict, scores and logits."""
    block, logits, taps = read(state, target)
    scores = process(logits, block, state)
    return settle(state, drafter, scores, taps), scores, logits


def read(state: DecodeState, target: Target) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """First half of a round: the target reads the drafts. Returns the block, its logits and taps."""
    block, slots = state.block()
    return block, *target(state, block, slots)


def settle(state: DecodeState, drafter: Drafter, scores: torch.Tensor, taps: torch.Tensor | None) -> Verdict:
    """Second half of a round: verify the drafts by `scores` `[B, K + 1, V]`, commit what holds, draft again."""
    verdict = state.commit(verify(scores, state))
    state.adopt(drafter.propose(state, taps, verdict))
    return verdict


def verify(scores: torch.Tensor, state: DecodeState) -> Verdict:
    """Judge the state's proposal by `scores` `[B, K + 1, V]`."""
    if not state.is_sampling:
        return verify_greedy(scores, state.proposal.tokens)
    scores = scores.float()
    if state.verification == "block" and state.proposal.probs is not None:
        return verify_block(scores, *state.proposal, state.seeds, state.lengths, state.limits - state.lengths)
    return verify_sampling(scores, *state.proposal, state.seeds, state.lengths)


@contextmanager
def hosted(model: PreTrainedModel, drafter: Drafter, keep_hidden_states: bool) -> Iterator[Target]:
    """Context in which `model` runs on a ragged cache, for an engine; on exit, also by an error, it is as it was."""
    with ExitStack() as stack:
        if current_engine() is None:
            stack.enter_context(engine())
        stack.enter_context(ragged_attention(model))
        stack.enter_context(own_experts(model, drafter))
        stack.enter_context(local_products(model))
        stack.enter_context(sums_over_peers(model))
        stack.enter_context(ops.narrow_products(model, drafter))
        stack.enter_context(fused_products(model, drafter))
        recorder = stack.enter_context(TapRecorder(model, drafter.tap_boundaries, drafter.taps_last_hidden_state))
        yield Target(model, recorder, HiddenStates() if keep_hidden_states else None)


def sampling_temperature(config: GenerationConfig) -> float | None:
    """The temperature that tokens are sampled at; None when decoding is greedy."""
    return (config.temperature or 1.0) if config.do_sample else None


def draws_draft_probs(drafter: Drafter, temperature: float | None, factors: torch.Tensor | None = None) -> bool:
    """Whether drafts are drawn from the drafter's distribution.

    Args:
        temperature: None when decoding is greedy.
        factors: of `row_temperatures`; the hottest row decides for the batch.
    """
    if temperature is None:
        return False
    if drafter.draft_probs == "auto":
        hottest = temperature if factors is None else temperature * float(factors.max())
        return hottest >= DRAFT_PROBS_TEMPERATURE
    return bool(drafter.draft_probs)


def padding_token(criteria: StoppingCriteriaList, config: GenerationConfig) -> int | None:
    """What rows continue with that stopped before others; None if plain `generate()` lets them go on instead."""
    if config._pad_token_tensor is None or not any(hasattr(rule, "eos_token_id") for rule in criteria):
        return None
    return int(config._pad_token_tensor)


def rooms_of(model: PreTrainedModel, prompts: Prompts, max_new_tokens: int) -> list[int]:
    """How many tokens each row may continue with: as many as are wanted and `model` has positions for.

    Raises:
        ValueError: a prompt has more tokens than there are positions.
    """
    count = num_positions(model)
    if count is None:
        return [max_new_tokens] * len(prompts.lengths)
    if prompts.longest > count:
        raise ValueError(
            f"A prompt has {prompts.longest} tokens, but {type(model).__name__} has {count} positions "
            "(max_position_embeddings); expected no more tokens than that."
        )
    # The last token of a text is not embedded.
    return [min(max_new_tokens, count + 1 - length) for length in prompts.lengths]


class Report:
    """What the host reads of a round, on its way from the device.

    Args:
        verdict: of the round; its tensors may be overwritten by the next one.
    """

    def __init__(self, verdict: Verdict):
        parts = (verdict.tokens, verdict.accepted[:, None], verdict.committed[:, None])
        packed = torch.cat(parts, dim=1)
        self._arrived = None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.current_stream(packed.device).record_event()
        else:
            self._packed = packed

    def read(self) -> tuple[list[list[int]], list[int], list[int]]:
        """Tokens of each row, numbers of accepted drafts and of committed tokens; waits for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = self._packed.tolist()
        return [row[:-2] for row in rows], [row[-2] for row in rows], [row[-1] for row in rows]


def has_hooks(modules: list[nn.Module]) -> bool:
    """Whether somebody listens to `modules`, or to all that there are, who would hear nothing of a replay.

    transformers' own hooks, which stay once a call has asked for hidden states, sleep until the next that does.
    """
    return bool(all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks) or any(
        getattr(hook, "__module__", None) != output_capturing.__name__
        for module in modules
        if module._forward_hooks or module._forward_pre_hooks
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def slots_for(tokens: int, is_kept: bool) -> int:
    """Slots for rows of up to `tokens` tokens and scrap; a few sizes only if the buffers are kept for other calls."""
    slots = tokens + 1
    if not is_kept:
        return slots
    if slots <= SLOT_STEP:
        return max(FEWEST_SLOTS, next_power_of_two(slots))
    return SLOT_STEP * -(-slots // SLOT_STEP)


def useful_drafts(asked: int, room: int, is_kept: bool) -> int:
    """Draft tokens a round where `asked` are asked for and rows have `room` for new tokens: none beyond that.

    Buffers that are kept for other calls are of a few sizes only, so of them small numbers are not cut down.
    """
    return min(asked, max(FEWEST_DRAFTS, next_power_of_two(room)) if is_kept else room)


def captured_width(longest: int, batch: int, chunk_size: int) -> int | None:
    """Columns of the captured prefill of `batch` rows, up to `longest` tokens long; None if it is not captured."""
    width = max(FEWEST_COLUMNS, next_power_of_two(max(longest - 1, 1)))
    return width if batch * width <= MOST_CAPTURED_TOKENS and width <= chunk_size else None


class CapturedRound:
    """`step`, captured: in one piece if the logits are processed without looking at the text, otherwise in two.

    Args:
        capture: makes graphs.
        state, target, drafter, process: of `step`.

    Attributes:
        execution: how rounds are run, in words.
    """

    def __init__(
        self,
        capture: Capture,
        state: DecodeState,
        target: Target,
        drafter: Drafter,
        process: BlockProcessor,
    ):
        self._state = state
        # What a graph returns stays in memory: nobody reads the scores and logits of a round in one piece. It is plain:
        # torch 2.11 cannot compile functions that return named tuples of their own making.
        with state.idle():
            if process.key is not None:
                self._whole = capture(lambda: tuple(step(state, target, drafter, process)[0]))
            else:
                self._whole = None
                self._read = capture(lambda: read(state, target))
                _, logits, taps = self._read.result
                self._scores = torch.zeros_like(logits, dtype=torch.float32)
                self._settle = capture(lambda: tuple(settle(state, drafter, self._scores, taps)))
        graphs = "one graph" if self._whole is not None else "two graphs, processors between"
        self.execution = f"captured in {graphs}, {'compiled' if capture.has_compiled else 'not compiled'}"

    def __call__(self, process: BlockProcessor) -> tuple[Verdict, None, None]:
        if self._whole is not None:
            return Verdict(*self._whole()), None, None
        block, logits, _ = self._read()
        self._scores.copy_(process(logits, block, self._state))
        return Verdict(*self._settle()), None, None


def why_not_captured(model: PreTrainedModel, modules: list[nn.Module], wants: dict[str, bool]) -> str | None:
    """The reason why rounds are not captured, so that their buffers need not be kept either; None if they are.

    A warning for what the caller may not know of.

    Args:
        model: the target.
        modules: its own and the drafter's.
        wants: by the names of what a round gives, whether it is kept for the caller.
    """
    if model.device.type not in CAPTURE:
        return f"nothing is captured on a device of type {model.device.type}"
    wanted = [name for name, is_wanted in wants.items() if is_wanted]
    if wanted:
        return f"{', '.join(wanted)} of every round are kept for the caller"
    if has_hooks(modules):
        reason = "modules have hooks, which would hear nothing of a replay"
        _warn_once(f"Rounds of {type(model).__name__} run eagerly: {reason}. Remove the hooks to have rounds captured.")
        return reason
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def capture_round(session: Session, target: Target, drafter: Drafter, process: BlockProcessor) -> CapturedRound | None:
    """`step`, captured; None, and a warning, if it does something that cannot be."""
    is_shared = tensor_parallel_group(target.model) is not None
    capture = Capture(target.model.device, session.graph_memory, drafter.compile_rounds, same_everywhere=is_shared)
    return _if_possible(
        "A round", target, drafter, lambda: CapturedRound(capture, session.state, target, drafter, process)
    )


def capture_prefill(session: Session, target: Target, drafter: Drafter, width: int) -> Callable[[], None] | None:
    """`prefill` of `width` columns, captured and not compiled, which would take as long for each width as for a round.

    None, and a warning, if it does something that cannot be captured; None also for mixtures of experts that would
    copy weights for every token. Afterwards the session is to be prefilled again: an attempt may stop half way.
    """
    if copies_experts(target.model, drafter):
        return None
    capture = Capture(target.model.device, session.graph_memory, is_compiled=False)
    return _if_possible(
        "The prefill",
        target,
        drafter,
        lambda: capture(lambda: prefill(session.state, target, drafter, width, chunk_size=width)),
    )


def _if_possible(what: str, target: Target, drafter: Drafter, capture: Callable[[], _T]) -> _T | None:
    modules = modules_of(target.model, drafter)
    try:
        with experts_without_host(target.model, drafter):
            before = behaviour_of(modules)
            captured = capture()
            if behaviour_of(modules) != before:
                raise RuntimeError("its forward pass changes attributes of modules, which a replay would not do")
            return captured
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(target.model).__name__
        logger.warning(f"{what} of {name} cannot be captured and runs eagerly: {first_line(error)}")
        return None


class Rounds:
    """The host's side of a loop of rounds: it watches from behind (`LAG`), so that the device need not wait for it.

    Args:
        state: prefilled.
        next_round: runs `step` on it, eagerly or captured.
        transcript: of what was said.
        counters: of the rows that somebody asked for; the state may have more.
        longest: length of the longest prompt.
        rooms: new tokens that each row may have. A row that has as many without having stopped is an error: the target
            has no positions for more.
    """

    def __init__(
        self,
        state: DecodeState,
        next_round: Callable[[], tuple[Verdict, torch.Tensor | None, torch.Tensor | None]],
        transcript: Transcript,
        counters: Counters,
        longest: int,
        rooms: list[int],
    ):
        self.state = state
        self.transcript = transcript
        self.counters = counters
        self._next_round = next_round
        self._batch = len(counters.rows)
        self.num_rounds = 0
        self._longest = longest
        self._rooms = rooms
        self._lag = LAG.get(state.tokens.device.type, 0)
        self._reports: deque[tuple[Report, dict[str, torch.Tensor | None]]] = deque()

    def run(self) -> None:
        """Run rounds until the transcript is complete. Rounds that began before the host knew are not looked at."""
        while not self.transcript.is_complete:
            # The drafts verified now, and those drafted after all of them were accepted.
            unseen = len(self._reports) * (self.state.num_draft_tokens + 1)
            spoken = self._longest + self.transcript.longest_row() + unseen
            self.state.live = spoken + 2 * self.state.num_draft_tokens
            verdict, scores, logits = self._next_round()
            self._reports.append((Report(verdict), {"scores": scores, "logits": logits}))
            if len(self._reports) > self._lag:
                self._take(*self._reports.popleft())

    def _take(self, report: Report, records: dict[str, torch.Tensor | None]) -> None:
        tokens, accepted, committed = (part[: self._batch] for part in report.read())
        self.num_rounds += 1
        for row, (num_accepted, num_committed) in enumerate(zip(accepted, committed, strict=True)):
            if num_committed > 0 and not self.transcript.is_done(row):
                room = self._rooms[row] - self.transcript.length(row)
                self.counters.count(row, num_accepted, num_committed, room)
        before = self.transcript.stopped
        self.transcript.add(tokens, committed, **records)
        for row, room in enumerate(self._rooms):
            if not self.transcript.stopped[row] and self.transcript.steps >= room:
                raise ValueError(
                    f"Row {row} of the batch has {room} new tokens and has not ended, but the target has no positions "
                    "for more; expected a limit (max_new_tokens, max_length) that fits max_position_embeddings."
                )
        if self.transcript.pads_finished_rows and self.transcript.stopped != before:
            stopped = torch.tensor(self.transcript.stopped, device=self.state.finished.device)
            self.state.finished[: self._batch] |= stopped


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
    reads_taps = bool(drafter.tap_boundaries) or drafter.taps_last_hidden_state
    rooms = rooms_of(model, prompts, max_new_tokens)
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
    stack = ExitStack()

    @functools.cache
    def host() -> Target:
        """What runs eagerly or is captured runs on this; modules are left alone in calls that only replay."""
        return stack.enter_context(hosted(model, drafter, wants["hidden_states"]))

    def session_key() -> SessionKey | None:
        if not is_kept:
            return None
        key = SessionKey(shape, drafter.compile_rounds, fingerprint(modules, model.device))
        if key not in drafter.sessions:
            host()  # which may move weights
            key = key._replace(fingerprint=key.fingerprint._replace(weights=weights_of(modules)))
        return key

    def allocate() -> DecodeState:
        return DecodeState.allocate(shape, drafter, num_cache_layers(model), model.device)

    def fill(session: Session) -> None:
        session.give_up_buffers()
        session.state.begin(
            prompts.rows(model.device),
            rooms,
            config._eos_token_tensor,
            seeds,
            temperature,
            factors,
            prompts.cached_lengths,
            prompts.draft_starts(reads_taps),
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
            if not (reads_taps or prompts.hidden):
                host()
                prefill_drafter(state, drafter, max(prompts.cached_lengths), chunk_size)
        replay = session.prefills.get(width)
        if replay is None:
            prefill(state, host(), drafter, max(longest_uncached - 1, 1), chunk_size)
        else:
            replay()

    with stack:
        session = stack.enter_context(drafter.sessions.session(session_key(), allocate, fill))
        state, captured = session.state, session.rounds.get(process.key)
        if captured is None:
            next_round = functools.partial(step, state, host(), drafter, process)
        else:
            next_round = functools.partial(captured, process)
        start = time.perf_counter()
        counters = Counters(batch, num_draft_tokens)
        rounds = Rounds(state, next_round, transcript, counters, longest, rooms)
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
