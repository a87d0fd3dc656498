"""Acceptance statistics: counted on the device, read once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class RowStats:
    """Counts of one row of the batch, or of several added up.

    Attributes:
        rounds: rounds the row took part in.
        drafted: draft tokens verified, up to the row's length limit.
        accepted: draft tokens committed.
        committed: tokens committed: accepted, recovered and bonus ones.
        drafted_per_position, accepted_per_position: the same by position in the block, first draft token first.
    """

    rounds: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    committed: int

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed a round; 1 + accepted drafts a round, but for blocks cut by an end or a limit."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts at each position that were accepted, which needs all before them to be."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]


@dataclass
class SpeculationStats(RowStats):
    """What speculation did in one `generate()` call; the counts are totals over the rows.

    Attributes:
        rows: the counts of each row.
        num_assistant_tokens: K, draft tokens a round.
        engine: `"static"` or `"stock"`.
        reason: why that engine ran.
        draft_probs: whether drafts were drawn from the drafter's distribution.
        num_rounds: rounds the batch ran, i.e. target passes after prefill.
        seconds: wall time of those rounds, drafting included and prefill not.
    """

    rows: list[RowStats] = field(default_factory=list)
    num_assistant_tokens: int = 0
    engine: str = ""
    reason: str = ""
    draft_probs: bool = False
    num_rounds: int = 0
    seconds: float = 0.0

    @property
    def milliseconds_per_round(self) -> float:
        return 1e3 * self.seconds / self.num_rounds if self.num_rounds else 0.0

    def __str__(self) -> str:
        positions = " ".join(f"{share:.2f}" for share in self.acceptance_per_position)
        return (
            f"{self.engine} engine ({self.reason}): {self.committed} tokens in {self.rounds} rounds of "
            f"{self.num_assistant_tokens} drafts, acceptance length {self.acceptance_length:.2f}, "
            f"per position [{positions}], {self.milliseconds_per_round:.1f} ms a round"
        )


class Counters:
    """Device-side counters of a batch; updated inside a round without a host read.

    Args:
        batch: rows.
        num_draft_tokens: K.
        device: where the round runs.
    """

    def __init__(self, batch: int, num_draft_tokens: int, device: torch.device):
        self.rounds = torch.zeros(batch, dtype=torch.int64, device=device)
        self.committed = torch.zeros(batch, dtype=torch.int64, device=device)
        self.drafted = torch.zeros(batch, num_draft_tokens, dtype=torch.int64, device=device)
        self.accepted = torch.zeros(batch, num_draft_tokens, dtype=torch.int64, device=device)

    def count(self, accepted: torch.Tensor, committed: torch.Tensor, room: torch.Tensor) -> None:
        """Add one round.

        Args:
            accepted: `[B]` accepted draft tokens.
            committed: `[B]` tokens committed; 0 for rows that did not take part.
            room: `[B]` tokens that the rows could still take before the round.
        """
        takes_part = committed > 0
        steps = torch.arange(self.drafted.shape[1], device=accepted.device)
        self.rounds += takes_part
        self.committed += committed
        self.drafted += (steps < room[:, None]) & takes_part[:, None]
        self.accepted += steps < torch.minimum(accepted, committed)[:, None]

    def summary(self, **about) -> SpeculationStats:
        """Read the counters; `about` fills the remaining fields of `SpeculationStats`."""
        table = torch.cat([self.rounds[:, None], self.committed[:, None], self.drafted, self.accepted], dim=1)
        width = self.drafted.shape[1]

        def row(counts: list[int]) -> tuple[int, list[int], list[int], int]:
            return counts[0], counts[2 : 2 + width], counts[2 + width :], counts[1]

        total = row(table.sum(dim=0).tolist())
        return SpeculationStats(*total, rows=[RowStats(*row(counts)) for counts in table.tolist()], **about)
