"""Beginnings that texts have in common are prefilled once, and nothing that is said depends on it."""

import contextlib
import functools
import itertools
import time

import pytest
import torch
from case_counts import cases, num_cases
from counting import COUNTED, counting_target, finding_drafter
from graph_stand_ins import replay_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RANDOM_DRAFTERS, SELDOM, copy_of, random_draft_model, random_eagle3, random_mtp
from targets import HYBRIDS, STATIC_FAMILIES, build_target, new_target, tiny_target
from transformers import ContinuousBatchingConfig

from hf_specdec import NoDrafter
from hf_specdec.calls.request import Request
from hf_specdec.engine import prefix_cache, target
from hf_specdec.engine.continuous import ContinuousRunner
from hf_specdec.engine.prefix_cache import Prefix, PrefixIndex, RowPrefixes, common_length, find_followers
from hf_specdec.graphs import buckets
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_equivalent

NEW = 8
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
KINDS = {**RANDOM_DRAFTERS, "copy": functools.partial(copy_of, noise=0.01), "none": NoDrafter}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(prefix_cache, "BLOCK", 4)
    monkeypatch.setattr(prefix_cache, "FEWEST_SAVED", 4)


@contextlib.contextmanager
def nothing_reused():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "BLOCK", 10**6)
        patch.setattr(prefix_cache, "FEWEST_SAVED", 10**6)
        yield


def tokens(count, seed):
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM = tokens(20, 0)
# With a common beginning, equal ones, one that is the beginning of others, and one that has nothing in common.
PROMPTS = [SYSTEM + tokens(count, count) for count in (5, 1, 9, 7)] + [SYSTEM + tokens(9, 9), SYSTEM, tokens(11, 50)]


@functools.cache
def alone(family, prompt, new=NEW):
    """What `generate()` without a drafter says to a prompt."""
    return continued(tiny_target(family), prompt, new)


def continued(model, prompt, new=NEW):
    ids = torch.tensor([prompt])
    options = {**GREEDY, "max_new_tokens": new, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


def expected(family, prompts, new=NEW):
    return [alone(family, tuple(prompt), new) for prompt in prompts]


@pytest.fixture
def prefilled(monkeypatch):
    """Numbers of tokens that targets run in prefills."""
    assert why_not_equivalent(tiny_target("llama"), "static") is None  # what the check runs does not count
    counts, run = [], target.Target.__call__

    def counted(self, state, ids, slots, logits_to_keep=0):
        if isinstance(logits_to_keep, torch.Tensor) or logits_to_keep == 1:
            counts.append(int((slots != state.dummy_slot).sum()))
        return run(self, state, ids, slots, logits_to_keep)

    monkeypatch.setattr(target.Target, "__call__", counted)
    return counts


def generate_batch(model, drafter, prompts, rows, shares=True, **options):
    config = ContinuousBatchingConfig(max_requests_per_batch=rows, allow_block_sharing=shares)
    out = model.generate_batch(prompts, None, config, assistant_model=drafter, **{**GREEDY, **options})
    assert all(one.error is None for one in out.values())
    return [one.generated_tokens for one in out.values()]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("eagle3", 1), ("mtp", 8), ("dspark", 3), ("copy", 3), ("none", 3)],
)
def test_prompts_in_bulk(prefilled, kind, rows):
    model = tiny_target("llama")
    drafter = KINDS[kind](model)
    assert generate_batch(model, drafter, PROMPTS, rows) == expected("llama", PROMPTS)
    stats = drafter.stats
    assert stats.cached_tokens >= 5 * (len(SYSTEM) - drafter.prefix_margin(stats.num_assistant_tokens) - 1) > 0
    # Of two equal prompts that are prefilled together, the second's last token is not run either.
    assert 0 <= sum(map(len, PROMPTS)) - stats.cached_tokens - sum(prefilled) <= 1
    assert stats.rows[-1].cached_tokens == 0


