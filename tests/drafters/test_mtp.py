"""MTP modules, loaded from targets in their published names: lossless, and every proposal and cache as recomputed."""

import itertools
from functools import cache

import pytest
import scripted_verification
import torch
from case_counts import cases, num_cases
from lossless import PROMPTS, greedy
from mtp import Published, draft, last_hidden_states, publish
from oracle import random_mtp
from scripted_verification import Seen, random_patterns, watch, wrong_now_and_then
from targets import VOCAB, padded_prompts
from varying_drafts import vary_drafts
from zoo_models import instantiate

from hf_specdec import AutoDrafter

STOCK = [("qwen3-next", 1), ("qwen3.5", 2)]
CHAININGS = ["modules", "target"]
# Families and numbers of modules; those with one module in their published form can have more. Every family chains its
# modules as published, by their own output; what changes by the target's is the same for all.
FAMILIES_AND_CHAININGS = [
    ("deepseek-v3", 3, "modules"),
    ("deepseek-v3", 3, "target"),
    ("glm-4.5", 2, "modules"),
    ("step-3.5", 3, "modules"),
    ("mimo", 1, "target"),
    ("mimo", 2, "modules"),
    ("speculators", 1, "modules"),
    ("qwen3-next", 1, "modules"),
    ("qwen3.5", 2, "modules"),
    ("qwen3.5-moe", 1, "modules"),
]
every_family = pytest.mark.parametrize(("family", "num_modules", "chaining"), FAMILIES_AND_CHAININGS)
NEW_TOKENS = num_cases(32, 24)


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory):
    """Writes and loads what a test asks for, once."""
    known: dict[tuple, Published] = {}

    def get(family: str, num_modules: int) -> Published:
        if (family, num_modules) not in known:
            folder = tmp_path_factory.mktemp("mtp") / "checkpoint"
            known[family, num_modules] = publish(family, folder, num_modules)
            # Few tokens are ever generated, so that drafts of random modules are right now and then.
            with torch.no_grad():
                known[family, num_modules].target.get_output_embeddings().weight[8:] *= 0.01
        return known[family, num_modules]

    return get


@pytest.mark.core_for(chaining=["modules"], family=["deepseek-v3", "step-3.5", "qwen3.5"])
@every_family
def test_greedy_is_identical(published, family, num_modules, chaining):
    at = published(family, num_modules)
    target = at.target.float()
    drafter, accepted = AutoDrafter.from_pretrained(at.folder, target, chaining=chaining), 0
    plain = cache(lambda batch: greedy(target, padded_prompts(PROMPTS[batch], seed=batch), max_new_tokens=NEW_TOKENS))
    for batch, num_draft_tokens in cases(((1, 2), (3, 1), (3, 2), (3, 4), (3, 7)), ((1, 2), (3, 4))):
        inputs = padded_prompts(PROMPTS[batch], seed=batch)
        out = greedy(target, inputs, drafter, num_draft_tokens, max_new_tokens=NEW_TOKENS)
        assert torch.equal(out, plain(batch)), (batch, num_draft_tokens)
        assert drafter.stats.engine == "static"
        accepted += drafter.stats.accepted
    assert accepted > num_cases(4, 2) or at.family.own_head


@pytest.mark.parametrize(("family", "num_modules"), STOCK)
def test_greedy_is_identical_on_the_stock_engine(published, family, num_modules):
    at = published(family, num_modules)
    target = at.target.float()
    drafter, accepted = AutoDrafter.from_pretrained(at.folder, target).configure(engine="stock"), 0
    for num_draft_tokens in cases((1, 2, 3, 5), (5,)):
        inputs = padded_prompts([9], seed=num_draft_tokens)
        plain = greedy(target, inputs, max_new_tokens=32)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens, max_new_tokens=32), plain)
        assert drafter.stats.engine == "stock"
        accepted += drafter.stats.accepted
    assert accepted > num_cases(4, 2)


