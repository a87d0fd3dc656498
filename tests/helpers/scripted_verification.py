"""Verification that accepts as many draft tokens as a test asks for, and a record of a drafter's rounds."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from targets import padded_prompts
from transformers import PreTrainedModel

from hf_specdec import Drafter
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.kernels.types import VerificationResult

PROMPTS = [6, 1, 9]


class Script:
    """Replaces verification: accepts the given numbers of draft tokens, then commits a random token.

    Where there are no drafts, as with the first token, only a random token is committed.
    """

    def __init__(self, patterns, vocab_size: int):
        self.patterns = iter(patterns)
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, scores, state, proposal) -> tuple[VerificationResult, None]:
        drafts = proposal.tokens
        wanted = next(self.patterns) if drafts.shape[1] else [0] * len(drafts)
        accepted = torch.tensor(wanted).clamp(max=drafts.shape[1])  # fewer are drafted than asked for
        own = torch.randint(2, self.vocab_size, (len(drafts), 1), generator=self.generator)
        tokens = torch.cat([drafts, own], dim=1).scatter(1, accepted[:, None], own)
        return VerificationResult(tokens, accepted, accepted + 1), None


def random_patterns(num_draft_tokens, num_rounds, rows=3):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, num_draft_tokens + 1, (num_rounds, rows), generator=generator).tolist()


def wrong_now_and_then(sequences: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`[B, T + 16]`: texts, wrong at random places, long enough for any draft."""
    known = torch.nn.functional.pad(sequences, (0, 16), value=2)
    wrong = torch.rand(known.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    return torch.where(wrong, (known + 1) % vocab_size, known)


@dataclass
class Seen:
    """A row after a call of `propose`: its text, its drafts, how many tokens it can still take, and of each cache the
    keys and values of the text's tokens."""

    text: torch.Tensor
    drafts: list[int]
    logits: torch.Tensor
    room: int
    caches: list[tuple[torch.Tensor, torch.Tensor]]


def watch(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Drafter,
    caches_of: Callable,
    answer: Callable = lambda state, proposal: proposal,
    say: Callable = lambda state, first, drawn: drawn,
) -> list[list[Seen]]:
    """Watch `drafter` propose; returns the rounds, which fill as it is called.

    Args:
        caches_of: maps (drafter, state, row, length of its text) to the keys and values in `Seen`.
        answer: maps (state, proposal) to the proposal in its place.
        say: maps (state, number of the first draft, drawn tokens) to the tokens in their place.
    """
    rounds, scored, propose, draw = [], [], drafter.propose, drafter.draw

    def watched_draw(state, logits, first):
        scored.append(logits)
        return say(state, first, draw(state, logits, first))

    def watched(state, aux_hidden_states, result):
        scored.clear()
        proposal = propose(state, aux_hidden_states, result)
        logits, rows = torch.cat(scored, dim=1) if scored else torch.empty(len(state.lengths), 0), []
        for row, length in enumerate(state.lengths.tolist()):
            room = 0 if state.finished[row] else int(state.limits[row]) - length
            caches, text = caches_of(drafter, state, row, length), state.tokens[row, :length].clone()
            rows.append(Seen(text, proposal.tokens[row].tolist(), logits[row], room, caches))
        rounds.append(rows)
        return answer(state, proposal)

    monkeypatch.setattr(drafter, "propose", watched)
    monkeypatch.setattr(drafter, "draw", watched_draw)
    return rounds


def run_script(
    monkeypatch: pytest.MonkeyPatch,
    target: PreTrainedModel,
    drafter: Drafter,
    caches_of: Callable,
    num_draft_tokens: int,
    patterns: list[list[int]],
    max_new_tokens: int | None = None,
    **options: object,
) -> list[list[Seen]]:
    """The rounds in which the engine runs through `patterns`, lists of accepted drafts, one for each row."""
    assert why_not_equivalent(target, "static") is None  # by true verification
    rounds, rows = watch(monkeypatch, drafter, caches_of), PROMPTS[: len(patterns[0])]
    vocab_size = target.config.get_text_config().vocab_size
    monkeypatch.setattr("hf_specdec.engine.rounds.verify", Script(patterns, vocab_size))
    room = max_new_tokens or 1 + min(sum(n[row] + 1 for n in patterns) for row in range(len(rows)))
    target.generate(
        **padded_prompts(rows, seed=5),
        do_sample=False,
        max_new_tokens=room,
        assistant_model=drafter,
        num_assistant_tokens=num_draft_tokens,
        **options,
    )
    assert drafter.stats.engine == "static"
    if max_new_tokens is None:
        assert len(rounds) > len(patterns) // 2
    assert {len(row.drafts) for rows in rounds for row in rows} <= {*range(min(num_draft_tokens, room) + 1)}
    return rounds
