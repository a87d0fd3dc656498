"""What calls return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..host.caches import GenerateDecoderOnlyOutput
from ..stats import SpeculationStats
from .row_request import RowRequest


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    `past_key_values` is a cache that plain `generate()` can continue: the caller's, or on the static engine one that is
    copied from the engine's buffers on first access. `attentions` are empty there, as for any attention kernel that
    computes no weights.

    Attributes:
        speculation: rounds, drafted and accepted tokens, the engine that ran and why; also `drafter.stats`.
    """

    speculation: SpeculationStats | None = None


@dataclass
class ContinuousOutput:
    """What a call by continuous batching returns.

    Attributes:
        requests: in the order of the prompts.
        speculation: statistics; also `drafter.stats`. Its `seconds` include prefill, which runs between rounds.
    """

    requests: list[RowRequest]
    speculation: SpeculationStats

    @property
    def sequences(self) -> torch.Tensor:
        """`[n]` int64: the generated tokens of all requests, one after the other."""
        return torch.tensor([token for request in self.requests for token in request.tokens], dtype=torch.int64)
