"""What calls return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..host.caches import GenerateDecoderOnlyOutput
from ..stats import SpeculationStats
from .prompts import Prompts


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    `past_key_values` is a cache that plain `generate()` can continue: the user's, or on the static engine one that is
    copied from the engine's buffers on first access. `attentions` are empty there, as for any attention kernel that
    computes no weights.

    Attributes:
        speculation: rounds, drafted and accepted tokens, the engine that ran and why; also `drafter.stats`.
        logprobs: `[B, new]` float32, of the new tokens under the distribution that they were drawn from, after all
            logits processors; 0 for the padding of rows that had ended; None unless `return_logprobs` asks for it.
        raw_logprobs: the same under the softmax of the target's logits.
    """

    speculation: SpeculationStats | None = None
    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


class HiddenStates:
    """Keeps the target's hidden states at every slot, for `output_hidden_states=True`."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def store(self, layers: tuple[torch.Tensor, ...], slots: torch.Tensor, num_slots: int) -> None:
        if not self._buffers:
            self._buffers = [layer.new_zeros(layer.shape[0], num_slots, *layer.shape[2:]) for layer in layers]
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        for buffer, layer in zip(self._buffers, layers, strict=True):
            buffer[rows, slots] = layer

    def steps(self, prompts: Prompts, num_steps: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """As `generate()` returns them: first the padded prompt without cached columns, then one position a step."""
        prompt_lengths, width = prompts.lengths, prompts.width - prompts.cached

        def gather(buffer: torch.Tensor, step: int) -> torch.Tensor:
            if step > 0:
                rows = torch.arange(buffer.shape[0], device=buffer.device)
                return buffer[rows, torch.tensor(prompt_lengths, device=buffer.device) - 1 + step][:, None]
            out = buffer.new_zeros(buffer.shape[0], width, *buffer.shape[2:])
            for row, (length, cached) in enumerate(zip(prompt_lengths, prompts.cached_lengths, strict=True)):
                out[row, width - (length - cached) :] = buffer[row, cached:length]
            return out

        return tuple(tuple(gather(buffer, step) for buffer in self._buffers) for step in range(num_steps))
