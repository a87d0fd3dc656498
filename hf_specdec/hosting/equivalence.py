"""The equivalence check: runs the target to find out whether an engine generates what plain `generate()` does.

A configuration does not tell what a class does with masks, caches and windows. So before an engine first runs a target,
it generates a few tokens, with drafts that are partly wrong, and its logits are compared with those of plain
`generate()`. The outcome is kept for the class and its configuration.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.layer_kinds import Use, first_reason
from ..calls.call import Call
from ..calls.first_pass import bounds_steps, for_static_engine, inputs_besides_tokens
from ..calls.kv_transfer import run_as_given
from ..calls.prompts import read_prompts
from ..config import DrafterConfig
from ..drafters.base import Drafter
from ..drafters.none import NoDrafter
from ..engine.static_engine import decode
from ..errors import failure_of
from ..graphs.buckets import useful_drafts
from ..graphs.cuda_graphs import on_device
from ..host.caches import OUTPUT_NAME, given_cache, is_of_caller
from ..host.generation import mask_length
from ..kernels.types import Proposal, VerificationResult
from ..modules.module_hooks import hooks_of, without_hooks
from ..modules.patch import engine as running_engine
from ..modules.signature import Identity, looked_at_once, signature_of
from ..patching.mask_rules import ordinary_prompts, why_not_kept, why_not_rules
from ..patching.masked_attention import why_not_masked
from ..patching.support import (
    cache_name,
    configured_layers,
    parts,
    stated_positions,
    uses_attention_interface,
    why_not_supported,
    why_not_used,
)
from ..sampling.randomness import Randomness
from ..state import DecodeState
from ..stock.compared_texts import (
    EXACT_LIMIT,
    LARGEST_LIMIT,
    NUM_NEW_TOKENS,
    ROUNDED_LIMIT,
    Generated,
    Inputs,
    PlainFails,
    difference_of,
    few_tokens,
    generate_greedily,
    is_exact_arithmetic,
    limit_of,
    limit_of_rounding,
    outcome_of,
    plain_texts,
    why_not_separate_rows,
)
from ..stock.separate_rows import call_of_row, why_not_separate
from ..stock.stock_engine import assist

logger = logging.getLogger(__name__)

NUM_DRAFT_TOKENS = 3
# Of five drafts the second and the fifth are wrong, so rounds accept none, some and all of them.
WRONG_DRAFTS, PERIOD = (1, 4), 5

# Prompt lengths of a batch whose bits are compared with those of its first row alone: the longest one first.
INVARIANT_LENGTHS = (150, 7, 33) * 3

# Inputs with a column for each token; generated tokens get the values of text.
_TOKEN_TYPES = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
_GIVEN_WITH_EVERY_TOKEN = "are read with every token, also in rounds"


class ScriptedDrafter(Drafter):
    """Drafts known `answers` `[B, n]` int64 to prompts of `lengths`, with wrong tokens at known positions.

    `packs_prompts` tells whether prompts are packed if the target allows it.
    """

    config_class = DrafterConfig

    def __init__(
        self, target: PreTrainedModel, answers: torch.Tensor, lengths: Sequence[int], packs_prompts: bool = False
    ):
        super().__init__(DrafterConfig(vocab_size=target.config.get_text_config().vocab_size))
        self.configure(num_assistant_tokens=NUM_DRAFT_TOKENS, draft_probs=False)
        columns = torch.arange(answers.shape[1], device=answers.device)
        is_wrong = torch.isin(columns % PERIOD, torch.tensor(WRONG_DRAFTS, device=answers.device))
        self._answers = torch.where(is_wrong, (answers + 1) % self.config.vocab_size, answers)
        self._lengths = torch.tensor(lengths, device=answers.device)
        self._target_config = target.config
        self.packs_prompts = packs_prompts

    @property
    def device(self) -> torch.device:
        return self._answers.device

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        steps = torch.arange(state.num_draft_tokens, device=self.device)
        at = (state.lengths.to(self.device) - self._lengths)[:, None] + steps
        return Proposal(self._answers.gather(1, at.clamp(0, self._answers.shape[1] - 1)), None)


def _generate(
    model: PreTrainedModel, inputs: Inputs, count: int, drafter: Drafter, engine: str, by_target: bool = False
) -> Generated:
    """`generate_greedily` on an engine, without the checks of a user's call; with `by_target` the target itself runs
    prompts, see `first_pass`."""

    def run(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=None, **given):
        given.pop("synced_gpus", None)
        mask = given.get("attention_mask")
        mask = None if mask is None else mask.cpu()
        cache = given_cache(given) if configured_layers(model).knows_length else None
        call = Call(
            model=model,
            drafter=drafter,
            prompts=read_prompts(input_ids.long(), mask, mask_length(generation_config), cache),
            processors=logits_processor,
            criteria=stopping_criteria,
            config=generation_config,
            num_draft_tokens=drafter.num_own_draft_tokens,
            randomness=Randomness(),
            cache=cache if is_of_caller(cache) else None,
            runs_once=True,
        )
        with on_device(model.device), running_engine(), looked_at_once():
            if engine == "stock":
                return assist(inputs_tensor, given, call)
            prepared = for_static_engine(call, given, by_target)
            if isinstance(prepared, str):
                raise ValueError(prepared)
            return decode(prepared[0])

    return generate_greedily(model, inputs, count, custom_generate=run)


def _difference(
    model: PreTrainedModel, inputs: Inputs, expected: Generated, drafter: Drafter, engine: str, by_target: bool = False
) -> float | str:
    """`difference_of` an engine's output and what is `expected`, or the error that the engine raises."""
    try:
        generated = _generate(model, inputs, expected.tokens.shape[1], drafter, engine, by_target)
    except Exception as error:
        return failure_of(error)
    return difference_of(generated, expected, is_exact_arithmetic(model, expected.logits))


