"""Rounds of speculative decoding as ops on a state see them: blocks of columns, some of them with the true tokens."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch

DUMMY = 5000


class Round(NamedTuple):
    """One pass over a block of columns.

    Attributes:
        positions: `[B, n]` int64, `DUMMY` in columns without a token.
        is_true: `[B, n]` bool, live columns with the token of the final text; other live columns have wrong drafts.
        certain: `[B]` int64.
        base: `[B]` int64, the position of the stored state before the pass.
        next_base: `[B]` int64, the same after the pass.
    """

    positions: torch.Tensor
    is_true: torch.Tensor
    certain: torch.Tensor
    base: torch.Tensor
    next_base: torch.Tensor


class _Rows:
    """Rows of a batch, and the position of each one's stored state."""

    def __init__(self, lengths: list[int], random: Random) -> None:
        self.lengths, self.bases, self.random = lengths, [0] * len(lengths), random

    def run(self, blocks: list[tuple[int, int, int]], certain: list[int], before: int = 0, behind: int = 0) -> Round:
        """A pass over `(first position, live columns, true columns)` of each row, between columns without tokens.

        Rows with few columns have further such columns before or behind them.
        """
        width = max(1, *(count for _, count, _ in blocks))
        positions, is_true, next_bases = [], [], []
        for row, (first, count, num_true) in enumerate(blocks):
            gap = self.random.choice([0, width - count])
            front, back = before + gap, behind + width - count - gap
            positions.append([DUMMY] * front + [*range(first, first + count)] + [DUMMY] * back)
            is_true.append([False] * front + [index < num_true for index in range(count)] + [False] * back)
            reached = max(self.bases[row], min(certain[row], first + count)) if count else self.bases[row]
            next_bases.append(reached)
        bases, self.bases = self.bases, next_bases
        return Round(*(torch.tensor(values) for values in (positions, is_true, certain, bases, next_bases)))

    def prefill(self, chunk: int | None) -> Iterator[Round]:
        """All tokens of each row but the last, in passes of `chunk` columns."""
        width = max(1, max(self.lengths) - 1)
        for start in range(0, width, chunk or width):
            counts = [max(0, min(length - 1 - start, chunk or width)) for length in self.lengths]
            yield self.run([(start, count, count) for count in counts], self.lengths)


def verification_rounds(
    num_drafts: int, num_rounds: int, lengths: list[int], lag: int = 0, chunk: int | None = None, seed: int = 0
) -> Iterator[Round]:
    """Prefill, then blocks of the last token and drafts; any number of drafts is accepted.

    Rows pause, and blocks end early, as at a limit of the length. `certain` is up to `lag` behind the lengths.
    """
    random = Random(seed)
    rows = _Rows(list(lengths), random)
    yield from rows.prefill(chunk)
    for _ in range(num_rounds):
        blocks, certain = [], [length - random.randint(0, lag) for length in rows.lengths]
        for row, length in enumerate(rows.lengths):
            if random.random() < 0.15:
                blocks.append((length - 1, 0, 0))
                continue
            drafted = random.choice([num_drafts, num_drafts, random.randint(0, num_drafts)])
            accepted = random.choice([0, drafted, random.randint(0, drafted)])
            blocks.append((length - 1, drafted + 1, accepted + 1))
            rows.lengths[row] += accepted + 1
        yield rows.run(blocks, certain, before=random.choice([0, 0, 2]), behind=random.choice([0, 1]))


def drafting_rounds(num_drafts: int, num_rounds: int, lengths: list[int], seed: int = 0) -> Iterator[Round]:
    """The passes of a draft model: kept tokens, then a column for each further draft.

    Accepted drafts are among the kept tokens of the next round, so they are passed again.
    """
    random = Random(seed)
    rows = _Rows(list(lengths), random)
    yield from rows.prefill(None)
    kept = [length - 1 for length in rows.lengths]
    for _ in range(num_rounds):
        accepted = [random.randint(0, num_drafts) for _ in rows.lengths]
        lengths = list(rows.lengths)
        yield rows.run(
            [(first, length - first, length - first) for first, length in zip(kept, lengths, strict=True)], lengths
        )
        for step in range(num_drafts - 1):
            yield rows.run(
                [(length + step, 1, int(step < number)) for length, number in zip(lengths, accepted, strict=True)],
                lengths,
            )
        kept, rows.lengths = lengths, [length + number + 1 for length, number in zip(lengths, accepted, strict=True)]
