"""PyTorch reference of suffix decoding (arXiv 2411.04975), by the rule of ArcticInference and vLLM.

Occurrences are searched for in every round; there is no suffix tree.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .types import LONGEST_MATCH, MOST_OCCURRENCES, NO_TOKEN, PLACE_BITS


def suffix_drafts(tokens: torch.Tensor, lengths: torch.Tensor, history: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """The tokens that most often followed other occurrences of each text's last tokens.

    S_m are the occurrences of the last m tokens of a text, in the text itself and in earlier texts. Draft k of match
    length m is the most frequent next token among those occurrences of S_m that all drafts before k followed. P_m(k) is
    the product of the shares of the drafts up to k. The match length is the m with the largest sum of P_m(k) over k <
    min(m, K), so that a short match gives few tokens. Among equal m the longest is taken; among equally frequent tokens
    the one after the longest match, then the latest.

    Args:
        tokens: `[B, slots]` int64, texts.
        lengths: `[B]` int64, lengths of the texts, at least 1.
        history: `[H]` int64, earlier texts, each followed by `NO_TOKEN`, beyond which there is no draft.
        num_drafts: K.

    Returns:
        `[B, K]` int64; the last token of the text where there is no draft.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    texts = torch.where(columns < lengths[:, None], tokens, NO_TOKEN)
    places = torch.cat([history.expand(len(texts), -1), texts], dim=1)
    places = pad(places, (max(MOST_OCCURRENCES - places.shape[1], 0), 1), value=NO_TOKEN)
    size, shifted = places.shape[1] - 1, pad(places, (LONGEST_MATCH - 1, 0), value=NO_TOKEN)
    is_match = places[:, 1:] != NO_TOKEN
    matched = torch.zeros_like(is_match, dtype=torch.int8)
    for back in range(LONGEST_MATCH):
        at = lengths[:, None] - 1 - back
        last = torch.where(at < 0, NO_TOKEN - 1, texts.gather(1, at.clamp(min=0)))
        is_match &= shifted[:, LONGEST_MATCH - 1 - back :][:, :size] == last
        matched += is_match
    keys = torch.where(matched > 0, (matched.long() << PLACE_BITS) + torch.arange(size, device=tokens.device), -1)
    keys = keys.topk(MOST_OCCURRENCES, dim=1).values
    matched, first = keys >> PLACE_BITS, (keys & ((1 << PLACE_BITS) - 1)).clamp(max=size) + 1

    match_lengths = torch.arange(1, LONGEST_MATCH + 1, device=tokens.device)[:, None]
    follows = matched[:, None] >= match_lengths  # [B, LONGEST_MATCH, MOST_OCCURRENCES]
    rank = torch.arange(MOST_OCCURRENCES - 1, -1, -1, device=tokens.device)
    share = torch.ones(follows.shape[:2], device=tokens.device)
    score, drafts = torch.zeros_like(share), []
    for number in range(num_drafts):
        following = places.gather(1, (first + number).clamp(max=size))
        total = follows.sum(dim=2)
        follows = follows & (following != NO_TOKEN)[:, None]
        counts = follows.float() @ (following[:, :, None] == following[:, None]).float()
        best, chosen = torch.where(follows, counts.long() * MOST_OCCURRENCES + rank, -1).max(dim=2)
        draft = following.gather(1, chosen)
        share = share * ((best.clamp(min=0) // MOST_OCCURRENCES) / total.clamp(min=1))
        score = score + torch.where(number < match_lengths[:, 0], share, 0)
        follows = follows & (following[:, None] == draft[..., None])
        drafts.append(torch.where(best < 0, texts.gather(1, lengths[:, None] - 1), draft))
    longest_best = torch.where(score == score.amax(dim=1, keepdim=True), match_lengths[:, 0], 0).argmax(dim=1)
    return torch.stack(drafts, dim=2)[torch.arange(len(texts), device=tokens.device), longest_best]
