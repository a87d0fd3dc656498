"""Time the kernels of a round against the GPU's copy bandwidth, in bfloat16 at the shapes of Llama-3.1-8B.

Recurrences and short convolutions have the shapes of Qwen3-Next (gated DeltaNet) and of Nemotron-3-Nano (Mamba2).

    python examples/kernel_bandwidth.py --output kernel_bandwidth.json

Every row of a batch has the same number of live tokens. Attention's bytes are the live keys and values, read once. A
recurrence's bytes are the state, read once and written once, after half of the last round's drafts are replayed. Calls
rotate among caches with several times the size of the GPU's L2 cache, as with the layers of a model, in one CUDA graph;
the table gives the median time of a call. The output of each kernel is first compared with that of its reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from hf_specdec import ops
from hf_specdec.kernels import (
    attention_reference,
    draft_sampling_reference,
    linear_reference,
    recurrence_reference,
    round_state_reference,
    short_conv_reference,
    top_k_top_p_reference,
    verification_reference,
)
from hf_specdec.kernels.attention import attention
from hf_specdec.kernels.types import DraftInputs, NormKind, RecurrenceRing, RotaryKind

HEADS, KV_HEADS, DIM = 32, 8, 128
DTYPE = torch.bfloat16
VOCABULARY, DRAFT_VOCABULARY = 128256, 32000
# Live tokens of a row, and the slots of its cache.
CONTEXTS = [(512, 4096), (4096, 4096), (512, 32768), (4096, 32768), (32768, 32768)]
# Heads, key heads, K and V of a recurrence, and whether it uses the delta rule.
RECURRENCES = {"gated DeltaNet": (32, 16, 128, 128, True), "Mamba2": (64, 8, 128, 64, False)}
CHANNELS, CONV_WIDTH = 8192, 4
# Output and input features: q, k and v; o; gate and up; down; the head.
LINEARS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
CALLS = 32
TOLERANCE = 2e-2


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    add("--num-queries", type=int, nargs="+", default=[1, 4, 8, 16])
    add("--contexts", type=int, nargs="+", help="tokens in the cache; by default 512, 4k and 32k of 4k and 32k slots")
    add("--slots", type=int, help="slots of the cache for `--contexts`; by default as many as tokens")
    add("--num-splits", type=int, nargs="+", help="shares that attention divides the slots into, instead of its choice")
    add("--output", type=Path, help="JSON file for the figures")
    return parser.parse_args(arguments)


def seconds_per_call(calls: list[Callable[[], Any]]) -> float:
    """Median time of a call; all calls are in one CUDA graph, one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=50, return_mode="median") / 1e3 / len(calls)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)])


def rotate(bytes_per_call: int) -> tuple[int, int]:
    """How many inputs to rotate among, and how many calls to time."""
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    num_inputs = max(1, min(128, math.ceil(4 * cache / bytes_per_call)))
    return num_inputs, max(CALLS, num_inputs)


def require_close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    if not error < TOLERANCE:
        raise SystemExit(f"{what}: differs from the reference by {error:.1e}; no time is worth reporting")


