"""Drafts that are trees: texts, caches and what is returned are those of generation without drafts."""

from functools import cache, partial

import pytest
import torch
from assistants import assistant_drafter, gemma4_target, new_assistant
from case_counts import cases, tries_all
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, GreedyTexts, continuations
from oracle import (
    RANDOM_DRAFTERS,
    TreeOracle,
    copy_of,
    random_draft_model,
    random_eagle3,
    random_mtp,
    random_peagle,
)
from targets import padded_prompts, set_policy, tiny_target
from transformers import ContinuousBatchingConfig, DynamicCache, RepetitionPenaltyLogitsProcessor
from varying_drafts import vary_drafts

from hf_specdec import SuffixDrafter
from hf_specdec.auto_k import round_costs
from hf_specdec.auto_k.auto_drafts import AutoDrafts
from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.cache.ragged_cache import RaggedCache
from hf_specdec.drafters.base import MOST_NODES
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.drafters.none import NoDrafter
from hf_specdec.engine import alone, lease
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.kernels.types import Nodes

NEW = 16
TEXTS = GreedyTexts(tiny_target, NEW)
FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gpt-oss", "qwen3-moe", "deepseek-v3"]
# Of drafts that do not depend on each other, of ones that walk along a block, and of passes for each depth.
PARALLEL, WALKING = ("p-eagle", "pard", "pard2", "dflash"), ("dspark", "dflash2", "domino", "dspine")
MAKERS = {name: RANDOM_DRAFTERS[name] for name in (*PARALLEL, *WALKING, "eagle3", "draft-model")}
MAKERS["mtp"] = partial(random_mtp, num_modules=1)
MODULES = {
    "mtp-target": partial(random_mtp, num_modules=3, chaining="target"),
    "mtp-modules": partial(random_mtp, num_modules=2, chaining="modules"),
}
MAKERS |= MODULES
FEW = 13  # tokens


def tree_oracle(target, inputs, sequences, accuracy=0.8):
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return TreeOracle(target, continuations(inputs, sequences), lengths, accuracy)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_without_drafts(family):
    drafter = TEXTS.check(family, PROMPTS[3], tree_oracle, 5, tree=14)
    stats = drafter.stats
    assert stats.tree == 14 and stats.acceptance_length > 1.8, stats
    drafter = TEXTS.check(family, PROMPTS[1], tree_oracle, 4, tree=70)
    assert drafter.stats.acceptance_length > 2, drafter.stats


@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_texts_with_trees_of_every_drafter_that_makes_them(kind):
    for num_drafts, tree in cases(((3, 2), (6, 40)), ((3, 2),) * (kind in ("dspark", "eagle3")) + ((6, 40),)):
        drafter = TEXTS.check("llama", PROMPTS[3], lambda target, *_: MAKERS[kind](target), num_drafts, tree=tree)
        assert drafter.stats.tree == tree


@pytest.mark.parametrize(
    ("kind", "options"),
    [("domino", {"do_sample": False}), ("eagle3", {"do_sample": True, "seeds": [1, 2**40]})],
    ids=["domino", "eagle3"],
)
def test_kernels_generate_the_same(kind, options, monkeypatch):
    """A greedy text, and one of seeds."""
    target, inputs = tiny_target("llama", num_layers=1), padded_prompts([3, 5])
    options |= {"max_new_tokens": 4}
    expected = target.generate(**inputs, **options, assistant_model=NoDrafter(target))
    set_policy(monkeypatch, "cpu", triton=True)
    options |= {"num_assistant_tokens": 3, "tree": 5}
    drafter = MAKERS[kind](target, aux_hidden_state_layer_ids=[0, 1])
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)


@pytest.mark.parametrize("kind", ["domino", "eagle3"])
def test_replayed_rounds_verify_other_trees(kind, monkeypatch):
    replay_on_cpu(monkeypatch)
    drafter = MAKERS[kind](tiny_target("llama"))
    for lengths in (PROMPTS[3], [4, 6, 2], PROMPTS[8]):
        target, inputs = tiny_target("llama"), padded_prompts(lengths)
        found = TEXTS.greedy(target, inputs, drafter, 4, tree=12)
        assert torch.equal(found, TEXTS.plain("llama", lengths))
        assert drafter.stats.execution.startswith("captured")