@pytest.mark.core_for(family=["llama", "gemma3"])
@pytest.mark.parametrize("family", [family for family in STATIC_FAMILIES if family not in HYBRIDS])
def test_every_family_of_targets(family):
    """Also with sliding windows shorter than the beginning, and in one call."""
    model = tiny_target(family)
    for make in cases([random_eagle3, random_mtp], [random_eagle3]):
        drafter = make(model)
        assert generate_batch(model, drafter, PROMPTS, 3) == expected(family, PROMPTS)
        assert drafter.stats.cached_tokens > 50
    drafter = NoDrafter(model)
    assert in_one_call(model, drafter, PROMPTS) == expected(family, PROMPTS)
    assert drafter.stats.cached_tokens > 50


@contextlib.contextmanager
def drafts_by_text(monkeypatch, drafter):
    """What is drafted after every text, by the text."""
    drafts, propose = {}, type(drafter).propose

    def noted(self, state, *args):
        proposal = propose(self, state, *args)
        for row in (~state.finished).nonzero()[:, 0].tolist():
            drafts[tuple(state.tokens[row, : state.lengths[row]].tolist())] = proposal.tokens[row].tolist()
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "propose", noted)
        yield drafts


@pytest.mark.parametrize(
    ("kind", "tree"), [*((kind, 0) for kind in KINDS if kind not in SELDOM and kind != "none"), ("mtp", 12)]
)
def test_drafts_are_those_of_prompts_that_are_prefilled_whole(monkeypatch, kind, tree):
    """And others if one token less than the margin is processed again: it is as small as it can be."""
    model = tiny_target("llama")
    drafter = KINDS[kind](model)

    def drafts(shares):
        with drafts_by_text(monkeypatch, drafter) as found:
            generate_batch(model, drafter, PROMPTS, 8, shares, num_assistant_tokens=3, tree=tree)
        assert (drafter.stats.cached_tokens > 0) == shares
        return found

    whole, margin = drafts(shares=False), drafter.prefix_margin(3, tree > 0)
    assert drafts(shares=True) == whole
    monkeypatch.setattr(type(drafter), "prefix_margin", lambda *_: margin - 1)
    assert drafts(shares=True) != whole


