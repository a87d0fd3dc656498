"""Slots, blocks and commits of rows: Triton against the references, and those against a loop over rows.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import pytest
import torch
from case_counts import num_cases

from hf_specdec.kernels import round_state, round_state_reference
from hf_specdec.kernels.types import VerificationResult

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 20


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that kernels are to write holds a token of no vocabulary before."""
    empty = torch.empty

    def filled(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(-77 if made.dtype == torch.int64 else float("nan"))

    monkeypatch.setattr(torch, "empty", filled)


def rows(batch, seed=0):
    """Tokens, lengths, limits and flags of rows: some finished, some at their limits."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    lengths = draw(2, SLOTS - 8, batch)
    limits = torch.minimum(lengths + draw(0, 9, batch), torch.tensor(SLOTS - 1))
    finished = draw(0, 4, batch) == 0
    return [one.to(DEVICE) for one in (draw(0, 9, batch, SLOTS), lengths, limits, finished)]


@pytest.mark.parametrize("seed", range(num_cases(3, 1)))
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
def test_slots_and_blocks(num_drafts, seed):
    tokens, lengths, limits, finished = rows(7, seed)
    wide = torch.randint(100, (7, 2 * num_drafts + 4), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    drafts, dummy = wide[:, 1 : 2 * num_drafts + 1 : 2], SLOTS - 1
    expected = round_state_reference.block(tokens, lengths, limits, finished, drafts, dummy)
    for found, right in zip(round_state.block(tokens, lengths, limits, finished, drafts, dummy), expected, strict=True):
        assert torch.equal(found, right)
    for row, length in enumerate(lengths.tolist()):
        assert expected[0][row].tolist() == [tokens[row, length - 1].item(), *drafts[row].tolist()]
        for column, slot in enumerate(expected[1][row].tolist()):
            position = length - 1 + column
            has_next = not finished[row] and position <= limits[row] - 2
            assert slot == (position if has_next else dummy)
    for first in (-2, 0, 3):
        options = lengths, limits, finished, first, num_drafts + 1, dummy
        assert torch.equal(round_state.next_slots(*options), round_state_reference.next_slots(*options))


@pytest.mark.parametrize("width", [1, 5, 1030])
def test_position_ids(width):
    slots = torch.randint(SLOTS, (3, 2 * width), generator=torch.Generator().manual_seed(0)).to(DEVICE)[:, ::2]
    offsets = torch.tensor([0, 5, -2], device=DEVICE)
    for given in (offsets, None):
        expected = round_state_reference.position_ids(slots, given, SLOTS - 1)
        assert torch.equal(round_state.position_ids(slots, given, SLOTS - 1), expected)
    assert bool((expected[slots == SLOTS - 1] == 0).all()) and torch.equal(expected, slots % (SLOTS - 1))


def committed_by_loop(tokens, lengths, finished, limits, ends, result):
    """What a commit does, row by row; without the last slot."""
    tokens, lengths, finished = tokens.tolist(), lengths.tolist(), finished.tolist()
    counts = []
    for row in range(len(lengths)):
        count = 0
        if not finished[row]:
            for token in result.tokens[row, : result.committed[row]].tolist():
                if lengths[row] >= limits[row]:
                    break
                tokens[row][lengths[row]] = max(token, 0)
                lengths[row] += 1
                count += 1
                if token in [-1, *ends[row].tolist()]:
                    finished[row] = True
                    break
            finished[row] |= lengths[row] >= limits[row]
        counts.append(count)
    return [row[:-1] for row in tokens], lengths, finished, counts


@pytest.mark.parametrize("seed", range(num_cases(6, 2)))
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_commit(width, seed):
    batch = 9
    state = rows(batch, seed)
    generator = torch.Generator().manual_seed(seed + 10)
    ends = torch.randint(6, (batch, 3), generator=generator).to(DEVICE)
    ends[:, 1:] = -1 if seed % 2 else ends[:, 1:]
    accepted = torch.randint(width, (batch,), generator=generator).to(DEVICE)
    # Among them -1, which ends a row for which the target's scores have no softmax.
    new = torch.randint(-1, 12, (width, batch), generator=generator).to(DEVICE).t()  # strides of any kind
    result = VerificationResult(new, accepted, accepted + 1)
    runs = []
    for module in (round_state_reference, round_state):
        tokens, lengths, limits, finished = (one.clone() for one in state)
        kept = VerificationResult(*(torch.full((batch, *size), -5, device=DEVICE) for size in ((width + 2,), (), ())))
        committed = module.commit(tokens, lengths, finished, limits, ends, result, kept)
        runs.append([tokens[:, :-1], lengths, finished, committed, *kept])
        again = [one.clone() for one in state]
        assert torch.equal(module.commit(again[0], again[1], again[3], again[2], ends, result, None), committed)
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    tokens, lengths, limits, finished = state
    expected = committed_by_loop(tokens, lengths, finished, limits, ends, result)
    assert [one.tolist() for one in runs[0][:4]] == list(expected)
    *_, kept_tokens, kept_accepted, kept_committed = runs[1]
    assert torch.equal(kept_tokens[:, :width], new.clamp(min=0)) and bool((kept_tokens[:, width:] == -5).all())
    assert torch.equal(kept_accepted, accepted) and kept_committed.tolist() == expected[3]