def why_not_equivalent(
    model: PreTrainedModel, engine: str, prompts_by_target: bool = False, is_padded: bool = True
) -> str | None:
    """The reason why `engine`, `"static"` or `"stock"`, does not generate what plain `generate()` does; None if it
    does.

    The first call for a class and configuration runs the model on a few tokens.

    Args:
        prompts_by_target: whether the target itself runs the prompts on the static engine, see `first_pass`.
        is_padded: whether rows must equal what plain `generate()` generates with their padding, where that matters.
    """

    def why_not(is_padded: bool) -> str | None:
        case = engine, prompts_by_target, is_padded
        return outcome_of(model, case, lambda: _compare(without_hooks(model), *case))

    outcome = why_not(True)
    if outcome is None or is_padded or engine == "stock" or why_not_separate_rows(model) is None:
        return outcome
    return why_not(False)


def _compare(model: PreTrainedModel, engine: str, prompts_by_target: bool, is_padded: bool) -> str | None:
    """Compare `engine` with plain `generate()`: one row, and a padded batch if the engine runs rows together."""
    count, (batch, alone, last) = NUM_NEW_TOKENS[engine], few_tokens(model)
    plain_alone, plain = plain_texts(model, count, alone, batch)
    is_exact = is_exact_arithmetic(model, plain.logits)
    limit = limit_of(plain_alone, plain, is_exact)
    if is_exact and limit > ROUNDED_LIMIT:
        logger.warning(
            "hf_specdec: %s computes in float32, but without a drafter, too, logits of a row are others in a batch "
            "than alone (by %.0f %% of their spread or more), as where activations are quantised by one scale for all "
            "tokens. Texts with a drafter may differ from those without one where two tokens are nearly as likely.",
            type(model).__name__,
            10 * limit,
        )
    if not is_padded:
        rows = plain_alone, *plain_texts(model, count, last)
        plain = Generated(torch.cat([row.tokens for row in rows]), torch.cat([row.logits for row in rows], dim=1))
    # The stock engine runs rows one by one; packed rows run as one row.
    cases = [(alone, plain_alone, False), (batch, plain, False), (batch, plain, True)]
    is_packed = not prompts_by_target and why_not_used(model, Use.PACKING) is None
    allowed = limit
    for given, expected, packs in cases[: 1 if engine == "stock" else 2 + is_packed]:
        lengths = given["attention_mask"].sum(dim=1).tolist()
        drafter = ScriptedDrafter(model, expected.tokens, lengths, packs)
        difference = _difference(model, given, expected, drafter, engine, prompts_by_target)
        if isinstance(difference, str):
            return f"it fails there on a few tokens ({difference})"
        if not difference <= allowed and not is_exact and is_padded:
            allowed = max(allowed, limit_of_rounding(model, given, expected))
        if not difference <= allowed:
            is_batch = len(lengths) > 1
            # Rows for which padding changes what plain generate() computes cannot be right with padding.
            padding = why_not_separate_rows(model) if is_batch and is_padded else None
            if padding is not None:
                return f"{padding}; expected prompts of the same length, or one row"
            what = "a padded batch" if is_batch else "one row"
            return f"its logits for {what} of a few tokens differ there from plain generate()'s by {difference:.2g}"
    if engine == "stock":
        return _why_not_steps(model)
    return (
        first_reason(part.why_not_same(model, limit) for part in parts(model))
        or (None if uses_attention_interface(model) else why_not_masked(model, limit))
        or why_not_rules(model, is_causal=not prompts_by_target)
    )


