"""PyTorch reference of verification by the target's own tokens; shapes and formula are in `verify_tree`."""

from __future__ import annotations

import torch

from . import random_reference
from .types import NO_TOKEN, RandomStream


def verify_tree(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor | None,
    depths: torch.Tensor | None,
    seeds: torch.Tensor | None,
    lengths: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the drafts that the target would have said without drafts: from the root on, the child with its token.

    The target's token after a node is the most likely one or, with `seeds`, that which is drawn at the node's position:
    the numbers of a draw depend on seed and position only, and no drafts are compared with numbers of their own. So a
    text is that of rounds without drafts, whatever the drafts and however they were chosen.

    Args:
        scores: `[B, N + 1, V]`, processed logits of the target at the root and at the drafts; float32 with `seeds`,
            else of any floating dtype. Of equal ones the lowest token is the most likely. NaN is larger than every
            number, and with `seeds` the token of a row without a softmax is `NO_TOKEN`.
        drafts: `[B, N]` int64. Those of one parent are different. N may be 0 of a chain.
        parents, depths: see `Tree`; None of a chain.
        seeds: `[B]` int64 row seeds; None for greedy decoding.
        lengths: `[B]` int64, the position of the token after the root.
        depth: D, the most drafts of a path; N of a chain.

    Returns:
        tokens `[B, D + 1]`, accepted and committed `[B]` of a `VerificationResult`, and the path `[B, D + 1]` int64,
        the nodes that were accepted, the root first; after these both are undefined.
    """
    batch = len(drafts)
    steps = torch.arange(depth + 1, device=drafts.device).expand(batch, -1)
    if seeds is None:
        chosen = scores.argmax(dim=-1)
    else:
        probs = scores.softmax(dim=-1)
        positions = lengths[:, None] + (steps if parents is None else depths)
        chosen = random_reference.exponential_sample(probs, seeds[:, None], positions, RandomStream.TARGET)
        chosen = chosen.masked_fill(probs[..., 0].isnan(), NO_TOKEN)
    if parents is None:
        accepted = (drafts == chosen[:, :-1]).cumprod(dim=1).sum(dim=1)
        return chosen, accepted, accepted + 1, steps.contiguous()
    tokens = torch.cat([drafts.new_full((batch, 1), NO_TOKEN), drafts], dim=1)
    node = torch.zeros(batch, 1, dtype=torch.int64, device=drafts.device)
    is_accepted, path = torch.ones_like(node, dtype=torch.bool), [node]
    accepted = torch.zeros_like(lengths)
    for _ in range(depth):
        fits = (parents == node) & (tokens == chosen.gather(1, node)) & is_accepted
        is_accepted = fits.any(dim=1, keepdim=True)
        node = torch.where(is_accepted, fits.int().argmax(dim=1, keepdim=True), node)
        accepted = accepted + is_accepted[:, 0]
        path.append(node)
    path = torch.cat(path, dim=1)
    return chosen.gather(1, path), accepted, accepted + 1, path
