"""PyTorch reference of the random numbers: Philox4x32-10 as a pure function of its counter, and sampling by it.

With the first Philox word w of the key (low and high word of the seed) and the counter (token, position, stream, step):

    uniform = min((w + 1/2) / 2^32, 1 - 2^-24),    exponential = -log(1 - uniform)
    exponential_sample = argmax over tokens v of weights[v] / exponential(seed, position, v, stream, step)

No state is kept: equal arguments give equal numbers, on every device, however rows are batched.
"""

from __future__ import annotations

import torch

from .types import RandomStream

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _philox(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int,
) -> list[torch.Tensor]:
    """Four random words, int64 below 2**32, of Philox4x32-10 (Salmon et al., SC 2011); see `uniform`."""
    key = [seeds & _WORD, (seeds >> 32) & _WORD]
    counter = [tokens & _WORD, positions & _WORD, torch.full_like(positions, stream), torch.zeros_like(positions)]
    counter[3] = counter[3] + steps
    for _ in range(10):
        even, odd = counter[0] * _PHILOX_MULTIPLIERS[0], counter[2] * _PHILOX_MULTIPLIERS[1]
        counter = [
            ((odd >> 32) & _WORD) ^ counter[1] ^ key[0],
            odd & _WORD,
            ((even >> 32) & _WORD) ^ counter[3] ^ key[1],
            even & _WORD,
        ]
        key = [(word + step) & _WORD for word, step in zip(key, _PHILOX_KEY_STEPS, strict=True)]
    return counter


def uniform(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Uniform float32 numbers in (0, 1), a pure function of the arguments: Philox4x32-10 (Salmon et al., SC 2011).

    The tensors broadcast against each other. The number is (word + 0.5) / 2**32, and the largest float32 below 1 where
    that rounds to 1; so it is never 0 and never 1. Numbers near 0 are fine-grained, those near 1 are multiples of
    2**-24.

    Args:
        seeds: int64; its low and its high word are the key.
        positions: int64, second word of the counter.
        tokens: int64, first word of the counter.
        stream: third word of the counter; separates numbers for different purposes.
        steps: int64, last word of the counter: the index of the draft token within its round.
    """
    numbers = (_philox(seeds, positions, tokens, stream, steps)[0].to(torch.float32) + 0.5) * 2.0**-32
    return numbers.clamp(max=1.0 - 2.0**-24)


def exponential(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Exponential float32 numbers of rate 1: -log(1 - u) of the numbers u of `uniform`, with the same arguments.

    In `exponential_sample` small numbers decide. They come from u near 0, which is fine-grained, and are computed by a
    series of -log(1 - u) = 2 atanh(u / (2 - u)), since 1 - u is coarse. With -log(u) about 1 in 128 samples among 2**17
    equal weights would be a tie, which the lowest token wins.
    """
    number = uniform(seeds, positions, tokens, stream, steps)
    ratio = number / (2.0 - number)
    square = ratio * ratio
    series = 1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0 + square * (1.0 / 9.0))))
    return torch.where(number < 0.25, 2.0 * ratio * series, -torch.log(1.0 - number))


def row_seeds(seed: torch.Tensor, batch: int) -> torch.Tensor:
    """`[batch]` int64 seeds, at least 0, from one `seed` `[1]` int64; that of row r does not depend on `batch`."""
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
    never sampled unless all weights are 0; then token 0 is.

    Args:
        weights: `[..., V]` float32, at least 0.
        seeds: int64, broadcast to `[...]`.
        positions: int64, broadcast to `[...]`: the position that the sampled token will have, or for draft tokens the
            first of the round.
        stream: purpose of the numbers; see `uniform`.
        steps: see `uniform`; an int64 tensor is broadcast to `[..., 1]`.

    Returns:
        `[...]` int64.
    """
    seeds, positions = seeds[..., None], positions[..., None]
    if weights.device.type == "cpu" and not torch.compiler.is_compiling():
        return _race_on_host(weights, seeds, positions, stream, steps)
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    return (weights / exponential(seeds, positions, tokens, stream, steps)).argmax(dim=-1)


# Numbers that are made at a time, which stay in a core's cache: those of 64 rows of 49,152 tokens take 0.17 CPU seconds
# so, all at once 0.55.
_AT_A_TIME = 65536


def _race_on_host(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int, steps: torch.Tensor | int
) -> torch.Tensor:
    """`exponential_sample` of `seeds`, `positions` and `steps` that are broadcast to `[..., 1]`: the same tokens."""
    shape = (*weights.shape[:-1], 1)
    counters = [torch.as_tensor(one, device="cpu").expand(shape).reshape(-1, 1) for one in (seeds, positions, steps)]
    flat = weights.reshape(-1, weights.shape[-1])
    times = torch.empty_like(flat)  # weights divided by numbers
    width = max(_AT_A_TIME // max(len(flat), 1), 1)
    for first in range(0, flat.shape[1], width):
        columns = slice(first, min(first + width, flat.shape[1]))
        tokens = torch.arange(columns.start, columns.stop, device="cpu")
        numbers = exponential(*counters[:2], tokens, stream, counters[2])
        torch.div(flat[:, columns], numbers, out=times[:, columns])
    return times.argmax(dim=-1).reshape(weights.shape[:-1])
