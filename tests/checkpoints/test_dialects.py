"""The same weights in every published layout draft the tokens of an independent float64 re-computation."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from case_counts import cases
from dialects import DIALECTS, PLAIN, VARIANTS, make_weights, tiny_target, write
from eagle_reference import propose, read_tensors, target_hidden_states

from hf_specdec import AutoDrafter

PROMPT = torch.tensor([5, 17, 99, 3, 42, 42, 8, 120, 64])


@torch.no_grad()
def draft(drafter, target, token_ids: torch.Tensor, num_draft_tokens: int, aux_hidden_states: tuple[int, ...]):
    """Draft greedily with `Eagle3Drafter.forward`, whole sequence and whole chain each time."""
    width = target_hidden_states(target, token_ids[:-1], aux_hidden_states)
    drafts, logits, last = [], [], len(token_ids) - 2
    for step in range(num_draft_tokens):
        tokens = torch.cat([token_ids, torch.tensor(drafts, dtype=torch.int64)])
        padded = torch.nn.functional.pad(width, (0, 0, 0, len(tokens) - len(width)))
        logits.append(drafter(tokens[None], padded[None], num_steps=step + 1)[step][0, last])
        index = int(logits[-1].argmax())
        drafts.append(index if drafter.target_ids is None else int(drafter.target_ids[index]))
    return drafts, logits


@pytest.mark.parametrize(
    ("dialect", "variant"),
    cases(
        every := list(product(DIALECTS, VARIANTS)),
        # Each variant in one dialect or two, and each dialect with the first of them.
        [one for at, one in enumerate(every) if at % len(VARIANTS) == 0 or at // len(VARIANTS) % 3 == at % 3],
    ),
)
def test_drafts_match_the_float64_reference(dialect, variant, tmp_path):
    spec = VARIANTS[variant]
    target = tiny_target(spec)
    folder = write(dialect, tmp_path, spec, make_weights(spec))
    drafter = AutoDrafter.from_pretrained(folder, target=target)
    expected, expected_logits = propose(read_tensors(folder), spec, target, PROMPT, 4)
    drafted, logits = draft(drafter, target, PROMPT, 4, spec.aux_hidden_state_layer_ids)
    assert drafted == expected
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), rtol=1e-4, atol=1e-4)
    assert drafter.aux_hidden_state_layer_ids == list(spec.aux_hidden_state_layer_ids)
    assert drafter.dtype == target.dtype and not drafter.training and drafter.is_bound


@pytest.mark.parametrize("dialect", DIALECTS)
def test_generate_with_a_published_checkpoint(dialect, tmp_path):
    target = tiny_target(PLAIN, dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(write(dialect, tmp_path, PLAIN, make_weights(PLAIN)), target=target)
    expected = target.generate(PROMPT[None], max_new_tokens=24, do_sample=False)
    found = target.generate(PROMPT[None], max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert torch.equal(found, expected)
    assert drafter.stats.drafted > 0
