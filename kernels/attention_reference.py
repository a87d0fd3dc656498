"""PyTorch reference of attention over the static KV cache."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .float8_reference import dequantise


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    chunk: int | None = None,
    scales: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a KV cache in which the slot is the position: a query at position t sees the slots s <= t. With
    `ends` it may also see later slots: those of a block whose tokens see each other.

    The last slot is the dummy slot: a query at position `slots - 1` or beyond, or before 0, is padding, and its result
    is 0 whatever the cache holds. So a caller that passes a prefix of a cache passes one slot more than the live ones.
    The Triton kernel never reads slots after the last one that a live query of the row sees. The reference gives them
    weight 0, so here they must be finite.

    Args:
        query: `[B, heads, n, D]`.
        key: `[B, kv_heads, slots, D]`; the new keys of the row are already in it. Head h of the queries reads head
            h // (heads // kv_heads).
        value: `[B, kv_heads, slots, Dv]`.
        positions: `[B, n]` int64, the slot of each query; may differ between rows, in any order.
        scaling: factor on the scores.
        window: sliding window; if given, slot s is visible only if t - s < window.
        sinks: `[heads]`, additional logits in the softmax without a value (gpt-oss).
        softcap: if given, scores become softcap * tanh(scores / softcap).
        starts: `[B]`, or `[B, n]` for prompts packed in one row, int64; if given, slot s is visible to a query only if
            s >= starts[b], or starts[b, n]. A query before its start is padding.
        ends: `[B, n]` int64, the last slot that each query sees, before the dummy slot; `positions` if None. Ends of
            padding are not read.
        chunk: if given, slot s is visible only if it is in the chunk of t or a later one; a chunk has this many slots.
            Not together with a window.
        scales: `[B, kv_heads, slots, 2]`, scales of float8 keys and values, see `float8_reference`.
        ancestors: `[B, n, W]` int64; if given, the queries are the nodes of a tree, parents first: node i is stored at
            slot positions[b, 0] + i, and its position is positions[b, 0] + its depth, which is below the window. It
            sees slots before positions[b, 0] as usual, and from there on only those of itself and its ancestors: node
            j, if bit j % 64 of word j // 64 is set. Not together with `ends`, chunks or starts `[B, n]`.

    Returns:
        `[B, n, heads, Dv]` in the query's dtype. Scores and softmax are in float32 with sinks or a softcap, otherwise
        as in `scaled_dot_product_attention`.
    """
    if scales is not None:
        key, value = (dequantise(one, scales[..., index]) for index, one in enumerate((key, value)))
    if starts is not None and starts.dim() == 2:
        return _packed_attention(query, key, value, positions, scaling, window, sinks, softcap, starts, ends)
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_slots = key.shape[1:3]
    groups = heads // kv_heads
    # Grouped-query attention: the query heads of a key head become more queries of it, so the cache is not copied.
    query = query.reshape(batch, kv_heads, groups * num_queries, query.shape[-1])
    slots = torch.arange(num_slots, device=key.device)
    root, is_padding = positions[:, :1], (positions >= num_slots - 1) | (positions < 0)
    positions = positions.masked_fill(is_padding, num_slots - 1)  # a softmax over no slot is NaN
    ends = positions if ends is None else torch.where(is_padding, positions, ends)
    if ancestors is not None:
        nodes = torch.arange(num_queries, device=key.device)
        ends = torch.where(is_padding, positions, root + nodes)
    visible = slots <= ends[:, None, :, None]
    if ancestors is not None:
        node = (slots - root)[:, None].expand(-1, num_queries, -1)
        word = ancestors.gather(2, (node.clamp(min=0) // 64).clamp(max=ancestors.shape[2] - 1))
        visible &= ((node < 0) | ((word >> node % 64) & 1 == 1))[:, None] | is_padding[:, None, :, None]
    if starts is not None:
        is_padding = is_padding | (positions < starts[:, None])
        visible &= (slots >= starts[:, None, None, None]) | is_padding[:, None, :, None]
    if window is not None:
        visible &= slots > positions[:, None, :, None] - window
    if chunk is not None:
        visible &= slots >= (positions // chunk * chunk)[:, None, :, None]
    visible = visible.expand(-1, groups, -1, -1).reshape(batch, 1, groups * num_queries, num_slots)
    if sinks is None and softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    else:
        scores = (query @ key.transpose(-1, -2)).float() * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, num_queries, 1)
            scores = torch.cat([scores, sink.reshape(batch, kv_heads, -1, 1)], dim=-1)
        out = scores.softmax(-1)[..., :num_slots].to(value.dtype) @ value
    return out.reshape(batch, heads, num_queries, -1).transpose(1, 2).masked_fill(is_padding[:, :, None, None], 0.0)


@torch.library.custom_op(
    "hf_specdec::packed_attention_reference",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor positions, float scaling, int? window, Tensor? sinks, "
    "float? softcap, Tensor starts, Tensor? ends) -> Tensor",
)
def _packed_attention(query, key, value, positions, scaling, window, sinks, softcap, starts, ends):
    """Attention with starts `[B, n]`: the queries with the same start are a group, which sees its own slots.

    Groups with the same numbers of queries and slots are rows of one batch. The host reads these numbers, so this is an
    op of its own, which hides its operations from tracing and recording.
    """
    batch, heads, num_queries, _ = query.shape
    num_slots, device = key.shape[2], key.device
    ends = positions if ends is None else ends
    is_live = (positions < num_slots - 1) & (positions >= starts)
    out = query.new_zeros(batch, num_queries, heads, value.shape[3])
    for row in range(batch):
        live = is_live[row].nonzero()[:, 0]
        order = live[starts[row, live].argsort(stable=True)]
        begins, groups, counts = starts[row, order].unique_consecutive(return_inverse=True, return_counts=True)
        last = torch.zeros_like(begins).scatter_reduce_(0, groups, ends[row, order], "amax")
        sizes = torch.stack([counts, last + 2 - begins], dim=1)  # one more than the live slots
        sizes, kinds = sizes.unique(dim=0, return_inverse=True)
        firsts = counts.cumsum(0) - counts
        for kind, (count, width) in enumerate(sizes.tolist()):
            begin = begins[kinds == kind, None]
            mine = order[firsts[kinds == kind, None] + torch.arange(count, device=device)]
            slots = begin + torch.arange(width, device=device)
            out[row, mine] = attention(
                query[row][:, mine].transpose(0, 1),
                key[row][:, slots].transpose(0, 1),
                value[row][:, slots].transpose(0, 1),
                positions[row, mine] - begin,
                scaling,
                window,
                sinks,
                softcap,
                ends=ends[row, mine] - begin,
            ).to(out.dtype)  # autocast may have chosen another dtype
    return out


@_packed_attention.register_fake
def _(query, key, value, *rest):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
