"""Acceptance statistics, counted on the host from the results of every round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class RowStats:
    """Counts of one row of the batch, or sums over several rows.

    Attributes:
        rounds: rounds the row took part in.
        drafted: draft tokens verified, up to the row's length limit.
        accepted: draft tokens committed.
        committed: tokens committed by rounds: accepted draft tokens, recovered and bonus tokens. The first token of a
            text comes with the prefill and belongs to no round.
        drafted_per_position, accepted_per_position: `drafted` and `accepted` by position in the block, `[K]`.
        cached_tokens: prompt tokens that were not prefilled, since another row has the same prefix.
        unread_tokens: leading prompt tokens that the drafter has not read, since the text continues a cache and their
            hidden states are not known.
    """

    rounds: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    committed: int = 0
    cached_tokens: int = 0
    unread_tokens: int = 0

    def add_counts(self, other: RowStats) -> None:
        """Add the counts of `other`, which may have another number of positions."""
        for name in ("drafted_per_position", "accepted_per_position"):
            columns = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, list(map(sum, columns)))
        for name in ("rounds", "committed", "cached_tokens", "unread_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed a round: 1 + accepted drafts, less where an end of sequence or a limit cuts a block."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts at each position that were accepted, which requires that all before them were."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]


def add_up(rows: Sequence[RowStats]) -> RowStats:
    """Sums of the counts of `rows`; positions that a row lacks count as 0."""
    total = RowStats()
    for row in rows:
        total.add_counts(row)
    return total


@dataclass
class SpeculationStats(RowStats):
    """Statistics of one `generate()` call with a drafter; counts are totals over the rows.

    Attributes:
        rows: the counts of each row.
        num_assistant_tokens: K, draft tokens a round; the largest K where it is chosen round by round.
        tree: the largest N of a round that was verified as a tree of depth K; 0 if all were chains.
        engine: `"static"` or `"stock"`.
        reason: why that engine ran.
        execution: how its rounds were run: captured or not, compiled or not, batch-invariant or not.
        batch_invariant: whether logits depended on neither the batch nor the drafts, see `Drafter.configure`.
        draft_probs: whether drafts were drawn from the drafter's distribution.
        num_rounds: rounds that the batch ran, i.e. target passes after the prefill.
        rounds_by_k: number of rounds by K, on the static engine.
        rounds_by_tree: number of rounds with trees by N.
        captures: number of CUDA graphs that the call has captured, of rounds and prefills.
        seconds: wall time of the rounds, with drafting, without the prefill.
    """

    rows: list[RowStats] = field(default_factory=list)
    num_assistant_tokens: int = 0
    tree: int = 0
    engine: str = ""
    reason: str = ""
    execution: str = ""
    batch_invariant: bool = False
    draft_probs: bool = False
    num_rounds: int = 0
    rounds_by_k: dict[int, int] = field(default_factory=dict)
    rounds_by_tree: dict[int, int] = field(default_factory=dict)
    captures: int = 0
    seconds: float = 0.0

    @property
    def milliseconds_per_round(self) -> float:
        return 1e3 * self.seconds / self.num_rounds if self.num_rounds else 0.0

    def __str__(self) -> str:
        positions = " ".join(f"{share:.2f}" for share in self.acceptance_per_position)
        tree = f", trees of up to {self.tree}" if self.tree else ""
        return (
            f"{self.engine} engine ({self.reason}): {self.committed} tokens in {self.rounds} rounds of "
            f"{self.num_assistant_tokens} drafts{tree}, acceptance length {self.acceptance_length:.2f}, "
            f"per position [{positions}], {self.milliseconds_per_round:.1f} ms a round"
        )


@dataclass
class TotalStats(RowStats):
    """Sums over calls.

    Attributes:
        calls: number of calls.
        captures: number of CUDA graphs that they have captured.
        seconds: their wall time, with prefills and checks.
    """

    calls: int = 0
    captures: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens committed by rounds for each second of the calls' time."""
        return self.committed / self.seconds if self.seconds else 0.0

    def add(self, stats: SpeculationStats, seconds: float) -> None:
        """Add a call that took `seconds`."""
        self.add_counts(stats)
        self.captures += stats.captures
        self.calls += 1
        self.seconds += seconds


class Counters:
    """Counts the tokens of `batch` rows in rounds of up to `num_draft_tokens` successive drafts.

    `on_count` is `auto_k.auto_drafts.Acceptance.observe`, or None.
    """

    def __init__(self, batch: int, num_draft_tokens: int, on_count: Callable[..., None] | None = None):
        self._on_count = on_count
        self.rows = [RowStats(0, [0] * num_draft_tokens, [0] * num_draft_tokens, 0) for _ in range(batch)]

    def count(
        self,
        rows: Iterable[tuple[int, int, int, int]],
        rejected: Sequence[Sequence[int]] | None = None,
        num_nodes: int = 0,
    ) -> None:
        """Add a round of unfinished rows: for each its number, and its accepted, committed and drafted tokens; drafts
        end at the row's length limit.

        `rejected`, by row, and `num_nodes` belong to a tree, see `Acceptance.observe`.
        """
        shapes: Counter[tuple[int, int]] = Counter()
        for number, (row, accepted, committed, drafted) in enumerate(rows):
            counts = self.rows[row]
            counts.rounds += 1
            counts.committed += committed
            for position in range(drafted):
                counts.drafted_per_position[position] += 1
            for position in range(min(accepted, committed)):
                counts.accepted_per_position[position] += 1
            if self._on_count is None:
                continue
            if rejected is None:
                shapes[accepted, drafted] += 1
            else:
                self._on_count(accepted, drafted, rejected[number], num_nodes)
        for (accepted, drafted), count in shapes.items():
            self._on_count(accepted, drafted, times=count)

    def summary(self, **about) -> SpeculationStats:
        """The counts of all rows; `about` gives the other fields of `SpeculationStats`."""
        return SpeculationStats(**vars(add_up(self.rows)), rows=self.rows, **about)
