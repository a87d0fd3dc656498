"""Measuring one case: a way to generate, a number of drafts and a batch size."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter
from ..engine.equivalence import why_not_equivalent
from ..stats import SpeculationStats
from .clock import Clock, GpuClock, synchronize
from .prompts import Batch
from .traffic import round_bytes

# New tokens of the call that `GpuClock` records; kernels by the thousand are slow to sum up.
RECORDED_TOKENS = 32


@dataclass
class Spread:
    """One figure over several runs."""

    median: float
    low: float
    high: float
    runs: list[float]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Spread:
        return cls(statistics.median(runs), min(runs), max(runs), list(runs))


class Setting(NamedTuple):
    """What cases have in common that are compared with each other; see `Case`."""

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
    """What is measured, and what was found; figures are None where there are none, and all of them after an error.

    A round is one pass of the target and, with a drafter, the drafting after it; without one it is a plain step.

    Attributes:
        name: `"dynamic"` and `"static"` for plain `generate()` on those caches, `"engine"` for the static engine
            without a drafter, else the drafter.
        k: draft tokens a round; None for plain `generate()`, 0 for the engine alone.
        batch_size: rows.
        temperature: of sampling; 0 for greedy decoding.
        prompt_length: tokens of every prompt if they are random; None for texts.
        draft_probs: of the drafter, `"on"`, `"off"` or `"auto"` (see `Drafter.configure`); None without a drafter, and
            in greedy decoding, where it changes nothing.
        error: why it could not be measured.
        engine: of ours that ran, `"static"` or `"stock"`, with the reason; None for plain `generate()`.
        tokens: new tokens of a run, of all rows, end-of-sequence tokens included and padding not.
        rounds: of a run, over all batches.
        same_texts: share of the rows whose text is that of plain `generate()` with the dynamic cache; only of greedy
            decoding. In types narrower than float32 ties are decided by rounding, so that less than 1 is no error.
        acceptance_length: tokens that a row commits a round.
        acceptance_per_position: share of the drafts at each position that were accepted.
        ms_per_round: wall time from the first tokens of a call to its last, over the rounds after the first.
        ms_to_first_token: wall time from the call to its first tokens.
        cold_ms_to_first_token: the same of the first call of all, which may compile, capture and allocate.
        tokens_per_second: new tokens of all rows over the wall time of whole calls.
        round_over_engine, round_over_dynamic: `ms_per_round` over that of the engine alone, of plain `generate()`.
        speedup: `tokens_per_second` over that of plain `generate()` with the dynamic cache.
        gpu_ms_per_round: time that the GPU computes a round; what it waits for the host is left out.
        peak_memory_bytes: the most that torch had allocated on a GPU, weights included.
        bytes_per_round: see `round_bytes`.
        bandwidth_share: those bytes over the round's time over the measured bandwidth of a copy.
    """

    name: str
    k: int | None
    batch_size: int
    temperature: float = 0.0
    prompt_length: int | None = None
    draft_probs: str | None = None
    error: str | None = None
    engine: str | None = None
    tokens: int | None = None
    rounds: int | None = None
    same_texts: float | None = None
    acceptance_length: float | None = None
    acceptance_per_position: list[float] = field(default_factory=list)
    ms_per_round: Spread | None = None
    ms_to_first_token: Spread | None = None
    cold_ms_to_first_token: float | None = None
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Run:
    """One pass over all batches, added up."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    timed_rounds: int = 0
    timed_seconds: float = 0.0
    to_first: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)


