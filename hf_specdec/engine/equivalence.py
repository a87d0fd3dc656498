"""Checks of a target by running it: what a class of models does with masks, caches and windows is not to be believed.

A target is checked when an engine first runs it, over a few tokens: what it says with drafts of which some are wrong is
compared, by logits, with what plain `generate()` says. The outcome is kept for its class and configuration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import ops
from ..config import DrafterConfig
from ..drafters.base import Drafter
from ..errors import first_line
from ..kernels.types import Proposal, VerificationResult
from ..patching.attention import registered_attention
from ..patching.support import settings_of
from ..state import DecodeState

# The tokens of the prompts; rows of unequal length show whether padding is left out. And those of each answer: two
# rounds show all that a static cache is used for, while the caches of the stock engine are cropped after every one.
PROMPT_LENGTHS = (7, 4)
NUM_NEW_TOKENS = {"static": 5, "stock": 8}
NUM_DRAFT_TOKENS = 3
# Of five drafts the second and the fifth are wrong: rounds accept none, some and all of them.
WRONG_DRAFTS, PERIOD = (1, 4), 5

# How far logits may be apart, as a share of their spread: what rounding makes of them is less, and what a wrong mask
# makes of them is more. Where the target's own logits differ by rounding, ten times that; at most the third.
EXACT_LIMIT, ROUNDED_LIMIT, LARGEST_LIMIT = 1e-3, 0.05, 0.25

PROBE_NAME = "hf_specdec_probe"
# A position beyond all windows.
_FAR = 1 << 30

_outcomes: dict[Hashable, str | None] = {}
_outcomes_lock = threading.Lock()


def why_not_equivalent(model: PreTrainedModel, engine: str) -> str | None:
    """The reason why `engine`, `"static"` or `"stock"`, does not say what plain `generate()` of `model` does, or None.

    The first call for a class and configuration runs the model, on a few tokens.
    """
    key = (engine, *_kind_of(model))
    if key not in _outcomes:
        with torch.no_grad(), ops.references():
            outcome = _compare(model, engine) or (_why_not_windows(model) if engine == "static" else None)
        with _outcomes_lock:
            _outcomes[key] = outcome
    return _outcomes[key]


def _kind_of(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """What an outcome is kept for: the class, its configurations, data type and device, how its inputs are prepared."""
    prepare = model.prepare_inputs_for_generation
    return type(model), getattr(prepare, "__func__", prepare), model.dtype, model.device.type, settings_of(model.config)


class _ScriptedDrafter(Drafter):
    """Drafts what rows continue with, wrong at known places.

    Args:
        target: to bind to.
        engine: to run.
        answers: `[B, n]` int64.
        lengths: tokens of each prompt.
    """

    config_class = DrafterConfig
    is_equivalence_check = True

    def __init__(self, target: PreTrainedModel, engine: str, answers: torch.Tensor, lengths: tuple[int, ...]):
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


def _compare(model: PreTrainedModel, engine: str) -> str | None:
    """Compare `engine` with plain `generate()`: a row alone, and where the engine takes batches a padded one."""
    inputs = _prompts(model)
    alone = {name: tensor[:1] for name, tensor in inputs.items()}
    count = NUM_NEW_TOKENS[engine]
    try:
        plain_alone = _say(model, alone, count)
        plain = _say(model, inputs, count)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model may raise
        return f"plain generate() fails on a few tokens ({type(error).__name__}: {first_line(error)})"
    is_exact = model.dtype == torch.float32 and not (
        model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    )
    noise = _difference(plain_alone, _Said(plain.tokens[:1], plain.logits[:, :1]), is_exact)
    limit = max(EXACT_LIMIT if is_exact else ROUNDED_LIMIT, min(10 * noise, LARGEST_LIMIT))
    for given, expected in ((alone, plain_alone), (inputs, plain))[: 1 if engine == "stock" else 2]:
        lengths = PROMPT_LENGTHS[: len(expected.tokens)]
        drafter = _ScriptedDrafter(model, engine, expected.tokens, lengths)
        try:
            said = _say(model, given, count, assistant_model=drafter)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it fails there on a few tokens ({type(error).__name__}: {first_line(error)})"
        difference = _difference(said, expected, is_exact)
        if not difference <= limit:
            what = "a padded batch" if len(lengths) > 1 else "one row"
            return f"its logits for {what} of a few tokens differ there from plain generate()'s by {difference:.2g}"
    return None


def _prompts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Left-padded prompts of ordinary tokens."""
    size = model.config.get_text_config().vocab_size
    special = {
        value
        for config in (model.config, model.config.get_text_config(), model.generation_config)
        for name, value in vars(config).items()
        if "token" in name and isinstance(value, int)
    }
    width = max(PROMPT_LENGTHS)
    ids = torch.zeros(len(PROMPT_LENGTHS), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    # Neighbours in a vocabulary are often alike; these are spread over it.
    ordinary = (token for token in (number * 7919 % size for number in range(1, 10 * size)) if token not in special)
    for row, length in enumerate(PROMPT_LENGTHS):
        ids[row, -length:] = torch.tensor([next(ordinary) for _ in range(length)])
        mask[row, -length:] = 1
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


class _Said(NamedTuple):
    """New tokens `[B, n]` int64 and the logits `[n, B, V]` that they were chosen by."""

    tokens: torch.Tensor
    logits: torch.Tensor


def _say(model: PreTrainedModel, inputs: dict[str, torch.Tensor], count: int, **options: Any) -> _Said:
    """The `count` tokens that `model` says greedily, whatever its own generation settings are."""
    names = [name for name in vars(model.generation_config) if not name.startswith("_")]
    names = [name for name in names if "assistant" not in name and "lookbehind" not in name]
    settings = dict.fromkeys(names) | {
        name: value for name, value in model.generation_config._get_default_generation_params().items() if name in names
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
    return _Said(out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits))


def _difference(said: _Said, expected: _Said, is_exact: bool) -> float:
    """How far logits are apart as a share of their spread, where they follow the same tokens.

    It is the largest of all steps and rows if computing `is_exact`; otherwise, where rounding may send a token to other
    experts, the median.
    """
    # Logits count up to the first token of a row that differs, which may be a tie.
    agree = (said.tokens == expected.tokens).long().cumprod(dim=1)
    counts = torch.cat([torch.ones_like(agree[:, :1]), agree[:, :-1]], dim=1).bool().t()
    ours, theirs = (
        logits.double() - logits.double().mean(-1, keepdim=True) for logits in (said.logits, expected.logits)
    )
    if not theirs.isfinite().all():
        return 0.0
    shares = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12))[counts]
    return float(shares.max() if is_exact else shares.median())