def _why_not_steps(model: PreTrainedModel) -> str | None:
    """A known reason why `model` computes a block of drafts differently from single tokens that a few tokens may not
    show; None if there is none."""
    with suppress(Exception):  # a model may raise anything where its layers run under hooks
        if configured_layers(model).keeps_states and why_not_supported(model) is None and bounds_steps(model):
            return (
                "its recurrent layers bound the time steps of several tokens at once, such as a block of drafts, and "
                "not those of single tokens"
            )
    return None


def why_not_equivalent_with(
    call: Call, model_kwargs: Mapping[str, Any], following: Mapping[str, Any], engine: str = "static"
) -> str | None:
    """`why_not_equivalent` for a call with inputs besides tokens, such as images, or of a model with forward hooks;
    None for other calls.

    It is not known what a model takes for images, nor what hooks do with a block of drafts. So the first such call is
    run itself, for a few tokens. If plain `generate()` fails, the inputs may be wrong, and that outcome is not kept.

    Args:
        model_kwargs: the call's inputs as prepared by `generate()`.
        following: model inputs of the first new token, see `first_pass.inputs_after_prompts`.
    """
    model, besides = call.model, inputs_besides_tokens(model_kwargs)
    hooks = hooks_of(signature_of(model).hooked)
    if not (besides or hooks):
        return None
    inputs = f"the call has model inputs besides tokens: {', '.join(sorted(besides))}"
    what = ", and ".join([inputs] * bool(besides) + ["modules of the target have forward hooks"] * bool(hooks))
    # Inputs that every token gets, except types of tokens: generated tokens are text.
    repeated = {name: value for name, value in following.items() if name in besides and name not in _TOKEN_TYPES}
    others = [name for name, value in repeated.items() if isinstance(value, (Mapping, list, tuple))]
    if others:
        return f"{what}, of which {', '.join(others)} {_GIVEN_WITH_EVERY_TOKEN}"
    # Hooks may treat a longer block differently.
    num_drafts = useful_drafts(call.num_draft_tokens, call.max_new_tokens, is_kept=False) if hooks else 0
    most_drafts = max(num_drafts, NUM_DRAFT_TOKENS)
    # Tensors by name only, other inputs also by value.
    values = tuple(
        (name, None if isinstance(value, (torch.Tensor, Mapping, list, tuple)) else repr(value))
        for name, value in sorted(besides.items())
    )
    hooked = (Identity(model), most_drafts, *hooks) if hooks else ()
    # The stock engine runs a row with its padding.
    is_padded = engine == "stock" and any(call.prompts.padding)

    def find() -> str | None:
        try:
            read = _read_with_every_token(call, model_kwargs, following, repeated)
            # There are no more drafts than the text has tokens left.
            count = max(NUM_NEW_TOKENS[engine], most_drafts)
            expected = generate_greedily(model, _given_again(call, model_kwargs), count)
        except Exception as error:
            raise PlainFails(f"{what}, on which plain generate() fails ({failure_of(error)})") from error
        if read:
            return f"{what}, of which {', '.join(read)} {_GIVEN_WITH_EVERY_TOKEN}"
        drafter = ScriptedDrafter(model, expected.tokens, call.prompts.lengths)
        drafter.configure(num_assistant_tokens=most_drafts)
        difference = _difference(model, _given_again(call, model_kwargs), expected, drafter, engine)
        if isinstance(difference, str):
            return f"{what}, on which it fails there ({difference})"
        if difference <= (EXACT_LIMIT if is_exact_arithmetic(model, expected.logits) else LARGEST_LIMIT):
            return None
        return f"{what}, after which logits differ there from plain generate()'s by {difference:.2g}"

    return outcome_of(model, (engine, is_padded, hooked, values), find)


