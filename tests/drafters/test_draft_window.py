"""`draft_window_size`: what drafting attends to, and that texts are the same."""

import pytest
import torch
from case_counts import cases
from lossless import greedy
from oracle import RANDOM_DRAFTERS, SELDOM, OracleDrafter, copy_of, random_eagle3
from targets import padded_prompts, tiny_target

from hf_specdec import NoDrafter, ops

WINDOW = 64
LENGTHS = [90, 3]
KINDS = {**RANDOM_DRAFTERS, "copy": copy_of}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "static") for kind in KINDS if kind not in SELDOM),
        *((kind, "stock") for kind in cases([kind for kind in KINDS if kind not in SELDOM], ["eagle3", "mtp"])),
    ],
)
def test_drafting_attends_to_the_last_tokens(kind, engine, monkeypatch):
    """Of every row, in every pass of a round; prompts are read whole, and texts are the same."""
    target = tiny_target("llama")
    drafter, inputs = KINDS[kind](target).configure(draft_window_size=WINDOW, engine=engine), padded_prompts(LENGTHS)
    plain, starts, attention = greedy(target, inputs, max_new_tokens=16), [], ops.attention

    def noted(*args):
        if args[8] is not None:
            starts.append(args[8].tolist())
        return attention(*args)

    def limited(state, window):
        limit(state, window)
        expected.append(None if window is None else [max(length - WINDOW, 0) for length in state.lengths.tolist()])
        seen.append(starts.copy())
        starts.clear()

    limit, expected, seen = drafter.limit_attention, [], []
    monkeypatch.setattr(ops, "attention", noted)
    monkeypatch.setattr(drafter, "limit_attention", limited)
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=16), plain)
    drafted = [(first, passes) for first, passes in zip(expected, seen[1:], strict=False) if first is not None]
    assert len(drafted) >= 3 and all(passes and all(one == first for one in passes) for first, passes in drafted)
    assert any(max(first) > 6 for first, _ in drafted)
    between = [passes for first, passes in zip(expected, seen[1:], strict=False) if first is None]
    assert not any(any(one) for passes in between for one in passes), "prompts are read from their beginning"


def test_a_window_of_the_whole_text_changes_no_draft():
    target = tiny_target("llama")
    inputs, accepted, drafter = padded_prompts([90, 3]), {}, copy_of(target, noise=0.03)
    for window in ("all", 64, 200, 2**70):
        drafter.configure(draft_window_size=window)
        greedy(target, inputs, drafter, 5, max_new_tokens=30)
        accepted[window] = [row.accepted_per_position for row in drafter.stats.rows]
    assert accepted[200] == accepted[2**70] == accepted["all"]
    assert accepted[64][1] == accepted["all"][1] and accepted[64][0] != accepted["all"][0]


def test_what_is_refused():
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    for wrong in (0, 63, -1, True, 100.0, "most"):
        with pytest.raises(ValueError, match=r'draft_window_size is .*; expected an int of at least 64, or "all"'):
            drafter.configure(draft_window_size=wrong)
    for other in (NoDrafter(target), OracleDrafter(target, torch.ones(1, 4, dtype=torch.int64), [5])):
        with pytest.raises(ValueError, match='has no key/value cache of its own; expected "all"'):
            other.configure(draft_window_size=128)
        other.configure(draft_window_size="all")
    assert drafter.draft_window_size is None