def time_attention(
    batch: int, num_queries: int, live: int, slots: int, num_splits: int | None, is_float8: bool
) -> tuple[float, int]:
    """Seconds and bytes of a call, over keys and values in `DTYPE` or as float8."""
    live = min(live, slots - 1)  # the last slot is the dummy slot
    size = 2 * batch * live * KV_HEADS * (DIM + DTYPE.itemsize if is_float8 else DIM * DTYPE.itemsize)
    num_inputs, num_calls = rotate(size)
    caches = torch.randn(num_inputs, 2, batch, slots, KV_HEADS, DIM, dtype=DTYPE, device="cuda").transpose(3, 4)
    scales = [None] * num_inputs
    if is_float8:
        stored = [tuple(map(ops.quantise, pair)) for pair in caches.transpose(3, 4)]
        caches = [[one.transpose(1, 2) for one, _ in pair] for pair in stored]
        scales = [torch.stack([one for _, one in pair], dim=-1).transpose(1, 2) for pair in stored]
    query = torch.randn(batch, num_queries, HEADS, DIM, dtype=DTYPE, device="cuda").transpose(1, 2)
    positions = (live - num_queries + torch.arange(num_queries, device="cuda")).expand(batch, -1).contiguous()

    def call(index: int) -> torch.Tensor:
        keys, values = caches[index % num_inputs]
        options = {"num_programs": num_splits, "scales": scales[index % num_inputs]}
        return attention(query, keys, values, positions, DIM**-0.5, **options)

    keys, values = (one[:, :, :live] for one in caches[0])
    if is_float8:
        keys, values = (ops.dequantise(one, scales[0][:, :, :live, i]) for i, one in enumerate((keys, values)))
    expected = [
        attention_reference.attention(*(part[row : row + 1] for part in (query, keys, values, positions)), DIM**-0.5)
        for row in range(batch)
    ]
    require_close(call(0), torch.cat(expected), "attention")
    return seconds_per_call([lambda index=index: call(index) for index in range(num_calls)]), size


def time_write_kv(batch: int, num_queries: int, live: int, slots: int) -> tuple[float, int]:
    """Seconds and bytes of a call; `live` is the slot of the first state."""
    live = min(live, slots - num_queries)
    size = 4 * batch * num_queries * KV_HEADS * DIM * DTYPE.itemsize
    num_inputs = 4
    caches = torch.zeros(num_inputs, 2, batch, slots, KV_HEADS, DIM, dtype=DTYPE, device="cuda")
    states = torch.randn(2, batch, num_queries, KV_HEADS, DIM, dtype=DTYPE, device="cuda").transpose(2, 3)
    positions = (live + torch.arange(num_queries, device="cuda")).expand(batch, -1).contiguous()

    def call(index: int) -> None:
        ops.write_kv(*caches[index % num_inputs], *states, positions, None)

    call(0)
    require_close(caches[0][:, :, live : live + num_queries], states.transpose(2, 3), "write_kv")
    return seconds_per_call([lambda index=index: call(index) for index in range(CALLS)]), size


def time_prepare_inputs(batch: int, num_queries: int, live: int, slots: int) -> tuple[float, int]:
    """Seconds and bytes of a call for `num_queries` kept tokens a row and no masks."""
    tokens = torch.randint(1000, (batch, slots), device="cuda")
    lengths = torch.full((batch,), min(live, slots - 1), device="cuda")
    limits, committed = torch.full_like(lengths, slots - 1), torch.full_like(lengths, num_queries)
    finished = torch.zeros(batch, dtype=torch.bool, device="cuda")

    def call(prepare=ops.prepare_inputs) -> DraftInputs:
        return prepare(tokens, lengths, committed, limits, finished, num_queries, 0, 0, 1, 0)

    pairs = zip(call(), call(round_state_reference.prepare_inputs), strict=True)
    for name, (got, expected) in zip(DraftInputs._fields, pairs, strict=True):
        if not torch.equal(got, expected):
            raise SystemExit(f"prepare_inputs: {name} differ from the reference; no time is worth reporting")
    return seconds_per_call([call] * CALLS), 5 * batch * num_queries * 8