def in_one_call(model, drafter, prompts, **options):
    """The texts of a call with a padded batch, one a row."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"attention_mask": mask, "assistant_model": drafter, **GREEDY, **options}
    return model.generate(ids, **options)[:, width:].tolist()


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "pard", "copy", "none"])
def test_one_call(monkeypatch, prefilled, kind):
    model = tiny_target("llama")
    drafter = KINDS[kind](model)
    assert in_one_call(model, drafter, PROMPTS) == expected("llama", PROMPTS)
    stats = drafter.stats
    assert stats.rows[0].cached_tokens == stats.rows[-1].cached_tokens == 0
    assert all(row.cached_tokens >= len(SYSTEM) - 2 for row in stats.rows[1:-1])
    # Of two equal prompts that are prefilled together, the second's last token is not run either.
    assert 0 <= sum(map(len, PROMPTS)) - stats.cached_tokens - sum(prefilled) <= 1
    assert in_one_call(model, drafter, PROMPTS[::-1]) == expected("llama", PROMPTS[::-1])
    cached = [row.cached_tokens for row in drafter.stats.rows]
    assert cached[:2] == [0, 0], "the first one is the beginning of the others"
    assert max(cached[row] for row in (3, 5, 6)) <= len(SYSTEM), "what is reused is a common beginning"
    assert max(cached) < len(SYSTEM) + 9, "of two equal prompts, the second's last token is not reused"


@pytest.mark.parametrize("kind", ["eagle3", "copy", "mtp"])
def test_sampled_sequences_of_a_prompt(kind):
    """Each says what its seed says, in one call and in bulk; drafts are accepted as if nothing were reused."""
    model, seeds = tiny_target("llama"), [3, 1, 4, 1]
    drafter = KINDS[kind](model).configure(3)
    options = {"do_sample": True, "temperature": 1.3, "num_return_sequences": 4, "seeds": seeds}
    prompt, outs = PROMPTS[0], []
    for context in (nothing_reused(), contextlib.nullcontext()):
        with context:
            out = model.generate(torch.tensor([prompt]), assistant_model=drafter, **{**GREEDY, **options})
            outs.append((out[:, len(prompt) :].tolist(), [(row.rounds, row.accepted) for row in drafter.stats.rows]))
    cached = [row.cached_tokens for row in drafter.stats.rows]
    assert outs[0] == outs[1] and outs[0][0][1] == outs[0][0][3] and len({tuple(text) for text in outs[0][0]}) == 3
    assert cached[0] == 0 and min(cached[1:]) >= len(prompt) - 2
    assert generate_batch(model, drafter, [prompt], 4, **options) == outs[0][0]
    assert [row.cached_tokens > 0 for row in drafter.stats.rows].count(True) == 3


def test_what_tokens_do_not_tell_is_not_reused():
    """Rows of a filled cache, whose columns may hold anything; layers of all positions; embeddings."""
    model, prompts = tiny_target("llama"), [PROMPTS[0]] * 3
    drafter = random_eagle3(model)
    options = {**GREEDY, "assistant_model": drafter, "return_dict_in_generate": True}
    ids = torch.tensor(prompts)
    first = model.generate(ids, **options)
    assert drafter.stats.cached_tokens > 0
    model.generate(first.sequences, **{OUTPUT_NAME: first[OUTPUT_NAME]}, **options)
    assert drafter.stats.cached_tokens == 0
    model.generate(ids, output_hidden_states=True, **options)
    assert drafter.stats.cached_tokens == 0
    embeds = model.get_input_embeddings()(ids)
    out = model.generate(ids, inputs_embeds=embeds + torch.arange(3)[:, None, None], **options)
    assert drafter.stats.cached_tokens == 0 and len({tuple(row) for row in out.sequences.tolist()}) > 1


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_recurrent_states_are_reused_for_equal_prompts_only(prefilled, family):
    model, prompts = tiny_target(family), [*PROMPTS, PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    drafter, texts = random_eagle3(model), expected(family, prompts)
    assert why_not_equivalent(model, "static") is None  # whose passes are not to be counted
    for shares in (True, False):
        prefilled.clear()
        assert generate_batch(model, drafter, prompts, 16, shares) == texts
        cached = [row.cached_tokens for row in drafter.stats.rows]
        again = [prompt in prompts[:number] for number, prompt in enumerate(prompts)]
        assert cached == [shares * one * (len(prompt) - 1) for one, prompt in zip(again, prompts, strict=True)]
        # Of equal prompts not even the last token is run again.
        assert sum(prefilled) == sum(map(len, prompts)) - sum(cached) - sum(map(bool, cached))


def test_equal_prompts_of_recurrent_targets_in_one_call(prefilled):
    model, prompts = tiny_target("qwen3-next"), [PROMPTS[1], PROMPTS[0], *PROMPTS[:3], PROMPTS[0]]
    for drafter in (random_eagle3(model), random_mtp(model), random_draft_model(model, parallel=True)):
        prefilled.clear()
        assert in_one_call(model, drafter, prompts) == expected("qwen3-next", prompts)
        cached = [row.cached_tokens for row in drafter.stats.rows]
        assert cached == [0, 0, len(PROMPTS[0]) - 1, len(PROMPTS[1]) - 1, 0, len(PROMPTS[0]) - 1]
        assert sum(prefilled) <= sum(len(prompt) - 1 for prompt in PROMPTS[:3]) + 2 * len(prompts)


def test_seeds_of_merged_prompts():
    model, seeds = tiny_target("qwen3-next"), [5, 6, 5]
    drafter = random_eagle3(model).configure(3)
    options = {"do_sample": True, "temperature": 1.3, "num_return_sequences": 3, "seeds": seeds}
    texts = [generate_batch(model, drafter, PROMPTS[:1], 4, shares, **options) for shares in (True, False)]
    assert texts[0] == texts[1] and texts[0][0] == texts[0][2] != texts[0][1]
    ids = torch.tensor(PROMPTS[:1])
    for context in (nothing_reused(), contextlib.nullcontext()):
        with context:
            out = model.generate(ids, assistant_model=drafter, **{**GREEDY, **options})
        assert out[:, ids.shape[1] :].tolist() == texts[0]
    assert drafter.stats.cached_tokens == 2 * (len(PROMPTS[0]) - 1)


def test_rope_that_depends_on_the_length_is_not_reused():
    """A longer prompt has other keys from its first token on."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [4.0, 0.3, 8.0, 0.2], "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    model = build_target("llama", rope_parameters=rope)
    for drafter in (NoDrafter(model), random_eagle3(model)):
        assert generate_batch(model, drafter, PROMPTS, 3) == [continued(model, prompt) for prompt in PROMPTS]
        cached = [row.cached_tokens for row in drafter.stats.rows]
        assert cached == [0, 0, 0, 0, len(PROMPTS[4]) - 1, 0, 0], "of an equal prompt in the same group at most"
    assert copy_of(model).prefix_margin(3) is None


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_captured(monkeypatch, kind):
    """Copies run between replays of graphs; the next call begins with other texts in the rows."""
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "GROUP_COLUMNS", (8, 4))
    monkeypatch.setattr(buckets, "PACKED_TOKENS", (16, 4))
    model = tiny_target("llama")
    drafter = KINDS[kind](model)
    for prompts in (PROMPTS, PROMPTS[::-1]):
        assert generate_batch(model, drafter, prompts, 4, num_assistant_tokens=3) == expected("llama", prompts)
        assert drafter.stats.cached_tokens > 60 and drafter.stats.execution.startswith("captured in one graph")
    assert in_one_call(model, drafter, PROMPTS) == expected("llama", PROMPTS)
    assert (drafter.stats.cached_tokens > 60) == drafter.packs_prompts
    for _ in range(2):
        again = [PROMPTS[1], PROMPTS[6], PROMPTS[1]]
        assert in_one_call(model, drafter, again) == expected("llama", again)
        assert drafter.stats.rows[2].cached_tokens >= len(PROMPTS[1]) - 2


