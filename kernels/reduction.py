"""Triton reductions over the vocabulary, shared by verification and the sampling of draft tokens.

A row of scores `[V]` is cut into blocks with a program each, in grids that depend only on shapes. The programs write a
partial result for each block, and the last kernel of an op merges them. The host reads nothing, so every op is safe in
a CUDA graph.

Argmax: the partial result is an int64 key. Its upper half is the block's largest value as an integer of the same order,
its lower half the complement of that value's index. The largest key of a row then belongs to the largest value, and
among equal values to the lowest index.

Softmax: the partial results are m = max score and s = sum exp(score - m) of the block. With M = max m over the blocks,
softmax = exp(score - M) / sum s exp(m - M).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .types import VerificationResult

LEAST_KEY, LEAST_ORDER = tl.constexpr(-(2**63)), tl.constexpr(-(2**31))
_WORD = tl.constexpr(0xFFFFFFFF)

# Tokens of a program: in kernels that only reduce, and in kernels that also compute a random number for each token.
REDUCE_BLOCK = 4096
SAMPLE_BLOCK = 1024
REDUCE_WARPS = 8
SAMPLE_WARPS = 4
# The most tokens of a group, see `group_keys`: those of a program.
MOST_OF_GROUP = 1024


@triton.jit
def scale_of(temperatures, row):
    """1 / temperature of a row of the batch, with which torch multiplies on a GPU to divide by a Python number.

    The first of `temperatures` is their pointer, the second their stride.
    """
    return tl.div_rn(tl.full([], 1.0, tl.float32), tl.load(temperatures[0] + row * temperatures[1]))


@triton.jit
def without_nan(value):
    """Float32 values, with -inf for NaN."""
    return tl.where(value > float("-inf"), value, float("-inf"))


@triton.jit
def order_of(value, is_valid):
    """Float32 values as int32 of the same order, `LEAST_ORDER` unless valid. As in PyTorch, NaN is larger than every
    number, and zeros of both signs are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(is_valid, tl.where(value != value, 0x7FFFFFFF, order), LEAST_ORDER)


@triton.jit
def value_of(order):
    """The float32 value of an `order_of`."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def take_largest(order, index):
    """The first largest of values `order`, its int32 `index`, and what is left of `order`.

    A GPU reduces 32-bit integers of a warp in one instruction, and keys in ten.
    """
    largest = tl.max(order, axis=0)
    at = tl.min(tl.where(order == largest, index, 0x7FFFFFFF), axis=0)
    return largest, at, tl.where(index == at, LEAST_ORDER, order)


@triton.jit
def keys_of(value, index, is_valid):
    """Keys of float32 values in the order of `order_of`."""
    key = (order_of(value, is_valid).to(tl.int64) << 32) | (_WORD - index.to(tl.int64))
    return tl.where(is_valid, key, LEAST_KEY)


@triton.jit
def largest_key(value, index, is_valid):
    """Key of the first largest float32 value, see `keys_of`."""
    return tl.max(keys_of(value, index, is_valid), axis=0)


@triton.jit
def index_of_key(key):
    """Index of a key's value."""
    return (key & _WORD) ^ _WORD


@triton.jit
def order_of_key(key):
    """A key's value as `order_of`."""
    return (key >> 32).to(tl.int32)


@triton.jit
def value_of_key(key):
    """A key's value, float32."""
    return value_of(order_of_key(key))


@triton.jit
def is_key_of_nan(key):
    """Whether a key's value is NaN; keys of numbers are smaller."""
    return (key >> 32) == 0x7FFFFFFF


@triton.jit
def store_softmax_stats(stats, at, score):
    """Store the maximum and the sum of exp(score - maximum) of a block of scores as element `at` of both `stats`."""
    maximum = tl.max(score, axis=0)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    tl.store(stats[0] + at, maximum)
    tl.store(stats[1] + at, tl.sum(tl.exp(score - base), axis=0))