def test_a_cache_runs_nodes_until_the_pass_ends():
    cache = RaggedCache(attention_layers(1), 8, torch.ones(1, dtype=torch.int64))
    nodes = Nodes(torch.zeros(1, 1), torch.ones(1, 1, 1))
    with pytest.raises(RuntimeError), cache.running(nodes):
        assert cache.nodes is nodes
        raise RuntimeError
    assert cache.nodes is None


def final_state(monkeypatch, target, inputs, drafter, max_new_tokens=48, **options):
    """The buffers that a call has left, and its sequences."""
    states = []
    run_round = lease.run_round
    monkeypatch.setattr(lease, "run_round", lambda state, *args: states.append(state) or run_round(state, *args))
    sequences = TEXTS.greedy(target, inputs, drafter, 4, max_new_tokens=max_new_tokens, **options)
    monkeypatch.setattr(lease, "run_round", run_round)
    return states[-1], sequences


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "gemma4"])
def test_caches_are_those_of_a_prefill_of_the_text(family, monkeypatch):
    """Every store of target and drafter, after more than 20 rounds; of the target also as the call returns it.

    Of Gemma 4 with its assistant, which reads it; of few tokens, so that it is often right.
    """
    inputs = padded_prompts(PROMPTS[3])
    target = gemma4_target(vocab_size=FEW) if family == "gemma4" else tiny_target(family)
    if family == "gemma4":
        inputs["input_ids"] = torch.where(inputs["attention_mask"] == 0, 0, inputs["input_ids"] % FEW)
    plain = TEXTS.greedy(target, inputs, max_new_tokens=48)
    cache = DynamicCache(config=target.config)
    if family == "gemma4":
        drafter = assistant_drafter(new_assistant(vocab_size=FEW), target)
    else:
        drafter = tree_oracle(target, inputs, plain, 0.5)
    state, found = final_state(monkeypatch, target, inputs, drafter, tree=12, **{OUTPUT_NAME: cache})
    assert torch.equal(found, plain) and drafter.stats.num_rounds > 20 and drafter.stats.acceptance_length > 1.3
    for row, pad in enumerate((inputs["attention_mask"] == 0).sum(dim=1).tolist()):
        expected = DynamicCache(config=target.config)
        with torch.no_grad():
            target(input_ids=plain[row : row + 1, pad:-1], **{OUTPUT_NAME: expected})
        for layer, ours, handed in zip(expected.layers, state.cache.layers, cache.layers, strict=True):
            for name in ("keys", "values") if layer.keys is not None else ():  # not where it reads another's
                right = getattr(layer, name)[0]
                count = right.shape[1]  # those of a window
                end = plain.shape[1] - pad - 1
                torch.testing.assert_close(getattr(ours, name)[row, end - count : end].transpose(0, 1), right)
                torch.testing.assert_close(getattr(handed, name)[row, :, -count:], right)


@pytest.mark.parametrize(
    "kind",
    cases(
        ["p-eagle", "pard2", "dspark", "dspine", "eagle3", "draft-model", "mtp-modules"],
        ["pard2", "dspark", "eagle3", "draft-model", "mtp-modules"],
    ),
)
def test_drafters_read_accepted_paths(kind, monkeypatch):
    """A drafter keeps after trees what it keeps after chains with the same text, and its last block is that text's."""
    check_kept(monkeypatch, kind)


