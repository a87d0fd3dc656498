"""Against transformers' own `generate(use_mtp=True)`: the same proposals and the same text, where it can run at all.

Where the two differ (5.17 and 5.23), by reading and by the tests here:

* transformers puts module k's slot p at position p + 1 + k, which is the same to RoPE, as each module has a cache of
  its own; tokens and hidden states are paired alike.
* It drafts as many tokens as there are modules, for one row, without padding.
* It fails for prompts of fewer tokens than there are modules, where it has no hidden states to recompute from.
* It finds modules by layer numbers that are written into its model classes (61 for DeepSeek-V3; 46 and 92 for GLM-4.5),
  so that the modules of a derivative with another depth, or a second module, are reported missing.
* It uses the target's head for all modules and hands on the stream after the final norm: not Step-3.5's way, whose
  modules have trained heads (vLLM #38339 and #38493 saw acceptance fall from 97 % to 4 % with the target's).
"""

import pytest
import torch
from case_counts import num_cases
from mtp import publish
from targets import padded_prompts
from transformers.generation import candidate_generator

from hf_specdec import AutoDrafter

CHECKPOINTS = [("deepseek-v3", 1), ("deepseek-v3", 3), ("glm-4.5", 2)]


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def at(request, tmp_path_factory):
    family, num_modules = request.param
    at = publish(family, tmp_path_factory.mktemp("mtp") / "checkpoint", num_modules)
    target = at.target
    # Few tokens are ever generated, so that drafts of random modules are right now and then.
    with torch.no_grad():
        target.lm_head.weight[4:] *= 0.01
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{3 + index}\." for index in range(num_modules)]
    return at


def theirs(monkeypatch, target, inputs, options):
    """What transformers generates and, by the length of the text, what it drafts."""
    drafted, get_candidates = {}, candidate_generator.MTPCandidateGenerator.get_candidates

    def watched(self, input_ids, *args, **kwargs):
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        drafted[input_ids.shape[1]] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    with monkeypatch.context() as patch:
        patch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", watched)
        return target.generate(**inputs, **options, use_mtp=True), drafted


def ours(monkeypatch, target, drafter, inputs, options):
    """As `theirs`, of our engine."""
    drafted, propose = {}, drafter.propose

    def watched(state, aux_hidden_states, result):
        proposal = propose(state, aux_hidden_states, result)
        drafted[int(state.lengths)] = proposal.tokens[0].tolist()
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "propose", watched)
        return target.generate(**inputs, **options, assistant_model=drafter), drafted


def test_prompts_of_fewer_tokens_than_modules(at):
    target = at.target
    drafter = AutoDrafter.from_pretrained(at.folder, target, chaining="modules")
    inputs, options = padded_prompts([1, 2, 3, 4]), {"do_sample": False, "max_new_tokens": 24}
    out = target.generate(**inputs, **options, assistant_model=drafter, num_assistant_tokens=3)
    assert torch.equal(out, target.generate(**inputs, **options))
    assert all(row.accepted > 0 for row in drafter.stats.rows)


# What `theirs` returned, by the checkpoint and the seed of the prompt.
THEIRS = {}


@pytest.mark.core_for(at=CHECKPOINTS[1:2], engine=["static"])
@pytest.mark.parametrize(
    ("at", "engine"),
    [*((one, "static") for one in CHECKPOINTS), (CHECKPOINTS[1], "stock")],
    indirect=["at"],
    ids=str,
)
def test_same_proposals_and_same_text(monkeypatch, at, engine):
    target, count = at.target, len(at.modules)
    drafter = AutoDrafter.from_pretrained(at.folder, target, chaining="modules", engine=engine)
    drafter.configure(num_assistant_tokens=count)
    compared, accepted = 0, 0
    for seed in range(num_cases(3, 2)):
        inputs = padded_prompts([7], seed=seed)
        options = {"do_sample": False, "max_new_tokens": 48}
        if (key := (at.folder, seed)) not in THEIRS:
            THEIRS[key] = theirs(monkeypatch, target, inputs, options)
            assert torch.equal(target.generate(**inputs, **options), THEIRS[key][0])
        text, their_drafts = THEIRS[key]
        our_text, our_drafts = ours(monkeypatch, target, drafter, inputs, options)
        assert torch.equal(our_text, text)
        accepted += drafter.stats.accepted
        # Theirs drafts nothing before the target's first pass, and may be out of step with ours after it.
        drafted_for = [length for length in their_drafts if their_drafts[length] and length in our_drafts]
        for length in drafted_for:
            assert our_drafts[length] == their_drafts[length], f"{length} tokens"
            compared += 1
    assert compared > 40 and accepted > 8