@triton.jit
def merge_softmax_stats(maxima, totals):
    """Base and normaliser of rows, from the statistics `[rows, blocks]` of their blocks.

    softmax = exp(score - base) / normaliser, which is NaN everywhere unless the normaliser is above 0.
    """
    base = tl.max(maxima, axis=1)
    # The maximum of a block or row of only -inf is -inf; exp(-inf - -inf) would be NaN.
    base = tl.where(base == float("-inf"), 0.0, base)
    return base, tl.sum(totals * tl.exp(maxima - base[:, None]), axis=1)


@triton.jit
def load_softmax(stats, row, num_stats, STATS: tl.constexpr):
    """`merge_softmax_stats` for one row of `softmax_stats`, `[1]` each."""
    stat = tl.arange(0, STATS)[None, :]
    is_stat = stat < num_stats
    maxima = tl.load(stats[0] + row * num_stats + stat, mask=is_stat, other=float("-inf"))
    return merge_softmax_stats(maxima, tl.load(stats[1] + row * num_stats + stat, mask=is_stat, other=0.0))


@kernel
def _argmax_kernel(
    scores_ptr,
    keys_ptr,
    scores_strides,
    width: Unspecialised,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """Key of one block of a row.

    Grid: (B * n, blocks). Reads BLOCK scores of `scores` `[B, n, V]`; writes one key of `keys` `[B * n, blocks]`.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    scores_ptr += row // width * scores_strides[0] + row % width * scores_strides[1]
    wait_for_inputs()
    score = tl.load(scores_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    key = largest_key(score, token, is_token)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), key)


@kernel
def _softmax_stats_kernel(
    scores_ptr,
    stats,
    scores_strides,
    width: Unspecialised,
    vocabulary,
    temperatures_ptr,
    BLOCK: tl.constexpr,
):
    """Maximum m and sum of exp(score - m) of one block of a row.

    Grid: (B * n, blocks). Reads BLOCK scores of `scores` `[B, n, V]` and, if given, their divisor in `temperatures`
    `[B]`; writes one element of both `stats`, `[B * n, blocks]` float32.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += row // width * scores_strides[0] + row % width * scores_strides[1]
    wait_for_inputs()
    score = tl.load(scores_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    if temperatures_ptr is not None:
        score = score / tl.load(temperatures_ptr + row // width)
    store_softmax_stats(stats, row * tl.num_programs(1) + tl.program_id(1), score)


def argmax_keys(scores: torch.Tensor) -> torch.Tensor:
    """Keys `[B * n, blocks]` int64 of `scores` `[B, n, V]`, float32, bfloat16 or float16."""
    batch, width, vocabulary = scores.shape
    assert scores.dtype in (torch.float32, torch.bfloat16, torch.float16), "scores must fit float32"
    assert scores.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    keys = torch.empty(batch * width, triton.cdiv(vocabulary, REDUCE_BLOCK), dtype=torch.int64, device=scores.device)
    _argmax_kernel[keys.shape](
        scores,
        keys,
        scores.stride()[:2],
        width,
        vocabulary,
        BLOCK=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
    )
    return keys


def softmax_stats(scores: torch.Tensor, temperatures: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of exponentials of each block of `scores` `[B, n, V]`, `[B * n, blocks]` float32 each.

    Scores are first divided by `temperatures` `[B]` if given.
    """
    batch, width, vocabulary = scores.shape
    assert scores.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    assert temperatures is None or temperatures.is_contiguous()
    shape = 2, batch * width, triton.cdiv(vocabulary, REDUCE_BLOCK)
    maxima, totals = torch.empty(shape, dtype=torch.float32, device=scores.device)
    _softmax_stats_kernel[shape[1:]](
        scores,
        (maxima, totals),
        scores.stride()[:2],
        width,
        vocabulary,
        temperatures,
        BLOCK=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
    )
    return maxima, totals


@kernel
def _groups_kernel(
    logits_ptr,
    keys_ptr,
    stats,
    temperatures,
    strides,
    width: Unspecialised,
    vocabulary,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NAN_IS_LEAST: tl.constexpr,
):
    """Keys of the groups of a block of a row, and the block's softmax statistics.

    Grid: (B * n, blocks). Reads BLOCK elements of `logits` `[B, n, V]` and, if given, their divisor in the first of
    `temperatures`, whose stride is the second; writes BLOCK // GROUP elements of `keys`
    `[B * n, blocks * BLOCK // GROUP]`, and one element of both `stats` `[B * n, blocks]`.
    """
    GROUPS: tl.constexpr = BLOCK // GROUP
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    logits_ptr += row // width * strides[0] + row % width * strides[1]
    at = row * tl.num_programs(1) + tl.program_id(1)
    wait_for_inputs()
    value = tl.load(logits_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
    if temperatures is not None:
        value *= scale_of(temperatures, row // width)
    if NAN_IS_LEAST:
        value = without_nan(value)
    store_softmax_stats(stats, at, value)
    keys = tl.reshape(keys_of(value, token, is_token), [GROUPS, GROUP])
    tl.store(keys_ptr + at * GROUPS + tl.arange(0, GROUPS), tl.max(keys, axis=1))


def group_keys(
    logits: torch.Tensor, group: int, temperatures: tuple[torch.Tensor, int] | None, NAN_IS_LEAST: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Key of the largest of each `group` tokens, a power of two, and the softmax statistics of blocks of groups.

    Args:
        logits: `[B, n, V]`.
        temperatures: `[B]` float32 and its stride: divisors of the logits; None for none.
        NAN_IS_LEAST: whether NaN counts as -inf; otherwise it is the largest.

    Returns:
        Keys `[B * n, groups]` int64, and maximum and sum of exponentials `[B * n, blocks]` float32.
    """
    batch, width, vocabulary = logits.shape
    assert logits.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    rows, num_blocks = batch * width, triton.cdiv(vocabulary, MOST_OF_GROUP)
    keys = torch.empty(rows, num_blocks * (MOST_OF_GROUP // group), dtype=torch.int64, device=logits.device)
    stats = tuple(torch.empty(2, rows, num_blocks, dtype=torch.float32, device=logits.device))
    _groups_kernel[(rows, num_blocks)](
        logits,
        keys,
        stats,
        temperatures,
        logits.stride()[:2],
        width,
        vocabulary,
        BLOCK=MOST_OF_GROUP,
        GROUP=group,
        NAN_IS_LEAST=NAN_IS_LEAST,
        num_warps=4,
    )
    return keys, stats


@kernel
def _merge_keys_kernel(
    keys_ptr,
    target_ids_ptr,
    out_ptr,
    num_blocks: Unspecialised,
    BLOCKS: tl.constexpr,
):
    """Merge the keys of a row.

    Grid: (rows,). Reads a row of `keys` `[rows, blocks]` and one element of `target_ids` if given; writes one element
    of `out` `[rows]`.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    wait_for_inputs()
    key = tl.max(tl.load(keys_ptr + row * num_blocks + block, mask=block < num_blocks, other=LEAST_KEY), axis=0)
    token = index_of_key(key)
    if target_ids_ptr is not None:
        token = tl.load(target_ids_ptr + token)
    tl.store(out_ptr + row, token)


def merge_keys(keys: torch.Tensor, shape: torch.Size, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens in the given shape from `keys` `[rows, blocks]`, mapped by `target_ids` if given."""
    out = torch.empty(shape, dtype=torch.int64, device=keys.device)
    _merge_keys_kernel[(len(keys),)](
        keys,
        target_ids,
        out,
        keys.shape[1],
        BLOCKS=triton.next_power_of_2(keys.shape[1]),
    )
    return out


def empty_result(batch: int, num_drafts: int, device: torch.device) -> VerificationResult:
    """Uninitialised result for `batch` rows of `num_drafts` each."""
    shapes = (batch, num_drafts + 1), batch, batch
    return VerificationResult(*(torch.empty(one, dtype=torch.int64, device=device) for one in shapes))
