"""What the zoo tries with a class besides greedy text: seeds, images, a continued cache, `generate_batch()`, trees.

The outcome of each is `RIGHT` or another one, with the fault, or None where plain `generate()` gives nothing to compare
with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zoo_sources
from oracle import OracleDrafter, TreeOracle, random_draft_model
from transformers import GenerationConfig, PreTrainedModel
from zoo_models import MAX_NEW_TOKENS, generate, is_sourced, prompts, rows_of
from zoo_outcomes import CRASH, REFUSED, RIGHT, WRONG, is_refusal, last_line

import hf_specdec
from hf_specdec import Drafter
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_separate_rows
from hf_specdec.kernels.types import Proposal
from hf_specdec.state import DecodeState

K = 4
NODES = 12  # of a tree
ACCURACY = 0.6
MORE = 3  # tokens of a second turn
COLUMNS = ("seeds", "image", "cache continued", "generate_batch()", "trees")

Outcome = tuple[str, str]


class NothingToCompare(Exception):
    """Plain `generate()` does not support it."""


class SaidInStats(Exception):
    """A call ran without it, and `stats.reason` says why."""


def columns_of(model: PreTrainedModel, name: str) -> dict[str, Outcome | None]:
    """The outcome of each of `COLUMNS`, with a note."""
    checks: dict[str, Callable[[], str]] = {
        "seeds": lambda: check_seeds(model),
        "image": lambda: check_image(model, name),
        "cache continued": lambda: check_cache(model),
        "generate_batch()": lambda: check_bulk(model),
        "trees": lambda: check_trees(model),
    }
    return {column: outcome_of(check) for column, check in checks.items()}


def outcome_of(check: Callable[[], str]) -> Outcome | None:
    """The outcome of a check that returns the fault, or an empty text."""
    try:
        wrong = check()
    except NothingToCompare:
        return None
    except SaidInStats as reason:
        return REFUSED, str(reason)
    except Exception as error:  # whatever a class raises
        ours = Path(hf_specdec.__file__).parent
        return (REFUSED, " ".join(str(error).split())) if is_refusal(error, False, ours) else (CRASH, last_line(error))
    return (WRONG, wrong) if wrong else (RIGHT, "")


def plain(call: Callable[[], Any]) -> Any:
    """The output of a call without a drafter."""
    try:
        return call()
    except Exception as error:  # whatever a class raises
        raise NothingToCompare from error


def new_tokens(text: torch.Tensor) -> torch.Tensor:
    return text[:, -MAX_NEW_TOKENS:]


def oracle_of(model: PreTrainedModel, text: torch.Tensor, lengths: list[int]) -> OracleDrafter:
    """An oracle, right at `ACCURACY` of the places after prompts of `lengths`; `text` ends with the continuations."""
    answers = torch.nn.functional.pad(new_tokens(text), (0, 16), value=2)
    return OracleDrafter(model, answers, lengths, ACCURACY)


def sample(model: PreTrainedModel, inputs: dict[str, torch.Tensor], seeds: list[int]) -> torch.Tensor:
    drafter = random_draft_model(model)
    options = {"do_sample": True, "max_new_tokens": MAX_NEW_TOKENS, "num_assistant_tokens": K, "seeds": seeds}
    with torch.no_grad():
        return new_tokens(model.generate(**inputs, assistant_model=drafter, **options))


def check_seeds(model: PreTrainedModel) -> str:
    """A row with a seed has the same text again, and the same alone as in the batch, if plain `generate()` has it so.

    Greedy texts of few different tokens may be the same where the padding of a row changes its logits.
    """
    inputs = prompts(model)
    texts = [plain(lambda given=given: generate(model, given)) for given in (inputs, *rows_of(inputs))]
    is_apart = torch.equal(new_tokens(texts[0]), torch.cat([new_tokens(text) for text in texts[1:]]))
    is_apart = is_apart and why_not_separate_rows(model) is None
    seeds = [11, 22]
    text = sample(model, inputs, seeds)
    if not torch.equal(sample(model, inputs, seeds), text):
        return "another text the second time"
    for row, given in enumerate(rows_of(inputs)):
        if is_apart and not torch.equal(sample(model, given, seeds[row : row + 1]), text[row : row + 1]):
            return f"row {row} says something else alone"
    return ""


def check_image(model: PreTrainedModel, name: str) -> str:
    """Two prompts of transformers' tests, each by itself, if they have inputs besides tokens."""
    if not is_sourced(name):
        raise NothingToCompare
    given = dict(zoo_sources.find(name.partition(" ")[0]).inputs)
    if not any(key.startswith(("pixel", "input_features", "image", "audio")) for key in given):
        raise NothingToCompare
    if "attention_mask" in given:  # theirs are random, which is no padding
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    options = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
    with torch.no_grad():
        text = plain(lambda: model.generate(**copy.deepcopy(given), **options))
    text = getattr(text, "sequences", text)  # of a class with a generate() of its own
    # Of what is returned the prompt is a part, unless it was embedded; some classes leave out its last token.
    width = text.shape[1] - MAX_NEW_TOKENS
    lengths = [width if width > 0 else given["input_ids"].shape[1]] * len(text)
    for drafter in (oracle_of(model, text, lengths), random_draft_model(model)):
        with torch.no_grad():
            found = model.generate(**copy.deepcopy(given), **options, assistant_model=drafter, num_assistant_tokens=K)
        if not torch.equal(found, text):
            return f"{int((found != text).sum())} tokens differ" if found.shape == text.shape else "another length"
    return ""