def check_kept(monkeypatch, kind, least_accepted=1.0, new=24):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    plain = TEXTS.greedy(target, inputs, max_new_tokens=new)
    kept = []
    for tree in (0, 30):
        drafter = MAKERS[kind](target)
        state, found = final_state(monkeypatch, target, inputs, drafter, new, tree=tree)
        assert torch.equal(found, plain) and drafter.stats.acceptance_length >= least_accepted
        # The last rounds differ in what they read and draft.
        ends = (state.lengths - 12).tolist()
        kept.append(
            [
                layer_buffer[row, :end].clone()
                for cache in state.memory.caches
                for layer in cache.layers
                for layer_buffer in layer.slot_buffers
                for row, end in enumerate(ends)
            ]
        )
    # Rounding adds up from module to module.
    tolerance = {"rtol": 1e-5, "atol": 1e-4 if kind in MODULES else 3e-5}
    for chain, tree in zip(*kept, strict=True):
        torch.testing.assert_close(tree, chain, **tolerance)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_read_accepted_paths_of_any_length(kind, monkeypatch):
    """Drafts are often right, so that rounds accept none, some or all of a path."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    answers = continuations(inputs, TEXTS.greedy(target, inputs, max_new_tokens=48))
    prompts, own, propose = inputs["attention_mask"].sum(dim=1), MtpDrafter.logits, MtpDrafter.propose
    reached = []

    def told(self, step, normed):
        logits = own(self, step, normed)
        at = (reached[0] - prompts + step).clamp(0, answers.shape[1] - 1)[:, None]
        right = answers.gather(1, at)
        is_told = ((at + right) % 4 > 0) & torch.ones_like(logits[..., 0], dtype=torch.bool)
        at_right = torch.nn.functional.one_hot(right, logits.shape[-1]).bool()
        return torch.where(is_told[..., None] & at_right, 30.0, logits)

    def proposing(self, state, *args):
        reached[:] = [state.lengths.clone()]
        return propose(self, state, *args)

    monkeypatch.setattr(MtpDrafter, "logits", told)
    monkeypatch.setattr(MtpDrafter, "propose", proposing)
    check_kept(monkeypatch, kind, least_accepted=2.2, new=48)


def sampled(target, inputs, drafter, seeds, **options):
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 12} | options
    return target.generate(**inputs, assistant_model=drafter, seeds=seeds, **options)


SEEDS, FILTERS = torch.arange(50) + 2**35, ({}, {"temperature": 1.3, "top_k": 0, "top_p": 0.9})


@cache
def texts_of_seeds():
    """Without drafts, at temperatures and filters of `generate()`."""
    target, inputs = tiny_target("llama"), padded_prompts([6] * 50)
    texts = [sampled(target, inputs, NoDrafter(target), SEEDS, **options) for options in FILTERS]
    assert all(len(set(map(tuple, one[:, 6:].tolist()))) > 45 for one in texts)
    return texts


@pytest.mark.parametrize("kind", ["p-eagle", "dspark", "eagle3", "draft-model", "mtp-target", "oracle"])
def test_a_seed_gives_the_text_that_it_gives_without_drafts(kind):
    """100 of 100 texts of the oracle; 50 of 50 of the others, which draft what is likeliest whatever is sampled."""
    target, inputs = tiny_target("llama"), padded_prompts([6] * 50)
    every = [*zip(FILTERS, texts_of_seeds(), strict=True)]
    for options, expected in every if kind == "oracle" or tries_all else every[:1]:
        drafter = tree_oracle(target, inputs, expected) if kind == "oracle" else MAKERS[kind](target)
        found = sampled(target, inputs, drafter, SEEDS, num_assistant_tokens=4, tree=12, **options)
        assert torch.equal(found, expected)
        assert drafter.stats.tree == 12 and (kind != "oracle" or drafter.stats.acceptance_length > 1.8)


@pytest.mark.parametrize("kind", ["p-eagle", "dspark", "eagle3", "draft-model", "mtp"])
def test_a_seed_gives_the_text_that_it_gives_without_drafts_with_chains(kind):
    target, inputs = tiny_target("llama"), padded_prompts([6, 2, 9, 5])
    seeds = [1, 2**40, 3, 4]
    expected = sampled(target, inputs, NoDrafter(target), seeds)
    drafter = RANDOM_DRAFTERS[kind](target).configure(3, verification="match")
    assert torch.equal(sampled(target, inputs, drafter, seeds), expected)
    assert not drafter.stats.draft_probs


def test_ends_and_limits_inside_of_trees():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[8])
    plain = TEXTS.plain("llama", PROMPTS[8])
    width = inputs["input_ids"].shape[1]
    for place in (3, 7, 11):
        options = {"eos_token_id": [int(plain[0, width + place]), int(plain[3, width + place])]}
        expected = TEXTS.greedy(target, inputs, **options)
        assert torch.equal(
            TEXTS.greedy(target, inputs, tree_oracle(target, inputs, plain), 5, tree=14, **options), expected
        )
    for count in (1, 2, 3, 9):
        drafter = tree_oracle(target, inputs, plain, 1.0)
        found = TEXTS.greedy(target, inputs, drafter, 5, tree=14, max_new_tokens=count)
        assert torch.equal(found, plain[:, : width + count])


@pytest.mark.parametrize("options", [{}, {"suppress_tokens": [3, 9, 27]}], ids=["as they are", "processed"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_scores_and_log_probabilities_of_accepted_paths(monkeypatch, is_captured, options):
    """Captured rounds have more rows than the call, and give the scores of later rounds, too."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **options}
    plain = TEXTS.greedy(target, inputs, **kept)
    drafter = copy_of(target, noise=0.03)
    if is_captured:
        replay_on_cpu(monkeypatch)
    found = TEXTS.greedy(target, inputs, drafter, 5, tree=14, return_logprobs="raw", **kept)
    assert torch.equal(found.sequences, plain.sequences) and drafter.stats.acceptance_length > 1.8
    assert drafter.stats.execution.startswith("captured in one graph") == is_captured
    for ours, right in ((found.scores, plain.scores), (found.logits, plain.logits)):
        torch.testing.assert_close(torch.stack(ours), torch.stack(right), rtol=1e-4, atol=1e-4)
    new = plain.sequences[:, -NEW:]
    right = torch.stack(plain.logits, dim=1).log_softmax(-1).gather(-1, new[..., None])[..., 0]
    torch.testing.assert_close(found.raw_logprobs, right, rtol=1e-4, atol=1e-4)


