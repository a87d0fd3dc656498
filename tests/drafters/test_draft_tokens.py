"""On the engine every proposal, after any pattern of acceptance, is that of a float64 re-computation from scratch.

So is the drafter's cache after every round: its slots hold what one pass over the committed text leaves in them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import blocks
import eagle_reference
import pard2_reference
import pytest
import scripted_verification
import torch
from case_counts import cases, num_cases, tries_all
from dialects import PEAGLE, PLAIN, VARIANTS, make_weights, tiny_target, write
from scripted_verification import Seen, random_patterns, watch, wrong_now_and_then
from targets import padded_prompts
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.cache_utils import DFlashCache
from varying_drafts import vary_drafts

from hf_specdec import AutoDrafter, Drafter, ops
from hf_specdec.host.caches import OUTPUT_NAME

MASK = 5
# Of targets: fewer than checkpoints name, which read none of the others.
TARGET_LAYERS = 6


@dataclass
class Case:
    """A drafter on its target; what it should draft after a text, tokens and logits; and its cache after a text."""

    target: PreTrainedModel
    drafter: Drafter
    draft: Callable[[torch.Tensor, int], tuple[list[int], list[torch.Tensor]]]
    cache: Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]


def target_of(spec=PLAIN) -> PreTrainedModel:
    return tiny_target(replace(spec, target_layers=TARGET_LAYERS))


def eagle(folder, spec, dialect, is_parallel=False) -> Case:
    """EAGLE-3, or P-EAGLE drafting in parallel or token by token."""
    write(dialect, folder, spec, make_weights(spec))
    target, weights = target_of(spec), eagle_reference.read_tensors(folder)
    drafter = AutoDrafter.from_pretrained(folder, target, parallel_drafting=is_parallel if spec.parallel else None)
    propose = eagle_reference.propose_in_parallel if is_parallel else eagle_reference.propose
    return Case(
        target,
        drafter,
        partial(propose, weights, spec, remembering := eagle_reference.Remembering(target)),
        partial(eagle_reference.eagle_cache, weights, spec, remembering),
    )


def block(folder, layout, spec, **overrides) -> Case:
    """DFlash or what is made of it."""
    weights = blocks.make_weights(spec)
    blocks.write(layout, folder, spec, weights)
    target = target_of()
    return Case(
        target,
        AutoDrafter.from_pretrained(folder, target, **overrides),
        partial(blocks.propose, weights, spec, remembering := eagle_reference.Remembering(target)),
        partial(blocks.context_cache, weights, spec, remembering),
    )


def draft_model(folder, is_parallel) -> Case:
    """A Llama, with other widths than the target's, drafting as PARD or token by token."""
    torch.manual_seed(4)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=PLAIN.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.2,
        tie_word_embeddings=is_parallel,
        **({"pard_token": MASK, "spd_type": "pard"} if is_parallel else {}),
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    target, (weights, spec) = target_of(), eagle_reference.read_llama(folder)
    draft = eagle_reference.draft_as_pard if is_parallel else eagle_reference.draft_as_llama
    return Case(
        target,
        AutoDrafter.from_pretrained(folder, target),
        partial(draft, weights, spec),
        lambda text: eagle_reference.llama(weights, spec, text)[1],
    )


def pard2(folder, **options) -> Case:
    """PARD-2, whose hidden states are in another order than the layers."""
    pard2_reference.write(folder, vocab_size=PLAIN.vocab_size, pard_token=MASK, **options)
    target = target_of()
    return Case(
        target,
        AutoDrafter.from_pretrained(folder, target),
        partial(pard2_reference.propose, folder, remembering := eagle_reference.Remembering(target)),
        partial(pard2_reference.cache, folder, remembering),
    )