# Requests that arrive while rounds run.


@pytest.fixture
def running():
    """Makes managers that run, and stops them."""
    with contextlib.ExitStack() as stack:

        def run(model, drafter, rows=4, **options):
            config = ContinuousBatchingConfig(max_requests_per_batch=rows, **options)
            manager = model.init_continuous_batching(None, config, assistant_model=drafter.configure(2), **GREEDY)
            manager.start()
            stack.callback(lambda: manager.is_running() and manager.stop(hard_stop=True))
            return manager

        yield run


def said(manager, prompt, **options):
    result = manager.get_result(manager.add_request(prompt, **options), timeout=60)
    assert result.error is None
    return result.generated_tokens


@pytest.mark.parametrize("kind", ["eagle3", "pard2", "mtp", "dflash"])
def test_chats(running, prefilled, kind):
    """A turn finds the prompts and replies of earlier ones, where they lie; chats that take turns keep their rows."""
    model = tiny_target("llama")
    drafter = KINDS[kind](model)
    manager = running(model, drafter, rows=2)
    chats, total = [list(SYSTEM), tokens(18, 7)], 0
    for turn, chat in itertools.product(range(3), chats):
        reply = said(manager, chat)
        assert reply == alone("llama", tuple(chat))
        total += len(chat) - 1
        chat += reply + tokens(3, turn)
    manager.stop()
    # Of every turn but the first, no more than a round of the last reply and the new message is run.
    first, later = len(SYSTEM) - 1 + 18 - 1, 3 + 4 + drafter.prefix_margin(2)
    assert sum(prefilled) <= first + 4 * later < total / 2


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "pard2", "mtp", "mtp-by-target", "dspark", "copy"])
def test_drafts_after_what_rounds_have_left(running, monkeypatch, kind):
    """They are those after the same text as one prompt, though the drafter has not read the last block of a reply."""
    model = tiny_target("llama")
    text = SYSTEM + alone("llama", tuple(SYSTEM))
    found = []
    for shares in (True, False):
        drafter = KINDS[kind](model)
        manager = running(model, drafter, rows=1, allow_block_sharing=shares)
        said(manager, SYSTEM)
        with drafts_by_text(monkeypatch, drafter) as drafts:
            said(manager, text + tokens(5, 1))
            said(manager, text)
        manager.stop()
        found.append(drafts)
    assert found[0] == found[1]