def time_recurrence(batch: int, num_queries: int, form: str) -> tuple[float, int]:
    """Seconds and bytes of a call for a block of `num_queries` columns, the first of which is certain."""
    heads, key_heads, dim, value_dim, delta = RECURRENCES[form]
    ring_size = 1 << (2 * (num_queries - 1)).bit_length()
    size = 2 * batch * heads * dim * value_dim * torch.float32.itemsize
    num_inputs, num_calls = rotate(size)

    def randn(*sizes: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device="cuda")

    def draw(num_columns: int) -> list[torch.Tensor]:
        decay = -0.1 * randn(batch, num_columns, heads, dtype=torch.float32).abs()
        return [randn(batch, num_columns, key_heads, dim), randn(batch, num_columns, heads, value_dim), decay]

    memories = []
    for _ in range(num_inputs):
        keys, updates, decays = draw(ring_size)
        state = randn(batch, heads, dim, value_dim, dtype=torch.float32)
        memories.append((state, RecurrenceRing(keys, updates.float(), decays)))
    inputs = [randn(batch, num_queries, key_heads, dim), *draw(num_queries), randn(batch, num_queries, heads).sigmoid()]
    base = torch.full((batch,), 100, device="cuda")
    first = base + (num_queries - 1) // 2
    positions = first[:, None] + torch.arange(num_queries, device="cuda")
    bounds, options = (base, first + 1, positions, 2**20), (delta, delta, dim**-0.5, None)

    def call(index: int) -> torch.Tensor:
        return ops.recurrence(*inputs, *memories[index % num_inputs], *bounds, *options)

    state, ring = memories[0][0].clone(), RecurrenceRing(*(part.clone() for part in memories[0][1]))
    expected = recurrence_reference.recurrence(*inputs, state, ring, *bounds, *options)
    require_close(call(0), expected, f"recurrence, {form}")
    require_close(memories[0][0], state, f"recurrence, {form}: state")
    return seconds_per_call([lambda index=index: call(index) for index in range(num_calls)]), size


def time_short_conv(batch: int, num_queries: int) -> tuple[float, int]:
    """Seconds and bytes of a call: inputs, results, and slots of the ring that are read and written."""
    size = batch * (CONV_WIDTH - 1 + 3 * num_queries) * CHANNELS * DTYPE.itemsize
    inputs = torch.randn(batch, num_queries, CHANNELS, dtype=DTYPE, device="cuda")
    weight = torch.randn(CHANNELS, CONV_WIDTH, dtype=DTYPE, device="cuda")
    ring_size = 1 << (CONV_WIDTH + 2 * num_queries - 2).bit_length()
    num_rings = 4
    rings = torch.randn(num_rings, batch, ring_size, CHANNELS, dtype=DTYPE, device="cuda")
    positions = (100 + torch.arange(num_queries, device="cuda")).expand(batch, -1).contiguous()

    def call(index: int) -> torch.Tensor:
        return ops.short_conv(inputs, rings[index % num_rings], positions, 2**20, weight, None, True)

    expected = short_conv_reference.short_conv(inputs, rings[0].clone(), positions, 2**20, weight, None, True)
    require_close(call(0), expected, "short_conv")
    return seconds_per_call([lambda index=index: call(index) for index in range(CALLS)]), size


