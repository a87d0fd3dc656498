"""Verification that accepts as many draft tokens as a test asks for."""

import torch

from hf_specdec.kernels.types import VerificationResult


class Script:
    """Takes the place of verification: accepts the given numbers of draft tokens, then commits a random token.

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