def test_every_draft_stays_right(running, monkeypatch, prefilled):
    """Of a drafter that reads the context 16 positions back, where a round had accepted drafts and a reply ended."""
    model = counting_target()
    drafter = finding_drafter(model, COUNTED + 1)
    manager = running(model, drafter, rows=1)
    text = [at % COUNTED for at in range(60)]
    assert said(manager, text[:30], max_new_tokens=9) == text[30:39]
    prefilled.clear()
    with drafts_by_text(monkeypatch, drafter) as drafts:
        assert said(manager, text[:40], max_new_tokens=20) == text[40:]
    assert 0 < sum(prefilled) <= 1 + 3 + 1 and len(drafts) == 7
    for before, drafted in drafts.items():
        room = len(text) - len(before)  # drafts beyond the limit may be any
        assert drafted[:room] == [(before[-1] + 1 + step) % COUNTED for step in range(2)][:room]


def test_a_longer_prompt_after_a_shorter_one(running, monkeypatch):
    """In a session of one row, whose prefill is not packed: the drafter reads all of the prompt."""
    target, found = tiny_target("llama"), []
    drafter = copy_of(target, noise=0.01)
    for first in ((), (tokens(3, 0),)):
        manager = running(target, drafter, rows=1)
        for prompt in first:
            said(manager, prompt)
        with drafts_by_text(monkeypatch, drafter) as drafts:
            said(manager, tokens(60, 1))
        manager.stop()
        found.append(drafts)
    assert found[0] == found[1]


def test_rows_that_run_or_were_cancelled_are_copied_from(running, prefilled):
    model = tiny_target("llama")
    manager = running(model, copy_of(model, noise=0.01))
    name = manager.add_request(SYSTEM, max_new_tokens=150, streaming=True)
    parts = manager.request_id_iter(name)
    so_far = next(part.generated_tokens for part in parts if len(part.generated_tokens) >= 10)
    for end in (tokens(2, 1), tokens(3, 2)):
        prefilled.clear()
        prompt = SYSTEM + so_far[:10] + end
        assert said(manager, prompt) == alone("llama", tuple(prompt))
        assert 0 < sum(prefilled) <= 8
        manager.cancel_request(name)
    last = list(parts)[-1].generated_tokens
    assert last == alone("llama", tuple(SYSTEM), 150)[: len(last)]


