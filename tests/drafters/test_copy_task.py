"""Drafters whose weights are made by hand for a target that counts: every draft is right, and none if a position, a
token or a hidden state is one off.

The target says token t + 1 after token t, modulo `COUNTED`, so that a text repeats itself every `COUNTED` positions.
The drafter has one layer with one head, whose scores depend on the distance of query and key alone: it finds the
context position a given distance back, and drafts what the target says after the token there.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from case_counts import cases
from counting import CHAINING, COUNTED, MASK, chaining_drafter, counting_target, feature_drafter, finding_drafter

LENGTHS = [18, 33, 25]


def acceptance(target, drafter, num_draft_tokens, engine="static") -> float:
    """Share of accepted drafts, of which the call has as many as fit, on counting prompts."""
    lengths = LENGTHS if engine == "static" else LENGTHS[:1]
    width = max(lengths)
    rows = [
        [MASK] * (width - length) + [(row + at) % COUNTED for at in range(length)] for row, length in enumerate(lengths)
    ]
    input_ids = torch.tensor(rows)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long(),
    }
    drafter.configure(engine=engine, num_assistant_tokens=num_draft_tokens)
    out = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=4 * (num_draft_tokens + 1))
    last = input_ids[:, -1:]
    assert torch.equal(out[:, width:], (last + 1 + torch.arange(out.shape[1] - width)) % COUNTED)
    return drafter.stats.accepted / drafter.stats.drafted


LAYERS = {
    "whole block": {"causal": False},
    "causal": {"causal": True},
    "windowed": {"layer_types": ["sliding_attention"], "sliding_window": COUNTED + 2, "causal": False},
    "windowed and causal": {"layer_types": ["sliding_attention"], "sliding_window": COUNTED + 2, "causal": True},
}


@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("anchor_first", [False, True])
def test_every_draft_is_right(anchor_first, layers, engine):
    """A mask drafts the token at its own position, which the token `COUNTED` + 1 positions before it tells; a token of
    a block that begins with the anchor drafts the next one, which the token `COUNTED` positions before it tells."""
    target, distance = counting_target(), COUNTED if anchor_first else COUNTED + 1
    drafter = finding_drafter(target, distance, anchor_first=anchor_first, **LAYERS[layers])
    for num_draft_tokens in (1, 3, 8):
        assert acceptance(target, drafter, num_draft_tokens, engine) == 1.0


@pytest.mark.parametrize("anchor_first", [False, True])
@pytest.mark.parametrize("error", [-1, 1])
def test_no_draft_is_right_one_position_off(anchor_first, error):
    target, distance = counting_target(), COUNTED if anchor_first else COUNTED + 1
    drafter = finding_drafter(target, distance + error, anchor_first=anchor_first)
    assert acceptance(target, drafter, 3) == 0.0


@pytest.mark.parametrize("anchor_first", [False, True])
def test_no_draft_is_right_by_the_other_convention(anchor_first):
    target = counting_target()
    drafter = finding_drafter(target, COUNTED + 1 if anchor_first else COUNTED, anchor_first=anchor_first)
    assert acceptance(target, drafter, 3) == 0.0


def test_a_window_that_ends_before_the_position_hides_it():
    """The query's own position counts: a window of n shows n - 1 positions before it."""
    target = counting_target()
    for window, expected in ((COUNTED + 2, 1.0), (COUNTED + 1, 0.0)):
        drafter = finding_drafter(
            target, COUNTED + 1, layer_types=["sliding_attention"], sliding_window=window, causal=False
        )
        assert acceptance(target, drafter, 5) == expected


@pytest.mark.parametrize(
    ("family", "anchor_first", "engine"),
    cases(
        every := list(product(CHAINING, [False, True], ["static", "stock"])),
        [one for at, one in enumerate(every) if at % 4 in ((0, 3), (1, 2))[at // 4 % 2]],
    ),
)
def test_every_draft_of_a_chain_is_right(family, anchor_first, engine):
    """The first follows the anchor in both conventions."""
    target = counting_target()
    drafter = chaining_drafter(target, 1, family, anchor_first=anchor_first)
    for num_draft_tokens in (1, 3, 8):
        assert acceptance(target, drafter, num_draft_tokens, engine) == 1.0
    for step in (0, 2):
        drafter = chaining_drafter(target, step, family, anchor_first=anchor_first)
        assert acceptance(target, drafter, 3, engine) == 0.0


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_every_draft_from_hidden_states_beside_tokens_is_right(engine):
    """A slot has the hidden states of the token before its own, and drafts the token after its own."""
    target = counting_target()
    for step, expected in ((2, 1.0), (1, 0.0), (3, 0.0)):
        for num_draft_tokens in (1, 3, 8) if expected else (3,):
            assert acceptance(target, feature_drafter(target, step), num_draft_tokens, engine) == expected
