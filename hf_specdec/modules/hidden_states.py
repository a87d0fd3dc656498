"""Auxiliary hidden states: they are recorded during a target's forward passes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..host.modeling import HOOK_OF_ACCELERATE
from .deferred import Deferred, plain
from .patch import register_pre_hook, this_thread


def modules_of(*models: nn.Module) -> list[nn.Module]:
    """All modules of `models`, each once; several times as fast as `Module.modules()`."""
    found = dict.fromkeys(models)
    unvisited = list(found)
    while unvisited:
        for module in unvisited.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                if module._modules:
                    unvisited.append(module)
    return list(found)


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """`get_decoder()`, which goes by attribute names; the base model if an attribute with such a name is the head."""
    decoder = model.get_decoder()
    is_head = not isinstance(decoder, PreTrainedModel) and decoder is model.get_output_embeddings()
    return model.base_model if is_head else decoder


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The decoder layers of `model`, first to last; None if they are not found.

    They are `text_decoder(model).layers`, or else the only outermost list in the decoder that has as many modules as
    the configuration has layers.
    """
    decoder = text_decoder(model)
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers) > 0:
        return layers
    if not isinstance(decoder, nn.Module):
        return None
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = [one for one in modules_of(decoder) if isinstance(one, nn.ModuleList) and len(one) == count]
    inner = {module for one in lists for module in modules_of(one) if module is not one}
    found = [one for one in lists if one not in inner]
    return found[0] if len(found) == 1 else None


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Number of decoder layers that `model` runs, 0 if not found: its configuration may name fewer than it has."""
    layers = find_decoder_layers(model) or ()
    return min(len(layers), getattr(model.config.get_text_config(), "num_hidden_layers", len(layers)))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module whose output the head of `model` reads.

    It is `text_decoder(model)`, or if that is a model with a head (Llama 4), the child with the decoder layers.
    """
    decoder = text_decoder(model)
    if not isinstance(decoder, PreTrainedModel) or decoder.get_output_embeddings() is None:
        return decoder
    layers = decoder_layers(model)
    return next((part for part in decoder.children() if any(one is layers for one in modules_of(part))), decoder)


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, first to last; raises `ValueError` if `find_decoder_layers` finds none."""
    layers = find_decoder_layers(target)
    if layers is None:
        raise ValueError(
            f"{type(target).__name__} has no list of decoder layers (`layers`, or one of num_hidden_layers modules), "
            "so hidden states cannot be recorded; expected a decoder-only model of transformers."
        )
    return layers


def device_of_last_layer(target: PreTrainedModel) -> torch.device:
    """The device on which the last decoder layer of `target` runs, also if accelerate dispatches or offloads layers."""
    layers = find_decoder_layers(target)
    last = target if layers is None else layers[-1]
    for module in last.modules():
        device = getattr(getattr(module, HOOK_OF_ACCELERATE, None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(last.parameters()).device


# Key of the decoder's output, after the final norm, among recorded hidden states; it sorts after all layer ids.
LAST_HIDDEN_STATE = sys.maxsize


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Auxiliary hidden states from their `parts`; None if there are none."""
    if len(parts) > 1:
        return torch.cat(parts, dim=-1)
    return parts[0] if parts else None