CASES = {
    "eagle3": lambda folder: eagle(folder, PLAIN, "speculators"),
    "p-eagle": lambda folder: eagle(folder, PEAGLE, "automodel", is_parallel=True),
    "p-eagle-sequential": lambda folder: eagle(folder, PEAGLE, "amazon"),
    "dflash": lambda folder: block(folder, "z-lab", blocks.LAYOUTS["z-lab"][1]),
    "dspark": lambda folder: block(folder, "specforge", blocks.LAYOUTS["specforge"][1]),
    "domino": lambda folder: block(folder, "specforge-domino", blocks.DOMINO),
    "dspine": lambda folder: block(folder, "specforge-dspine", blocks.DSPINE),
    "dflash2": lambda folder: block(folder, "z-lab-2", blocks.DFLASH2),
    "pard": lambda folder: draft_model(folder, is_parallel=True),
    "pard2": pard2,
    "draft-model": lambda folder: draft_model(folder, is_parallel=False),
}
PEAGLE_VARIANTS = {
    "one-layer": replace(PEAGLE, num_layers=1),
    "four-layers": replace(PEAGLE, num_layers=4),
    "borrowed-embedding": replace(PEAGLE, own_embedding=False),
    "narrow-drafter": replace(PEAGLE, hidden_size=24, head_dim=6),
    "fc-norm": replace(PEAGLE, fc_norm=True, norm_output=True),
    "norm-before-fc": replace(PEAGLE, norm_before_fc=True, norm_before_residual=True),
    "draft-vocabulary": replace(PEAGLE, draft_vocab_size=40, maps_vocabulary=True),
    "qwen3": replace(PEAGLE, qk_norm=True, head_dim=12, rope_theta=500000.0, mask_token=77),
}


def caches_of(drafter, state, row, length):
    kept = slice(length - drafter.shift)
    return [(layer.keys[row, kept].clone(), layer.values[row, kept].clone()) for layer in state.memory.cache.layers]