class _Mask(NamedTuple):
    """A mask, the function of (row, head, query, key) that made it, and the window that this was said to have."""

    tensor: torch.Tensor
    function: Callable[..., Any]
    window: int | None


class _Attention(NamedTuple):
    """How a layer called its attention: the window that it handed over, and its mask if transformers made it."""

    window: int | None
    mask: _Mask | None


class _Probe(threading.local):
    """What the probe's attention and mask functions have been called with in this thread."""

    def __init__(self) -> None:
        self.calls: list[_Attention] = []
        self.masks: list[_Mask] = []


_probe = _Probe()


def _probing_attention(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
    made = next((mask for mask in _probe.masks if mask.tensor is attention_mask), None)
    _probe.calls.append(_Attention(sliding_window, made))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _probing_mask(*args, mask_function=None, local_size=None, **kwargs):
    mask = eager_mask(*args, mask_function=mask_function, **kwargs)
    _probe.masks.append(_Mask(mask, mask_function, local_size))
    return mask


ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probing_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probing_mask)


def _why_not_windows(model: PreTrainedModel) -> str | None:
    """The reason why masks show queries other keys than the windows do that attention is handed; None if they do not.

    The few tokens of the comparison are inside any window.
    """
    inputs = _prompts(model)
    _probe.__init__()
    try:
        with registered_attention(model, PROBE_NAME):
            model(**inputs, use_cache=False)
        calls = list(_probe.calls)
    finally:
        _probe.__init__()
    for number, call in enumerate(calls):
        if call.mask is not None and not _shows_window(call.mask, call.window):
            handed = "no window" if call.window is None else f"a window of {call.window}"
            return f"the mask of attention {number} shows other tokens than its attention is told to ({handed})"
    return None


def _shows_window(mask: _Mask, window: int | None) -> bool:
    """Whether `mask` is a causal one with `window`, all if None."""

    def shows(query: int, key: int) -> bool:
        expected = key <= query and (window is None or key > query - window)
        return bool(mask.function(0, 0, torch.tensor(query), torch.tensor(key))) == expected

    near = range(min(PROMPT_LENGTHS))
    edges = (0,) if window is None else (_FAR - window + 1, _FAR - window)
    if not all(shows(query, key) for query in near for key in near):
        return False
    try:
        return all(shows(_FAR, key) for key in (_FAR + 1, _FAR, *edges))
    except IndexError:  # a function that looks tokens up, such as those of images, knows the given ones only
        return mask.window == window
