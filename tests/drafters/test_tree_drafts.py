"""Trees of drafts that depend on those before them: the likeliest paths by the distributions of chains."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from case_counts import cases
from oracle import (
    random_dflash2,
    random_domino,
    random_draft_model,
    random_dspark,
    random_dspine,
    random_eagle3,
    random_mtp,
)
from targets import padded_prompts, tiny_target

from hf_specdec.modules.hidden_states import AuxHiddenStateRecorder

DEPTH, NUM_NODES = 3, 20
FEW = {"draft_vocab_size": 9}  # so that all of the draft vocabulary are candidates
KINDS = {
    "dspark": partial(random_dspark, **FEW),
    "dspark-vanilla": partial(random_dspark, markov_type="vanilla", **FEW),
    "dspark-gated": partial(random_dspark, markov_type="gated", anchor_first=True, **FEW),
    "domino": partial(random_domino, pure_draft_prefix_len=1, **FEW),
    "dflash2": random_dflash2,
    "dspine": random_dspine,
}
BY_LAYERS = {
    "eagle3": partial(random_eagle3, layer_types=["sliding_attention"], sliding_window=6),
    "draft-model": random_draft_model,
    "mtp": partial(random_mtp, num_modules=1),
    "mtp-target": partial(random_mtp, num_modules=3, chaining="target"),
    "mtp-modules": partial(random_mtp, num_modules=2, chaining="modules"),
}


@torch.no_grad()
def paths_by_chains(drafter, anchor, normed):
    """Log-probabilities of all paths of candidates, found by walking along each: `{tokens: log-probability}`."""
    logits = drafter.logits(drafter.begin(anchor, normed)[0][..., : drafter.config.hidden_size])[0].double()
    count = drafter.num_candidates or logits.shape[-1]
    candidates = logits.topk(count).indices
    ranks = torch.tensor([*product(range(count), repeat=DEPTH)])
    total, others = torch.zeros(len(ranks), dtype=torch.float64), []
    for step in range(DEPTH):  # what is no candidate keeps its weight by the head
        others.append(logits[step].scatter(0, candidates[step], -torch.inf).logsumexp(0))

    def choose(scores, step):
        index = candidates[step][ranks[:, step]]
        scores = scores[:, 0].double()
        whole = torch.logaddexp(scores.logsumexp(-1), others[step])
        total.add_(scores.gather(1, index[:, None])[:, 0] - whole)
        taken = index if drafter.target_ids is None else drafter.target_ids[index]
        return (taken, total.clone()), taken[:, None]

    steps = drafter._walk(anchor.expand(len(ranks), -1), normed.expand(len(ranks), -1, -1), choose)
    taken, sums = zip(*steps, strict=True)
    tokens = torch.stack(taken, dim=1).tolist()
    return {tuple(path[: n + 1]): float(sums[n][at]) for at, path in enumerate(tokens) for n in range(DEPTH)}


def paths_of(parents, tokens):
    """The tokens of the path to each node of one row, by node; `parents` `[N + 1]`, `tokens` `[N]`."""
    paths = {0: ()}
    for node, token in enumerate(tokens.tolist(), start=1):
        paths[node] = (*paths[int(parents[node])], token)
    return paths


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_trees_are_the_likeliest_paths_of_chains(kind):
    target = tiny_target("llama", num_layers=4)
    drafter = KINDS[kind](target)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(target.config.vocab_size, (1, 7), generator=generator)
    states = torch.randn(1, 7, drafter.config.aux_hidden_size, generator=generator)
    anchors = torch.tensor([[6, 4]])
    normed = drafter.unroll_blocks(text, states, anchors, DEPTH)[0]
    first = text[0, anchors[0]][:, None]
    one = torch.ones(2)
    state = SimpleNamespace(
        is_sampling=False, num_nodes=NUM_NODES, num_draft_tokens=DEPTH, temperature=one[0], row_temperatures=one
    )
    (proposal,) = drafter.draft(state, first, normed)
    for row in range(2):
        paths = paths_of(proposal.tree.parents[row], proposal.tokens[row])
        by_chains = paths_by_chains(drafter, first[row : row + 1], normed[row : row + 1])
        likeliest = sorted(by_chains, key=by_chains.get, reverse=True)[:NUM_NODES]
        assert len(paths) == NUM_NODES + 1 and {*paths.values()} - {()} == {*likeliest}
        assert max(map(len, likeliest)) == DEPTH


def read_hidden_states(target, drafter, tokens):
    """`[1, n, width]`: what the drafter reads of the target at `tokens` `[1, n]`; None if nothing."""
    ids, reads_last = drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state
    with AuxHiddenStateRecorder(target, ids, reads_last) as recorder:
        target(tokens)
        return recorder.aux_hidden_states


def likeliest_by_layers(after, depth, num_nodes, width):
    """Paths of EAGLE-2's tree: of each layer the `width` likeliest are gone on from, and of all `num_nodes` are kept.

    Args:
        after: log-probabilities `[V]` of what follows a path of tokens.
    """
    found, front = {}, {(): 0.0}
    for _ in range(depth):
        layer = {}
        for path, score in front.items():
            logprobs = after(path)
            for token in logprobs.topk(min(num_nodes, 16)).indices.tolist():
                layer[(*path, token)] = score + float(logprobs[token])
        found |= layer
        front = {path: layer[path] for path in sorted(layer, key=layer.get, reverse=True)[:width]}
    return {*sorted(found, key=found.get, reverse=True)[:num_nodes]}


@pytest.mark.parametrize(
    ("kind", "depth", "num_nodes", "width"),
    cases(
        every := [(kind, *sizes) for kind in BY_LAYERS for sizes in ((4, 12, 4), (3, 40, 8), (5, 3, 1))],
        [one for at, one in enumerate(every) if one[2] == 12 or at // 3 % 2 == one[2] // 40],
    ),
)
@torch.no_grad()
def test_trees_by_layers_are_those_of_whole_texts(kind, depth, num_nodes, width, monkeypatch):
    """Their conditional distributions are those that the drafter has for each path by itself, without a cache."""
    target, inputs = tiny_target("llama"), padded_prompts([7, 4])
    drafter = BY_LAYERS[kind](target)
    grow, found = type(drafter)._grow, []

    def growing(self, state, *args):
        proposal = grow(self, state, *args)
        texts = [tokens[:length] for tokens, length in zip(state.tokens.clone(), state.lengths.tolist(), strict=True)]
        found.append((texts, proposal.tokens.clone(), proposal.tree.parents.clone()))
        return proposal

    monkeypatch.setattr(type(drafter), "_grow", growing)
    options = {"num_assistant_tokens": depth, "tree": num_nodes, "max_new_tokens": 9, "do_sample": False}
    target.generate(**inputs, **options, assistant_model=drafter)
    assert len(found) >= 4
    for texts, tokens, parents in found[0], found[3]:
        for row, text in enumerate(texts):
            place = len(text) - 1 - drafter.shift
            states = read_hidden_states(target, drafter, text[None])

            def after(path, text=text, place=place, states=states):
                whole = torch.cat([text, torch.tensor(path, dtype=torch.int64)])[None]
                if states is not None:
                    states = torch.nn.functional.pad(states, (0, 0, 0, len(path)))
                normed = drafter.unroll(whole, states, len(path) + 1)[-1][0, place]
                logprobs = (drafter.logit_scale * (drafter.head_weight @ normed)).log_softmax(-1)
                if drafter.target_ids is None:
                    return logprobs
                return torch.full((target.config.vocab_size,), -torch.inf).scatter(0, drafter.target_ids, logprobs)

            least = min(depth, num_nodes)
            expected = likeliest_by_layers(after, least, num_nodes, width)
            assert set(paths_of(parents[row], tokens[row]).values()) - {()} == expected
