"""What calls return."""

from __future__ import annotations

from dataclasses import dataclass

from ..host.caches import GenerateDecoderOnlyOutput
from ..stats import SpeculationStats


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    `past_key_values` is a cache that plain `generate()` can continue: the user's, or on the static engine one that is
    copied from the engine's buffers on first access. `attentions` are empty there, as for any attention kernel that
    computes no weights.

    Attributes:
        speculation: rounds, drafted and accepted tokens, the engine that ran and why; also `drafter.stats`.
    """

    speculation: SpeculationStats | None = None
