"""What `generate()` returns."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..stats import SpeculationStats


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    `past_key_values` is a cache that plain `generate()` can continue: the caller's, or on the static engine one that is
    made when somebody looks at it. `attentions` there are those of a target that computes no weights: empty.
    """

    speculation: SpeculationStats | None = None
