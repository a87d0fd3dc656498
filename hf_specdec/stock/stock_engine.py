"""The stock engine: our drafters in transformers' own `_assisted_decoding`.

It is for targets that the static engine cannot host. It runs eagerly, on the cache that the target itself wants. The
rows of a batch run one after the other, see `separate_rows`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..cache.layer_kinds import LayerKinds, patches_of, plug_ins
from ..calls.call import Call, SpeculativeOutput
from ..calls.transcript import CallersStreamer
from ..engine.rounds import propose
from ..host.caches import (
    OUTPUT_NAME,
    GenerateDecoderOnlyOutput,
    StaticLayer,
    given_cache,
    is_of_caller,
    recording_restored,
)
from ..host.generation import CandidateGenerator, assisted_decoding
from ..kernels.types import VerificationResult
from ..modules.hidden_states import AuxHiddenStateRecorder
from ..modules.patch import register_pre_hook, replaced, user_code
from ..ops import over_vocabulary
from ..patching.support import configured_layers, parts
from ..state import DecodeState, Shape
from ..stats import Counters
from .compared_texts import why_not_separate_rows
from .separate_rows import call_of_row, criteria_of_row, join_rows

logger = logging.getLogger(__name__)


class CommittedTextCriteria(StoppingCriteriaList):
    """The stopping criteria of a call of one row. They are not evaluated for text that the target has not extended yet.

    transformers 5.17 also evaluates them for blocks without candidates, before the target has added its token. A time
    limit would then end an output without its first token.
    """

    committed = 0

    def __call__(self, input_ids: torch.LongTensor, scores: tuple[torch.Tensor] | None, **kwargs) -> torch.Tensor:
        if input_ids.shape[1] == self.committed:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        with user_code():
            return super().__call__(input_ids, scores, **kwargs)


class DrafterCandidateGenerator(CandidateGenerator):
    """transformers' `CandidateGenerator` for a `Drafter`.

    The loop asks for candidates before the target has run, so the first answer is empty. Every later call follows one
    verified block, and makes one `propose`. A candidate that would end the output by `criteria` is left to the target,
    so that nothing is accepted beyond the end. `call` is row `row` of the whole call; `counters` count all its rows.
    """

    requires_model_outputs = True

    def __init__(
        self, call: Call, row: int, recorder: AuxHiddenStateRecorder, criteria: StoppingCriteriaList, counters: Counters
    ):
        self._call, self._row, self._drafter = call, row, call.drafter
        self._recorder, self._criteria, self._counters = recorder, criteria, counters
        self._padding = call.prompts.padding[0]
        self.model_kwargs_overrides: dict[str, Any] = {"logits_to_keep": 0} if recorder.misses_positions else {}
        self._state: DecodeState | None = None
        self._num_candidates = 0
        self._start: float | None = None

    def get_candidates(
        self, input_ids: torch.LongTensor, is_first_iteration: bool = False, n_last_matches: int = 0, **kwargs
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Candidates `[1, length + n]` for `input_ids` `[1, length]`, and logits `[1, n, V]` of their distribution."""
        self._criteria.committed = input_ids.shape[1]
        if is_first_iteration:
            return input_ids, None
        if self._state is None:
            self._begin(input_ids)
        else:
            self._follow(input_ids, int(n_last_matches))
        proposal, logits = self._proposal, None
        tokens = proposal.tokens.to(input_ids.device)
        candidates = torch.cat([input_ids, tokens], dim=1)
        length = input_ids.shape[1]
        self._num_candidates = next(
            (n for n in range(tokens.shape[1]) if bool(self._criteria(candidates[:, : length + n + 1], None).any())),
            tokens.shape[1],
        )
        model, own_length = self._call.model, length - self._padding
        for longest in (part.longest_with_drafts(model, own_length) for part in parts(model)):
            if longest is not None:
                self._num_candidates = min(self._num_candidates, longest - own_length)
        if proposal.probs is not None:
            # Logits without a softmax give no draft.
            are_laws = proposal.probs[0].isfinite().all(dim=-1)
            self._num_candidates = min(self._num_candidates, int(are_laws.cumprod(dim=0).sum()))
        if self._num_candidates == 0:
            return input_ids, None
        if proposal.probs is not None:
            logits = proposal.probs[:, : self._num_candidates].log()
            vocabulary = self._drafter.config.vocab_size
            logits = over_vocabulary(logits, proposal.draft_ids, vocabulary, fill=float("-inf")).to(input_ids.device)
        return candidates[:, : length + self._num_candidates], logits

    @property
    def seconds(self) -> float:
        """Seconds since the first round."""
        return 0.0 if self._start is None else time.perf_counter() - self._start

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        if self._state is None:
            return
        num_matches = int(num_matches)
        self._counters.count([(self._row, num_matches, num_matches + 1, self._num_candidates)])

    def _begin(self, input_ids: torch.Tensor) -> None:
        # The hidden states of tokens in the caller's cache are not known, so the drafter starts after these tokens.
        call, aux_hidden_states = self._call, self._aux_hidden_states()
        length = input_ids.shape[1] - self._padding
        num_seen = length - 1
        if aux_hidden_states is not None:
            num_seen = min(num_seen, aux_hidden_states.shape[1])
            aux_hidden_states = aux_hidden_states[:, -num_seen:]
        tokens = input_ids[0, -num_seen - 1 :].to(self._drafter.device)
        self._counters.rows[self._row].unread_tokens = length - len(tokens)
        remaining = call.config.max_length - input_ids.shape[1]
        self._num_draft_tokens = min(call.num_draft_tokens, remaining)
        max_new_tokens, is_sampling = remaining + self._num_draft_tokens + 1, call.temperature is not None
        slots = len(tokens) + max_new_tokens + 1
        shape = Shape(1, slots, self._num_draft_tokens, is_sampling, call.draft_probs, num_ends=0)
        self._state = state = self._drafter.new_state(shape, layers=LayerKinds(), device=tokens.device)
        state.set_temperature(call.temperature)
        state.admit(range(1), [tokens], [max_new_tokens], call.seeds.tolist())
        if call.row_temperatures is not None:
            state.row_temperatures.copy_(call.row_temperatures)
        state.live = state.slots
        self._start = time.perf_counter()
        self._drafter.start_prefill(state)
        self._drafter.prefill(state, aux_hidden_states, torch.arange(num_seen, device=tokens.device)[None])
        self._propose(1, None if aux_hidden_states is None else aux_hidden_states[:, -1:])

    def _follow(self, input_ids: torch.Tensor, num_matches: int) -> None:
        committed = num_matches + 1
        length = int(self._state.lengths)
        self._state.tokens[:, length : length + committed] = input_ids[:, -committed:]
        self._state.lengths += committed
        self._propose(committed, self._aux_hidden_states())

    def _aux_hidden_states(self) -> torch.Tensor | None:
        # With accelerate's hooks, layers of the target may run on other devices than the drafter.
        aux_hidden_states = self._recorder.aux_hidden_states
        return None if aux_hidden_states is None else aux_hidden_states.to(self._drafter.device)

    def _propose(self, committed: int, aux_hidden_states: torch.Tensor | None) -> None:
        """Draft after a block whose first `committed` tokens were kept, with hidden states `[1, n, width]`."""
        window = None
        if aux_hidden_states is not None:
            window = aux_hidden_states.new_zeros(1, self._num_draft_tokens + 1, aux_hidden_states.shape[-1])
            window[:, :committed] = aux_hidden_states[:, :committed]
        count = torch.full_like(self._state.lengths, committed)
        result = VerificationResult(self._state.tokens[:, : self._num_draft_tokens + 1], count - 1, count)
        self._proposal = propose(self._state, self._drafter, window, result)


