"""PyTorch reference of the random numbers: Philox4x32-10 as a pure function of its counter, and sampling with it.

w are the words for the key (low and high word of the seed) and the counter (number, position, stream, step):

    uniform(token) = u(w_0) = min((w_0 + 1/2) / 2^32, 1 - 2^-24),    exponential(w) = -log(1 - u(w))
    exponential_sample = argmax over tokens v of weights[v] / race_times(seed, position, v, stream, step)

`race_times` are independent exponential numbers of rate 1. They are made by groups of G = 64 tokens, so that one number
bounds a group from below: the least of G such numbers is exponential of rate G, it belongs to each token with
probability 1 / G, and the others exceed it by exponential numbers. a are the words of number -1 - g for group g, and b
those of number v // 4 for token v:

    least[g] = exponential(a_0) / G
    race_times[v] = least[g], g = v // G, if v mod G = a_1 >> 26, else least[g] + exponential(b_(v mod 4))

There is no state: equal arguments give equal numbers, on every device and in every batch.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .types import RACE_GROUP, RandomStream

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# As many groups are drawn from whole: to look for those that may hold the token takes longer.
_FEW_GROUPS = 4


def _philox(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    numbers: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int,
) -> list[torch.Tensor]:
    """Four random words, int64 below 2**32, of Philox4x32-10 (Salmon et al., SC 2011); see `uniform`."""
    # An operation with a Python number takes the host twice as long as one with a tensor; and both multiplications of a
    # round are one: `left` has words 0 and 2 of the counter, `right` words 1 and 3.
    constants = 0xFFFFFFFF, 32, *_PHILOX_MULTIPLIERS, *_PHILOX_KEY_STEPS
    word, half, *pairs = (positions.new_full((), number) for number in constants)
    shape = torch.broadcast_shapes(seeds.shape, positions.shape, numbers.shape, getattr(steps, "shape", ()))
    factors, key_steps = torch.stack(pairs).view(2, 2, *[1] * len(shape))
    left = torch.stack([numbers.expand(shape) & word, positions.new_full((), stream).expand(shape)])
    right = torch.stack([positions.expand(shape) & word, (torch.zeros_like(positions) + steps).expand(shape)])
    key = torch.stack([seeds, seeds >> half]).view(2, *[1] * (len(shape) - seeds.dim()), *seeds.shape)
    for _ in range(10):
        products = (left * factors).flip(0)
        left = (products >> half).bitwise_xor_(right).bitwise_xor_(key).bitwise_and_(word)
        right = products.bitwise_and_(word)
        key = key + key_steps
    return [left[0], right[0], left[1], right[1]]


def uniform(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Uniform float32 numbers in (0, 1), a pure function of the arguments: Philox4x32-10 (Salmon et al., SC 2011).

    The tensors broadcast against each other. The number is (word + 0.5) / 2**32, or the largest float32 below 1 if
    that rounds to 1; so it is never 0 or 1. Numbers near 0 are fine-grained, numbers near 1 are multiples of 2**-24.

    Args:
        seeds: int64; the low and the high word are the key.
        positions: int64, second word of the counter.
        tokens: int64, first word of the counter.
        stream: third word of the counter, a `RandomStream`.
        steps: int64, last word of the counter: the index of the draft token within its round.
    """
    return _unit(_philox(seeds, positions, tokens, stream, steps)[0])


def _unit(words: torch.Tensor) -> torch.Tensor:
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def _exponential(words: torch.Tensor) -> torch.Tensor:
    """Exponential float32 numbers of rate 1 from words: -log(1 - u) with the u of `uniform`.

    Small numbers decide in `exponential_sample`. They come from u near 0, which is fine-grained. A series of -log(1 -
    u) = 2 atanh(u / (2 - u)) computes them, because 1 - u is coarse. With -log(u) about 1 in 128 samples among 2**17
    equal weights would be a tie, which the lowest token wins.
    """
    number = _unit(words)
    ratio = number / (2.0 - number)
    square = ratio * ratio
    series = 1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0 + square * (1.0 / 9.0))))
    return torch.where(number < 0.25, 2.0 * ratio * series, -torch.log(1.0 - number))


