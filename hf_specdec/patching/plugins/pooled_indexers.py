"""Indexers that choose pools of adjacent tokens, over a `RaggedCache`, without reading anything on the host.

A query sees the tokens of a few pools, the complete ones with the highest scores, and the tokens after the last
complete pool. Pools are counted from the first token of a text. What transformers' indexers look up on the host is a
function of positions here. A kind of indexer is recognised by its modules and settings, and by what it chooses among a
few random tokens (see `indexer_probes`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...cache.ragged_cache import RaggedCache
from ...host.caches import CACHE_NAMES, given_cache
from ...host.modeling import ROTATION


class Pools(NamedTuple):
    """Pools of `size` slots of a cache during a pass.

    Attributes:
        first: `[B, 1]` int64, the first slot of each row.
        num_seen: `[B, n]` int64, number of tokens that each query sees.
    """

    size: int
    first: torch.Tensor
    num_seen: torch.Tensor

    @classmethod
    def of(cls, cache: RaggedCache, size: int) -> Pools:
        positions = cache.positions
        first = torch.zeros_like(positions[:, :1]) if cache.starts is None else cache.starts[:, None]
        return cls(size, first, positions - first + 1)

    def first_slots(self, span: int) -> torch.Tensor:
        """The first slot of each pool that may be complete within `span` slots, `[B, P]` int64."""
        return self.first + self.size * torch.arange(-(-span // self.size), device=self.first.device)

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """`states` `[B, span, D]` of slots by pools, `[B, P, size, D]`; behind the last slot values are arbitrary."""
        first = self.first_slots(states.shape[1])
        slots = first[..., None] + torch.arange(self.size, device=first.device)
        at = slots.clamp(max=states.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, states.shape[2])
        return states.gather(1, at).view(*slots.shape, -1)

    def choose(self, scores: torch.Tensor, count: int, with_tail: bool = True) -> torch.Tensor:
        """The slots that queries see, `[B, n, m]` int64, -1 for none: those of at most `count` complete pools with the
        highest `scores` `[B, n, P]`, and `with_tail` those of the tokens after the last complete pool."""
        complete = (self.num_seen // self.size)[..., None]
        is_complete = torch.arange(scores.shape[-1], device=scores.device) < complete
        lowest = torch.finfo(scores.dtype).min
        best = scores.masked_fill(~is_complete, lowest).topk(min(count, scores.shape[-1])).indices
        steps = torch.arange(self.size, device=scores.device)
        is_best = is_complete.gather(-1, best)[..., None]
        chosen = torch.where(is_best, best[..., None] * self.size + steps, -1).flatten(-2)
        if with_tail:
            tail = complete * self.size + steps[:-1]
            chosen = torch.cat([chosen, torch.where(tail < self.num_seen[..., None], tail, -1)], dim=-1)
        return torch.where(chosen < 0, -1, chosen + self.first[..., None])


def visible_slots(chosen: torch.Tensor, span: int) -> torch.Tensor:
    """`[B, n, span]` bool: whether a slot is among `chosen` `[B, n, m]`; negative entries are ignored."""
    seen = torch.zeros(*chosen.shape[:2], span + 1, dtype=torch.bool, device=chosen.device)
    return seen.scatter_(-1, torch.where(chosen < 0, span, chosen).clamp(max=span), True)[..., :span]


def _at_slots(angles: torch.Tensor, slots: torch.Tensor, cache: RaggedCache, span: int) -> torch.Tensor:
    """Cosines or sines at `slots` `[B, P]` int64 among the `span` that `cache` shows, `[B, P, R]`.

    `angles` are `[B, n, R]` of the pass's columns, or `[B, span + n, R]`, with those of slots from before the pass.
    """
    batch, columns = cache.positions.shape
    held = angles.shape[1] - columns
    where = torch.arange(span + 1, device=slots.device).repeat(batch, 1)
    own = torch.arange(held, held + columns, device=slots.device).expand(batch, -1)
    where.scatter_(1, cache.positions.clamp(max=span), own)
    at = where.gather(1, slots.clamp(max=span)).clamp(max=angles.shape[1] - 1)
    return angles.expand(batch, -1, -1).gather(1, at[..., None].expand(-1, -1, angles.shape[2]))


def _products(query: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    """Products `[B, n, heads, P]` float32 of queries `[B, n, heads, D]` and keys of pools `[B, P, D]`."""
    # Heads count as further queries, since torch would copy the keys for every query.
    flat = torch.matmul(query.flatten(1, 2).float(), pooled.float().transpose(-1, -2))
    return flat.unflatten(1, query.shape[1:3])


def _choose_by_means(
    module: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: RaggedCache,
) -> torch.Tensor:
    """By the mean of a pool's keys, normalised and rotated at its first token; Qwen4's QSA."""
    columns, width = hidden_states.shape[1], module.index_head_dim
    rotate = inspect.unwrap(type(module).forward).__globals__[ROTATION]
    both = module.index_qk_proj(hidden_states)
    query, key = both.split([module.index_n_heads * width, both.shape[-1] - module.index_n_heads * width], dim=-1)
    query = module.q_layernorm(query.unflatten(-1, (-1, width)))
    cos, sin = (angles[:, -columns:] for angles in position_embeddings)
    query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2)

    keys = cache.update_indexer(key, module.layer_idx)
    pools = Pools.of(cache, module.compress_ratio)
    pooled = module.k_layernorm(pools.split(keys).float().mean(dim=2).to(keys.dtype))
    slots, span = pools.first_slots(keys.shape[1]), keys.shape[1]
    cos, sin = (_at_slots(angles, slots, cache, span) for angles in position_embeddings)
    pooled = rotate(pooled[:, None], cos=cos, sin=sin)[:, 0]
    scores = F.relu(_products(query, pooled)).sum(dim=2) / math.sqrt(width)
    return pools.choose(scores, module.block_topk)


def _choose_by_gates(
    module: nn.Module,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: RaggedCache,
) -> torch.Tensor:
    """By the mean of a pool's keys, weighted by gates; GLM-5-next's. The mask `[B, n]` is stored, too."""
    query = module.wq_b(q_resid).unflatten(-1, (-1, module.head_dim))
    key = module.k_norm(module.wk(hidden_states))
    gates = F.linear(hidden_states, module.index_kpool_compress_gate)
    is_token = attention_mask.to(key.dtype)[..., None]
    stored = cache.update_indexer(torch.cat([key, gates, is_token], dim=-1), module.layer_idx)
    pools = Pools.of(cache, module.index_kpool)
    keys, gates, _ = pools.split(stored).split([module.head_dim, module.head_dim, 1], dim=-1)
    shares = (gates.float() + module.index_kpool_compress_ape.float()).softmax(dim=2).to(keys.dtype)
    pooled = (shares * keys).sum(dim=2)

    scores = F.relu(_products(query, pooled) * module.softmax_scale)
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
    return pools.choose(scores, module.index_topk // module.index_kpool, module.index_kpool_always_select_tail)


class PooledIndexer(NamedTuple):
    """A kind of indexer.

    Attributes:
        choose: the slots that queries see, see `Pools.choose`; it has the arguments of the indexer's `forward`.
        names: names of its modules, parameters and settings.
        inputs: arguments that are states of tokens, each with the linear layer that reads it.
        size: the setting for the number of tokens of a pool.
        most_pools, most_tokens: the settings for how much a query sees, in pools or in tokens.
    """

    choose: Callable[..., torch.Tensor]
    names: frozenset[str]
    inputs: dict[str, str]
    size: str
    most_pools: tuple[str, ...]
    most_tokens: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        return _arguments(self.choose)


KINDS = (
    PooledIndexer(
        _choose_by_means,
        names=frozenset({"index_qk_proj", "q_layernorm", "k_layernorm", "index_n_heads", "index_head_dim"}),
        inputs={"hidden_states": "index_qk_proj"},
        size="compress_ratio",
        most_pools=("block_topk",),
        most_tokens=("token_budget",),
    ),
    PooledIndexer(
        _choose_by_gates,
        names=frozenset({"wq_b", "wk", "k_norm", "weights_proj", "softmax_scale", "n_heads", "head_dim"})
        | {"index_kpool_compress_ape", "index_kpool_compress_gate", "index_kpool_always_select_tail"},
        inputs={"hidden_states": "wk", "q_resid": "wq_b"},
        size="index_kpool",
        most_pools=(),
        most_tokens=("index_topk",),
    ),
)


def kind_of(module: nn.Module) -> PooledIndexer | None:
    """The kind of indexer that `module` may be, by its names and arguments; None if it is none."""
    for kind in KINDS:
        names = (*kind.names, kind.size, *kind.most_pools, *kind.most_tokens)
        if all(hasattr(module, name) for name in names) and _arguments(type(module).forward) == kind.arguments:
            return kind
    return None


def _arguments(function: Callable) -> list[str]:
    names = list(inspect.signature(inspect.unwrap(function)).parameters)[1:]
    return ["cache" if name in CACHE_NAMES else name for name in names]


# What an indexer returns: indices of slots `[B, n, m]` int32, or a mask `[B, 1, n, span]`, bool or to be added.
Form = Literal["indices", "mask", "bias"]


def indexer_forward(module: nn.Module, kind: PooledIndexer, form: Form, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The output of the indexer `module`, of `kind`, on a `RaggedCache`, in its `form`."""
    given = dict(zip(kind.arguments, args, strict=False)) | kwargs
    cache = given_cache(given)
    if not isinstance(cache, RaggedCache) or not cache.is_by_slot:
        return type(module).forward(module, *args, **kwargs)
    with torch.no_grad():
        others = {name: value for name, value in given.items() if name not in CACHE_NAMES}
        chosen = kind.choose(module, **others, cache=cache)
    if form == "indices":
        return chosen.to(torch.int32)
    seen = visible_slots(chosen, cache.span)[:, None]
    if form == "mask":
        return seen
    dtype = given["hidden_states"].dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
