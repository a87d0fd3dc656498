"""Measurement of a case: a baseline or a drafter, with its K, batch size and other settings."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from ..config import AUTO
from ..drafters import Drafter
from ..host.generation import GenerationOutput, WorkloadHints
from ..hosting.equivalence import why_not_equivalent
from ..memory.virtual_memory import peak_committed_bytes, reset_peak_committed_bytes
from ..stats import SpeculationStats, add_up
from .batches import Batch
from .clock import Clock, GpuClock, synchronize
from .traffic import round_bytes

# New tokens of the call that `GpuClock` records. With more tokens the profiler's events take long to sum up.
RECORDED_TOKENS = 32


@dataclass
class Spread:
    """A figure over several runs."""

    median: float
    low: float
    high: float
    runs: list[float]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Spread:
        return cls(statistics.median(runs), min(runs), max(runs), list(runs))


@dataclass
class Latency:
    """A time over many requests, in milliseconds; 99 % of them take at most `p99`."""

    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """From times in seconds; None if there are none."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        return cls(1e3 * statistics.median(ordered), 1e3 * ordered[math.ceil(0.99 * len(ordered)) - 1])


class Setting(NamedTuple):
    """The settings that comparable cases share; see `Case`."""

    batch_size: int
    temperature: float
    prompt_length: int | None

    def __str__(self) -> str:
        parts = [f"batch {self.batch_size}"]
        if self.temperature:
            parts.append(f"T = {self.temperature:g}")
        if self.prompt_length is not None:
            parts.append(f"prompt {self.prompt_length}")
        return ", ".join(parts)


@dataclass
class Case:
    """A case and its figures. Figures that do not apply are None, and after an error all are.

    A round is one pass of the target and, with a drafter, the drafting after it. Without a drafter it is one decoding
    step.

    Attributes:
        name: `"dynamic"` or `"static"` for plain `generate()` with that cache, `"engine"` for the static engine without
            a drafter, else the drafter's name.
        k: draft tokens a round, or "auto"; None for plain `generate()`, 0 for the engine alone.
        prompt_length: number of tokens of every prompt if prompts are random; None for texts.
        draft_probs: `"on"`, `"off"` or `"auto"` (see `Drafter.configure`); None without a drafter, and in greedy
            decoding and with trees, where it has no effect.
        tree: N, number of drafts of a round's tree of depth up to `k`, or "auto"; 0 for chains.
        error: why the case could not be measured.
        engine: which engine of hf_specdec ran, `"static"` or `"stock"`, with the reason; None for plain `generate()`.
        tokens: new tokens of a run, over all rows, with end-of-sequence tokens and without padding.
        rounds: rounds of a run, over all batches.
        cached_tokens: tokens of prompts that a run did not prefill, because of the prefix cache.
        same_texts: share of the rows with the same text as plain `generate()` with the dynamic cache; only for greedy
            decoding. In dtypes narrower than float32 rounding decides ties, so less than 1 is no error.
        acceptance_length: mean number of tokens that a row commits in a round.
        acceptance_per_position: share of accepted drafts at each position.
        rounds_by_k, rounds_by_tree: number of rounds of all runs by K, and by drafts of the tree; empty for the stock
            engine.
        ms_per_round: wall time from the first tokens of a call to its last, over the rounds between them.
        ms_to_first_token: wall time from the call to its first tokens (TTFT).
        cold_ms_to_first_token: TTFT of the case's first call, which may compile, capture and allocate.
        request_to_first_token: time from adding a request to a manager to its first tokens.
        request_per_token: mean time between two tokens of a request.
        request_gap: time between successive tokens of a request, without those of the same round, which come together.
        tokens_per_second: new tokens of all rows over the wall time of whole calls.
        round_over_engine, round_over_dynamic: `ms_per_round` over that of the engine without a drafter, and over that
            of plain `generate()` with the dynamic cache.
        speedup: `tokens_per_second` over that of plain `generate()` with the dynamic cache.
        gpu_ms_per_round: time for which the GPU computes in a round, without waiting for the host.
        peak_memory_bytes: peak of torch's allocations on a GPU, weights included, plus that of the rows' memory.
        bytes_per_round: see `round_bytes`.
        bandwidth_share: `bytes_per_round` over the round's time, as a share of the measured copy bandwidth.
    """

    name: str
    k: int | None
    batch_size: int
    temperature: float = 0.0
    prompt_length: int | None = None
    draft_probs: str | None = None
    tree: int | str = 0
    error: str | None = None
    engine: str | None = None
    tokens: int | None = None
    rounds: int | None = None
    cached_tokens: int = 0
    same_texts: float | None = None
    acceptance_length: float | None = None
    acceptance_per_position: list[float] = field(default_factory=list)
    rounds_by_k: dict[int, int] = field(default_factory=dict)
    rounds_by_tree: dict[int, int] = field(default_factory=dict)
    ms_per_round: Spread | None = None
    ms_to_first_token: Spread | None = None
    cold_ms_to_first_token: float | None = None
    request_to_first_token: Latency | None = None
    request_per_token: Latency | None = None
    request_gap: Latency | None = None
    tokens_per_second: Spread | None = None
    round_over_engine: float | None = None
    round_over_dynamic: float | None = None
    speedup: float | None = None
    gpu_ms_per_round: float | None = None
    peak_memory_bytes: int | None = None
    bytes_per_round: int | None = None
    bandwidth_share: float | None = None

    @property
    def setting(self) -> Setting:
        return Setting(self.batch_size, self.temperature, self.prompt_length)

    @property
    def label(self) -> str:
        return short_name(self.name) + (" (stock engine)" if (self.engine or "").startswith("stock") else "")