def settled_caches(drafter, state, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the steps' caches hold at the slots whose tokens are committed."""
    num_modules, is_chained = drafter.config.num_modules, drafter.config.chaining == "modules"
    caches = [state.memory.cache, *state.memory.later_caches]
    found = []
    for step in range(state.most_draft_tokens if is_chained else min(state.most_draft_tokens, num_modules)):
        layer = caches[step // num_modules].layers[step % num_modules]
        end = max(length - 1 - (step if is_chained else 0), 0)
        found.append((layer.keys[row, :end].clone(), layer.values[row, :end].clone()))
    return found


def check(
    at: Published, drafter, rounds: list[list[Seen]], num_draft_tokens: int, known: torch.Tensor | None = None
) -> None:
    """Assert that all that was seen equals a recomputation from scratch, of the tokens `known` `[1, T]` if given."""
    chaining = drafter.config.chaining
    # The target is causal, so one pass over the last text holds the hidden states of all before.
    hidden = [last_hidden_states(at.target, row.text[:-1]) for row in rounds[-1]]
    fresh = [
        draft(at, at.target, row.text, num_draft_tokens, chaining, hidden=states)[2] if len(row.text) > 1 else []
        for row, states in zip(rounds[-1], hidden, strict=True)
    ]
    for row, seen in ((row, seen) for rows in rounds for row, seen in enumerate(rows)):
        assert torch.equal(seen.text, rounds[-1][row].text[: len(seen.text)])
        if seen.room == 0:
            continue
        for step, (found, true) in enumerate(zip(seen.caches, fresh[row], strict=False)):
            for name, ours, theirs in zip(("keys", "values"), found, true, strict=True):
                message = f"{name} of step {step}, row {row}, {len(seen.text)} tokens"
                theirs = theirs.transpose(0, 1)[: len(ours)]
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=message)
        if len(seen.text) < 2 or not seen.drafts:  # No slot predicts anything.
            continue
        given = None if known is None else known[row, len(seen.text) :].tolist()
        tokens, logits, _ = draft(at, at.target, seen.text, len(seen.drafts), chaining, given, hidden[row])
        assert seen.drafts[: seen.room] == tokens[: seen.room], f"row {row}, {len(seen.text)} tokens"
        ours, theirs = seen.logits[: seen.room], torch.stack(logits)[: seen.room]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def run_script(monkeypatch, at, chaining, num_draft_tokens, patterns, max_new_tokens=None, **options) -> None:
    """Run the engine through `patterns`, a list of rounds of accepted drafts a row; check what it does."""
    target = at.target.double()
    drafter = AutoDrafter.from_pretrained(at.folder, target, chaining=chaining)
    script = num_draft_tokens, patterns, max_new_tokens
    rounds = scripted_verification.run_script(monkeypatch, target, drafter, settled_caches, *script, **options)
    check(at, drafter, rounds, min(num_draft_tokens, max_new_tokens or num_draft_tokens))


@pytest.mark.parametrize(
    ("num_modules", "num_draft_tokens", "chaining"),
    cases(
        list(itertools.product([1, 2, 3], [1, 2, 3, 4], CHAININGS)),
        [(1, 1, "modules"), (1, 3, "target"), (2, 3, "modules"), (2, 3, "target"), (3, 2, "target"), (3, 4, "modules")],
    ),
)
def test_all_patterns_of_two_rounds(monkeypatch, published, num_modules, num_draft_tokens, chaining):
    pairs = itertools.product(range(num_draft_tokens + 1), repeat=2)
    patterns = [[accepted] for pair in pairs for accepted in pair] + [[0]] * 2
    run_script(monkeypatch, published("mimo", num_modules), chaining, num_draft_tokens, patterns)


@every_family
def test_random_patterns_of_a_ragged_batch(monkeypatch, published, family, num_modules, chaining):
    patterns = random_patterns(3, num_cases(20, 8))
    run_script(monkeypatch, published(family, num_modules), chaining, 3, patterns)


@pytest.mark.parametrize("num_draft_tokens", cases([5, 8], [8]))
@pytest.mark.parametrize(
    ("family", "num_modules", "chaining"),
    [("mimo", 2, "modules"), ("mimo", 3, "target"), ("step-3.5", 3, "modules")],
)
def test_more_drafts_than_modules(monkeypatch, published, family, num_modules, num_draft_tokens, chaining):
    patterns = random_patterns(num_draft_tokens, num_cases(20, 8))
    run_script(monkeypatch, published(family, num_modules), chaining, num_draft_tokens, patterns)


@pytest.mark.parametrize("chaining", CHAININGS)
@pytest.mark.parametrize("num_modules", [1, 3])
def test_any_number_of_drafts_in_each_round(monkeypatch, published, num_modules, chaining):
    asked = vary_drafts(monkeypatch, [3, 0, 1, 4, 2, 0, 0, 0, 4, 4, 1, 3, 0, 2])
    run_script(monkeypatch, published("mimo", num_modules), chaining, 4, random_patterns(4, 60), max_new_tokens=40)
    assert set(asked) == set(range(5))


@pytest.mark.parametrize("chaining", CHAININGS)
def test_prompts_in_chunks(monkeypatch, published, chaining):
    patterns = random_patterns(4, 8)
    for size in cases((1, 2, 5), (1, 5)):
        with monkeypatch.context() as patch:
            run_script(patch, published("mimo", 3), chaining, 4, patterns, prefill_chunk_size=size)


@pytest.mark.core_for(chaining=["target"])
@pytest.mark.parametrize("chaining", CHAININGS)
def test_length_limit(monkeypatch, published, chaining):
    """Only drafts that fit count, and those that do not disturb no others."""
    for max_new_tokens in cases((2, 3, 4, 6, 9, 10), (2, 4, 9)):
        with monkeypatch.context() as patch:
            patterns = [[2, 0, 1], *random_patterns(4, 12)]
            run_script(patch, published("mimo", 3), chaining, 4, patterns, max_new_tokens)


@pytest.mark.parametrize(
    ("family", "num_modules", "chaining"),
    [("qwen3-next", 1, "modules"), ("qwen3.5", 2, "target"), ("mimo", 3, "modules")],
)
def test_stock_engine(monkeypatch, published, family, num_modules, chaining):
    """There the target verifies; its own output is drafted, wrong at random places."""
    at = published(family, num_modules)
    target = at.target.double()
    inputs, options = padded_prompts([6], seed=5), {"do_sample": False, "max_new_tokens": 40}
    generated = target.generate(**inputs, **options)
    known = wrong_now_and_then(generated, VOCAB)

    def say(state, first, drawn):
        at = int(state.lengths) + first
        return drawn._replace(tokens=known[:, at : at + 1])

    drafter = AutoDrafter.from_pretrained(at.folder, target, engine="stock", chaining=chaining)
    rounds = watch(monkeypatch, drafter, settled_caches, say=say)
    out = target.generate(**inputs, **options, assistant_model=drafter, num_assistant_tokens=4)
    assert torch.equal(out, generated)
    assert {len(after[0].text) - len(before[0].text) for before, after in itertools.pairwise(rounds)} >= {1, 5}
    check(at, drafter, rounds, 4, known)


@pytest.mark.parametrize(
    "class_name",
    [
        "FalconForCausalLM",  # layers of another name
        "GraniteMoeHybridForCausalLM",  # no RoPE
        "GPTNeoXForCausalLM",  # a cache by another name
        "Gemma3nForCausalLM",  # sizes by layer
        "Gemma4ForCausalLM",  # inputs by layer
        "DeepseekV4ForCausalLM",  # layers of other types only
        "Zamba2ForCausalLM",
    ],
)
def test_layers_that_cannot_be_those_of_modules_are_refused(class_name):
    target = instantiate(class_name, 0.3, True)
    with pytest.raises(ValueError, match="cannot be those of MTP modules"):
        random_mtp(target)