def check_cache(model: PreTrainedModel) -> str:
    """A second turn that continues the cache that plain `generate()` left after a first one."""
    inputs = rows_of(prompts(model))[0]
    with torch.no_grad():
        first = plain(
            lambda: model.generate(
                **inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS // 2, return_dict_in_generate=True
            )
        )
    cache = getattr(first, OUTPUT_NAME, None)
    if cache is None:
        raise NothingToCompare
    ids = torch.cat([first.sequences, rows_of(prompts(model, seed=2))[0]["input_ids"][:, :MORE]], dim=1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    text = plain(lambda: generate(model, turn, **{OUTPUT_NAME: copy.deepcopy(cache)}))
    for drafter in (oracle_of(model, text, [ids.shape[1]]), random_draft_model(model)):
        given = copy.deepcopy(cache)
        found = generate(model, turn, **{OUTPUT_NAME: given}, assistant_model=drafter, num_assistant_tokens=K)
        if not torch.equal(found, text):
            return f"{int((found != text).sum())} of {MAX_NEW_TOKENS} new tokens differ"
    return ""


def check_bulk(model: PreTrainedModel) -> str:
    """Prompts of a bulk call have the same texts as alone."""
    return difference_in_bulk(model, lambda texts: random_draft_model(model))


def difference_in_bulk(model: PreTrainedModel, drafter_of: Callable[[torch.Tensor], Drafter], **options: Any) -> str:
    """How the texts of a bulk call differ from those of its prompts alone; with these `[n, T]` it has a drafter."""
    if not hasattr(model, "generate_batch"):
        raise NothingToCompare
    rows = rows_of(prompts(model))
    texts = torch.cat([new_tokens(plain(lambda row=row: generate(model, row))) for row in rows])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        pad_token_id=model.generation_config.pad_token_id,
        eos_token_id=-1,
    )
    config.eos_token_id = None
    given = [row["input_ids"][0].tolist() for row in rows]
    with torch.no_grad():
        found = model.generate_batch(
            given, generation_config=config, assistant_model=drafter_of(texts), progress_bar=False, **options
        )
    by_prompt = {tuple(one.prompt_ids): list(one.generated_tokens) for one in found.values()}
    wrong = [row for row, ids in enumerate(given) if by_prompt.get(tuple(ids)) != texts[row].tolist()]
    return f"the texts of rows {wrong} differ" if wrong else ""


class OracleOfRequests(TreeOracle):
    """Identifies rows by the lengths of their prompts, wherever they are."""

    def propose(self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: Any) -> Proposal:
        self._rows = (self._prompt_lengths == state.prompt_lengths[:, None]).int().argmax(dim=1)
        return super().propose(state, aux_hidden_states, result)


def check_trees(model: PreTrainedModel) -> str:
    """Greedy texts with trees of drafts, of a padded batch and, if the class supports it, of a bulk call."""
    inputs, made = prompts(model), []
    lengths = inputs["attention_mask"].sum(dim=1).tolist()

    def drafter_of(text: torch.Tensor) -> OracleOfRequests:
        answers = torch.nn.functional.pad(new_tokens(text), (0, 16), value=2)
        made.append(OracleOfRequests(model, answers, lengths, ACCURACY))
        return made[-1]

    text, options = plain(lambda: generate(model, inputs)), {"num_assistant_tokens": K, "tree": NODES}
    found = generate(model, inputs, assistant_model=drafter_of(text), **options)
    if not torch.equal(found, text):
        return f"{int((found != text).sum())} tokens differ"
    if not made[0].stats.tree:
        raise SaidInStats(made[0].stats.reason)
    if hasattr(model, "generate_batch"):
        try:
            wrong = difference_in_bulk(model, drafter_of, **options)
        except ValueError as error:
            if "Continuous batching" not in str(error):  # which another column is about
                raise
        else:
            if wrong:
                return f"in bulk {wrong}"
    stats = [one.stats for one in made if one.stats is not None]
    return "".join(f"no draft was accepted: {one}" for one in stats if not one.accepted)