def check(case: Case, rounds: list[list[Seen]]) -> None:
    """Assert that all that was seen is as it should be."""
    fresh = [case.cache(row.text) for row in rounds[-1]]
    for row, seen in ((row, seen) for rows in rounds for row, seen in enumerate(rows)):
        assert torch.equal(seen.text, rounds[-1][row].text[: len(seen.text)])
        if seen.room == 0:
            continue
        # Drafts that no longer fit may be anything, and so may one that no slot predicts. A block ends where they end.
        num_useful = min(len(seen.drafts), seen.room)
        tokens, logits = case.draft(seen.text, num_useful) if num_useful else ([], [])
        which = slice(num_useful - len(tokens), seen.room)
        expected = slice(0, max(seen.room - which.start, 0))
        assert seen.drafts[which] == tokens[expected], f"row {row}, {len(seen.text)} tokens"
        for ours, theirs in zip(seen.logits[which], logits[expected], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        # What a text leaves in a slot depends on nothing after it, so one pass over the last text holds all before.
        for layer, (found, true) in enumerate(zip(seen.caches, fresh[row], strict=True)):
            for name, ours, theirs in zip(("keys", "values"), found, true, strict=True):
                message = f"{name} of layer {layer}, row {row}, {len(seen.text)} tokens"
                assert torch.allclose(ours, theirs[: len(ours)], rtol=1e-5, atol=1e-4), message


def run_script(monkeypatch, case, *script, **options) -> None:
    """Run the engine through a script; check what it does."""
    check(case, scripted_verification.run_script(monkeypatch, case.target, case.drafter, caches_of, *script, **options))


@pytest.mark.parametrize(
    ("family", "num_draft_tokens"),
    cases(
        every := list(itertools.product(CASES, [1, 2, 3, 4])),
        [one for one in every if one[1] == 2 or one in (("eagle3", 1), ("p-eagle", 3), ("dspark", 3))],
    ),
)
def test_all_patterns_of_two_rounds(monkeypatch, tmp_path, family, num_draft_tokens):
    pairs = itertools.product(range(num_draft_tokens + 1), repeat=2)
    patterns = [[accepted] for pair in pairs for accepted in pair] + [[0]] * 2
    run_script(monkeypatch, CASES[family](tmp_path), num_draft_tokens, patterns)


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(("num_draft_tokens", "num_rounds"), cases([(5, 16), (5, 10), (8, 10), (16, 6)], [(16, 6)]))
def test_random_patterns_of_a_ragged_batch(monkeypatch, tmp_path, family, num_draft_tokens, num_rounds):
    patterns = random_patterns(num_draft_tokens, num_rounds)
    run_script(monkeypatch, CASES[family](tmp_path), num_draft_tokens, patterns)


@pytest.mark.parametrize("family", CASES)
def test_any_number_of_drafts_in_each_round(monkeypatch, tmp_path, family):
    """Rounds without drafts, and with fewer or more than the last, leave the same cache and draft the same."""
    generator = torch.Generator().manual_seed(11)
    numbers = torch.randint(0, 6, (24,), generator=generator).tolist() + [0, 0, 0, 5, 0, 1]
    asked = vary_drafts(monkeypatch, numbers)
    run_script(monkeypatch, CASES[family](tmp_path), 5, random_patterns(5, 60), max_new_tokens=48)
    assert set(asked) == set(range(6))


@pytest.mark.parametrize("family", cases(list(CASES), ["p-eagle", "dflash", "pard2"]))
def test_prompts_in_chunks(monkeypatch, tmp_path, family):
    run_script(monkeypatch, CASES[family](tmp_path), 2, random_patterns(2, 4), prefill_chunk_size=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_eagle3(monkeypatch, tmp_path, variant):
    run_script(monkeypatch, eagle(tmp_path, VARIANTS[variant], "speculators"), 5, random_patterns(5, num_cases(12, 6)))


@pytest.mark.parametrize(
    ("variant", "is_parallel"),
    cases(
        every := list(itertools.product(PEAGLE_VARIANTS, [True, False])),
        [one for one in every if one[1] or one[0] in ("four-layers", "fc-norm", "draft-vocabulary")],
    ),
)
def test_variants_of_peagle(monkeypatch, tmp_path, variant, is_parallel):
    case = eagle(tmp_path, PEAGLE_VARIANTS[variant], "automodel", is_parallel)
    run_script(monkeypatch, case, 5, random_patterns(5, 12 if tries_all and is_parallel else 6))


@pytest.mark.parametrize(
    ("layout", "number"), [(layout, number) for layout, specs in blocks.LAYOUTS.items() for number in range(len(specs))]
)
def test_layouts_of_drafters_of_blocks(monkeypatch, tmp_path, layout, number):
    case = block(tmp_path, layout, blocks.LAYOUTS[layout][number])
    run_script(monkeypatch, case, 5, random_patterns(5, num_cases(8, 5)))


@pytest.mark.parametrize(
    ("layout", "number"),
    [(layout, at) for layout, specs in blocks.LAYOUTS.items() for at, spec in enumerate(specs) if spec.markov],
)
@torch.no_grad()
def test_training_of_dspark_reads_what_drafting_does(tmp_path, layout, number):
    """The products of `head_inputs` are the logits of the drafts, given the tokens that were drafted before them."""
    drafter = block(tmp_path, layout, blocks.LAYOUTS[layout][number]).drafter
    text = torch.randint(PLAIN.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 9, drafter.config.aux_hidden_size, generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[3, 7], [5, 2]])
    normed = drafter.unroll_blocks(text, states, anchors, 4)
    first = text.gather(1, anchors)
    logits = torch.stack(drafter.chain(first, normed), dim=2)
    best = logits.argmax(-1) if drafter.target_ids is None else drafter.target_ids[logits.argmax(-1)]
    inputs, weight = drafter.head_inputs(normed, torch.cat([first[..., None], best[..., :-1]], dim=-1))
    torch.testing.assert_close(inputs @ weight.T, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_recomputation_is_transformers_own_assistant(tmp_path):
    """Of Muse Glimmer, whose windows shorten what a block sees before it and of itself."""
    spec, target = blocks.LAYOUTS["muse"][0], target_of()
    weights, num_tokens = blocks.make_weights(spec), 6
    folder = blocks.write("muse", tmp_path, spec, weights)
    model = MuseGlimmerAssistantModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    text = torch.randint(spec.vocab_size, (14,), generator=torch.Generator().manual_seed(1))
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(len(text) - 1)
    block = [int(text[-1])] + [spec.mask_token] * (num_tokens - 1)
    with torch.no_grad():
        theirs = model(
            noise_embeds=target.get_input_embeddings().weight[block][None],
            context_hidden_states=eagle_reference.target_hidden_states(target, text[:-1], spec.layer_ids)[None],
            position_ids=torch.arange(len(text) - 1 + num_tokens)[None],
            **{OUTPUT_NAME: cache},
            use_cache=True,
        ).last_hidden_state[0]
    weights = {name: value.double() for name, value in weights.items()}
    ours = blocks.block_hidden_states(weights, spec, target, text, num_tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CASES)
def test_length_limit(monkeypatch, tmp_path, family):
    """Only drafts that fit count, and those that do not disturb no others."""
    case = CASES[family](tmp_path)
    for max_new_tokens in cases((2, 3, 4, 6, 9, 10, 12), (3, 10)):
        with monkeypatch.context() as patch:
            run_script(patch, case, 8, [[2, 0, 1]] + random_patterns(8, 12), max_new_tokens)


@pytest.mark.parametrize("family", CASES)
def test_stock_engine(monkeypatch, tmp_path, family):
    """There the target verifies; its own output is drafted, wrong at random places."""
    case = CASES[family](tmp_path)
    inputs, options = padded_prompts([6], seed=5), {"do_sample": False, "max_new_tokens": 40}
    generated = case.target.generate(**inputs, **options)
    known = wrong_now_and_then(generated, PLAIN.vocab_size)

    def answer(state, proposal):
        length = int(state.lengths)
        return proposal._replace(tokens=known[:, length : length + state.num_draft_tokens])

    rounds = watch(monkeypatch, case.drafter.configure(engine="stock"), caches_of, answer)
    out = case.target.generate(**inputs, **options, assistant_model=case.drafter, num_assistant_tokens=4)
    assert torch.equal(out, generated)
    assert {after[0].text.shape[0] - before[0].text.shape[0] for before, after in itertools.pairwise(rounds)} >= {1, 5}
    check(case, rounds)


def layout(text, committed, limit, is_finished, dummy_slot, width, num_masks, mask_token, shift):
    """What the columns of one row of a first pass hold, `[W]` of (token, slot, position, source), one by one."""
    kept = [(len(text) - committed + n, n) for n in range(committed)]
    columns = [(text[at], at - shift, at - shift, source) for at, source in kept if at >= shift]
    masks = range(len(text) - shift, len(text) - shift + num_masks)
    columns += [(mask_token, slot, slot, -1) for slot in masks]
    inert = (0, dummy_slot, 0, -1)
    columns = [inert] * (width - len(columns)) + columns
    return [inert if is_finished or column[1] + 1 + shift >= limit else column for column in columns]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("num_draft_tokens", "is_parallel"), [(1, True), (4, True), (4, False), (16, True)])
def test_layout_of_the_first_pass(shift, num_draft_tokens, is_parallel):
    num_masks = num_draft_tokens - 1 if is_parallel else 0
    batch, slots, width = 200, 60, num_draft_tokens + 1 + num_masks
    generator = torch.Generator().manual_seed(num_draft_tokens)

    def draw(low, high):
        """`[B]` integers from `low` to `high`."""
        return low + (torch.rand(batch, generator=generator) * (high - low + 1)).long()

    lengths, finished = draw(1, slots - 2), draw(0, 1) == 1
    committed = draw(1, lengths.clamp(max=num_draft_tokens + 1))
    limits = draw(lengths + ~finished, slots - 1)
    tokens = torch.randint(1, 90, (batch, slots), generator=generator)
    before = [argument.clone() for argument in (tokens, lengths, committed, limits, finished)]
    found = torch.stack(ops.prepare_inputs(*before, width, num_masks, 91, shift, 0)[:4], dim=-1).tolist()
    for row in range(batch):
        text = tokens[row, : lengths[row]].tolist()
        about = (int(committed[row]), int(limits[row]), bool(finished[row]), slots - 1, width, num_masks, 91, shift)
        assert [tuple(column) for column in found[row]] == layout(text, *about), row
    assert all(map(torch.equal, before, (tokens, lengths, committed, limits, finished)))


@pytest.mark.parametrize("family", CASES)
def test_drafts_after_one_token_do_not_depend_on_the_batch(monkeypatch, tmp_path, family):
    """EAGLE has no slot to draft the first of them from; what stands for it is nobody else's business either."""
    case, logits = CASES[family](tmp_path), []
    for lengths in ([1], [1, 9]):
        with monkeypatch.context() as patch:
            rounds = watch(patch, case.drafter, caches_of)
            case.target.generate(**padded_prompts(lengths, seed=5), max_new_tokens=5, assistant_model=case.drafter)
        logits.append(rounds[0][0].logits[:5])
    torch.testing.assert_close(*logits)
