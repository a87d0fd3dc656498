"""Every causal and image-text class of transformers, tiny and random, with drafters: right, refused or wrong?

    python tests/helpers/zoo.py --write docs/targets.md      all classes; the table of what runs where
    python tests/helpers/zoo.py --only LlamaForCausalLM      some of them, in full
    python tests/helpers/zoo.py --source <checkout> ...      in the configurations of transformers' own tests, of a
                                                             checkout of its repository of the installed version

Each class is built with the default configuration of its own family, shrunk by `zoo_configs`. Then greedy `generate()`
with two drafters, one that knows the text and is wrong at 40 % of the places and a random draft model, must generate
what plain `generate()` generates, or refuse the call before it begins. So must the classes of `images.KINDS`, under
their names with "(images)" behind, with prompts with images. `zoo_columns` tries more with each class: seeds, images of
transformers' tests, a continued cache, `generate_batch()`, and trees of drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
import zoo_rounds
import zoo_sources
from images import IMAGE, image_model, image_prompts
from images import KINDS as KINDS_OF_IMAGES
from model_state import unchecked
from oracle import OracleDrafter, random_draft_model
from transformers import PreTrainedModel
from zoo_columns import COLUMNS, columns_of
from zoo_models import AS_DECODER, MAX_NEW_TOKENS, THEIRS, build, class_names, generate, is_sourced, prompts, rows_of
from zoo_outcomes import CRASH, NO_TEXT, NOT_BUILT, REFUSED, RIGHT, WRONG, is_refusal, last_line
from zoo_workers import Worker, serve

import hf_specdec
from hf_specdec import Drafter

NUM_DRAFT_TOKENS = 4
ACCURACY = 0.6
SECONDS_PER_CLASS = 240
OURS = "hf_specdec"

# What names of classes have behind them for prompts with images, and the parts of these.
WITH_IMAGES = " (images)"
IMAGE_ROWS = [[4, IMAGE, 5], [3], [2, IMAGE, 3, IMAGE, 6]]


@dataclass
class Outcome:
    """The outcome of one class.

    Attributes:
        name: of the class.
        model_type: of its configuration.
        engine: "static", "stock" or, where no call was run, None.
        reason: why that engine, or why not.
        outcome: one of RIGHT, REFUSED, WRONG, CRASH, NOT_BUILT, NO_TEXT.
        error: the error, or how the texts differ.
        notes: of single calls, and of the plain text.
        columns: outcomes of `zoo_columns.COLUMNS`, with a note for each.
        source: whose configuration it was.
        seconds: of the whole run.
    """

    name: str
    model_type: str = ""
    engine: str | None = None
    reason: str = ""
    outcome: str = NOT_BUILT
    error: str = ""
    notes: list[str] = field(default_factory=list)
    columns: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    source: str = OURS
    seconds: float = 0.0


@dataclass
class Call:
    """One call with a drafter: its outcome and the reason."""

    outcome: str
    engine: str | None = None
    reason: str = ""
    error: str = ""


def call(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    expected: torch.Tensor | None,
    drafter_of: Callable[[], Drafter],
) -> Call:
    """Generate with a drafter and compare with `expected` `[B, P + T]`; None if plain `generate()` failed."""
    forwards: list[int] = []
    handle = model.register_forward_pre_hook(unchecked(lambda *args: forwards.append(1)))
    drafter = None
    try:
        drafter = drafter_of()
        text = generate(model, inputs, assistant_model=drafter, num_assistant_tokens=NUM_DRAFT_TOKENS)
    except Exception as error:
        if is_refusal(error, bool(forwards), Path(hf_specdec.__file__).parent):
            return Call(REFUSED, None, " ".join(str(error).split()))
        return Call(CRASH if expected is not None else NO_TEXT, error=last_line(error))
    finally:
        handle.remove()
    stats = drafter.stats
    if stats is None:
        return Call(WRONG, error="the drafter was ignored")
    if expected is None:
        return Call(NO_TEXT, stats.engine, stats.reason)
    if text.shape == expected.shape and torch.equal(text, expected):
        return Call(RIGHT, stats.engine, stats.reason)
    return Call(WRONG, stats.engine, stats.reason, difference(text, expected, inputs["input_ids"].shape[1]))


def difference(text: torch.Tensor, expected: torch.Tensor, width: int) -> str:
    """In words, how `text` differs from `expected`, `[B, P + T]`, with prompts of `width` tokens."""
    if text.shape != expected.shape:
        return f"a text of shape {list(text.shape)} instead of {list(expected.shape)}"
    row, place = (int(at) for at in (text != expected).nonzero()[0])
    wrong = int((text != expected).sum())
    new = expected[:, width:].numel()
    return f"{wrong} of {new} new tokens differ, first token {place - width} of row {row}"


def plain(model: PreTrainedModel, inputs: dict[str, torch.Tensor], notes: list[str]) -> torch.Tensor | None:
    """The output of plain `generate()`, `[B, P + T]`; None if it fails."""
    try:
        return generate(model, inputs)
    except Exception as error:
        notes.append(f"plain generate() of {len(inputs['input_ids'])}: {last_line(error)}")
        return None


def calls_of(
    model: PreTrainedModel, batches: list[dict[str, torch.Tensor]], notes: list[str], brief: bool = False
) -> Iterator[tuple[str, Call]]:
    """Every call, by its name: of prompts as a batch, and of each, or the last, by itself if `batches` go on with them.

    If `brief` the draft model, which is nearly always wrong, drafts for the batch only.
    """
    texts = [plain(model, batch, notes) for batch in batches]
    new = [None if text is None else text[:, -MAX_NEW_TOKENS:] for text in texts]
    if all(text is not None for text in new):
        if new[1:] and not torch.equal(new[0][1 - len(new) :], torch.cat(new[1:])):
            notes.append("plain generate() generates other tokens for a padded batch than for its rows")
        variety = [len(set(row.tolist())) for row in new[0]]
        if max(variety) < 4:
            notes.append(f"texts of few different tokens: {variety}")
    for batch, text, continuation in zip(batches, texts, new, strict=True):
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        if continuation is None:
            continuation = torch.zeros(len(lengths), MAX_NEW_TOKENS, dtype=torch.int64)
        answers = torch.nn.functional.pad(continuation, (0, 16), value=2)
        where = f"batch of {len(lengths)}" if len(lengths) > 1 else f"row of {lengths[0]}"
        yield (
            f"{where}, scripted",
            call(model, batch, text, lambda a=answers, n=lengths: OracleDrafter(model, a, n, ACCURACY)),
        )
        if not brief or batch is batches[0]:
            yield f"{where}, draft model", call(model, batch, text, lambda: random_draft_model(model))


def run(name: str, brief: bool = False) -> Outcome:
    """Build the class `name` and run all calls with it; if `brief`, those of `calls_of` and of the last prompt alone,
    which is the one with padding in the batch."""
    start, result = time.perf_counter(), Outcome(name)
    try:
        if name.endswith(WITH_IMAGES):
            model = image_model(name.removesuffix(WITH_IMAGES))
            batches = [image_prompts(model, IMAGE_ROWS)]
        else:
            model = build(name)
            batches = [prompts(model), *rows_of(prompts(model))[-1 if brief else 0 :]]
        result.model_type = model.config.model_type
        result.source = THEIRS if is_sourced(name) else OURS
    except Exception as error:  # any error of a class that cannot be built like this
        result.error = last_line(error)
    else:
        judge(result, dict(calls_of(model, batches, result.notes, brief)))
        if not brief and not name.endswith(WITH_IMAGES) and result.outcome != NOT_BUILT:
            result.columns = columns_of(model, name)
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def judge(result: Outcome, calls: dict[str, Call]) -> None:
    """Write the outcome of `calls`, by their names, into `result`."""
    by_outcome = {
        outcome: [(name, call) for name, call in calls.items() if call.outcome == outcome]
        for outcome in (WRONG, CRASH, RIGHT, NO_TEXT, REFUSED)
    }
    result.outcome = next(outcome for outcome, found in by_outcome.items() if found)
    if result.outcome == NO_TEXT:
        result.error = result.notes[0]
    if result.outcome in (WRONG, CRASH):
        for outcome in (WRONG, CRASH):
            result.notes += [f"{name}: {outcome}: {call.error}" for name, call in by_outcome[outcome]]
        name, first = by_outcome[result.outcome][0]
        result.error = f"{name}: {first.error}"
    ran = [call for found in by_outcome.values() for _, call in found if call.engine is not None]
    if ran:
        result.engine, result.reason = ran[0].engine, ran[0].reason
        refusals = {call.reason for _, call in by_outcome[REFUSED]}
        result.notes += [f"refused: {reason}" for reason in sorted(refusals)]
    elif by_outcome[REFUSED]:
        result.reason = by_outcome[REFUSED][0][1].reason


def run_in(worker: Worker, name: str) -> Outcome:
    """`run(name)` in a process of its own; a CRASH if that dies or takes too long."""
    start = time.perf_counter()
    try:
        return Outcome(**worker.run(name, SECONDS_PER_CLASS))
    except (ChildProcessError, TimeoutError) as error:
        return Outcome(name, outcome=CRASH, error=str(error), seconds=round(time.perf_counter() - start, 2))


def table(outcomes: list[Outcome]) -> str:
    """`outcomes` as the Markdown of docs/targets.md."""
    with_images = [outcome for outcome in outcomes if outcome.name.endswith(WITH_IMAGES)]
    outcomes = merged([outcome for outcome in outcomes if outcome not in with_images])
    theirs = sum(outcome.source == THEIRS for outcome in outcomes)
    whose = "the default configuration of its family, shrunk until windows, experts and top-k take effect"
    if theirs:
        whose = f"the configuration of transformers' own tests ({theirs} classes), or else {whose}"
    counts = Counter(kind_of(outcome) for outcome in outcomes)
    lines = [
        "# Targets",
        "",
        "Which engine runs which class of transformers, and whether the text is that of plain `generate()`.",
        "",
        f"Made by `python tests/helpers/zoo.py --write docs/targets.md` with transformers {transformers.__version__} "
        f"and torch {torch.__version__.split('+')[0]} on a CPU: every class of the causal and image-text mappings in "
        f"{whose}, with random weights in float32; text prompts, greedy, as a padded batch of two and one by one, with "
        f"a drafter that is right at {ACCURACY:.0%} of the places and with a draft model, K = {NUM_DRAFT_TOKENS}.",
        "",
        f"| {len(outcomes)} classes | |",
        "|---|---|",
        *(f"| {kind} | {counts[kind]} |" for kind in KINDS if counts[kind]),
        "",
        "The static engine runs the rows of a batch together, the stock engine one after the other. Classes that are "
        "encoders unless `is_decoder` is set are listed as decoders; as encoders they are refused. Further columns: "
        "sampled rows with seeds, repeated and alone; a prompt with an image or a sound; a second turn that continues "
        "the cache; a bulk call; trees of 12 drafts, in a padded batch and a bulk call (reasons for refusals: "
        "see below). A dash: plain `generate()` does not support it, or no inputs were at hand.",
        "",
        *rows_of_table(outcomes, with_images),
        "",
        "## Trees",
        "",
        "Classes of the static engine that support chains of drafts only, and why.",
        "",
        *rows_without_trees(outcomes),
        "",
        "## Images",
        "",
        "Prompts with no, one and two images (sounds) as a padded batch, with the same drafters.",
        "",
        *rows_of_table(with_images),
    ]
    text = "\n".join(lines) + "\n"
    return zoo_rounds.with_section(text, json.loads(zoo_rounds.FILE.read_text())) if zoo_rounds.FILE.exists() else text


def merged(outcomes: list[Outcome]) -> list[Outcome]:
    """`outcomes` without encoders that are also listed as decoders."""
    suffix = f" {AS_DECODER}"
    decoders = {outcome.name.removesuffix(suffix) for outcome in outcomes if outcome.name.endswith(suffix)}
    kept = [outcome for outcome in outcomes if outcome.name not in decoders]
    return [replace(outcome, name=outcome.name.removesuffix(suffix)) for outcome in kept]


def columns_of_row(outcome: Outcome, images: dict[str, Outcome]) -> list[str]:
    """The further columns of `outcome`, those of `COLUMNS`; `images` by class."""
    found = {name: None if pair is None else pair[0] for name, pair in outcome.columns.items()}
    if found.get("image") is None and outcome.name in images:
        found["image"] = images[outcome.name].outcome
    return [found.get(name) or "-" for name in COLUMNS]


def rows_of_table(outcomes: list[Outcome], with_images: list[Outcome] | None = None) -> list[str]:
    """The lines of a table of `outcomes`; with the further columns if there are outcomes `with_images`."""
    images = {one.name.removesuffix(WITH_IMAGES): one for one in with_images or ()}
    more = COLUMNS if with_images is not None else ()
    heads = ["class", "engine", "outcome", *more, "why"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.name.lower()):
        why = outcome.error if outcome.outcome in (WRONG, CRASH, NOT_BUILT, NO_TEXT) else outcome.reason
        why = "" if outcome.engine == "static" and outcome.outcome == RIGHT else why.replace("|", "\\|")
        name = outcome.name.removesuffix(WITH_IMAGES)
        cells = [name, outcome.engine or "", outcome.outcome, *(columns_of_row(outcome, images) if more else ()), why]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rows_without_trees(outcomes: list[Outcome]) -> list[str]:
    """The lines of a table of reasons why static targets have no trees, with the classes of each."""
    classes: dict[str, list[str]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.name.lower()):
        found, reason = outcome.columns.get("trees") or ("", "")
        if found == REFUSED and outcome.engine == "static":
            reason = reason.partition(" but ")[2].partition(". Set tree=0")[0] or reason
            classes.setdefault(reason.removeprefix(f"{outcome.name} has "), []).append(outcome.name)
    return [
        "| what there is | classes |",
        "|---|---|",
        *(f"| {why} | {', '.join(of)} |" for why, of in classes.items()),
    ]


KINDS = (
    "right on the static engine",
    "right on the stock engine",
    "refused with a reason",
    "no text from a text prompt without a drafter either",
    "not built",
    "wrong",
    "crash",
)


def kind_of(outcome: Outcome) -> str:
    """The one of `KINDS` that `outcome` belongs to."""
    if outcome.outcome == RIGHT:
        return f"right on the {outcome.engine} engine"
    return {REFUSED: KINDS[2], NO_TEXT: KINDS[3]}.get(outcome.outcome, outcome.outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="run only these classes, and print every note")
    parser.add_argument("--write", type=Path, help="write the table of all classes here")
    parser.add_argument("--json", type=Path, help="write outcomes here, one a line, as they come")
    parser.add_argument("--source", type=Path, metavar="CHECKOUT", help="of transformers' repository, for its tests")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    source = []
    if args.source is not None:
        zoo_sources.use(args.source)  # refuses what is none
        source = ["--source", str(args.source)]
    if args.worker:
        serve(lambda name: asdict(run(name)))
        return
    if args.only and args.write:
        parser.error("--write is for all classes, not for those of --only")
    worker, outcomes = Worker(__file__, "--worker", *source), []
    if args.json:
        args.json.write_text("")
    for name in args.only or [*class_names(), *(f"{name}{WITH_IMAGES}" for name in KINDS_OF_IMAGES)]:
        outcomes.append(outcome := run_in(worker, name))
        more = " ".join(f"{(outcome.columns.get(name) or ('-',))[0]:8}" for name in COLUMNS)
        why = outcome.error or outcome.reason
        line = f"{outcome.name:45} {outcome.engine or '-':7} {outcome.outcome:13} {more} {why}"
        said = [f"{name}: {pair[0]}: {pair[1]}" for name, pair in outcome.columns.items() if pair and pair[1]]
        wrong = [one for one in said if f": {WRONG}: " in one or f": {CRASH}: " in one]
        notes = [*outcome.notes, *said] if args.only else wrong
        print(line[:240], *(f"    {note}" for note in notes), sep="\n", flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    worker.stop()
    if args.write:
        args.write.parent.mkdir(exist_ok=True)
        args.write.write_text(table(outcomes))
    counts = Counter(kind_of(outcome) for outcome in outcomes)
    print("; ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
    for name in COLUMNS:
        found = Counter((outcome.columns.get(name) or ("-",))[0] for outcome in outcomes)
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in found.most_common())}")
        counts.update({kind: found[kind] for kind in (WRONG, CRASH)})
    sys.exit(bool(counts[WRONG] or counts[CRASH]))


if __name__ == "__main__":
    main()
