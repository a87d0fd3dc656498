"""The first forward pass of a call by the unpatched target, for prompts that are more than tokens.

Only the target's own code knows how to handle images, audio or a caller's embeddings: how they are merged with the
tokens, which tokens see each other, and which positions they have. So the target runs such prompts once, unpatched,
with all inputs of the call, as in plain `generate()`. Its keys and values are copied to the slots of the engine's
cache, and its last logits give the first new token. From then on there is only text, and rounds are those of any call:
slot == position in the cache, and position ids differ from the slots by a constant of each row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from ..cache.hidden_states import HiddenStates
from ..cache.layer_kinds import LayerKind, LayerKinds, LayerMemory, Use, patches_of
from ..cache.ragged_cache import RaggedCache
from ..errors import first_line
from ..host.caches import CACHE_NAMES
from ..host.generation import ModelOutput, inputs_after
from ..host.modeling import ROPE_DELTAS
from ..modules.hidden_states import AuxHiddenStateRecorder, modules_of, text_decoder
from ..modules.patch import engine, register_pre_hook, this_thread, user_code
from ..modules.signature import fact
from ..patching.mask_rules import ordinary_prompts
from ..patching.support import cache_layers, cache_name, configured_layers
from ..state import DecodeState
from .call import Call
from .kv_transfer import read_cache, run_as_given, stores_keys
from .prompts import Prompts

# Model inputs that engines replace by their own.
REPLACED_INPUTS = frozenset(
    {
        *CACHE_NAMES,
        "attention_mask",
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
# Rows of position ids `[rows, B, n]` with M-RoPE if the first row counts tokens, which transformers uses for masks.
_ROWS_WITH_TEXT = 4


def _sections(position_ids: torch.Tensor) -> torch.Tensor:
    """Position ids as `[sections, B, n]`, from what transformers gives a model: `[B, n]` or several rows of them."""
    if position_ids.dim() == 2:
        return position_ids[None]
    return position_ids[1:] if len(position_ids) == _ROWS_WITH_TEXT else position_ids


@contextmanager
def kept_rope_deltas(model: PreTrainedModel) -> Iterator[None]:
    """Context that restores `rope_deltas`, which M-RoPE models keep from one call to the next."""
    before = [(one, vars(one)[ROPE_DELTAS]) for one in modules_of(model) if ROPE_DELTAS in vars(one)]
    try:
        yield
    finally:
        for module, value in before:
            setattr(module, ROPE_DELTAS, value)


def inputs_besides_tokens(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call besides tokens and what an engine replaces: images, for example."""
    return {name: value for name, value in model_kwargs.items() if name not in REPLACED_INPUTS and _is_input(value)}


def _is_input(value: Any) -> bool:
    # transformers passes an empty dictionary of images to multimodal models with text prompts.
    return isinstance(value, torch.Tensor) or (value is not None and value is not False and value != {})


def ordinary_offsets(prompts: Prompts, model_kwargs: Mapping[str, Any]) -> list[int] | None:
    """For each row, position ids minus positions, if that is the same for all its tokens; else None.

    `position_ids` are `[B, P]`, or with M-RoPE `[sections, B, P]`. They usually count the tokens of each row; a text
    that continues a cache with images has an offset.
    """
    given = model_kwargs.get("position_ids")
    if given is None:
        return [0] * len(prompts.padding)
    if given.dim() not in (2, 3) or given.shape[-1] != prompts.width:
        return None
    given, columns = given.cpu(), torch.arange(prompts.width)
    if not any(prompts.padding) and torch.equal(given, columns.expand_as(given)):  # the usual case
        return [0] * len(prompts.padding)
    given = given.expand(*given.shape[:-2], len(prompts.padding), -1)
    positions = columns - torch.tensor(prompts.padding)[:, None]
    last = given.reshape(-1, *given.shape[-2:])[-1, :, -1:]
    offsets = last - positions[:, -1:]
    is_run = (positions >= 0) & (columns >= prompts.cached)
    return offsets[:, 0].tolist() if bool(((given == positions + offsets) | ~is_run).all()) else None


def for_static_engine(
    call: Call, model_kwargs: Mapping[str, Any], by_target: bool = False
) -> tuple[Call, Mapping[str, Any]] | str:
    """Prepare `call` for the static engine. Returns the call and, if the target itself runs the prompts (always with
    `by_target`), the model inputs of the first new token; or the reason why the engine cannot run it."""
    model, prompts = call.model, call.prompts
    besides, offsets = inputs_besides_tokens(model_kwargs), ordinary_offsets(prompts, model_kwargs)
    by_target = by_target or bool(besides) or offsets is None
    kinds = configured_layers(model)
    if (by_target or any(offsets)) and (obstacle := kinds.why_not(Use.OTHER_INPUTS)) is not None:
        return f"it has {obstacle}"
    if not by_target:
        return replace(call, position_offsets=offsets) if any(offsets) else call, {}
    what = ", ".join(sorted(besides)) or "position_ids of its own"
    if prompts.cached and (obstacle := kinds.why_not(Use.OTHER_INPUTS_CONTINUED)) is not None:
        return f"the call has {what}, and continues a cache with {obstacle}"
    if call.config.prefill_chunk_size is not None:
        return f"the call has {what}, and prompts are to run in chunks (prefill_chunk_size)"
    following = inputs_after_prompts(model, prompts, model_kwargs)
    offsets = following if isinstance(following, str) else position_offsets(prompts, following)
    if isinstance(offsets, str):
        return offsets
    return replace(call, position_offsets=offsets, inputs=model_kwargs), following


