"""Which reading of an ambiguous checkpoint were its weights trained for? One prompt tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..checkpoints.dialects import SPECFORGE, rope_by_layer_type
from ..config import DEFAULT_ROPE_THETA, Eagle3Config, PEagleConfig
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.layers import rotary_embedding
from ..patching.hidden_states import AuxHiddenStateRecorder, decoder_layers
from ..patching.support import LENGTH_DEPENDENT_ROPE

NUM_STEPS = 3


class Interpretation(NamedTuple):
    """One way to read a checkpoint, by keywords of `AutoDrafter.from_pretrained`.

    `taps` None: no boundary is read. `rope_parameters`: the whole of them, where more than their base is in question.
    """

    aux_hidden_state_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool
    final_norm: bool
    rope_theta: float
    rope_parameters: dict[str, Any] | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes().items())

    def changes(self) -> dict[str, Any]:
        changes = self._asdict() | {
            "aux_hidden_state_layer_ids": self.aux_hidden_state_layer_ids and list(self.aux_hidden_state_layer_ids)
        }
        if self.rope_parameters is not None:
            del changes["rope_theta"]
        return {name: value for name, value in changes.items() if value is not None}


class Score(NamedTuple):
    """How often a reading's drafts are the target's own choice.

    Attributes:
        reading: what was scored.
        agreement: a fraction for each draft step.
        hits: bool, over all positions and steps; the same positions for every reading.
    """

    interpretation: Interpretation
    agreement: tuple[float, ...]
    hits: torch.Tensor

    @property
    def mean(self) -> float:
        return float(self.hits.float().mean())


@dataclass(frozen=True)
class SelfCheck:
    """Scores of all readings, best first.

    Attributes:
        scores: one a reading.
        current: the reading that loading chose.
    """

    scores: tuple[Score, ...]
    current: Interpretation

    @property
    def best(self) -> Score:
        return self.scores[0]

    @property
    def conclusive(self) -> bool:
        """Whether the best reading beats the current one by more than twice the noise of a sign test."""
        current = next(score for score in self.scores if score.interpretation == self.current)
        won = int((self.best.hits & ~current.hits).sum())
        lost = int((current.hits & ~self.best.hits).sum())
        return won - lost > 2 * (won + lost) ** 0.5

    @property
    def verdict(self) -> str:
        if not self.conclusive:
            return f"the current reading stands ({self.current}): no other is clearly better."
        current = self.current.changes()
        changed = {
            name: value for name, value in self.best.interpretation.changes().items() if current.get(name) != value
        }
        keywords = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        return f"the weights were trained for another reading; pass {keywords} to AutoDrafter.from_pretrained."


def interpretations_of(
    config: Eagle3Config, aux_hidden_state_layer_ids: list[int], num_layers: int, target_rope: dict[str, Any]
) -> Iterator[Interpretation]:
    """Every reading that a published checkpoint of this configuration might mean, the current one first.

    Args:
        config: the drafter's.
        taps: boundaries it taps at present, ascending.
        num_layers: of the target. Boundaries one lower and one higher are tried where they exist.
        target_rope: RoPE parameters of the target, also by type of layer. A drafter that was trained with their scaling
            may not say so.
    """
    shifted = [tuple(tap + shift for tap in aux_hidden_state_layer_ids) for shift in (0, 1, -1)]
    layer_ids = (
        [found for found in shifted if found[0] >= 0 and found[-1] <= num_layers]
        if aux_hidden_state_layer_ids
        else [None]
    )
    own, theirs = config.rope_parameters, list(rope_by_layer_type(target_rope).values()) or [target_rope]
    bases = [float(rope.get("rope_theta", DEFAULT_ROPE_THETA)) for rope in theirs]
    ropes: list[tuple[float, dict[str, Any] | None]] = [
        (theta, None) for theta in dict.fromkeys((own["rope_theta"], DEFAULT_ROPE_THETA, *bases))
    ]
    for rope, base in zip(theirs, bases, strict=True):
        if rope.get("rope_type", "default") not in {own["rope_type"], "default", *LENGTH_DEPENDENT_ROPE}:
            ropes.append((base, dict(rope)))
    residuals = (config.norm_before_residual, not config.norm_before_residual)
    # Nothing is fed back where all tokens are drafted in one pass.
    feedbacks = (config.norm_output, not config.norm_output)[: 1 if config.parallel_drafting else 2]
    # Only SpecForge's EAGLE-3 files may hold a final norm that is not to be applied.
    is_optional = config.final_norm and config.dialect == SPECFORGE and not isinstance(config, PEagleConfig)
    finals = (True, False) if is_optional else (config.final_norm,)
    for layer_id, residual, feedback, final, (theta, rope) in product(layer_ids, residuals, feedbacks, finals, ropes):
        yield Interpretation(layer_id, residual, feedback, final, theta, rope)


def reread(drafter: Eagle3Drafter, target: PreTrainedModel, interpretation: Interpretation) -> Eagle3Drafter:
    """The same weights, not copied, under another reading, bound to `target`."""
    settings = drafter.config.to_dict() | interpretation.changes()
    if interpretation.rope_parameters is None:
        theta = settings.pop("rope_theta")
        settings["rope_parameters"] = drafter.config.rope_parameters | {"rope_theta": theta}
    config = type(drafter.config).from_dict(settings)
    with torch.device("meta"):
        other = type(drafter)(config)
    weights = drafter.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()}, assign=True)
    other.rotary_emb = rotary_embedding(config).to(drafter.device)
    other.bind(target)
    return other.eval()


@torch.no_grad()
def self_check(
    drafter: Eagle3Drafter, target: PreTrainedModel, input_ids: torch.Tensor, num_new_tokens: int = 128
) -> SelfCheck:
    """Score every reading of a bound drafter on a prompt and the target's own greedy continuation of it.

    The target runs once over the text. Each reading then drafts from every position, `NUM_STEPS` tokens deep, and is
    scored by how often its first choice is the target's.

    Args:
        drafter: bound to `target`.
        target: in eval mode.
        input_ids: `[1, n]` int64 prompt.
        num_new_tokens: length of the continuation.
    """
    input_ids = input_ids.to(target.device)
    text = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=num_new_tokens, do_sample=False
    )
    num_layers = len(decoder_layers(target))
    target_rope = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    interpretations = list(
        interpretations_of(drafter.config, drafter.aux_hidden_state_layer_ids, num_layers, target_rope)
    )
    layer_ids = sorted(
        {layer_id for interpretation in interpretations for layer_id in interpretation.aux_hidden_state_layer_ids or ()}
    )
    with AuxHiddenStateRecorder(target, layer_ids, last_hidden_state=drafter.reads_last_hidden_state) as recorder:
        choices = target(text, use_cache=False).logits[0].argmax(-1)
        aux_hidden_states = recorder.aux_hidden_states
    width = drafter.config.target_hidden_size
    recorded = dict(zip(layer_ids, aux_hidden_states.split(width, dim=-1), strict=True)) if layer_ids else {}
    scores = []
    for interpretation in interpretations:
        chosen = (
            aux_hidden_states
            if interpretation.aux_hidden_state_layer_ids is None
            else torch.cat([recorded[tap] for tap in interpretation.aux_hidden_state_layer_ids], dim=-1)
        )
        scores.append(_score(reread(drafter, target, interpretation), interpretation, text, chosen, choices))
    ordered = sorted(scores, key=lambda score: -score.mean)
    return SelfCheck(tuple(ordered), interpretations[0])


def _score(
    drafter: Eagle3Drafter,
    interpretation: Interpretation,
    text: torch.Tensor,
    aux_hidden_states: torch.Tensor,
    choices: torch.Tensor,
) -> Score:
    """Score one reading. `choices` is `[S]`: the target's most likely token after each of the `[1, S]` tokens."""
    device = drafter.device
    steps = drafter(text.to(device), aux_hidden_states.to(device), num_steps=NUM_STEPS)
    hits = []
    for step, logits in enumerate(steps):
        drafted = logits[0].argmax(-1)
        drafted = drafted if drafter.target_ids is None else drafter.target_ids[drafted]
        # At step s slot p drafts the token at position p + 2 + s, the target's choice at position p + 1 + s.
        wanted = choices[step + 1 :].to(device)
        hits.append((drafted[: len(wanted)] == wanted).cpu())
    return Score(interpretation, tuple(float(hit.float().mean()) for hit in hits), torch.cat(hits))
