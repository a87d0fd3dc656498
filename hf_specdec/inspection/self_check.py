"""Self-check: finds, on one prompt, the interpretation that the weights of an ambiguous checkpoint were trained for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..checkpoints.interpretation import Overrides, overridden
from ..checkpoints.rope import rope_by_layer_type
from ..config import DEFAULT_ROPE_THETA, DraftLayersConfig
from ..drafters.draft_layers import DraftLayersDrafter
from ..drafters.layers import rotary_embedding
from ..modules.hidden_states import AuxHiddenStateRecorder, decoder_layers
from ..patching.plugins.length_rope import LENGTH_DEPENDENT

# Number of draft steps that are scored.
NUM_STEPS = 3


class Score(NamedTuple):
    """How often draft tokens under an interpretation are the target's most likely tokens: `agreement` is the share for
    each draft step, `hits` `[n]` bool has all steps and positions; n is the same for every interpretation."""

    interpretation: Overrides
    agreement: tuple[float, ...]
    hits: torch.Tensor

    @property
    def mean(self) -> float:
        return float(self.hits.float().mean())


@dataclass(frozen=True)
class SelfCheck:
    """Scores of all interpretations, best first, and the `current` one, which the drafter was loaded with."""

    scores: tuple[Score, ...]
    current: Overrides

    @property
    def best(self) -> Score:
        return self.scores[0]

    @property
    def conclusive(self) -> bool:
        """Whether the best interpretation beats the current one by over two standard deviations of a sign test."""
        current = next(score for score in self.scores if score.interpretation == self.current)
        won = int((self.best.hits & ~current.hits).sum())
        lost = int((current.hits & ~self.best.hits).sum())
        return won - lost > 2 * (won + lost) ** 0.5

    @property
    def conclusion(self) -> str:
        if not self.conclusive:
            stated = ", ".join(f"{name}={value}" for name, value in self.current.items())
            return f"the current interpretation stands ({stated}): no other is clearly better."
        best = self.best.interpretation
        keywords = ", ".join(f"{name}={value!r}" for name, value in best.items() if self.current.get(name) != value)
        return f"the weights were trained for another interpretation; pass {keywords} to AutoDrafter.from_pretrained."


def interpretations_of(
    config: DraftLayersConfig, aux_hidden_state_layer_ids: list[int], num_layers: int, target_rope: dict[str, Any]
) -> list[Overrides]:
    """Every interpretation that a checkpoint of this configuration may have been trained for, the current one first.

    These include layer ids one lower and one higher than the current ones, if the target has such layers, and the
    target's RoPE parameters, also by type of layer: a drafter may have been trained with their scaling without stating
    it.
    """
    choices: dict[str, list[Any]] = {}
    if aux_hidden_state_layer_ids:
        shifted = [[layer_id + shift for layer_id in aux_hidden_state_layer_ids] for shift in (0, 1, -1)]
        choices["aux_hidden_state_layer_ids"] = [ids for ids in shifted if ids[0] >= 0 and ids[-1] <= num_layers]
    choices |= config.readings()
    own, theirs = config.rope_parameters, list(rope_by_layer_type(target_rope).values()) or [target_rope]
    bases = [float(rope.get("rope_theta", DEFAULT_ROPE_THETA)) for rope in theirs]
    known = {own["rope_type"], "default", *LENGTH_DEPENDENT}
    ropes = [{"rope_theta": theta} for theta in dict.fromkeys((own["rope_theta"], DEFAULT_ROPE_THETA, *bases))]
    ropes += [{"rope_parameters": dict(rope)} for rope in theirs if rope.get("rope_type", "default") not in known]
    return [dict(zip(choices, values, strict=True)) | rope for *values, rope in product(*choices.values(), ropes)]


def with_interpretation(
    drafter: DraftLayersDrafter, target: PreTrainedModel, interpretation: Overrides
) -> DraftLayersDrafter:
    """A drafter with the same weights, not copied, under another interpretation, bound to `target`."""
    config = type(drafter.config).from_dict(overridden(drafter.config.to_dict(), interpretation))
    with torch.device("meta"):
        other = type(drafter)(config)
    weights = drafter.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()}, assign=True)
    other.rotary_emb = rotary_embedding(config).to(drafter.device)
    other.bind(target)
    return other.eval()


@torch.no_grad()
def self_check(
    drafter: DraftLayersDrafter, target: PreTrainedModel, input_ids: torch.Tensor, num_new_tokens: int = 128
) -> SelfCheck:
    """Score every interpretation of a bound drafter on a prompt `[1, n]` int64 and the target's greedy continuation.

    The target, in eval mode, runs once over the text. Under each interpretation the drafter then drafts `NUM_STEPS`
    tokens from every position; its score is how often its most likely token is the target's.
    """
    input_ids = input_ids.to(target.device)
    text = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=num_new_tokens, do_sample=False
    )
    num_layers = len(decoder_layers(target))
    target_rope = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    interpretations = interpretations_of(drafter.config, drafter.aux_hidden_state_layer_ids, num_layers, target_rope)
    layer_ids = sorted({one for reading in interpretations for one in reading.get("aux_hidden_state_layer_ids", ())})
    with AuxHiddenStateRecorder(target, layer_ids, last_hidden_state=drafter.reads_last_hidden_state) as recorder:
        choices = target(text, use_cache=False).logits[0].argmax(-1)
        recorded = recorder.aux_hidden_states
    width = drafter.config.target_hidden_size
    by_id = dict(zip(layer_ids, recorded.split(width, dim=-1), strict=True)) if layer_ids else {}
    scores, device = [], drafter.device
    text, choices = text.to(device), choices.to(device)
    for reading in interpretations:
        ids = reading.get("aux_hidden_state_layer_ids")
        aux_hidden_states = recorded if ids is None else torch.cat([by_id[layer_id] for layer_id in ids], dim=-1)
        other, hits = with_interpretation(drafter, target, reading), []
        num_steps = min(NUM_STEPS, getattr(other.config, "depth", NUM_STEPS))
        for step, logits in enumerate(other(text, aux_hidden_states.to(device), num_steps=num_steps)):
            drafted = other.target_tokens(logits[0].argmax(-1))
            # At step s slot p drafts the token at position p + 2 + s, the target's choice at position p + 1 + s.
            targets = choices[step + 1 :]
            hits.append((drafted[: len(targets)] == targets).cpu())
        scores.append(Score(reading, tuple(float(hit.float().mean()) for hit in hits), torch.cat(hits)))
    return SelfCheck(tuple(sorted(scores, key=lambda score: -score.mean)), interpretations[0])