def test_float8_keys_are_moved_with_their_scales():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    expected = TEXTS.greedy(target, inputs, NoDrafter(target, kv_cache_dtype="fp8"), None)
    drafter = tree_oracle(target, inputs, expected).configure(kv_cache_dtype="fp8")
    assert torch.equal(TEXTS.greedy(target, inputs, drafter, 5, tree=14), expected)
    assert drafter.stats.acceptance_length > 1.8


@pytest.mark.parametrize("is_sampling", [False, True])
def test_processors_that_read_the_text_verify_chains(is_sampling):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    options = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3)], "max_new_tokens": 12}
    if is_sampling:
        options |= {"do_sample": True, "seeds": [1, 2, 3]}
    expected = target.generate(**inputs, **options | {"assistant_model": NoDrafter(target)})
    drafter = random_peagle(target).configure(4, tree=12)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)
    assert drafter.stats.tree == 0
    assert "chains, since RepetitionPenaltyLogitsProcessor may read the text" in drafter.stats.reason


def test_what_is_no_tree_is_refused():
    target = tiny_target("llama")
    for tree in (-1, MOST_NODES + 1, 2.0, True, "all"):
        with pytest.raises(ValueError, match=f"tree is {tree!r}; expected an int of 0, for a chain, to 127"):
            random_peagle(target).configure(tree=tree)
    for make in (NoDrafter, SuffixDrafter):
        for tree in (8, "auto"):
            with pytest.raises(ValueError, match=f"{make.__name__} drafts chains only"):
                make(target).configure(tree=tree)
        drafter = make(target)
        with pytest.raises(ValueError, match=f"{make.__name__} drafts chains only"):
            TEXTS.greedy(target, padded_prompts([5]), drafter, 3, tree=8)


