"""A ring of texts that calls have generated, with the target's hidden states at their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Text(NamedTuple):
    """A text of a call: tokens `[length]` int64, the prompt's included, and hidden states `[length - 1, width]` of all
    tokens but the last, which the target has not run."""

    tokens: torch.Tensor
    prompt_length: int
    hidden_states: torch.Tensor


class Rollouts:
    """A ring of texts, in which new texts replace the oldest. Engines fill it while it is `Drafter.rollouts`.

    It keeps hidden states of `layer_ids`, see `AuxHiddenStateRecorder`, then the one after the final norm, for texts of
    at most `max_tokens` in all. `dropped` counts the texts that were replaced or were too long.
    """

    def __init__(self, layer_ids: Sequence[int], max_tokens: int):
        self.layer_ids, self.max_tokens, self.dropped = list(layer_ids), max_tokens, 0
        # Each text with the number of tokens before it. Operations are atomic, because managers have threads.
        self._texts: deque[tuple[int, Text]] = deque()
        self._num_tokens = 0

    def keep(self, hidden_states: torch.Tensor, prompt: torch.Tensor, tokens: Sequence[int]) -> None:
        """Add a text: `hidden_states` `[length - 1, width]`, which are copied, `prompt` `[n]` int64, new `tokens`."""
        new = torch.tensor(tokens, dtype=torch.int64, device=hidden_states.device)
        text = torch.cat([prompt.to(new.device), new])
        self._texts.append((self._num_tokens, Text(text, len(prompt), hidden_states.clone())))
        self._num_tokens += len(text)
        while self._texts and self._num_tokens - self._texts[0][0] > self.max_tokens:
            self._texts.popleft()
            self.dropped += 1

    def take(self) -> list[Text]:
        """Remove all texts and return them, oldest first."""
        return [self._texts.popleft()[1] for _ in range(len(self._texts))]