@dataclass
class Bench:
    """What all cases share.

    Attributes:
        target: generates.
        options: of every `generate()` call; a case adds those of sampling.
        runs: measured passes over the batches of a case; one more comes before them and is not counted.
        bandwidth: bytes a second of a copy on the target's device.
        gpu_time: whether the GPU's own time is recorded too, in a call of its own.
        is_scripted: whether drafts are accepted by chance, so that texts mean nothing.
        progress: called after every pass.
        plain_texts: what plain `generate()` has said, by setting.
    """

    target: PreTrainedModel
    options: dict[str, Any]
    runs: int
    bandwidth: float
    gpu_time: bool = False
    is_scripted: bool = False
    progress: Callable[[], None] = lambda: None
    plain_texts: dict[Setting, list[list[int]]] = field(default_factory=dict)

    def measure(
        self,
        case: Case,
        batches: Callable[[], list[Batch]],
        drafter: Drafter | None = None,
        context: Callable[[], AbstractContextManager] = nullcontext,
        **options: Any,
    ) -> Case:
        """Fill in `case`; whatever goes wrong is noted in it.

        Args:
            case: to measure.
            batches: makes what the target continues.
            drafter: of the case.
            context: every call runs in one; errors in making it are the case's too.
            options: of the case's `generate()` calls.
        """
        options["do_sample"] = case.temperature > 0
        if case.temperature > 0:
            options |= {"temperature": case.temperature, "top_k": 0, "top_p": 1.0}
        if drafter is not None:
            options |= {"assistant_model": drafter, "num_assistant_tokens": case.k or None}
        try:
            if drafter is not None:
                why_not_equivalent(
                    self.target, "static"
                )  # The target is checked by true verification, not by scripted.
            with context():
                self._measure(case, batches(), drafter, options)
        except Exception as error:  # Out of memory, a drafter that does not fit: the other cases go on.
            case.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self._forget(drafter)
        return case

    def _measure(self, case: Case, batches: list[Batch], drafter: Drafter | None, options: dict[str, Any]) -> None:
        device = self.target.device
        # On a GPU every shape is warmed up, since each may be compiled or tuned for.
        cold = self._run(batches if device.type != "cpu" else batches[:1], drafter, options)
        case.cold_ms_to_first_token = 1e3 * cold.to_first[0]
        self.progress()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        found = []
        for _ in range(self.runs):
            found.append(self._run(batches, drafter, options))
            self.progress()
        if device.type == "cuda":
            case.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        self._fill(case, found)
        self._compare_texts(case, found[0].texts)
        length = statistics.fmean(found[0].lengths)
        case.bytes_per_round = round_bytes(self.target, drafter, case.k or 0, case.batch_size, length)
        if case.bytes_per_round is not None and case.ms_per_round is not None:
            seconds = case.ms_per_round.median / 1e3
            case.bandwidth_share = case.bytes_per_round / seconds / self.bandwidth
        if self.gpu_time and device.type == "cuda":
            case.gpu_ms_per_round = self._record(batches[0], drafter, options)

    def _run(self, batches: list[Batch], drafter: Drafter | None, options: dict[str, Any]) -> Run:
        run = Run()
        torch.manual_seed(0)
        for inputs in batches:
            clock, device = Clock(), self.target.device
            synchronize(device)
            start = time.perf_counter()
            out = self.target.generate(**inputs, **self.options, **options, streamer=clock)
            synchronize(device)
            run.seconds += time.perf_counter() - start
            prompt = inputs["input_ids"].shape[1]
            new = out[:, prompt:].cpu()
            counts = count_tokens(new, self.target.generation_config.eos_token_id)
            run.texts += [row[:count] for row, count in zip(new.tolist(), counts, strict=True)]
            rounds = drafter.stats.num_rounds if drafter is not None else out.shape[1] - prompt
            run.tokens += sum(counts)
            run.rounds += rounds
            run.timed_rounds += rounds - 1
            run.timed_seconds += clock.last - clock.first
            run.to_first.append(clock.first - start)
            lengths = inputs["attention_mask"].sum(dim=1).tolist()
            run.lengths += [length + count / 2 for length, count in zip(lengths, counts, strict=True)]
            if drafter is not None:
                run.stats.append(drafter.stats)
        return run

    def _fill(self, case: Case, runs: list[Run]) -> None:
        first = runs[0]
        case.tokens, case.rounds = first.tokens, first.rounds
        case.tokens_per_second = Spread.of([run.tokens / run.seconds for run in runs])
        case.ms_to_first_token = Spread.of([1e3 * statistics.fmean(run.to_first) for run in runs])
        if all(run.timed_rounds > 0 for run in runs):
            case.ms_per_round = Spread.of([1e3 * run.timed_seconds / run.timed_rounds for run in runs])
        if case.k is not None:
            stats = [one for run in runs for one in run.stats]
            case.engine = f"{stats[0].engine}: {stats[0].reason}; {stats[0].execution}".removesuffix("; ")
            case.acceptance_length = sum(one.committed for one in stats) / sum(one.rounds for one in stats)
            case.acceptance_per_position = _shares(stats)

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
        out = self.target.generate(**inputs, **(self.options | limits), **options, streamer=clock)
        synchronize(self.target.device)
        rounds = drafter.stats.num_rounds if drafter is not None else out.shape[1] - inputs["input_ids"].shape[1]
        seconds = clock.busy_seconds()
        return 1e3 * seconds / (rounds - 1) if rounds > 1 else None

    def _forget(self, drafter: Drafter | None) -> None:
        """Give back the GPU memory that a case has left behind, its error's included."""
        if drafter is not None:
            drafter.release()  # Captured rounds would be replayed in another case's context.
        if self.target.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def count_tokens(new: torch.Tensor, eos: int | list[int] | None) -> list[int]:
    """Tokens of each row of `[B, n]` int64 up to its first end-of-sequence token, that one included."""
    ends = torch.tensor([] if eos is None else eos, dtype=torch.int64).reshape(-1)
    is_end = torch.isin(new, ends)
    lengths = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, new.shape[1])
    return lengths.tolist()


def _shares(stats: list[SpeculationStats]) -> list[float]:
    drafted = [sum(counts) for counts in zip(*(one.drafted_per_position for one in stats), strict=True)]
    accepted = [sum(counts) for counts in zip(*(one.accepted_per_position for one in stats), strict=True)]
    return [kept / tried if tried else 0.0 for kept, tried in zip(accepted, drafted, strict=True)]


def compare(cases: list[Case]) -> None:
    """Fill in what compares a case with the baselines of its setting."""
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