def inputs_after_prompts(
    model: PreTrainedModel, prompts: Prompts, model_kwargs: Mapping[str, Any]
) -> dict[str, Any] | str:
    """The inputs that plain `generate()` gives `model` with the first new token, except a cache; or why not known."""
    given = {name: value for name, value in model_kwargs.items() if name not in CACHE_NAMES}
    embeddings, columns = given.get("inputs_embeds"), prompts.input_ids.shape[1]
    if embeddings is not None and embeddings.shape[1] != columns:
        return f"inputs_embeds has {embeddings.shape[1]} columns, and input_ids {columns}"
    longer = torch.nn.functional.pad(prompts.input_ids, (0, 1))
    try:
        with kept_rope_deltas(model):
            given = inputs_after(model, ModelOutput(), given, num_new_tokens=1)
            return model.prepare_inputs_for_generation(
                longer, next_sequence_length=1, is_first_iteration=False, **given
            )
    except Exception as error:  # a model may raise anything
        return f"what follows its prompt cannot be told ({type(error).__name__}: {first_line(error)})"


def position_offsets(prompts: Prompts, following: Mapping[str, Any]) -> list[int] | str:
    """For each row, position ids minus positions after the prompt; or the reason why there is no such number."""
    if following.get("position_ids") is None:
        return [0] * len(prompts.lengths)
    position_ids = _sections(following["position_ids"])[..., -1]
    if bool((position_ids != position_ids[0]).any()):
        return "the tokens after its prompt have several position ids each"
    lengths = torch.tensor(prompts.lengths)
    return (position_ids[0].cpu().expand_as(lengths) - lengths).tolist()


class _ByColumn:
    """The keys and values of one pass, `[B, kv_heads, n, head_dim]`, stored by column, as a layer gives them."""

    is_compileable = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        self.indexer_keys = indexer_key_states
        return indexer_key_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0


@functools.cache
def _by_column(layer_class: type[LayerMemory]) -> type[LayerMemory]:
    return type(f"Column{layer_class.__name__}", (_ByColumn, layer_class), {})


class _ColumnCache(RaggedCache):
    """A cache for one pass over prompts: recurrent states by position, keys and values by column."""

    is_by_slot = False

    def _new_layer(self, kind: LayerKind) -> LayerMemory:
        return (_by_column(kind.layer_class) if kind.stores_keys else kind.layer_class)(self, kind)


def _column_cache(
    model: PreTrainedModel, lengths: torch.Tensor, positions: torch.Tensor, slots: int, num_draft_tokens: int
) -> _ColumnCache:
    """A cache for one pass over prompts of `lengths` `[B]` int64; `positions` `[B, n]` are those of the columns."""
    cache = _ColumnCache(LayerKinds(cache_layers(model).layers), slots, lengths, None, num_draft_tokens)
    cache.restart()
    cache.advance(positions, slots)
    return cache


@contextmanager
def _on_column_cache(model: PreTrainedModel) -> Iterator[None]:
    """Context in which layers of `model` run on a `_ColumnCache`."""
    with ExitStack() as stack:
        for patch in patches_of(dict.fromkeys(map(type, cache_layers(model))), model):
            stack.enter_context(patch)
        yield


@fact
def bounds_steps(model: PreTrainedModel) -> bool:
    """Whether recurrent layers of `model` bound the time steps in passes over several tokens, but not over one.

    The first call for a class and configuration runs the model on a few tokens.
    """
    inputs = ordinary_prompts(model, [3])
    positions = torch.arange(3, device=model.device)[None]
    cache = _column_cache(model, torch.tensor([3], device=model.device), positions, 4, 1)
    with torch.no_grad(), engine(), _on_column_cache(model):
        model(**inputs, use_cache=True, **{cache_name(model): cache})
    return cache.bounds_steps