class ReachableProcessors(LogitsProcessorList):
    """The logits processors of a call of one row. They are not called for text that they themselves rule out.

    The loop calls them for every prefix of a block of candidates, but a processor such as `prefix_allowed_tokens_fn`
    may fail for text after a token that it forbids. Scores after such a token stay unprocessed: it is not accepted.
    """

    def __init__(self, call: Call):
        super().__init__(call.processors)
        self._is_greedy = call.temperature is None

    _scores: torch.Tensor | None = None
    _length: int | None = None
    _is_ruled_out = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        length = input_ids.shape[1]
        # Every block begins with an allowed token, so only text that extends the previous text can be ruled out.
        if self._length == length - 1:
            before, token = self._scores[0], input_ids[0, -1]
            # Greedy decoding chooses a token even if all are ruled out.
            is_greedy_choice = self._is_greedy and bool(before.argmax() == token)
            self._is_ruled_out |= bool(before[token].isneginf()) and not is_greedy_choice
        else:
            self._is_ruled_out = False
        if not self._is_ruled_out:
            with user_code():
                self._scores = scores = super().__call__(input_ids, scores, **kwargs)
        self._length = length
        return scores


class ReplayCache(DynamicCache):
    """A `DynamicCache` with recurrent layers that can be cropped.

    The last tokens cannot be removed from a recurrent state. So `remember`, a pre-hook of `target`, copies the layers
    before each forward pass; `crop` restores the copy and runs the kept tokens again. It shares the layers of `cache`,
    if given.
    """

    is_croppable = True

    def __init__(self, target: PreTrainedModel, cache: Cache | None):
        super().__init__(config=target.config.get_text_config())
        if cache is not None and cache.layers:
            self.layers = cache.layers
        self._target = target
        self._snapshot: list[dict[str, Any]] = []
        self._inputs: dict[str, Any] = {}

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove < 0:
            for layer, saved in zip(self.layers, self._snapshot, strict=True):
                layer.__dict__.update(_copy_state(saved))
            kept = self._inputs | {"logits_to_keep": 1}
            for name in ("input_ids", "position_ids", "attention_mask", "cache_position"):
                if kept.get(name) is not None:
                    kept[name] = kept[name][..., :tokens_to_remove]
            self._target(**kept)
        super().crop(0)

    def remember(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if given_cache(kwargs) is not self:
            return
        self._inputs = kwargs
        self._snapshot = [_copy_state(layer.__dict__) for layer in self.layers]


def _prepares_rest(model: PreTrainedModel, cached: int) -> Callable:
    """`prepare_inputs_for_generation`, whose first call leaves out the `cached` tokens of the caller's cache: otherwise
    transformers' loop would append the whole prompt again."""
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_rest(input_ids, *args, is_first_iteration=False, **kwargs):
        if is_first_iteration:
            kwargs["next_sequence_length"] = input_ids.shape[1] - cached
        return prepare(input_ids, *args, is_first_iteration=is_first_iteration, **kwargs)

    return prepare_rest


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    # Attention layers replace their tensors at every update; recurrent layers write into the tensors in their dicts.
    return {
        name: {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }


def assist(
    inputs_tensor: torch.Tensor | None, model_kwargs: dict[str, Any], call: Call
) -> SpeculativeOutput | torch.Tensor:
    """Generate with transformers' `_assisted_decoding` and our candidates, row after row.

    transformers' loop samples from torch's global generators; if the caller names another source of random numbers,
    they are seeded for each row and restored after it. `inputs_tensor` and `model_kwargs` are what `generate()` passes.
    """
    if call.temperature is not None and call.randomness.seeds is not None and any(call.prompts.padding):
        difference = why_not_separate_rows(call.model)
        if difference is not None:
            logger.warning("hf_specdec: texts of rows with seeds depend on their padding: %s.", difference)
    seeds, is_seeded = call.seeds, call.randomness.is_given
    devices = sorted({parameter.device for parameter in call.model.parameters() if parameter.is_cuda}, key=str)
    counters, seconds = Counters(call.batch, call.num_draft_tokens), 0.0
    outputs, draft_probs = [], False
    for row in range(call.batch):
        own, inputs = call_of_row(call, model_kwargs, row)
        own = replace(own, criteria=criteria_of_row(call, row))
        with torch.random.fork_rng(devices, enabled=is_seeded):
            if is_seeded:
                torch.manual_seed(int(seeds[row]))
            output, seconds_of_row = _assist_row(inputs_tensor, inputs, own, row, counters)
        text = (output if isinstance(output, torch.Tensor) else output.sequences)[0, own.prompts.padding[0] :]
        length = own.prompts.input_ids.shape[1] - own.prompts.padding[0]
        call.drafter.observe(text[:length], text[length:])
        outputs.append(output)
        seconds += seconds_of_row
        draft_probs |= own.draft_probs
    output = outputs[0] if call.batch == 1 else join_rows(call, model_kwargs, outputs)
    call.drafter._last_stats = stats = counters.summary(
        num_assistant_tokens=call.num_draft_tokens,
        engine="stock",
        reason=call.reason,
        draft_probs=draft_probs,
        num_rounds=sum(row.rounds for row in counters.rows),
        seconds=seconds,
    )
    return output if isinstance(output, torch.Tensor) else SpeculativeOutput(**output, speculation=stats)


def _assist_row(
    inputs_tensor: torch.Tensor | None, model_kwargs: dict[str, Any], call: Call, row: int, counters: Counters
) -> tuple[GenerateDecoderOnlyOutput | torch.Tensor, float]:
    """Generate one row; returns the output of transformers' loop, and the seconds of its rounds."""
    model, drafter = call.model, call.drafter
    criteria = CommittedTextCriteria(call.criteria)
    with ExitStack() as stack:
        recorder = stack.enter_context(
            AuxHiddenStateRecorder(model, drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state)
        )
        for patch in patches_of(plug_ins(), drafter):
            stack.enter_context(patch)
        cache = given_cache(model_kwargs)
        # The loop makes sliding-window layers keep tokens that have left their window.
        stack.enter_context(recording_restored(cache))
        # Keys of cross-attention belong to images, not to tokens that may be rejected.
        fixed = set(getattr(model.config.get_text_config(), "cross_attention_layers", None) or ())
        if fixed and cache is not None:

            def crop(tokens_to_remove: int) -> None:
                for index, layer in enumerate(cache.layers):
                    if index not in fixed:
                        layer.crop(tokens_to_remove)

            stack.enter_context(replaced("crop", [(cache, crop)]))
        if cached := call.prompts.cached:
            prepare_rest = _prepares_rest(model, cached)
            stack.enter_context(replaced("prepare_inputs_for_generation", [(model, prepare_rest)]))
        if configured_layers(model).keeps_states:
            replay = ReplayCache(model, cache)
            stack.enter_context(register_pre_hook(model, replay.remember))
            model_kwargs = model_kwargs | {OUTPUT_NAME: replay}
        generator = DrafterCandidateGenerator(call, row, recorder, criteria, counters)
        output = assisted_decoding(
            model,
            call.prompts.input_ids,
            stopping_criteria=criteria,
            generation_config=call.config,
            assistant_model=generator,
            logits_processor=ReachableProcessors(call),
            streamer=None if call.streamer is None else CallersStreamer(call.streamer),
            inputs_tensor=inputs_tensor,
            **model_kwargs,
        )
        seconds = generator.seconds
    is_dict = isinstance(output, GenerateDecoderOnlyOutput)
    if is_dict and cache is not None and isinstance(output[OUTPUT_NAME], ReplayCache):
        output[OUTPUT_NAME] = cache
    return output, seconds


def check_stock_call(call: Call, model_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if transformers' assisted generation cannot run `call`, or not correctly."""
    name, reason, prompts = type(call.model).__name__, call.reason, call.prompts
    if call.drafter.reads_target_cache:
        raise ValueError(
            f"{type(call.drafter).__name__} reads the keys and values of {name} on the static engine only, but the "
            f"call runs on the stock engine ({reason}). Pass the model itself, loaded with AutoModelForCausalLM, as "
            "assistant_model: transformers runs it in its own loop, one row at a time."
        )
    cache, kinds = given_cache(model_kwargs), configured_layers(call.model)
    static = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer)]
    # Static layers write into their tensors, and `ReplayCache` does not copy these.
    is_lost = (kinds.keeps_states and static) or (not kinds.knows_length and is_of_caller(cache))
    if is_lost or any(not getattr(layer, "is_croppable", True) for layer in static):
        what = "recurrent layers" if is_lost else "sliding windows that the sequence may outgrow"
        raise ValueError(
            f"{name} has {what}, and on the stock engine ({reason}) cannot use a {type(cache).__name__}. Pass the "
            "whole prompt without that cache, or generate without assistant_model."
        )
    if prompts.hidden:
        raise ValueError(
            f"{name} runs on the stock engine ({reason}), which needs the whole sequence in input_ids, but the first "
            f"{prompts.hidden} tokens are in `{OUTPUT_NAME}` only. Pass them in input_ids, too."
        )