def test_texts_that_ended_move_along_to_fewer_rows(running, prefilled, monkeypatch):
    monkeypatch.setattr(buckets, "ROWS_TO_FEWER", 2)
    moved, switch = [], ContinuousRunner._switch

    def noted(run, lease, *args):
        moved.append((run.num_rows, lease.shape.batch))
        return switch(run, lease, *args)

    monkeypatch.setattr(ContinuousRunner, "_switch", noted)
    model = tiny_target("llama")
    manager = running(model, random_eagle3(model), rows=8)
    manager.add_requests([tokens(3, seed) for seed in range(2)], max_new_tokens=150)
    manager.add_requests([tokens(3, seed) for seed in range(3)], max_new_tokens=2)
    text = SYSTEM + said(manager, SYSTEM)
    deadline = time.monotonic() + 60
    while (8, 4) not in moved:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    prefilled.clear()
    assert said(manager, text + [5]) == alone("llama", (*text, 5))
    assert 0 < sum(prefilled) <= 1 + 3 + 1


def test_a_change_of_the_target_in_a_pause(running):
    model = new_target("llama")
    manager = running(model, random_eagle3(model))
    said(manager, PROMPTS[0])
    with manager.pause(), torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0))
    prompt = PROMPTS[1]
    after = continued(model, prompt)
    assert after != alone("llama", tuple(prompt)) and said(manager, prompt) == after


def test_sharing_is_switched_off_as_in_transformers(running, prefilled):
    model = tiny_target("llama")
    manager = running(model, random_eagle3(model), allow_block_sharing=False)
    for prompt in PROMPTS[:3]:
        assert said(manager, prompt) == alone("llama", tuple(prompt))
    assert sum(prefilled) == sum(map(len, PROMPTS[:3]))