def _least_times(
    seeds: torch.Tensor, positions: torch.Tensor, groups: torch.Tensor, stream: int, steps: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`least` of each group, float32, and the index in the group, int64, of the token that has it."""
    words = _philox(seeds, positions, -1 - groups, stream, steps)
    return _exponential(words[0]) / RACE_GROUP, words[1] >> 26


def _times_of_groups(
    least: torch.Tensor,
    place: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    groups: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int,
) -> torch.Tensor:
    """`race_times` of all tokens of groups, `[..., RACE_GROUP]`; the tensors broadcast to `[...]`."""
    quads = groups[..., None] * (RACE_GROUP // 4) + torch.arange(RACE_GROUP // 4, device=groups.device)
    steps = steps[..., None] if isinstance(steps, torch.Tensor) else steps
    words = torch.stack(_philox(seeds[..., None], positions[..., None], quads, stream, steps), dim=-1).flatten(-2)
    is_least = torch.arange(RACE_GROUP, device=groups.device) == place[..., None]
    return least[..., None] + torch.where(is_least, 0.0, _exponential(words))


def race_times(
    seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int, stream: int, steps: torch.Tensor | int = 0
) -> torch.Tensor:
    """Independent exponential float32 numbers of rate 1 for tokens 0 to `vocabulary` - 1, `[..., vocabulary]`.

    The other arguments are those of `uniform`; tensors broadcast to `[...]`.
    """
    groups = torch.arange(-(-vocabulary // RACE_GROUP), device=seeds.device)
    seeds, positions = seeds[..., None], positions[..., None]
    steps = steps[..., None] if isinstance(steps, torch.Tensor) else steps
    least, place = _least_times(seeds, positions, groups, stream, steps)
    return _times_of_groups(least, place, seeds, positions, groups, stream, steps).flatten(-2)[..., :vocabulary]


def race_times_of(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, stream: int) -> torch.Tensor:
    """`race_times` of `tokens`, int64 in any order; all tensors broadcast against each other."""
    least, place = _least_times(seeds, positions, tokens // RACE_GROUP, stream, 0)
    words = torch.stack(_philox(seeds, positions, tokens // 4, stream, 0), dim=-1)
    word = words.gather(-1, (tokens % 4).expand(words.shape[:-1])[..., None])[..., 0]
    return least + torch.where(place == tokens % RACE_GROUP, 0.0, _exponential(word))


def row_seeds(seed: torch.Tensor, batch: int) -> torch.Tensor:
    """`[batch]` int64 seeds, at least 0, from one `seed` `[1]` int64; the seed of a row does not depend on `batch`."""
    rows = torch.arange(batch, device=seed.device)
    words = _philox(seed, torch.zeros_like(rows), rows, RandomStream.SEED, 0)
    return words[0] | ((words[1] >> 1) << 32)


def exponential_sample(
    weights: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Sample one token per row with probability proportional to `weights`, by the exponential-race method.

    The token is argmax over v of weights[v] / e[v], with independent exponential numbers e. A token of weight 0 is
    sampled only if all weights are 0; it is then token 0.

    Args:
        weights: `[..., V]` float32, at least 0.
        seeds: int64, broadcast to `[...]`.
        positions: int64, broadcast to `[...]`: the position of the sampled token; for draft tokens the position of the
            round's first.
        stream: a `RandomStream`.
        steps: see `uniform`; an int64 tensor is broadcast to `[...]`.

    Returns:
        `[...]` int64.
    """
    has_groups = weights.device.type == "cpu" and weights.shape[-1] > _FEW_GROUPS * RACE_GROUP
    if has_groups and not torch.compiler.is_compiling() and not _len_torch_dispatch_stack():
        return _sample_by_groups(weights, seeds, positions, stream, steps)
    return (weights / race_times(seeds, positions, weights.shape[-1], stream, steps)).argmax(dim=-1)


def _sample_by_groups(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int, steps: torch.Tensor | int
) -> torch.Tensor:
    """`exponential_sample` that computes only the numbers of groups that may hold the token, as the host finds.

    No token's quotient exceeds its group's largest weight divided by `least`, even after rounding.
    """
    shape, vocabulary = weights.shape[:-1], weights.shape[-1]
    counters = [torch.as_tensor(one, device="cpu").expand(shape).reshape(-1) for one in (seeds, positions, steps)]
    flat, tail = weights.reshape(-1, vocabulary), vocabulary % RACE_GROUP
    whole = flat[:, : vocabulary - tail].unflatten(1, (vocabulary // RACE_GROUP, RACE_GROUP))
    bounds = whole.amax(dim=2)
    if tail:
        bounds = torch.cat([bounds, flat[:, vocabulary - tail :].amax(dim=1, keepdim=True)], dim=1)
    groups = torch.arange(bounds.shape[1], device="cpu")
    least, place = _least_times(*(one[:, None] for one in counters[:2]), groups, stream, counters[2][:, None])
    bounds /= least

    def best(rows: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest quotient, and its token, in n pairs of a row and a group, `[n]` each."""
        seeds, positions, steps = (one[rows] for one in counters)
        arguments = least[rows, groups], place[rows, groups], seeds, positions, groups
        times = _times_of_groups(*arguments, stream, steps)
        tokens = groups[:, None] * RACE_GROUP + torch.arange(RACE_GROUP, device="cpu")
        values = flat[rows[:, None], tokens.clamp(max=vocabulary - 1)] / times
        values, places = values.masked_fill(tokens >= vocabulary, -1.0).max(dim=1)
        return values, groups * RACE_GROUP + places

    rows = torch.arange(len(flat), device="cpu")
    least_best, _ = best(rows, bounds.argmax(dim=1))
    rows, candidates = ((bounds >= least_best[:, None]) & (bounds > 0)).nonzero(as_tuple=True)
    values, tokens = best(rows, candidates)
    values_of_groups, tokens_of_groups = torch.full_like(bounds, -1.0), torch.zeros(bounds.shape, dtype=torch.int64)
    values_of_groups[rows, candidates], tokens_of_groups[rows, candidates] = values, tokens
    return tokens_of_groups.gather(1, values_of_groups.argmax(dim=1, keepdim=True)).reshape(shape)
