"""Hidden states of the target by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HiddenStates:
    """Hidden states of the target at every slot, for `output_hidden_states=True` or for a drafter that learns. Those of
    a rejected draft are overwritten, as its keys are.

    Attributes:
        buffers: `[B, slots, streams, width]` for each kind of hidden states, 1 stream in most models; empty before a
            pass.
    """

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._shapes: list[torch.Size] = []

    def store(self, layers: Sequence[torch.Tensor], slots: torch.Tensor, num_slots: int, num_packed: int = 1) -> None:
        """Store each of `layers`, `[B, n, width]` or `[B, n, streams, width]`, at `slots` `[B, n]` int64 of rows of
        `num_slots`. If `num_packed` rows are packed in one, B = 1."""
        if not self.buffers:
            size = len(slots) * num_packed, num_slots
            self._shapes = [layer.shape[2:] for layer in layers]
            self.buffers = [
                layer.new_zeros(*size, shape[:-1].numel(), shape[-1])
                for layer, shape in zip(layers, self._shapes, strict=True)
            ]
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        for buffer, layer, shape in zip(self.buffers, layers, self._shapes, strict=True):
            buffer.view(len(slots), -1, *shape)[rows, slots] = layer

    def copy_rows(self, rows: torch.Tensor, source: HiddenStates, taken: slice | torch.Tensor, slots: int) -> None:
        """Copy `slots` leading slots of the rows `taken` of `source` to `rows`."""
        for ours, theirs in zip(self.buffers, source.buffers, strict=True):
            ours[rows, :slots] = theirs[taken, :slots]

    def steps(
        self, prompt_lengths: Sequence[int], cached_lengths: Sequence[int], width: int, num_tokens: Sequence[int]
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Hidden states as `generate()` returns them: the padded prompt of `width` columns, without cached ones, then
        one position a step; zeros for a row after its `num_tokens` new tokens."""

        def gather(buffer: torch.Tensor, step: int) -> torch.Tensor:
            if step > 0:
                rows = torch.arange(len(buffer), device=buffer.device)
                out = buffer[rows, torch.tensor(prompt_lengths, device=buffer.device) - 1 + step][:, None]
                out[[row for row, count in enumerate(num_tokens) if step >= count]] = 0
                return out
            out = buffer.new_zeros(len(buffer), width, *buffer.shape[2:])
            for row, (length, cached) in enumerate(zip(prompt_lengths, cached_lengths, strict=True)):
                out[row, width - (length - cached) :] = buffer[row, cached:length]
            return out

        buffers = [one.view(*one.shape[:2], *shape) for one, shape in zip(self.buffers, self._shapes, strict=True)]
        return tuple(tuple(gather(buffer, step) for buffer in buffers) for step in range(max(num_tokens)))
