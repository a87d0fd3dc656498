"""Trees of drafts that depend on those before them: the likeliest paths by the distributions of chains."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from oracle import random_dflash2, random_domino, random_dspark, random_dspine
from targets import tiny_target

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
    taken, sums = [], []

    def choose(scores):
        step = len(taken)
        index = candidates[step][ranks[:, step]]
        scores = scores[:, 0].double()
        whole = torch.logaddexp(scores.logsumexp(-1), others[step])
        total.add_(scores.gather(1, index[:, None])[:, 0] - whole)
        sums.append(total.clone())
        taken.append(index if drafter.target_ids is None else drafter.target_ids[index])
        return taken[-1][:, None]

    drafter._walk(anchor.expand(len(ranks), -1), normed.expand(len(ranks), -1, -1), choose)
    tokens = torch.stack(taken, dim=1).tolist()
    return {tuple(path[: n + 1]): float(sums[n][at]) for at, path in enumerate(tokens) for n in range(DEPTH)}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_trees_are_the_likeliest_paths_of_chains(kind):
    target = tiny_target("llama")
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
        paths = {0: ()}
        for node in range(1, NUM_NODES + 1):
            paths[node] = (*paths[int(proposal.tree.parents[row, node])], int(proposal.tokens[row, node - 1]))
        by_chains = paths_by_chains(drafter, first[row : row + 1], normed[row : row + 1])
        likeliest = sorted(by_chains, key=by_chains.get, reverse=True)[:NUM_NODES]
        assert len(paths) == NUM_NODES + 1 and {*paths.values()} - {()} == {*likeliest}
        assert max(map(len, likeliest)) == DEPTH