def time_linear(num_rows: int, size_out: int, size_in: int) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and bytes of a linear layer, by the kernel where it is chosen, and by PyTorch; bytes of weights."""
    size = size_out * size_in * DTYPE.itemsize
    num_inputs, num_calls = rotate(size)
    weights = torch.randn(num_inputs, size_out, size_in, dtype=DTYPE, device="cuda") / size_in**0.5
    inputs = torch.randn(num_rows, size_in, dtype=DTYPE, device="cuda")
    functions = {"F.linear": torch.nn.functional.linear}
    if ops.has_fast_linear(inputs, weights[0]):
        functions = {"linear": ops.linear} | functions
    for name, function in functions.items():
        require_close(function(inputs, weights[0]), linear_reference.linear(inputs, weights[0]), name)
        calls = [
            lambda index=index: function(inputs, weights[index % num_inputs])  # noqa: B023 (called in this turn)
            for index in range(num_calls)
        ]
        yield f"{name}, {size_out} x {size_in}", seconds_per_call(calls), size


def time_layer_ops(num_rows: int) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and bytes of a norm, the rotary embedding of query and key, and a gated activation, of one layer.

    Heads, gate and up are parts of the output of one linear layer. Bytes count each input and output once.
    """
    width, inner = HEADS * DIM, LINEARS[2][0] // 2
    hidden, weight = (torch.randn(*shape, dtype=DTYPE, device="cuda") for shape in ((1, num_rows, width), (width,)))
    cos, sin = torch.randn(2, 1, num_rows, DIM, dtype=DTYPE, device="cuda")
    parts = torch.randn(1, num_rows, LINEARS[0][0], dtype=DTYPE, device="cuda").unflatten(-1, (-1, DIM))
    query, key, _ = (part.transpose(1, 2) for part in parts.split([HEADS, KV_HEADS, KV_HEADS], dim=2))
    gate, up = torch.randn(1, num_rows, 2 * inner, dtype=DTYPE, device="cuda").chunk(2, dim=-1)
    norm, rotary = NormKind(cast_first=True), RotaryKind()
    cases = (
        ("rms_norm", (hidden, weight, 1e-5, norm), 2 * width),
        ("rotary", (cos, sin, [query, key], rotary), 2 * (HEADS + KV_HEADS) * DIM),
        ("gated_activation", (gate, up, "silu"), 3 * inner),
    )
    for name, arguments, elements in cases:
        function = getattr(ops, name)
        with ops.references():
            expected = function(*arguments)
        found = function(*arguments)
        for pair in zip(*((one if isinstance(one, list) else [one]) for one in (found, expected)), strict=True):
            require_close(*pair, name)
        calls = [lambda: function(*arguments)] * CALLS  # noqa: B023 (called in this turn)
        yield name, seconds_per_call(calls), num_rows * elements * DTYPE.itemsize


