"""The self-check finds the interpretation of config.json that a drafter's weights were trained for.

The drafter is fitted to one text in under a second, so that it agrees with the target there under the true reading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import blocks
import pytest
import torch
from counting import COUNTED, counting_target, finding_drafter
from dialects import PLAIN, Spec, tiny_target, write
from eagle_reference import target_hidden_states
from torch.nn import functional as F

from hf_specdec import AutoDrafter
from hf_specdec.cli import main
from hf_specdec.config import Eagle3Config, PEagleConfig
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter, PEagleDrafter
from hf_specdec.inspection.self_check import SelfCheck, interpretations_of, self_check, with_interpretation
from hf_specdec.modules.hidden_states import AuxHiddenStateRecorder

SPEC = Spec(vocab_size=64, draft_vocab_size=64, maps_vocabulary=False, own_embedding=True)
TRUTH = {"norm_before_residual": False, "norm_output": True, "final_norm": True, "rope_theta": 10000.0}
TRUTH["aux_hidden_state_layer_ids"] = [2, 4, 5]
NUM_NEW_TOKENS = 8


@dataclass(frozen=True)
class Fitted:
    target: torch.nn.Module
    drafter: Eagle3Drafter
    prompt: torch.Tensor

    def check(self, drafter: Eagle3Drafter) -> SelfCheck:
        return self_check(drafter, self.target, self.prompt, NUM_NEW_TOKENS)


def fit(target, spec: Spec, truth: dict[str, Any], text: torch.Tensor, steps: int = 60) -> Eagle3Drafter:
    """A drafter that under `truth` drafts what the target chooses in `text`."""
    torch.manual_seed(0)
    config = Eagle3Config(**settings(spec, truth))
    return train(Eagle3Drafter(config), target, text, steps)


def settings(spec: Spec, truth: dict[str, Any]) -> dict[str, Any]:
    return dict(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.eps,
        aux_hidden_state_layer_ids=truth["aux_hidden_state_layer_ids"],
        norm_before_residual=truth["norm_before_residual"],
        norm_output=truth["norm_output"],
        final_norm=truth["final_norm"],
        initializer_range=0.2,
    )


def train(drafter: Eagle3Drafter, target, text: torch.Tensor, steps: int) -> Eagle3Drafter:
    drafter.bind(target)
    with torch.no_grad(), AuxHiddenStateRecorder(target, drafter.aux_hidden_state_layer_ids) as recorder:
        choices, aux_hidden_states = target(text).logits.argmax(-1), recorder.aux_hidden_states
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                weight.mul_(1 + 0.5 * torch.randn_like(weight))
        # A small embedding, so that the drafter learns to use its hidden states.
        drafter.layers[0].input_layernorm.weight.mul_(0.3)
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.01)
    for _ in range(steps):
        loss = torch.zeros(())
        for step, logits in enumerate(drafter(text, aux_hidden_states, num_steps=3)):
            wanted = choices[:, step + 1 :]
            loss = loss + F.cross_entropy(logits[:, : wanted.shape[1]].flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    target = tiny_target(SPEC, dtype=torch.float32, initializer_range=0.4)
    prompt = torch.randint(SPEC.vocab_size, (1, 160), generator=torch.Generator().manual_seed(1))
    text = target.generate(prompt, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    return Fitted(target, fit(target, SPEC, TRUTH, text), prompt)


@pytest.mark.core
def test_true_interpretation_is_kept(fitted):
    result = fitted.check(fitted.drafter)
    assert result.best.interpretation == result.current == TRUTH
    assert result.best.mean > 0.9 and not result.conclusive
    assert "stands" in result.conclusion


@pytest.mark.parametrize(
    "wrong",
    [
        {"aux_hidden_state_layer_ids": [3, 5, 6]},
        {"aux_hidden_state_layer_ids": [1, 3, 4]},
        {"norm_before_residual": True},
        {"norm_output": False},
        {"rope_theta": 1e6},
        {"aux_hidden_state_layer_ids": [3, 5, 6], "norm_output": False, "rope_theta": 1e6},
    ],
    ids=str,
)
def test_wrong_interpretation_is_corrected(fitted, wrong):
    misread = with_interpretation(fitted.drafter, fitted.target, TRUTH | wrong)
    result = fitted.check(misread)
    assert result.best.interpretation == TRUTH and result.conclusive
    assert all(f"{name}=" in result.conclusion for name in wrong)


def test_new_interpretation_copies_no_weight(fitted):
    other = with_interpretation(fitted.drafter, fitted.target, TRUTH | {"norm_output": False})
    assert other.lm_head.weight.data_ptr() == fitted.drafter.lm_head.weight.data_ptr()
    assert fitted.drafter.config.norm_output and not other.config.norm_output


def test_specforge_norm_that_is_not_applied(fitted):
    """Before its pull request 879 SpecForge's norm_output False meant that the norm in the file is not applied."""
    text = fitted.target.generate(fitted.prompt, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    truth = TRUTH | {"norm_output": False, "final_norm": False}
    drafter = fit(fitted.target, SPEC, truth, text, steps=90)
    config = Eagle3Config.from_dict(drafter.config.to_dict() | {"final_norm": True, "dialect": "SpecForge"})
    written = Eagle3Drafter(config)
    generator = torch.Generator().manual_seed(0)
    never_trained = 1 + torch.randn(SPEC.hidden_size, generator=generator)
    written.load_state_dict(drafter.state_dict() | {"norm.weight": never_trained})
    written.bind(fitted.target)
    result = fitted.check(written)
    assert not result.best.interpretation["final_norm"] and "final_norm=False" in result.conclusion


def test_inspect_finds_layer_ids_that_count_layer_outputs(fitted, tmp_path, capsys):
    """Ids that equal the default of layer outputs, yet count layer inputs, as in one of NVIDIA's gpt-oss-120b heads."""
    spec = replace(SPEC, aux_hidden_state_layer_ids=(1, 3, 4))
    truth = TRUTH | {"aux_hidden_state_layer_ids": [1, 3, 4], "norm_output": False}
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(SPEC.vocab_size, (1, 16), generator=generator)
    text = fitted.target.generate(prompt, max_new_tokens=128, do_sample=False)
    drafter = fit(fitted.target, spec, truth, text)
    fitted.target.save_pretrained(tmp_path / "target")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    folder = write("specforge", tmp_path / "drafter", spec, drafter.state_dict(), eagle_config=nested)
    assert AutoDrafter.from_pretrained(folder, fitted.target).aux_hidden_state_layer_ids == [2, 4, 5]

    capsys.readouterr()
    command = ["inspect", str(folder), "--target", str(tmp_path / "target"), "--self-check"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["self_check"]
    assert result["conclusive"] and result["best"]["aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert main(command) == 0
    assert "pass aux_hidden_state_layer_ids=[1, 3, 4]" in capsys.readouterr().out


# ---- P-EAGLE


@pytest.fixture(scope="module")
def parallel(fitted) -> Fitted:
    """A P-EAGLE drafter whose chains were fitted as it drafts them, at mask tokens."""
    text = fitted.target.generate(fitted.prompt, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    torch.manual_seed(0)
    config = PEagleConfig(**settings(SPEC, TRUTH | {"norm_output": False}), mask_token_id=5)
    drafter = PEagleDrafter(config)
    torch.nn.init.normal_(drafter.mask_hidden)
    drafter = train(drafter, fitted.target, text, steps=90)
    drafter.bind(fitted.target)
    return Fitted(fitted.target, drafter, fitted.prompt)


def test_peagle_is_scored_as_it_drafts(parallel):
    result = parallel.check(parallel.drafter)
    assert result.best.interpretation == result.current == TRUTH | {"norm_output": False}
    assert min(result.best.agreement) > 0.8 and not result.conclusive
    # Nothing is fed back in one pass, so that norm_output is no question.
    assert not any(score.interpretation["norm_output"] for score in result.scores)
    assert len(result.scores) == 6


@pytest.mark.parametrize(
    "wrong", [{"aux_hidden_state_layer_ids": [3, 5, 6]}, {"norm_before_residual": True}, {"rope_theta": 1e6}], ids=str
)
def test_wrong_interpretation_of_peagle_is_corrected(parallel, wrong):
    truth = TRUTH | {"norm_output": False}
    misread = with_interpretation(parallel.drafter, parallel.target, truth | wrong)
    assert type(misread) is PEagleDrafter
    assert misread.mask_hidden.data_ptr() == parallel.drafter.mask_hidden.data_ptr()
    result = parallel.check(misread)
    assert result.best.interpretation == truth and result.conclusive
    assert all(f"{name}=" in result.conclusion for name in wrong)


def test_rope_scaling_of_the_target_is_an_interpretation(parallel):
    """SpecForge's P-EAGLE trainer drops the scaling that a target has; another trainer may have kept it."""
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    readings = interpretations_of(parallel.drafter.config, [2, 4, 5], 8, linear)
    assert readings[0] == TRUTH | {"norm_output": False}
    (scaled, *_) = [reading for reading in readings if "rope_parameters" in reading]
    assert scaled["rope_parameters"] == linear and "rope_theta" not in scaled
    drafter = with_interpretation(parallel.drafter, parallel.target, scaled)
    assert drafter.config.rope_parameters == linear
    result = parallel.check(drafter)
    assert result.best.interpretation["rope_theta"] == 10000.0 or not result.conclusive


def test_rope_bases_by_layer_type_are_interpretations(parallel):
    bases = {"sliding_attention": 5e5, "full_attention": 1e6}
    ropes = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    readings = interpretations_of(parallel.drafter.config, [2, 4, 5], 8, ropes)
    assert {reading["rope_theta"] for reading in readings} == {1e4, 5e5, 1e6}


def test_inspect_scores_peagle(parallel, tmp_path, capsys):
    spec = replace(SPEC, parallel=True)
    parallel.target.save_pretrained(tmp_path / "target")
    folder = write("amazon", tmp_path / "drafter", spec, parallel.drafter.state_dict())
    capsys.readouterr()
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target"), "--self-check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "p-eagle" and len(report["self_check"]["scores"]) == 6


# ---- DFlash and what is made of it


def block_of(layout: str, number: int, folder) -> tuple[torch.nn.Module, DFlashDrafter, blocks.Block, dict]:
    spec = blocks.LAYOUTS[layout][number]
    weights = blocks.make_weights(spec)
    target = tiny_target(PLAIN)
    blocks.write(layout, folder, spec, weights)
    return target, AutoDrafter.from_pretrained(folder, target), spec, weights


@pytest.mark.parametrize(
    ("layout", "number"),
    [("z-lab", 1), ("z-lab-2", 0), ("muse", 0), ("specforge", 1), ("specforge-domino", 1), ("speculators", 0)],
)
def test_blocks_are_scored_as_they_draft(layout, number, tmp_path):
    """The logits at each place are those of the block after it."""
    target, drafter, spec, weights = block_of(layout, number, tmp_path)
    text = torch.randint(spec.vocab_size, (12,), generator=torch.Generator().manual_seed(3))
    aux_hidden_states = target_hidden_states(target, text, spec.layer_ids)
    with torch.no_grad():
        steps = drafter(text[None], aux_hidden_states[None], num_steps=3)
    for place in range(len(text) - 1):
        _, expected = blocks.propose(weights, spec, target, text[: place + 2], 3)
        for step, logits in zip(steps, expected, strict=True):
            torch.testing.assert_close(step[0, place], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [{"anchor_first": True}, {"aux_hidden_state_layer_ids": [3]}, {"causal": [True]}, {"rope_theta": 1e6}],
    ids=str,
)
def test_wrong_interpretation_of_blocks_is_corrected(wrong):
    """Of a drafter made by hand, which is right about every token of a text that counts, to the end of its context."""
    target = counting_target()
    drafter = finding_drafter(target, COUNTED + 1, causal=False)
    truth = {"aux_hidden_state_layer_ids": [2], "anchor_first": False, "causal": [False], "rope_theta": 10000.0}
    misread = with_interpretation(drafter, target, truth | wrong)
    prompt = torch.arange(40)[None] % COUNTED
    result = self_check(misread, target, prompt, num_new_tokens=60)
    assert result.current == truth | wrong
    (mean,) = [score.mean for score in result.scores if score.interpretation == truth]
    assert mean == result.best.mean > 0.7
    if "anchor_first" in wrong or "rope_theta" in wrong:
        assert result.conclusive and all(f"{name}=" in result.conclusion for name in wrong)


def test_inspect_scores_blocks(tmp_path, capsys):
    target, *_ = block_of("z-lab", 1, tmp_path / "drafter")
    target.float().save_pretrained(tmp_path / "target")
    capsys.readouterr()
    command = ["inspect", str(tmp_path / "drafter"), "--target", str(tmp_path / "target"), "--self-check"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "dflash" and report["target"]["fits"]
    assert report["block"] == {"block_size": 17, "anchor_first": False, "causal": [False, True]}
    assert len(report["self_check"]["scores"]) == 3 * 2 * 3 * 2
    assert main(command[:-1]) == 0
    assert "block        block_size 17, anchor_first False, causal [False, True]" in capsys.readouterr().out
