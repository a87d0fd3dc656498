"""On the engine every proposal, after any pattern of acceptance, is that of a float64 re-computation from scratch."""

import itertools

import pytest
import torch
from dialects import DIALECTS, make_weights, tiny_target, write
from straightline import propose, read_tensors
from targets import padded_prompts
from test_dialects import PLAIN, VARIANTS

from hf_specdec import AutoDrafter, decoding
from hf_specdec.sampling import Verdict

PROMPTS = [6, 2, 9]


class Script:
    """Takes the place of verification: accepts as many drafts as it is told, then commits a token of its own."""

    def __init__(self, patterns, vocab_size: int):
        self.patterns = iter(patterns)
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, scores, state) -> Verdict:
        drafts = state.proposal.tokens
        accepted = torch.tensor(next(self.patterns))
        own = torch.randint(2, self.vocab_size, (len(drafts), 1), generator=self.generator)
        tokens = torch.cat([drafts, own], dim=1).scatter(1, accepted[:, None], own)
        return Verdict(tokens, accepted, accepted + 1)


def proposals_match(monkeypatch, folder, spec, num_draft_tokens: int, patterns: list[list[int]]) -> None:
    """Run the engine through `patterns`, a list of rounds of accepted drafts a row; compare what it drafts."""
    target = tiny_target(spec)
    drafter = AutoDrafter.from_pretrained(folder, target=target)
    weights, seen = read_tensors(folder), []
    original = drafter.propose

    def watched(state, taps, verdict):
        proposal = original(state, taps, verdict)
        texts = [state.tokens[row, : int(state.lengths[row])].clone() for row in range(len(state.tokens))]
        room = torch.where(state.finished, 0, state.limits - state.lengths)
        seen.append((texts, proposal.tokens.tolist(), room.tolist()))
        return proposal

    monkeypatch.setattr(drafter, "propose", watched)
    monkeypatch.setattr(decoding, "verify", Script(patterns, spec.vocab_size))
    rows = PROMPTS[: len(patterns[0])]
    target.generate(
        **padded_prompts(rows, seed=5),
        do_sample=False,
        max_new_tokens=min(sum(pattern[row] + 1 for pattern in patterns) for row in range(len(rows))),
        assistant_model=drafter,
        num_assistant_tokens=num_draft_tokens,
    )
    assert len(seen) > len(patterns) // 2
    for texts, tokens, rooms in seen:
        for text, drafted, room in zip(texts, tokens, rooms, strict=True):
            if room > 0:  # drafts that no longer fit may be anything
                expected = propose(weights, spec, target, text, num_draft_tokens)[0]
                assert drafted[:room] == expected[:room]


@pytest.mark.core
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_all_patterns_of_two_rounds(monkeypatch, tmp_path, dialect, num_draft_tokens):
    folder = write(dialect, tmp_path, PLAIN, make_weights(PLAIN))
    pairs = itertools.product(range(num_draft_tokens + 1), repeat=2)
    patterns = [[accepted] for pair in pairs for accepted in pair] + [[0]] * 2
    proposals_match(monkeypatch, folder, PLAIN, num_draft_tokens, patterns)


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_patterns_of_a_ragged_batch(monkeypatch, tmp_path, variant):
    spec = VARIANTS[variant]
    folder = write("speculators", tmp_path, spec, make_weights(spec))
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randint(0, 6, (24, 3), generator=generator).tolist()
    proposals_match(monkeypatch, folder, spec, 5, patterns)