@settings(deadline=None, max_examples=num_cases(30, 6))
@given(st.data())
def test_random_schedules(data):
    """Prompts with common beginnings of any depth, arriving and cancelled at any time, in rows that grow and shrink."""
    model = tiny_target("llama")
    drafter = data.draw(st.sampled_from(["eagle3", "copy", "mtp"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "BLOCK", data.draw(st.sampled_from([1, 3])))
        patch.setattr(prefix_cache, "FEWEST_SAVED", data.draw(st.sampled_from([1, 12])))
        patch.setattr(prefix_cache, "MOST_COPIED", data.draw(st.sampled_from([10, 1000])))
        patch.setattr(buckets, "ROWS_TO_FEWER", 2)
        patch.setattr(buckets, "PACKED_TOKENS", data.draw(st.sampled_from([(2048, 32), (3, 2)])))
        config = ContinuousBatchingConfig(max_requests_per_batch=data.draw(st.sampled_from([1, 3, 8])))
        manager = model.init_continuous_batching(None, config, assistant_model=KINDS[drafter](model), **GREEDY)
        manager.start()
        try:
            texts, asked, cancelled = [SYSTEM[:6]], {}, set()
            for _ in range(data.draw(st.integers(2, 10))):
                action = data.draw(st.sampled_from(["add", "add", "go on", "wait", "cancel"]))
                if action in ("add", "go on"):
                    text = data.draw(st.sampled_from(texts))
                    text = text[: data.draw(st.sampled_from([4, 11, 40]))] + tokens(data.draw(st.integers(0, 3)), 1)
                    if action == "go on":
                        text = text + alone("llama", tuple(text))[: data.draw(st.integers(1, NEW))]
                    texts.append(text)
                    asked[manager.add_request(text)] = text
                elif action == "wait":
                    time.sleep(data.draw(st.sampled_from([0.001, 0.03])))
                elif asked:
                    cancelled.add(data.draw(st.sampled_from(sorted(asked))))
                    manager.cancel_request(max(cancelled))
            for name, text in asked.items():
                result = manager.get_result(name, timeout=60)
                if result.error is None:
                    assert result.generated_tokens == alone("llama", tuple(text))
                else:
                    assert name in cancelled and "was cancelled" in result.error
        finally:
            manager.stop(timeout=60)


# What is chosen.


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=14)), max_size=8), st.data())
def test_index_finds_the_longest_beginning(texts, data):
    """Among the blocks' length; names are used again, texts grow, and some are removed or renamed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "BLOCK", 3)
        patch.setattr(prefix_cache, "MOST_COMPARED", 10)
        index, held = PrefixIndex(), {}
        for name, text in texts:
            if name in held and data.draw(st.booleans()):
                index.extend(name, text)
                held[name] = held[name] + text
            else:
                index.add(name, text)
                held[name] = text
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            index.discard(gone)
            del held[gone]
        if data.draw(st.booleans()):
            names = {name: 10 + number for number, name in enumerate(sorted(held)[1:])}
            index.rename(names)
            held = {names[name]: text for name, text in held.items() if name in names}
        prompt = data.draw(st.lists(st.integers(0, 1), max_size=14))
        best = max((common_length(prompt, text) for text in held.values()), default=0)
        match = index.longest(prompt)
        assert all(index.size(name) == len(text) for name, text in held.items())
        if best < 3:
            assert match is None
        else:
            assert common_length(prompt, held[match.name]) == match.length == best
            assert match.length + match.rest == len(held[match.name])


def test_equal_hashes_are_no_equal_texts(monkeypatch):
    monkeypatch.setattr(prefix_cache, "_key", lambda before, block: 0)
    index = PrefixIndex()
    index.add(0, tokens(8, 0))
    assert index.longest(tokens(8, 1)) is None and index.longest(tokens(8, 0)).length == 8


def test_common_length():
    for length, at in itertools.product((0, 1, 255, 256, 700), (0, 100, 255, 256, 600)):
        one = list(range(length))
        other = [*one[:at], -1, *one[at + 1 :]] if at < length else one
        assert common_length(one, other) == min(at, length) == common_length(other, one)
        assert common_length(one, [*one, 5]) == length


def request(prompt):
    return Request(0, torch.tensor(prompt), NEW, prompt_ids=prompt)


def rows_with(texts, margin=1):
    """Rows whose requests had these prompts."""
    prefixes = RowPrefixes(margin)
    for row, text in texts.items():
        assert prefixes.plan([request(text)], [row]).prefixes[0].row == row
        prefixes.enter(row)
    return prefixes


def test_rows_that_requests_take():
    one, other = tokens(12, 1), tokens(12, 2)
    plan = rows_with({0: one, 1: other}).plan([request(one + [5, 6])], [2, 0, 1])
    assert plan.prefixes == [Prefix(0, 0, 10)], "where its own text lies"
    plan = rows_with({0: one, 1: other}).plan([request(one[:8])], [2, 0, 1])
    assert plan.prefixes == [Prefix(2, 0, 6)], "the least recently used, while the text is longer"
    plan = rows_with({0: one, 1: other}).plan([request(one[:8]), request(other[:7])], [0, 1])
    assert plan.prefixes == [Prefix(0, 0, 6), Prefix(1, 1, 5)], "no row that is copied from is copied to"
    plan = rows_with({0: one, 1: other}).plan([request(one[:8]), request(one[:7] + [1]), request(other[:8])], [0, 1, 2])
    assert plan.prefixes == [Prefix(2, 0, 6), Prefix(0, 0, 6), Prefix(1, 1, 6)]
    plan = rows_with({0: one, 1: other}).plan([request(one[:8]), request(one[:7] + [1])], [0, 1])
    assert plan.prefixes == [Prefix(1, 0, 6), Prefix(0, 0, 6)]


def test_requests_wait_for_those_that_begin_alike():
    long, base = tokens(20, 1), tokens(12, 2)
    group = [request(long + [1]), request(long + [2]), request(base), request(long)]
    plan = rows_with({}).plan(group, [0, 1, 2, 3])
    assert plan.now == [0, 2] and plan.later == [1, 3]
    plan = rows_with({7: long}).plan(group[:2], [0, 1])
    assert plan.later == [] and plan.prefixes == [Prefix(0, 7, 18), Prefix(1, 7, 18)], "a row has it already"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "FEWEST_SAVED", 100)
        assert find_followers([one.prompt_ids for one in group], 1, [0] * 4) == set()