def _given_again(call: Call, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {"input_ids": call.prompts.input_ids, **inputs_besides_tokens(model_kwargs)}
    if model_kwargs.get("attention_mask") is not None:
        inputs["attention_mask"] = model_kwargs["attention_mask"]
    if call.prompts.cached:
        inputs[OUTPUT_NAME] = copy.deepcopy(given_cache(model_kwargs))
    return inputs


def _read_with_every_token(
    call: Call, model_kwargs: Mapping[str, Any], following: Mapping[str, Any], repeated: Mapping[str, Any]
) -> list[str]:
    """Names of the inputs that the target also reads with new tokens: other values change its logits, or fail."""
    tensors = {name: value for name, value in repeated.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return []
    model, cache = call.model, DynamicCache(config=call.model.config.get_text_config(decoder=True))
    if call.prompts.cached:
        cache = copy.deepcopy(given_cache(model_kwargs))
    run_as_given(model, call.prompts.input_ids, call.config, model_kwargs, cache)

    def logits(**changed: torch.Tensor) -> torch.Tensor:
        inputs = {**following, **changed, cache_name(model): copy.deepcopy(cache), "return_dict": True}
        return model(**inputs).logits.float()

    expected, read = logits(), []
    limit = EXACT_LIMIT if is_exact_arithmetic(model, expected) else ROUNDED_LIMIT
    for name, value in tensors.items():
        try:
            is_read = float((logits(**{name: _changed(value)}) - expected).norm() / expected.norm()) > limit
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the changed value does not fit
            is_read = True
        read += [name] * is_read
    return read


def _changed(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.bool:
        return ~values
    if not values.is_floating_point():
        return values + 1
    return values + torch.linspace(1, 2, values.numel()).to(values).view_as(values)


def check_stock(call: Call, model_kwargs: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless transformers' assisted generation of `call` gives what plain `generate()` does.

    `model_kwargs` are the model inputs as prepared by `generate()`.
    """
    model, name = call.model, type(call.model).__name__
    obstacle = why_not_kept(model, call.config.max_length - 1) or why_not_equivalent(model, "stock")
    if obstacle is None and (separate := why_not_separate(call, model_kwargs)) is not None:
        raise ValueError(
            f"{name} runs on the stock engine ({call.reason}), where the rows of a batch cannot run one after the "
            f"other: {separate}. Generate row by row, or without assistant_model."
        )
    if obstacle is None:
        rows = (call_of_row(call, model_kwargs, row) for row in range(call.batch))
        obstacle = first_reason(why_not_equivalent_with(*row, {}, "stock") for row in rows)
    if obstacle is not None:
        raise ValueError(
            f"{name} cannot generate with a drafter: neither on the static engine ({call.reason}), nor in "
            f"transformers' own assisted generation ({obstacle}). Generate without assistant_model."
        )


def why_not_batch_invariant(model: PreTrainedModel) -> str | None:
    """The reason why logits of `model` do not have the same bits alone and in a batch; None if they do.

    The first call for a class and configuration runs a row alone without drafts, and in a padded batch with drafts.

    Raises:
        ValueError: an operation is not known to be batch-invariant, see `patching.batch_invariance`.
    """
    return outcome_of(model, "batch-invariant", lambda: _compare_bits(without_hooks(model)), references=False)


def _compare_bits(model: PreTrainedModel) -> str | None:
    count = NUM_NEW_TOKENS["static"]
    lengths = [min(length, (stated_positions(model) or length + count) - count) for length in INVARIANT_LENGTHS]
    inputs = ordinary_prompts(model, lengths)
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    expected = _generate(model, first, count, NoDrafter(model, batch_invariant=True), "static")
    drafter = ScriptedDrafter(model, expected.tokens.expand(len(lengths), -1), lengths)
    generated = _generate(model, inputs, count, drafter.configure(batch_invariant=True), "static")
    if torch.equal(generated.logits[:, 0], expected.logits[:, 0]):
        return None
    share = (generated.logits[:, 0] != expected.logits[:, 0]).double().mean()
    return (
        f"{share:.0%} of the logits of {type(model).__name__} have other bits in a batch of a few tokens than alone on "
        "this device; expected the same"
    )
