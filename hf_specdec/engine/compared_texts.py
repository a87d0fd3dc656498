"""Texts of a few tokens that are compared: what is generated with drafts that are known, and how far logits differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..config import DrafterConfig
from ..drafters.base import Drafter
from ..host.generation import GenerationMixin, default_settings
from ..kernels.types import Proposal, VerificationResult
from ..state import DecodeState

NUM_DRAFT_TOKENS = 3
# Of five drafts the second and the fifth are wrong: rounds accept none, some and all of them.
WRONG_DRAFTS, PERIOD = (1, 4), 5

# Largest difference of logits, relative to their spread: rounding errors are below, the effect of a wrong mask is
# above. In reduced precision ten times the target's own difference between batch sizes is allowed, but at most the
# third number.
EXACT_LIMIT, ROUNDED_LIMIT, LARGEST_LIMIT = 1e-3, 0.05, 0.25


class ScriptedDrafter(Drafter):
    """Drafts the known continuations of the prompts, with wrong tokens at known positions.

    Args:
        target: to bind to.
        engine: to run.
        answers: `[B, n]` int64, the continuations.
        lengths: tokens of each prompt.

    Attributes:
        packs_prompts: whether prompts are packed where the target allows it.
    """

    config_class = DrafterConfig
    is_equivalence_check = True
    packs_prompts = False

    def __init__(self, target: PreTrainedModel, engine: str, answers: torch.Tensor, lengths: Sequence[int]):
        super().__init__(DrafterConfig(vocab_size=target.config.get_text_config().vocab_size))
        self.configure(num_assistant_tokens=NUM_DRAFT_TOKENS, draft_probs=False, engine=engine)
        columns = torch.arange(answers.shape[1], device=answers.device)
        is_wrong = torch.isin(columns % PERIOD, torch.tensor(WRONG_DRAFTS, device=answers.device))
        self._answers = torch.where(is_wrong, (answers + 1) % self.config.vocab_size, answers)
        self._lengths = torch.tensor(lengths, device=answers.device)
        self._target_config = target.config

    @property
    def device(self) -> torch.device:
        return self._answers.device

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        steps = torch.arange(state.num_draft_tokens, device=self.device)
        at = (state.lengths.to(self.device) - self._lengths)[:, None] + steps
        return Proposal(self._answers.gather(1, at.clamp(0, self._answers.shape[1] - 1)), None)


def autocast_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The dtype of matrix products under autocast on the device of `model`; None without autocast."""
    kind = model.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def is_exact_arithmetic(model: PreTrainedModel, logits: torch.Tensor) -> bool:
    """Whether equal computations give equal logits up to rounding errors of float32.

    Args:
        model: the target.
        logits: of it. Its `forward` may round what it computes, whatever the dtype of its weights: mixed precision of
            trainers is a `forward` under autocast.
    """
    if autocast_dtype(model) not in (None, torch.float32):
        return False
    if any(torch.equal(logits, logits.to(dtype).to(logits)) for dtype in (torch.bfloat16, torch.float16)):
        return False
    return model.dtype == torch.float32 and not (model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32)


def limit_of(alone: Generated, batch: Generated, is_exact: bool) -> float:
    """The largest difference that is rounding, where `alone` is the first row of `batch`, which has no padding."""
    noise = difference_of(alone, Generated(batch.tokens[:1], batch.logits[:, :1]), is_exact)
    return max(EXACT_LIMIT if is_exact else ROUNDED_LIMIT, min(10 * noise, LARGEST_LIMIT))


class Generated(NamedTuple):
    """New tokens `[B, n]` int64 and the logits `[n, B, V]` that they were chosen from."""

    tokens: torch.Tensor
    logits: torch.Tensor


def put_together(*rows: Generated) -> Generated:
    """`rows` as one batch."""
    return Generated(torch.cat([row.tokens for row in rows]), torch.cat([row.logits for row in rows], dim=1))


def generate_greedily(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int, **options: Any) -> Generated:
    """`count` greedy tokens of `model`, whatever its own generation settings are."""
    names = [name for name in vars(model.generation_config) if not name.startswith("_")]
    names = [name for name in names if "assistant" not in name and "lookbehind" not in name]
    settings = dict.fromkeys(names) | {
        name: value for name, value in default_settings(model.generation_config).items() if name in names
    }
    settings |= {
        "max_length": None,
        "do_sample": False,
        "max_new_tokens": count,
        "return_dict_in_generate": True,
        "output_logits": True,
        "use_cache": True,
        "disable_compile": True,
    }
    settings.pop("transformers_version", None)
    out = GenerationMixin.generate(model, **inputs, **settings, **options)
    return Generated(out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits))


def difference_of(generated: Generated, expected: Generated, is_exact: bool) -> float:
    """Difference of logits relative to their spread, over the steps that follow the same tokens.

    The maximum over steps and rows if arithmetic `is_exact`; otherwise the median, as rounding may route a token to
    other experts. Where rounds are wrong, texts differ from the second step on, and the first step, which follows the
    prompt, is right: of an even number the larger one in the middle counts if it is no rounding.
    """
    # Logits are compared up to the first token that differs, which may be a tie.
    agree = (generated.tokens == expected.tokens).long().cumprod(dim=1)
    counts = torch.cat([torch.ones_like(agree[:, :1]), agree[:, :-1]], dim=1).bool().t()
    ours, theirs = (
        logits.double() - logits.double().mean(-1, keepdim=True) for logits in (generated.logits, expected.logits)
    )
    if not theirs.isfinite().all():
        return 0.0
    shares = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12))[counts]
    if is_exact:
        return float(shares.max())
    ordered = shares.sort().values
    larger = float(ordered[len(ordered) // 2])
    return larger if larger > LARGEST_LIMIT else float(shares.median())
