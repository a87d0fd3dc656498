"""Copies between user caches and the engine's: before a call that continues a cache, and after a call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from ..cache.key_layers import Keys
from ..cache.layer_kinds import LayerKinds
from ..cache.ragged_cache import RaggedCache
from ..host.caches import OUTPUT_NAME, CacheLayerMixin
from ..host.generation import ModelOutput, keeps_logits, prefill
from ..modules.adapters import with_row_hooks
from ..modules.evaluation import Evaluation
from ..modules.locks import lock_of
from ..modules.signature import signature_of, versions_of
from ..patching.support import cache_name, parts
from .call import Call
from .prompts import Prompts


def why_not_readable(cache: Cache, kinds: LayerKinds) -> str | None:
    """The reason why a filled `cache` cannot be copied into a `RaggedCache` with `kinds` of layers; None if it can."""
    # A cache made without a configuration has no layers after the last one with keys.
    storing = [(layer, kind) for layer, kind in zip(cache.layers, kinds, strict=False) if not kind.is_empty]
    others = sorted({type(layer).__name__ for layer, kind in storing if type(layer) not in kind.sources})
    if others:
        return f"the call continues a cache with layers of type {', '.join(others)}"
    # Missing states are found when they are read: a layer without keys need not have any.
    keyed = [layer for layer, _ in storing if isinstance(layer, CacheLayerMixin)]
    filled, expected = sum(layer.is_initialized for layer in keyed), sum(kind.stores_keys for kind in kinds)
    if filled != expected or len(cache.layers) > len(kinds):
        return f"the call continues a cache in which {filled} of {expected} layers are filled"
    return None


def stores_keys(cache: Cache) -> bool:
    """Whether layers of `cache` store keys and values, which tell the number of cached tokens."""
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def holds_all_keys(cache: Cache, columns: int) -> bool:
    """Whether all layers of `cache` hold keys, of all `columns` columns and not of a window only, and nothing else."""
    filled = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return len(filled) == len(cache.layers) and all(
        type(layer) in Keys.sources and layer.keys.shape[2] >= columns for layer in filled
    )


def has_other_dtypes(cache: Cache, dtype: torch.dtype) -> bool:
    """Whether some keys or values of `cache` are not of `dtype`; a call under autocast may store two dtypes."""
    found = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return any(isinstance(one, torch.Tensor) and one.dtype != dtype for one in found)


def read_cache(cache: Cache, ragged: RaggedCache, prompts: Prompts, batch: int, device: torch.device) -> None:
    """Copy the `prompts` part of `cache` into `ragged`, whose buffers have `batch` rows and are on `device`.

    With recurrent states, `cache` must be a `RaggedCache` with a row for each prompt, or a pass must have allocated the
    layers of `ragged`.

    Raises:
        ValueError: `cache` lacks states of the target, or has states of other shapes.
    """
    is_ragged = isinstance(cache, RaggedCache)
    if is_ragged:
        ragged.copy_rows(torch.arange(len(prompts.padding), device=device), cache, 0)
    ends = torch.tensor(prompts.cached_lengths, device=device)
    for layer, ours in zip(cache.layers, ragged.layers, strict=False):
        ours.read_slots(layer, prompts.padding, prompts.cached, batch, device)
        if not is_ragged:
            ours.read_states(layer, ends)
    if ragged.recurrence is not None and not is_ragged:
        # A pass over a single column uses the functions for one token.
        ragged.recurrence.resume(ends, is_step=prompts.width - prompts.cached == 1)


@contextmanager
def _unchanged_on_error(cache: Cache) -> Iterator[None]:
    """Context that, on an error, restores the layers of `cache`, except tensors that were written in place."""
    before = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
        for layer in cache.layers
    ]
    try:
        yield
    except BaseException:
        del cache.layers[len(before) :]
        for layer, attributes in zip(cache.layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        raise


def run_as_given(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    inputs: Mapping[str, Any],
    cache: Cache,
) -> ModelOutput:
    """Run `model` over prompts `[B, P]` int64 as plain `generate()` does, with `config` and `inputs` prepared by it."""
    return prefill(model, input_ids, config, dict(inputs) | {cache_name(model): cache})


def _weights_of(model: PreTrainedModel) -> tuple:
    """A fingerprint of the weights of `model` and its active adapters, see `versions_of`."""
    weights = list(model.parameters())
    return signature_of(model).adapters.state, [(id(one), one.dtype) for one in weights], versions_of(weights)


class FinishedCall:
    """The keys, values and states of a finished call on the static engine, until another call uses its buffers.

    Attributes:
        sequences: `[B, P + new]` int64, what the call returns.
        columns: leading columns that the target has run in all rows; never the last column of the text.
        run_prompts: runs the target over the prompts as plain `generate()` does, into a given cache; None if the
            prompts are tokens only.
        bounds_steps: whether the target bounds the time steps of passes over several tokens only, see `RecurrentState`.
        adapters: see `Call`.
        is_written: whether `write_to` has copied the columns.
        weights: `_weights_of` the target during the call.
        autocast: the autocast context of the call.
    """

    def __init__(self, call: Call, ragged: RaggedCache, sequences: torch.Tensor, columns: int):
        self.model, self.prompts, self.adapters, kind = call.model, call.prompts, call.adapters, call.device.type
        self.ragged, self.sequences, self.columns, self.is_written = ragged, sequences, columns, False
        self.position_offsets, self.bounds_steps, self.run_prompts = call.position_offsets, ragged.bounds_steps, None
        if call.inputs is not None and ragged.recurrence is not None:  # states may have to be computed again
            given = call.model, call.prompts.input_ids, call.config, call.inputs
            self.run_prompts = functools.partial(run_as_given, *given)
        self.weights = _weights_of(self.model)
        self.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def write_to(self, cache: Cache) -> None:
        """Append to `cache` those of the `columns` that it lacks; nothing if `complete` has to compute them anew.

        That is so for recurrent states that cannot be brought to the last column of all rows, and for indexers' keys
        and compressed windows, which caches take from the model only. After an error `cache` is unchanged.
        """
        ragged, ends = self.ragged, self.prompts.ends(self.columns)
        if not all(kind.is_written for kind in ragged.kinds):
            return
        if ragged.recurrence is not None and not (self.columns == self._most and ragged.replay(ends)):
            return
        with _unchanged_on_error(cache):
            if ragged.kinds.stores_keys:
                self._write_slots(cache)
            ends = torch.tensor(ends, device=self.sequences.device)
            pairs = zip(cache.layers, ragged.layers, strict=False)
            for write in [ours.write_states(layer, ends) for layer, ours in pairs]:
                write()  # no more allocations from here on
        self.is_written = True

    @property
    def _most(self) -> int:
        """Columns that plain `generate()` has run: all but the last one of the text."""
        return self.prompts.hidden + self.sequences.shape[1] - 1

    def _write_slots(self, cache: Cache) -> None:
        device = self.sequences.device
        padding = torch.tensor(self.prompts.padding, device="cpu")[:, None]
        columns = torch.arange(int(cache.get_seq_length()), self.columns, device="cpu")
        if not len(columns):
            return
        # Nothing reads keys and values of padding.
        slots = (columns - padding).clamp(min=0).to(device)
        for index, layer in enumerate(self.ragged.layers):
            layer.write_slots(cache, index, slots)

    def complete(self, cache: Cache) -> None:
        """Run the target over the remaining columns, except the last, as plain `generate()` has done.

        In these columns some rows had ended and continue with padding tokens.

        Raises:
            RuntimeError: the weights of the target may have changed since the call.
        """
        if self.is_written and self.columns == self._most:
            return
        if self.weights != _weights_of(self.model):
            raise RuntimeError(
                f"{OUTPUT_NAME} of a call is completed when it is read first, by {type(self.model).__name__}, of which "
                "weights or adapters have changed since the call, or an optimizer has made a step; expected that it is "
                "read before. Read its layers after the call, or pass the call an empty "
                "DynamicCache(config=model.config), which it fills."
            )
        with_adapters = with_row_hooks(signature_of(self.model).adapters.layers, self.adapters)
        with torch.no_grad(), Evaluation(self.model), self.autocast, with_adapters:
            self._run_rest(cache)

    def _run_rest(self, cache: Cache) -> None:
        prompts = self.prompts
        has_keys = stores_keys(cache)
        # A cache with recurrent states only is always empty here: calls do not fill it.
        held = int(cache.get_seq_length()) if has_keys else 0
        if self.run_prompts is not None and not held:
            self.run_prompts(cache)
            held = prompts.width
        text = self.sequences[:, held - prompts.hidden : -1]
        if not text.shape[1]:
            return
        width = held + text.shape[1]
        padding = torch.tensor(prompts.padding, device=text.device)[:, None]
        positions = torch.arange(width, device=text.device) - padding
        offsets = torch.tensor(self.position_offsets or [0] * len(padding), device=text.device)[:, None]
        options = {"logits_to_keep": 1} if keeps_logits(self.model) else {}
        for begin, end in self._passes(held, width):
            self.model(
                input_ids=text[:, begin - held : end - held],
                attention_mask=(positions[:, 0 if has_keys else begin : end] >= 0).long(),
                position_ids=(positions.clamp(min=0) + offsets)[:, begin:end],
                use_cache=True,
                **{cache_name(self.model): cache},
                **options,
            )

    def _passes(self, held: int, width: int) -> Iterator[tuple[int, int]]:
        """The passes over columns `held` to `width`, as begin and end: one pass, or passes over one token if needed."""
        together = width
        if held and any(part.forgets_states(self.model) for part in parts(self.model)):
            together = held
        elif self.bounds_steps:
            together = min(max(held, self.prompts.width), width)
        if held < together:
            yield held, together
        for column in range(together, width):
            yield column, column + 1


class DeferredCache(DynamicCache):
    """The keys and values of a finished call, copied from the engine's buffers on first access.

    It behaves as a `DynamicCache`, and is pickled as one.

    Args:
        call: the finished call. `take_over` must be called before another call uses its buffers.
    """

    def __init__(self, call: FinishedCall):
        self._call: FinishedCall | None = None
        self._is_copied = self._is_busy = False
        super().__init__()
        self._call = call

    @property
    def layers(self) -> list:
        call = self._call
        if call is not None:
            with lock_of(call.model):  # other threads may read it, or need the buffers or the modes of modules
                if self._call is not None and not self._is_busy:
                    self.take_over()
                    with self._busy(), _unchanged_on_error(self):
                        call.complete(self)
                    self._call = None
        return self._layers

    @layers.setter
    def layers(self, layers: list) -> None:
        self._layers = layers

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Context in which the thread that holds the target's lock reads the layers as they are."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def take_over(self) -> None:
        """Copy the engine's buffers, unless that is done already."""
        call = self._call
        if call is None or self._is_copied:
            return
        if call.sequences.is_cuda:  # the reader may use another stream than the call
            torch.cuda.synchronize(call.sequences.device)
        vars(self).update(vars(DynamicCache(config=call.model.config.get_text_config(decoder=True))))
        self._layers = vars(self).pop("layers")
        with self._busy(), torch.inference_mode(False), torch.no_grad():
            call.write_to(self)
        call.ragged, self._is_copied = None, True

    def __reduce_ex__(self, protocol: int) -> tuple:
        own = {"_call", "_is_busy", "_is_copied", "_layers"}
        state = {"layers": self.layers} | {name: value for name, value in vars(self).items() if name not in own}
        return DynamicCache, (), state