class AuxHiddenStateRecorder:
    """Context in which forward passes of `target`, if run by the engine that enters it, record auxiliary hidden states.

    Args:
        layer_ids: ids to record, ascending. Id b is the residual stream that enters layer b, transformers'
            `hidden_states[b]`; id n, of n layers, is the stream that leaves the last layer, *before* the final norm.
        last_hidden_state: whether to record the decoder's output, after the final norm, too, as the last one.

    Attributes:
        recorded: the hidden states of the last pass, `[B, n, hidden_size]`, by layer id or `LAST_HIDDEN_STATE`.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], last_hidden_state: bool = False):
        self._target, self._layer_ids, self._last_hidden_state = target, layer_ids, last_hidden_state
        self.recorded: dict[int, torch.Tensor] = {}
        self._handles = ExitStack()
        self._engine: object | None = None

    @property
    def records(self) -> bool:
        return self._last_hidden_state or bool(self._layer_ids)

    @property
    def misses_positions(self) -> bool:
        """Whether a pass that returns only the logits of its last tokens would record some layers at these tokens only:
        layers that store no keys of their own leave out the others."""
        return self.records and bool(getattr(self._target.config.get_text_config(), "num_kv_shared_layers", 0))

    @property
    def aux_hidden_states(self) -> torch.Tensor | None:
        """`[B, n, count * hidden_size]` of the last pass, in the order of the layer ids; None before any pass."""
        return joined(self.parts())

    def parts(self) -> tuple[torch.Tensor, ...]:
        """The parts of `aux_hidden_states`, `[B, n, hidden_size]` each, on one device; empty before any pass."""
        recorded = [self.recorded[key] for key in sorted(self.recorded)]
        recorded = [plain(one) if isinstance(one, Deferred) else one for one in recorded]
        if len({tensor.device for tensor in recorded}) > 1:
            recorded = [tensor.to(recorded[-1].device) for tensor in recorded]
        return tuple(recorded)

    def __enter__(self) -> AuxHiddenStateRecorder:
        self._engine = this_thread.engine
        if self._last_hidden_state:
            decoder = decoder_of(self._target)
            self._handles.enter_context(self._register_hook(decoder, LAST_HIDDEN_STATE))
        layers = decoder_layers(self._target) if self._layer_ids else ()
        for layer_id in self._layer_ids:
            self._handles.enter_context(self._register_hook(layers[max(layer_id - 1, 0)], layer_id))
        return self

    def __exit__(self, *exception) -> None:
        self._handles.close()
        self.recorded.clear()

    def _register_hook(self, module: nn.Module, key: int):
        def record(output: Any) -> None:
            if torch.compiler.is_compiling() or this_thread.engine is self._engine:
                if not isinstance(output, (tuple, torch.Tensor)):
                    output = output.last_hidden_state
                self.recorded[key] = output[0] if isinstance(output, tuple) else output

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            record(args[0] if args else kwargs["hidden_states"])

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            record(output)

        return register_pre_hook(module, before) if key == 0 else module.register_forward_hook(after)


# Tokens of the pass that checks shapes. More than one, since some layers of some models run the last token only.
NUM_PROBE_TOKENS = 3


def check_aux_hidden_states(
    target: PreTrainedModel, layer_ids: list[int], last_hidden_state: bool, width: int, name: str
) -> None:
    """Run `target`, unless it is on the meta device, over a few tokens and check its auxiliary hidden states.

    Args:
        layer_ids, last_hidden_state: as in `AuxHiddenStateRecorder`.
        width: size of each hidden state that the drafter `name` expects.

    Raises:
        ValueError: a layer's output is not `[1, tokens, width]`, e.g. it has several streams, or the last token only.
    """
    weights = next(target.get_input_embeddings().parameters())
    if weights.device.type == "meta" or not (layer_ids or last_hidden_state):
        return
    tokens = torch.arange(1, 1 + NUM_PROBE_TOKENS, device=weights.device)[None]
    tokens = tokens % target.config.get_text_config().vocab_size
    expected = (1, NUM_PROBE_TOKENS, width)
    with torch.no_grad(), AuxHiddenStateRecorder(target, layer_ids, last_hidden_state) as recorder:
        target(input_ids=tokens, use_cache=False)
        found = {layer_id: tuple(recorded.shape) for layer_id, recorded in recorder.recorded.items()}
    wrong = {layer_id: shape for layer_id, shape in found.items() if shape != expected}
    missing = set(layer_ids) - found.keys()
    if wrong or missing:
        places = {LAST_HIDDEN_STATE: "after the last layer"}
        what = ", ".join(f"{list(shape)} {places.get(at, f'at layer id {at}')}" for at, shape in sorted(wrong.items()))
        raise ValueError(
            f"{name} reads hidden states of {type(target).__name__}, but over {NUM_PROBE_TOKENS} tokens its layers "
            f"return {what or f'nothing at the layer ids {sorted(missing)}'}; expected {list(expected)} everywhere. "
            "Drafters that read hidden states do not support such a target; a draft model, which reads tokens, may."
        )