def time_vocabulary(batch: int, num_queries: int) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and bytes of the kernels over the vocabulary, for `num_queries` rows of logits a row of the batch.

    Bytes count each input and output once: the logits, and for drawing also the distributions.
    """
    num_drafts = num_queries - 1
    size = batch * num_queries * VOCABULARY
    num_inputs, num_calls = rotate(2 * size)
    logits = torch.randn(num_inputs, batch, num_queries, VOCABULARY, dtype=DTYPE, device="cuda")
    draft_logits = torch.randn(num_inputs, batch, 1, DRAFT_VOCABULARY, dtype=DTYPE, device="cuda")
    target_ids = torch.arange(0, 4 * DRAFT_VOCABULARY, 4, device="cuda")
    draft_ids = ops.invert_draft_vocabulary(target_ids, VOCABULARY)
    drafts = logits[0, :, :num_drafts].argmax(dim=-1)
    seeds, lengths = torch.arange(batch, device="cuda"), torch.full((batch,), 100, device="cuda")
    temperatures = torch.ones(batch, device="cuda")
    scores = logits[: max(1, num_inputs // 2)].float()
    scores += 1e-3 * torch.rand_like(scores)  # no ties
    top_k, tail = torch.full_like(lengths, 20), torch.full_like(temperatures, 0.2)
    probs = torch.rand(batch, num_drafts, DRAFT_VOCABULARY, device="cuda").softmax(dim=-1) if num_drafts else None
    law = (probs, draft_ids if num_drafts else None, seeds, lengths)
    kernels = (
        (
            "verify_tree",
            ops.verify_tree,
            verification_reference.verify_tree,
            logits,
            (drafts, None, None, None, lengths, num_drafts),
            2 * size,
        ),
        (
            "verify_sampling",
            ops.verify_sampling,
            verification_reference.verify_sampling,
            scores,
            (drafts, *law),
            4 * size,
        ),
        (
            "apply_top_k_top_p",
            ops.apply_top_k_top_p,
            top_k_top_p_reference.apply_top_k_top_p,
            scores,
            (temperatures, top_k, tail),
            8 * size,
        ),
        (
            "best_draft",
            ops.best_draft,
            draft_sampling_reference.best_draft,
            draft_logits,
            (target_ids,),
            2 * batch * DRAFT_VOCABULARY,
        ),
        (
            "draw_draft",
            ops.draw_draft,
            draft_sampling_reference.draw_draft,
            draft_logits,
            (temperatures, seeds, lengths, 0),
            6 * batch * DRAFT_VOCABULARY,
        ),
    )
    for name, kernel, expected, inputs, others, num_bytes in kernels:
        got, right = (function(inputs[0], *others) for function in (kernel, expected))
        pairs = [(got, right)] if isinstance(got, torch.Tensor) else zip(got, right, strict=True)
        for ours, theirs in pairs:
            # A random number may be so close to the acceptance threshold that rounding decides.
            agree = torch.isclose(ours, theirs, rtol=1e-4, atol=1e-7).reshape(len(ours), -1).all(dim=1)
            if agree.sum() < len(ours) - 1:
                raise SystemExit(f"{name}: differs from the reference; no time is worth reporting")
        calls = [
            lambda index=index: kernel(inputs[index % len(inputs)], *others)  # noqa: B023 (called in this turn)
            for index in range(num_calls)
        ]
        yield name, seconds_per_call(calls), num_bytes


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    contexts = [(live, arguments.slots or live) for live in arguments.contexts] if arguments.contexts else CONTEXTS
    for batch in arguments.batch_sizes:
        for num_queries in arguments.num_queries:
            shape = {"batch": batch, "queries": num_queries}
            for live, slots in contexts:
                for splits, is_float8 in itertools.product(arguments.num_splits or [None], (False, True)):
                    seconds, size = time_attention(batch, num_queries, live, slots, splits, is_float8)
                    case = shape | {"live": live, "slots": slots, "splits": splits}
                    yield {"kernel": "attention" + ", float8" * is_float8} | case | {"seconds": seconds, "bytes": size}
            live, slots = contexts[0]
            for name, time_kernel in (("write_kv", time_write_kv), ("prepare_inputs", time_prepare_inputs)):
                seconds, size = time_kernel(batch, num_queries, live, slots)
                case = shape | {"live": live, "slots": slots, "splits": None}
                yield {"kernel": name} | case | {"seconds": seconds, "bytes": size}
            of_states = [
                *((f"recurrence, {form}", *time_recurrence(batch, num_queries, form)) for form in RECURRENCES),
                ("short_conv", *time_short_conv(batch, num_queries)),
            ]
            of_linears = [one for sizes in LINEARS for one in time_linear(batch * num_queries, *sizes)]
            of_layers = time_layer_ops(batch * num_queries)
            for name, seconds, size in (*of_states, *of_linears, *of_layers, *time_vocabulary(batch, num_queries)):
                case = shape | {"live": None, "slots": None, "splits": None}
                yield {"kernel": name} | case | {"seconds": seconds, "bytes": size}


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("kernel_bandwidth.py needs a CUDA device: there is none to measure on.")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}: copies at {bandwidth / 1e9:.0f} GB/s")
    print(
        f"{'kernel':28}{'batch':>6}{'queries':>8}{'live':>7}{'slots':>7}{'splits':>7}{'us':>9}{'GB/s':>7}{'of copy':>9}"
    )
    rows = []
    for row in measure(arguments):
        rate = row["bytes"] / row["seconds"]
        print(
            f"{row['kernel']:28}{row['batch']:6}{row['queries']:8}{row['live'] or '-':>7}{row['slots'] or '-':>7}"
            f"{row['splits'] or 'auto':>7}{row['seconds'] * 1e6:9.1f}{rate / 1e9:7.0f}{rate / bandwidth:9.0%}",
            flush=True,
        )
        rows.append(row)
    if arguments.output:
        result = {"device": name, "torch": torch.__version__, "triton": triton.__version__, "copy": bandwidth}
        arguments.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