class FirstPass:
    """The first pass of a call with `inputs`. It replaces the `Target` when the engine prefills the drafter."""

    def __init__(self, call: Call):
        self._call = call
        self._cache: Cache | None = None

    @torch.no_grad()
    def run(self, slots: int, num_draft_tokens: int) -> None:
        """Run the unpatched target over the prompts, unless the results of an earlier run still wait for `bring`.

        The results will be copied to a cache of `slots`, for rounds of at most `num_draft_tokens`.
        """
        if self._cache is not None:
            return
        call, model = self._call, self._call.model
        drafter, prompts = call.drafter, call.prompts
        columns = torch.arange(prompts.cached, prompts.width) - torch.tensor(prompts.padding)[:, None]
        self._positions = torch.where(columns < 0, slots - 1, columns).to(model.device)
        cache = self._new_cache(slots, num_draft_tokens)
        with ExitStack() as stack:
            # This pass is the user's: in inference mode if the user is. Only this pass is recorded.
            stack.enter_context(user_code())
            stack.enter_context(engine())
            recorder = stack.enter_context(
                AuxHiddenStateRecorder(model, drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state)
            )
            inputs, ours = {}, this_thread.engine

            def record(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                if this_thread.engine is ours:
                    inputs.update(kwargs)

            stack.enter_context(register_pre_hook(text_decoder(model), record))
            if isinstance(cache, RaggedCache):
                stack.enter_context(_on_column_cache(model))
            given = call.inputs
            if recorder.misses_positions:  # a list of columns makes the model run all tokens
                given = {**given, "logits_to_keep": torch.tensor([-1], device=model.device)}
            try:
                out = run_as_given(model, prompts.input_ids, call.config, given, cache)
            except BaseException:
                if prompts.cached:  # some layers of the user's cache have grown
                    with suppress(Exception):
                        cache.crop(prompts.cached)
                raise
            found = int(cache.get_seq_length()) if stores_keys(cache) else prompts.width
            if found != prompts.width:
                raise ValueError(
                    f"{type(model).__name__} made {found} columns of a prompt of {prompts.width}; expected a token for "
                    "each of them in input_ids, as its processor makes them, or a call without assistant_model."
                )
            self._logits = out.logits[:, -1:]
            self._aux_hidden_states = recorder.parts()
            self._embeddings = inputs.get("inputs_embeds") if drafter.reads_embeddings else None
            position_ids = inputs.get("position_ids")
            self._position_ids = None if position_ids is None else _sections(position_ids)
            self._hidden_states = out.hidden_states if "hidden_states" in call.kept else None
        self._cache = cache

    def _new_cache(self, slots: int, num_draft_tokens: int) -> Cache:
        model, prompts = self._call.model, self._call.prompts
        if prompts.cached:
            return self._call.cache
        if not configured_layers(model).keeps_states:
            return DynamicCache(config=model.config.get_text_config(decoder=True))
        lengths = torch.tensor(prompts.lengths, device=model.device)
        return _column_cache(model, lengths, self._positions, slots, num_draft_tokens)

    def bring(self, state: DecodeState, kept: HiddenStates | None) -> None:
        """Copy keys, values and recurrent states of the prompts to `state`, and hidden states to `kept`."""
        prompts, batch = self._call.prompts, len(state.lengths)
        whole = replace(prompts, cached=prompts.width)
        read_cache(self._cache, state.cache, whole, batch, self._call.model.device)
        if kept is not None:
            kept.store(self._hidden_states, self._positions, state.slots)
        if not prompts.cached:
            self._cache = None

    def __call__(
        self, state: DecodeState, tokens: torch.Tensor, slots: torch.Tensor, logits_to_keep: torch.Tensor | int = 0
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """As a `Target`, at slots of the prompts: logits `[B, 1, V]` after the prompts, whatever `slots` are, and the
        parts of auxiliary hidden states."""
        return self._logits[self._rows(slots)[:, 0]], tuple(self._at(one, slots) for one in self._aux_hidden_states)

    def position_ids(self, state: DecodeState, slots: torch.Tensor, sections: bool) -> torch.Tensor:
        """See `DecodeState.position_ids`."""
        if self._position_ids is None:
            return state.text_positions(slots)
        rows, columns = self._rows(slots), self._columns(slots)
        given = self._position_ids.expand(-1, self._call.batch, -1)
        found = given[:, rows, columns] if sections and len(given) > 1 else given[0, rows, columns]
        return torch.where(slots < state.dummy_slot, found, 0)

    def embeddings(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The embeddings that the decoder was given at `slots`, `[B, n, H]`; None if they were not recorded."""
        return None if self._embeddings is None else self._at(self._embeddings, slots)

    def _at(self, recorded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return recorded[self._rows(slots), self._columns(slots)]

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of the call `[B, 1]`; the last row stands for further rows of the state, which are finished."""
        return torch.arange(len(slots), device=slots.device).clamp(max=self._call.batch - 1)[:, None]

    def _columns(self, slots: torch.Tensor) -> torch.Tensor:
        """Columns of the pass at `slots` `[B, n]`; arbitrary for slots outside of the prompts."""
        prompts = self._call.prompts
        padding = torch.tensor(prompts.padding, device=slots.device)[self._rows(slots)]
        return (slots + padding - prompts.cached).clamp(0, prompts.width - prompts.cached - 1)
