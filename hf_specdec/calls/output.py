"""What calls return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..host.caches import GenerateDecoderOnlyOutput
from ..stats import SpeculationStats


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    Plain `generate()` can continue its cache: the user's, or on the static engine one that is copied from the engine's
    buffers on first access. `attentions` are empty there, as for any attention kernel that computes no weights.

    Attributes:
        speculation: rounds, drafted and accepted tokens, the engine that ran and why; also `drafter.stats`.
        logprobs: `[B, new]` float32, of the new tokens under the distribution that they were drawn from, after all
            logits processors; 0 for the padding of rows that had ended; None unless `return_logprobs` asks for it.
        raw_logprobs: the same under the softmax of the target's logits.
    """

    speculation: SpeculationStats | None = None
    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None