def short_name(name: str) -> str:
    """The last part of the name of a folder or repository."""
    return Path(name).name


@dataclass
class Run:
    """Sums of one pass over all batches."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    timed_seconds: float = 0.0
    to_first: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)
    results: list[GenerationOutput] = field(default_factory=list)


@dataclass
class Bench:
    """Measures the cases of a target.

    Attributes:
        batches: makes the inputs of a case's `generate()` calls.
        options: options of every `generate()` call; a case adds those of sampling.
        runs: measured passes over the batches of a case, after one warm-up pass.
        bandwidth: bytes a second of a copy on the target's device.
        gpu_time: whether to record also the GPU's own time, in a separate call.
        continuous: whether the static engine runs all prompts of a case by continuous batching, with the batch size as
            number of rows; if not, batch after batch.
        serve: whether a manager runs the prompts of a case, with the batch size as number of concurrent requests.
        is_scripted: whether acceptance is scripted, so that texts are not compared.
        progress: called after every pass.
        plain_texts: tokens that plain `generate()` generated, by setting.
    """

    target: PreTrainedModel
    batches: Callable[[Case], list[Batch]]
    options: dict[str, Any]
    runs: int
    bandwidth: float
    gpu_time: bool = False
    continuous: bool = False
    serve: bool = False
    is_scripted: bool = False
    progress: Callable[[], None] = lambda: None
    plain_texts: dict[Setting, list[list[int]]] = field(default_factory=dict)

    def measure(
        self,
        case: Case,
        drafter: Drafter | None = None,
        context: Callable[[], AbstractContextManager] = nullcontext,
        **options: Any,
    ) -> Case:
        """Measure `case` with or without a `drafter`, and fill in its figures, or `case.error` after an exception.
        `context` is a context for the `generate()` calls, `options` are their additional options."""
        options["do_sample"] = case.temperature > 0
        if case.temperature > 0:
            options |= {"temperature": case.temperature, "top_k": 0, "top_p": 1.0}
        if drafter is not None:
            options |= {"assistant_model": drafter, "num_assistant_tokens": case.k or None, "tree": case.tree}
        try:
            if drafter is not None:
                # Before the context, so that the equivalence check runs with true verification.
                why_not_equivalent(self.target, "static")
            with context():
                self._measure(case, self.batches(case), drafter, options)
        except Exception as error:  # such as out of memory or an unsuitable drafter; the other cases are measured
            case.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if drafter is not None:
            drafter.release()  # the next case must not replay CUDA graphs of this one's context
        if self.target.device.type == "cuda":  # the case still holds memory, also after an error
            gc.collect()
            torch.cuda.empty_cache()
        return case

    def _measure(self, case: Case, batches: list[Batch], drafter: Drafter | None, options: dict[str, Any]) -> None:
        device = self.target.device
        # On a GPU every batch is warmed up, because kernels may be compiled or tuned for its shape.
        cold = self._run(batches if device.type != "cpu" else batches[:1], drafter, options)
        if cold.to_first:
            case.cold_ms_to_first_token = 1e3 * cold.to_first[0]
        self.progress()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            reset_peak_committed_bytes(device)
        found = []
        for _ in range(self.runs):
            found.append(self._run(batches, drafter, options))
            self.progress()
        if device.type == "cuda":
            # The rows' memory is not from torch's allocator.
            case.peak_memory_bytes = torch.cuda.max_memory_allocated(device) + peak_committed_bytes(device)
        self._fill(case, found)
        self._compare_texts(case, found[0].texts)
        length = statistics.fmean(found[0].lengths)
        if case.k != AUTO:
            case.bytes_per_round = round_bytes(self.target, drafter, case.k or 0, case.batch_size, length)
        if case.bytes_per_round is not None and case.ms_per_round is not None:
            seconds = case.ms_per_round.median / 1e3
            case.bandwidth_share = case.bytes_per_round / seconds / self.bandwidth
        if self.gpu_time and device.type == "cuda":
            case.gpu_ms_per_round = self._record(batches[0], drafter, options)

    def _run(self, batches: list[Batch], drafter: Drafter | None, options: dict[str, Any]) -> Run:
        options = self.options | options
        if (self.continuous or self.serve) and drafter is not None:
            return self._run_requests(batches, drafter, options)
        run = Run()
        torch.manual_seed(0)
        for inputs in batches:
            clock, device = Clock(), self.target.device
            synchronize(device)
            start = time.perf_counter()
            out = self.target.generate(**inputs, **options, streamer=clock)
            synchronize(device)
            run.seconds += time.perf_counter() - start
            prompt = inputs["input_ids"].shape[1]
            new = out[:, prompt:].cpu()
            counts = count_tokens(new, self.target.generation_config.eos_token_id)
            run.texts += [row[:count] for row, count in zip(new.tolist(), counts, strict=True)]
            # The prefill gives the first tokens.
            rounds = drafter.stats.num_rounds if drafter is not None else out.shape[1] - prompt - 1
            run.tokens += sum(counts)
            run.rounds += rounds
            run.timed_seconds += clock.times[-1] - clock.times[1]
            run.to_first.append(clock.times[1] - start)
            lengths = inputs["attention_mask"].sum(dim=1).tolist()
            run.lengths += [length + count / 2 for length, count in zip(lengths, counts, strict=True)]
            if drafter is not None:
                run.stats.append(drafter.stats)
        return run

    def _run_requests(self, batches: list[Batch], drafter: Drafter, options: dict[str, Any]) -> Run:
        """Run the prompts of all batches as requests. Rounds are not timed, because prefill runs between them."""
        prompts = [
            row[mask.bool()].tolist()  # without padding
            for inputs in batches
            for row, mask in zip(inputs["input_ids"].cpu(), inputs["attention_mask"].cpu(), strict=True)
        ]
        config = ContinuousBatchingConfig(max_requests_per_batch=len(batches[0]["input_ids"]))
        torch.manual_seed(0)
        if self.serve:
            seconds, results = self._run_manager(prompts, config, options)
        else:
            synchronize(self.target.device)
            start = time.perf_counter()
            results = list(self.target.generate_batch(prompts, None, config, **options).values())
            seconds = time.perf_counter() - start
        texts = [result.generated_tokens for result in results]
        return Run(
            seconds=seconds,
            tokens=sum(map(len, texts)),
            rounds=drafter.stats.num_rounds,
            texts=texts,
            lengths=[len(prompt) + len(text) / 2 for prompt, text in zip(prompts, texts, strict=True)],
            stats=[drafter.stats],
            results=results if self.serve else [],
        )

    def _run_manager(
        self, prompts: list[list[int]], config: ContinuousBatchingConfig, options: dict[str, Any]
    ) -> tuple[float, list[GenerationOutput]]:
        """Seconds and results of a manager's run of all prompts; a request is added whenever one has ended."""
        with self.target.continuous_batching_context_manager(
            continuous_batching_config=config,
            workload_hints=WorkloadHints(max(map(len, prompts)), options["max_new_tokens"], len(prompts)),
            persistent_manager=True,
            **options,
        ) as manager:
            start, results = time.perf_counter(), {}
            first = prompts[: config.max_requests_per_batch]
            names = [manager.add_request(prompt, record_timestamps=True) for prompt in first]
            while len(results) < len(prompts):
                result = manager.get_result()
                if result is None or result.error is not None:
                    raise RuntimeError("The manager ended." if result is None else result.error)
                results[result.request_id] = result
                if len(names) < len(prompts):
                    names.append(manager.add_request(prompts[len(names)], record_timestamps=True))
            return time.perf_counter() - start, [results[name] for name in names]

    def _fill(self, case: Case, runs: list[Run]) -> None:
        first = runs[0]
        case.tokens, case.rounds = first.tokens, first.rounds
        case.tokens_per_second = Spread.of([run.tokens / run.seconds for run in runs])
        if first.to_first:
            case.ms_to_first_token = Spread.of([1e3 * statistics.fmean(run.to_first) for run in runs])
        if all(run.to_first and run.rounds > 0 for run in runs):
            case.ms_per_round = Spread.of([1e3 * run.timed_seconds / run.rounds for run in runs])
        results = [one for run in runs for one in run.results]
        case.request_to_first_token = Latency.of([one.timestamps[0] - one.created_time for one in results])
        spans = [one.timestamps for one in results if len(one.timestamps) > 1]
        case.request_per_token = Latency.of([(times[-1] - times[0]) / (len(times) - 1) for times in spans])
        gaps = [after - before for times in spans for before, after in pairwise(times)]
        case.request_gap = Latency.of([gap for gap in gaps if gap > 0])
        if case.k is not None:
            stats = [one for run in runs for one in run.stats]
            case.engine = f"{stats[0].engine}: {stats[0].reason}; {stats[0].execution}".removesuffix("; ")
            total = add_up(stats)
            case.acceptance_length = total.acceptance_length
            case.acceptance_per_position = total.acceptance_per_position
            case.cached_tokens = sum(one.cached_tokens for one in first.stats)
            for name in ("rounds_by_k", "rounds_by_tree"):
                counts = sum((Counter(getattr(one, name)) for one in stats), Counter())
                setattr(case, name, dict(sorted(counts.items())))

    def _compare_texts(self, case: Case, texts: list[list[int]]) -> None:
        if case.temperature > 0 or self.is_scripted:
            return
        if case.name == "dynamic":
            self.plain_texts[case.setting] = texts
        elif case.setting in self.plain_texts:
            plain = self.plain_texts[case.setting]
            case.same_texts = statistics.fmean(mine == theirs for mine, theirs in zip(texts, plain, strict=True))

    def _record(self, inputs: Batch, drafter: Drafter | None, options: dict[str, Any]) -> float | None:
        clock = GpuClock(self.target.device)
        limits = {"max_new_tokens": min(RECORDED_TOKENS, self.options["max_new_tokens"])}
        out = self.target.generate(**inputs, **(self.options | options | limits), streamer=clock)
        synchronize(self.target.device)
        rounds = drafter.stats.num_rounds if drafter is not None else out.shape[1] - inputs["input_ids"].shape[1] - 1
        seconds = clock.busy_seconds()
        return 1e3 * seconds / rounds if rounds > 0 else None


def count_tokens(new: torch.Tensor, eos: int | list[int] | None) -> list[int]:
    """Number of tokens of each row of `new` `[B, n]` int64, up to and including its first end-of-sequence token."""
    ends = torch.tensor([] if eos is None else eos, dtype=torch.int64).reshape(-1)
    is_end = torch.isin(new, ends)
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, new.shape[1])
    return lengths.tolist()


def compare(cases: list[Case]) -> None:
    """Fill in the figures that compare cases with the baselines of their settings."""
    plain = {(case.name, case.setting): case for case in cases if case.error is None}
    for case in cases:
        engine, dynamic = (plain.get((name, case.setting)) for name in ("engine", "dynamic"))
        case.round_over_engine = _ratio(case, engine, "ms_per_round")
        case.round_over_dynamic = _ratio(case, dynamic, "ms_per_round")
        case.speedup = _ratio(case, dynamic, "tokens_per_second")


def _ratio(case: Case, other: Case | None, figure: str) -> float | None:
    mine, theirs = getattr(case, figure), getattr(other, figure, None)
    if mine is None or theirs is None or math.isclose(theirs.median, 0.0):
        return None
    return mine.median / theirs.median
