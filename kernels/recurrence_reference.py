"""PyTorch reference of the recurrence of linear attention and state-space layers, for blocks of drafts.

For the state S `[K, V]` of a head, at each position:

    S = S * exp(decay)
    u = beta * (value - S^T key) with the delta rule, else beta * value
    S = S + key u^T
    out = S^T query

Head h has key head h // (H / Hk). It covers Gated DeltaNet and Kimi Delta Attention (`delta`, `normalize`), Mamba2
(query C, key B, value x, decay dt * A, beta dt) and Mamba1 (one head, `rates` A).

The stored state is that of position `base`: it includes all tokens before it. For later tokens a ring, see
`ring_reference`, holds key, u and decay, so that a replay needs no product with the state. A block that begins after
`base` first replays the positions between them: the accepted drafts of the last block.
"""

from __future__ import annotations

import torch

from .ring_reference import PassPositions, keep
from .types import RecurrenceRing


def _normalize(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + 1e-6)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    ring: RecurrenceRing,
    base: torch.Tensor,
    certain: torch.Tensor,
    positions: torch.Tensor,
    dummy: int,
    delta: bool,
    normalize: bool,
    scale: float,
    rates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the recurrence over a block of columns from the state of an earlier position.

    The live columns of a row begin at or after `base`. A row without a live column changes nothing.

    The state of position min(certain, last + 1), where last is the last live position, is stored if that is after
    `base`; it is the `base` of the next call. The last R live columns at positions from `certain` on are written to the
    ring. The caller must ensure that `first - base` is at most R // 2, and that `last - base` is less than R in a row
    with a live column at `certain` or later: R >= 2 K + 1 is enough for K drafts.

    Args:
        query, key: `[B, n, Hk, K]`.
        value: `[B, n, H, V]`.
        decay: float32 logarithms of the factors on the state: `[B, n, H]`, or `[B, n, H, K]` for each key channel, or
            with `rates` `[B, n, H, V]`.
        beta: `[B, n, H]`, or None for 1.
        state: `[B, H, K, V]` float32, the state of position `base`; updated in place. The computation is in its dtype.
        ring: keys before normalisation, u and decays of the positions from `base` on; updated in place. Only entries
            between `base` and the block are read.
        base: `[B]` int64.
        certain: `[B]` int64; tokens at earlier positions are final and become part of the stored state.
        positions: `[B, n]` int64, the position of each column.
        dummy: the position of padding columns.
        delta: whether to use the delta rule.
        normalize: whether to normalise queries and keys, x / sqrt(sum of x^2 + 1e-6).
        scale: factor on the queries.
        rates: `[H, K, V]` float32; if given, the logarithm for element (k, v) is decay[v] * rates[k, v].

    Returns:
        `[B, n, H, V]` in the dtype of `value`; 0 in padding columns.
    """
    dtype, heads = state.dtype, value.shape[2]
    block, is_new = PassPositions.of(positions, dummy), positions < dummy
    num_replayed = ring.keys.shape[1] // 2
    replayed = base[:, None] + torch.arange(num_replayed, device=base.device)
    entry = torch.arange(len(base), device=base.device)[:, None], replayed % ring.keys.shape[1]
    is_replayed = (replayed < block.begin) & is_new.any(dim=1, keepdim=True)

    # One sequence: replayed positions, then the block. Elsewhere decay, key and update are 0 and leave S as it is.
    def join(entries: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        parts = keep(entries[entry], is_replayed), keep(inputs, is_new)
        return torch.cat([part.to(dtype) for part in parts], dim=1)

    def per_head(vectors: torch.Tensor) -> torch.Tensor:
        """`[B, m, H, K, 1]`, for products with the state."""
        return vectors.repeat_interleave(heads // vectors.shape[2], dim=2)[..., None]

    is_live = torch.cat([is_replayed, is_new], dim=1)
    is_stored = torch.cat([replayed, positions], dim=1) + 1 == torch.minimum(certain[:, None], block.last + 1)
    is_stored = (is_live & is_stored)[..., None, None, None]
    queries, keys = keep(query, is_new).to(dtype), join(ring.keys, key)
    if normalize:
        queries, keys = _normalize(queries), _normalize(keys)
    queries, keys = per_head(queries * scale), per_head(keys)
    decays, updates = join(ring.decays, decay), join(ring.updates, value)
    if rates is None:
        factors = decays.exp().reshape(*decays.shape[:3], -1, 1)
    betas = None if beta is None else keep(beta, is_new).to(dtype)[..., None]

    current = stored = state
    new_updates, out = [], []
    for step in range(is_live.shape[1]):
        column, key_column, update = step - num_replayed, keys[:, step], updates[:, step]
        current = current * ((decays[:, step, :, None] * rates).exp() if rates is not None else factors[:, step])
        if column >= 0:
            if delta:
                update = update - (current * key_column).sum(dim=2)
            if betas is not None:
                update = update * betas[:, column]
            new_updates.append(update)
        current = current + key_column * update[:, :, None]
        stored = torch.where(is_stored[:, step], current, stored)
        if column >= 0:
            out.append((current * queries[:, column]).sum(dim=2))
    state.copy_(stored)
    for part, columns in zip(ring, (key, torch.stack(new_updates, dim=1), decay), strict=True):
        block.keep(part, columns, certain)
    return keep(torch.stack(out, dim=1), is_new).to(value.dtype)
