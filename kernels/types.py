"""What the operations of a round take and return."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch


class DraftInputs(NamedTuple):
    """What a drafter's first pass of a round runs, `[B, W]` int64 each; written by `prepare_inputs`.

    Attributes:
        tokens: to embed.
        slots: of the drafter's cache; the scrap slot for columns that are inert.
        positions: to embed; 0 for columns that are inert.
        sources: which row of the round's verified block a column's hidden state comes from; -1 for mask columns,
            which have a hidden state of their own, and for inert ones.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, width: int, device: torch.device | str) -> DraftInputs:
        """Buffers for `batch` rows of `width` columns: K + 1 for the tokens of a round, and K - 1 for masks."""
        return cls(*(torch.zeros(batch, width, dtype=torch.int64, device=device) for _ in cls._fields))


class RandomStream(IntEnum):
    """Purposes of random numbers; numbers of different streams are independent (see `uniform`)."""

    ACCEPT = 0
    TARGET = 1
    DRAFT = 2
    SEED = 3


class VerificationResult(NamedTuple):
    """Outcome of one round.

    Attributes:
        tokens: `[B, K + 1]` int64: the accepted draft tokens, then the recovered or bonus token; the rest is undefined.
        accepted: `[B]` int64, number of accepted draft tokens, 0 to K.
        committed: `[B]` int64, number of leading `tokens` that the row commits: `accepted + 1`, less what lies after
            an end-of-sequence token or the length limit, and 0 for finished rows.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


class Proposal(NamedTuple):
    """Draft tokens of one round.

    Attributes:
        tokens: `[B, K]` int64, in the target's vocabulary.
        probs: `[B, K, V_d]` float32, the distributions q that the tokens were drawn from, over the draft vocabulary;
            None for deterministic drafts, i.e. point masses.
        draft_ids: `[vocab_size]` int64, where each token is in the draft vocabulary, -1 where it is not; None where
            the draft vocabulary is the first V_d tokens. It is not of the round, and is never copied.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    draft_ids: torch.Tensor | None = None