@pytest.mark.parametrize(
    ("family", "settings", "options", "reason"),
    [
        ("qwen3-next", {}, {}, "recurrent layers, whose states follow one text"),
        ("lfm2", {}, {}, "recurrent layers"),
        ("mistral", {}, {"num_assistant_tokens": 7}, "windows of 7 tokens; expected more than num_assistant_tokens"),
        ("llama", {"engine": "stock"}, {}, "the stock engine"),
        ("llama", {}, {"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states of every step"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_calls_that_have_no_trees(family, settings, options, reason):
    target, inputs = tiny_target(family), padded_prompts([5, 3])
    drafter = random_draft_model(target, parallel=True).configure(**settings)
    options = {"num_assistant_tokens": 3, "max_new_tokens": 8, "do_sample": False, "tree": 8} | options
    with pytest.raises(ValueError, match=f"Drafts are to be trees of 8 .*{reason}"):
        target.generate(**inputs, assistant_model=drafter, **options)


def test_windows_of_drafters_that_run_nodes():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target, layer_types=["sliding_attention"], sliding_window=4)
    with pytest.raises(ValueError, match="Eagle3Drafter has windows of 4 tokens; expected more than num_assistant_tok"):
        TEXTS.greedy(target, inputs, drafter, 4, tree=8)
    assert torch.equal(TEXTS.greedy(target, inputs, drafter, 3, tree=8), TEXTS.plain("llama", PROMPTS[3]))


@pytest.mark.parametrize("kind", MODULES)
def test_modules_draft_so_many_in_a_row(kind):
    target, inputs = tiny_target("llama"), padded_prompts([5, 3])
    drafter = MAKERS[kind](target)
    with pytest.raises(ValueError, match="MtpDrafter drafts up to 31 in a row; expected num_assistant_tokens"):
        TEXTS.greedy(target, inputs, drafter, 32, tree=127, max_new_tokens=40)
    plain = TEXTS.greedy(target, inputs, max_new_tokens=4)
    assert torch.equal(TEXTS.greedy(target, inputs, drafter, 31, tree=127, max_new_tokens=4), plain)


@pytest.mark.parametrize("kind", ["domino", "eagle3"])
def test_bulk_texts_are_those_of_generate_without_drafts(kind):
    """More requests than rows, greedy and sampled; those whose processors read the text verify chains."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[8][:5])
    prompts = [row[mask != 0].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    few = ContinuousBatchingConfig(max_requests_per_batch=2)
    drafter = RANDOM_DRAFTERS[kind](target).configure(4, tree=12)
    reading = RepetitionPenaltyLogitsProcessor(1.3)
    for sampled, processors in ((False, []), (True, []), (kind == "eagle3", [reading])):
        options = {"do_sample": True, "seeds": [*range(5)]} if sampled else {"do_sample": False}
        options |= {"max_new_tokens": FEW, "logits_processor": processors}
        plain = target.generate(**inputs, **options, assistant_model=NoDrafter(target))
        out = target.generate_batch(prompts, **options, continuous_batching_config=few, assistant_model=drafter)
        found = [one.generated_tokens for one in out.values()]
        assert found == plain[:, -FEW:].tolist()
        assert drafter.stats.tree == (0 if processors else 12)


REQUESTS = ([5, 6, 7], [9, 8, 11, 4, 3], [20, 21], [3, 3, 8, 30], [41])
OWN = {"repetition_penalty": 1.4}  # read the text


def texts_of_manager(target, drafter, **options):
    """Of requests with seeds, greedy and sampled by turns, of which the last but one has processors of its own."""
    settings = ContinuousBatchingConfig(max_requests_per_batch=4, per_request_processors=True)
    manager = target.init_continuous_batching(
        None, settings, assistant_model=drafter, max_new_tokens=NEW, eos_token_id=-1, **options
    )
    names = [
        manager.add_request(prompt, seed=7 + at, do_sample=at % 2 == 1, **(OWN if at == len(REQUESTS) - 2 else {}))
        for at, prompt in enumerate(REQUESTS)
    ]
    manager.start()
    try:
        results = [manager.get_result(name, timeout=60) for name in names]
    finally:
        manager.stop()
    assert all(one.error is None for one in results), [one.error for one in results]
    return [one.generated_tokens for one in results]


@pytest.mark.parametrize("is_captured", [False, True])
def test_managers_draft_trees_while_no_processor_reads_the_text(is_captured, monkeypatch):
    if is_captured:
        replay_on_cpu(monkeypatch)
    target = tiny_target("llama")
    expected = texts_of_manager(target, NoDrafter(target))
    drafter = random_peagle(target).configure(3, tree=8)
    assert texts_of_manager(target, drafter) == expected
    counts = drafter.stats.rounds_by_tree
    assert {*counts} == {8} and 0 < counts[8] < drafter.stats.num_rounds and drafter.stats.tree == 8


def test_a_manager_is_asked_for_trees_as_a_call_is():
    target = tiny_target("llama")
    drafter = random_peagle(target)
    assert texts_of_manager(target, drafter, num_assistant_tokens=3, tree=5) == texts_of_manager(
        target, NoDrafter(target)
    )
    assert drafter.stats.tree == 5
    with pytest.raises(ValueError, match="tree is 8, but SuffixDrafter drafts chains only"):
        texts_of_manager(target, SuffixDrafter(target), tree=8)


@pytest.mark.parametrize(
    ("kind", "is_captured"), [*((kind, True) for kind in ("p-eagle", "domino", "eagle3", *MODULES)), ("mtp", False)]
)
def test_rounds_of_other_shapes_follow_each_other(kind, is_captured, monkeypatch):
    """Chains and trees of several sizes in one text, whose drafter reads what each has left."""
    if is_captured:
        replay_on_cpu(monkeypatch)
    vary_drafts(monkeypatch, [(4, 12), 2, (4, 5), 0, (4, 12), (2, 12), 4])
    drafter = TEXTS.check("llama", PROMPTS[3], lambda target, *_: MAKERS[kind](target), 4, tree=12)
    stats = drafter.stats
    assert {*stats.rounds_by_tree} == {5, 12} and {*stats.rounds_by_k} == {0, 2, 4}
    assert sum(stats.rounds_by_tree.values()) < stats.num_rounds == sum(stats.rounds_by_k.values())
    assert stats.execution.startswith("captured" if is_captured else "eager")


RAN = AutoDrafts.ran


def scripted(monkeypatch, milliseconds):
    """Let rounds take `milliseconds` of what they have, as "auto" is told; and what takes no time be free."""
    monkeypatch.setattr(
        AutoDrafts, "ran", lambda self, drafted, _, is_typical: RAN(self, drafted, milliseconds(drafted), is_typical)
    )
    round_costs.table_of.cache_clear()
    monkeypatch.setattr(lease.SessionLease, "_price", lambda *args: 0.0)


@pytest.mark.usefixtures("shapes_decide")
@pytest.mark.parametrize("is_bulk", [False, True])
def test_auto_chooses_chains_and_trees_by_what_they_take(is_bulk, monkeypatch):
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(alone, "is_better_alone", lambda *_: False)  # whatever the shapes suggest to a CPU
    target, inputs = tiny_target("llama", num_layers=4), padded_prompts([6, 2])
    options = {"max_new_tokens": 64, "do_sample": False, "num_assistant_tokens": "auto", "tree": 31}
    plain = TEXTS.greedy(target, inputs, max_new_tokens=64)
    prompts = [row[mask != 0].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    for is_dear in (False, True):
        # Trees for nothing; or drafts that no acceptance pays for.
        scripted(monkeypatch, lambda drafted, dear=is_dear: 5.0 + 9 * drafted.width * dear)
        drafter = random_peagle(target, aux_hidden_state_layer_ids=[1, 3, 4])  # which is right now and then
        if is_bulk:
            out = target.generate_batch(prompts, **options, assistant_model=drafter)
            assert [one.generated_tokens for one in out.values()] == plain[:, -64:].tolist()
        else:
            assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
        used = sum(drafter.stats.rounds_by_tree.values()) / drafter.stats.num_rounds
        assert used < 0.2 if is_dear else used > 0.6, drafter.stats
        assert {*drafter.stats.rounds_by_tree} <= {15, 31}


def test_which_calls_may_choose_trees(monkeypatch):
    """Greedy ones, and those whose chains are verified by the target's tokens, where a GPU would be worth it."""
    chosen = []
    monkeypatch.setattr(lease, "tree_size", lambda rows, device: chosen.append(rows) or 15)
    target, inputs = tiny_target("llama"), padded_prompts([6, 2])

    def chooses(drafter, target=target, **options):
        chosen.clear()
        options = {"max_new_tokens": 4, "do_sample": False, "num_assistant_tokens": "auto", **options}
        target.generate(**inputs, **options, assistant_model=drafter)
        return bool(chosen)

    drafter = random_peagle(target)
    assert not chooses(drafter) and chooses(drafter, tree="auto")
    drafter.configure(tree="auto")
    assert chooses(drafter) and not chooses(drafter, tree=0)
    assert not chooses(drafter, num_assistant_tokens=3)
    assert "chains, since num_assistant_tokens is 3" in drafter.stats.reason
    assert not chooses(drafter, do_sample=True) and not chooses(drafter, repetition_penalty=1.2)
    assert chooses(drafter.configure(verification="match"), do_sample=True, seeds=[1, 2])
    assert not chooses(drafter.configure(tree=0)) and chooses(random_eagle3(target), tree="auto")
    hybrid = tiny_target("qwen3-next")
    drafter = random_draft_model(hybrid, parallel=True)
    assert not chooses(drafter, hybrid, tree="auto") and "chains, since" in drafter.stats.reason
