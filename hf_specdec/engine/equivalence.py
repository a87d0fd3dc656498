"""The equivalence check: whether an engine generates what plain `generate()` does, found by running the target.

What a class does with masks, caches and windows cannot be told from its configuration. So when an engine first runs a
target, it generates a few tokens with drafts of which some are wrong, and the logits are compared with those of plain
`generate()`. The outcome is kept for the class and its configuration.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from .. import ops
from ..drafters.none import NoDrafter
from ..errors import first_line
from ..host.caches import OUTPUT_NAME, given_cache
from ..patching.hidden_states import modules_of
from ..patching.length_rope import why_not_marked
from ..patching.mask_rules import PROMPT_LENGTHS, ordinary_prompts, why_not_rules
from ..patching.masked_attention import why_not_masked
from ..patching.module_hooks import hooks_of, without_hooks
from ..patching.packing import packs_prompts
from ..patching.support import (
    cache_name,
    has_recurrent_layers,
    length_limits,
    longest_window,
    settings_of,
    stated_positions,
    uses_attention_interface,
    why_not_supported,
)
from ..patching.variants import Identity, keep, variant_of
from .buckets import useful_drafts
from .compared_texts import (
    EXACT_LIMIT,
    LARGEST_LIMIT,
    NUM_DRAFT_TOKENS,
    ROUNDED_LIMIT,
    Generated,
    ScriptedDrafter,
    autocast_dtype,
    difference_of,
    generate_greedily,
    is_exact_arithmetic,
    limit_of,
    put_together,
)
from .first_pass import bounds_steps, inputs_besides_tokens, kept_rope_deltas
from .kv_transfer import run_as_given
from .prompts import Prompts
from .request import Request

logger = logging.getLogger(__name__)

# Numbers of new tokens: two rounds cover everything on a static cache; caches of the stock engine are cropped after
# every round, which takes more.
NUM_NEW_TOKENS = {"static": 5, "stock": 8}

# Lengths of the prompts of a batch whose bits are compared with those of its first row alone: the longest one first.
INVARIANT_LENGTHS = (150, 7, 33) * 3

# Inputs with a column for each token, of which generated ones are given those of text.
_TOKEN_TYPES = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
_GIVEN_WITH_EVERY_TOKEN = "are read with every token, also in rounds"

_outcomes: dict[Hashable, str | None] = {}


def why_not_equivalent(
    model: PreTrainedModel, engine: str, prompts_by_target: bool = False, is_padded: bool = True
) -> str | None:
    """The reason why `engine`, `"static"` or `"stock"`, does not generate what plain `generate()` does; None if it
    does.

    The first call for a class and configuration runs the model on a few tokens.

    Args:
        model: the target.
        engine: to check.
        prompts_by_target: whether the static engine lets the target itself run the prompts, see `first_pass`.
        is_padded: whether rows are to be what plain `generate()` generates with their padding, where that is not the
            same as without it.
    """
    outcome = _why_not_for(model, engine, prompts_by_target, True)
    if outcome is None or is_padded or engine == "stock" or why_not_separate_rows(model) is None:
        return outcome
    return _why_not_for(model, engine, prompts_by_target, False)


def _why_not_for(model: PreTrainedModel, engine: str, prompts_by_target: bool, is_padded: bool) -> str | None:
    """As `why_not_equivalent`, also where padding makes no difference."""
    key = (engine, prompts_by_target, is_padded, *_kind_of(model))
    if key in _outcomes:
        return _outcomes[key]
    try:
        with torch.no_grad(), ops.references(), kept_rope_deltas(model):
            checked = without_hooks(model)
            outcome = _compare(checked, engine, prompts_by_target, is_padded)
            if outcome is None and engine == "static":
                outcome = why_not_rules(checked, not prompts_by_target)
    except _PlainFails as error:
        return str(error)
    return keep(_outcomes, key, outcome)


class _PlainFails(Exception):
    """Plain `generate()` raised an error, in which case nothing is kept: the next time it may not."""

    def __init__(self, error: Exception):
        super().__init__(f"plain generate() fails on a few tokens ({type(error).__name__}: {first_line(error)})")


class CallWithInputs(NamedTuple):
    """A call with inputs besides tokens, or of a model whose modules have hooks.

    Attributes:
        model: the target.
        prompts, config: of the call.
        model_kwargs: its inputs as prepared by `generate()`.
        besides: those that are neither tokens nor replaced by the engine's own.
        following: what the model is given with the first new token, see `first_pass.inputs_after_prompts`.
        hooks: see `hooks_of`.
        engine: to check.
        num_draft_tokens: K of the call; hooks may treat a longer block differently.
    """

    model: PreTrainedModel
    prompts: Prompts
    config: GenerationConfig
    model_kwargs: Mapping[str, Any]
    besides: Mapping[str, Any]
    following: Mapping[str, Any]
    hooks: tuple[int, ...] = ()
    engine: str = "static"
    num_draft_tokens: int = NUM_DRAFT_TOKENS

    @classmethod
    def of(
        cls,
        request: Request,
        model_kwargs: Mapping[str, Any],
        besides: Mapping[str, Any],
        following: Mapping[str, Any],
        hooks: tuple[int, ...],
        engine: str = "static",
    ) -> CallWithInputs:
        """The call of `request`."""
        num_drafts = useful_drafts(request.num_draft_tokens, request.max_new_tokens, is_kept=False)
        given = request.model, request.prompts, request.config, model_kwargs
        return cls(*given, besides, following, hooks, engine, num_drafts)

    @property
    def most_drafts(self) -> int:
        """The largest K to check."""
        return max(self.num_draft_tokens if self.hooks else 0, NUM_DRAFT_TOKENS)

    @property
    def what(self) -> str:
        """What is to be checked about the call, as the beginning of a reason."""
        inputs = f"the call has model inputs besides tokens: {', '.join(sorted(self.besides))}"
        hooks = "modules of the target have forward hooks"
        return ", and ".join([inputs] * bool(self.besides) + [hooks] * bool(self.hooks))

    @property
    def repeated(self) -> dict[str, Any]:
        """The inputs that are given with every token, but for types of tokens, which are those of text then."""
        return {
            name: value for name, value in self.following.items() if name in self.besides and name not in _TOKEN_TYPES
        }

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What an outcome is kept for: the names of tensors, and what is not a tensor by value."""
        values = (
            (name, None if isinstance(value, (torch.Tensor, Mapping, list, tuple)) else repr(value))
            for name, value in sorted(self.besides.items())
        )
        hooked = (Identity(self.model), self.most_drafts, *self.hooks) if self.hooks else ()
        # The stock engine runs a row with the padding that it is given.
        is_padded = self.engine == "stock" and any(self.prompts.padding)
        return (self.engine, is_padded, hooked, *values, *_kind_of(self.model))


def why_not_equivalent_with(call: CallWithInputs) -> str | None:
    """As `why_not_equivalent` for calls with inputs besides tokens, such as images, and for hooks.

    What a model takes for images is not known, nor what hooks do with a block of drafts, of which they may change the
    last token only. So the first call with them is itself run, for a few tokens. If plain `generate()` fails, the
    inputs may be wrong, and nothing is kept of that.
    """
    what = call.what
    others = [name for name, value in call.repeated.items() if isinstance(value, (Mapping, list, tuple))]
    if others:
        return f"{what}, of which {', '.join(others)} {_GIVEN_WITH_EVERY_TOKEN}"
    key = call.key
    if key in _outcomes:
        return _outcomes[key]
    with torch.no_grad(), ops.references(), kept_rope_deltas(call.model):
        try:
            read = _read_with_every_token(call)
            expected = _generate_with(call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may raise anything
            return f"{what}, on which plain generate() fails ({type(error).__name__}: {first_line(error)})"
        if read:
            outcome = f"{what}, of which {', '.join(read)} {_GIVEN_WITH_EVERY_TOKEN}"
        else:
            outcome = _compare_with(call, expected, what)
    return keep(_outcomes, key, outcome)


def why_not_equivalent_row(request: Request, model_kwargs: Mapping[str, Any]) -> str | None:
    """As `why_not_equivalent_with` of the stock engine, for a call of one row with inputs besides tokens or hooks; None
    for others. `model_kwargs` as of `CallWithInputs`."""
    hooks, besides = hooks_of(modules_of(request.model)), inputs_besides_tokens(model_kwargs)
    if not hooks and not besides:
        return None
    return why_not_equivalent_with(CallWithInputs.of(request, model_kwargs, besides, {}, hooks, "stock"))


def _read_with_every_token(call: CallWithInputs) -> list[str]:
    """The names of inputs that `call.model` reads with new tokens, too, and not with the prompts only.

    With the first new token the model is given other values; what it reads changes its logits, or is an error.
    """
    tensors = {name: value for name, value in call.repeated.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return []
    model, cache = call.model, DynamicCache(config=call.model.config.get_text_config(decoder=True))
    if call.prompts.cached:
        cache = copy.deepcopy(given_cache(call.model_kwargs))
    run_as_given(model, call.prompts.input_ids, call.config, call.model_kwargs, cache)

    def logits(**changed: torch.Tensor) -> torch.Tensor:
        inputs = {**call.following, **changed, cache_name(model): copy.deepcopy(cache), "return_dict": True}
        return model(**inputs).logits.float()

    expected, read = logits(), []
    limit = EXACT_LIMIT if is_exact_arithmetic(model, expected) else ROUNDED_LIMIT
    for name, value in tensors.items():
        try:
            is_read = float((logits(**{name: _changed(value)}) - expected).norm() / expected.norm()) > limit
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it does not fit to something
            is_read = True
        read += [name] * is_read
    return read


def _changed(values: torch.Tensor) -> torch.Tensor:
    """`values` with every entry changed."""
    if values.dtype == torch.bool:
        return ~values
    if not values.is_floating_point():
        return values + 1
    return values + torch.linspace(1, 2, values.numel()).to(values).view_as(values)


def _generate_with(call: CallWithInputs, **options: Any) -> Generated:
    """A few greedy tokens after the prompts of `call`."""
    inputs = {"input_ids": call.prompts.input_ids, **call.besides}
    if call.model_kwargs.get("attention_mask") is not None:
        inputs["attention_mask"] = call.model_kwargs["attention_mask"]
    if call.prompts.cached:
        inputs[OUTPUT_NAME] = copy.deepcopy(given_cache(call.model_kwargs))
    # No more drafts are made than the text has tokens left.
    count = max(NUM_NEW_TOKENS[call.engine], call.most_drafts)
    return generate_greedily(call.model, inputs, count, **options)


def _compare_with(call: CallWithInputs, expected: Generated, what: str) -> str | None:
    """Compare the engine with plain `generate()`, which has generated `expected`; `what` begins the reason."""
    drafter = ScriptedDrafter(call.model, call.engine, expected.tokens, call.prompts.lengths)
    drafter.configure(num_assistant_tokens=call.most_drafts)
    try:
        generated = _generate_with(call, assistant_model=drafter)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{what}, on which it fails there ({type(error).__name__}: {first_line(error)})"
    is_exact = is_exact_arithmetic(call.model, expected.logits)
    difference = difference_of(generated, expected, is_exact)
    if difference <= (EXACT_LIMIT if is_exact else LARGEST_LIMIT):
        return None
    return f"{what}, after which logits differ there from plain generate()'s by {difference:.2g}"


def why_not_separate_rows(model: PreTrainedModel, is_padded: bool = True, keeps_padding: bool = False) -> str | None:
    """The reason why plain `generate()` of a row in a batch differs from that of the row alone; None if it does not.

    The first call for a class and configuration runs the model on a few tokens.

    Args:
        model: the target.
        is_padded: whether the row is padded in the batch.
        keeps_padding: whether it has its padding alone, too.
    """
    key = ("separate rows", is_padded, keeps_padding, *_kind_of(model))
    if key in _outcomes:
        return _outcomes[key]
    try:
        with torch.no_grad():
            compare = _compare_padded_rows if is_padded and keeps_padding else _compare_rows
            outcome = compare(without_hooks(model), is_padded)
    except _PlainFails as error:
        return str(error)
    return keep(_outcomes, key, outcome)


def why_not_batch_invariant(model: PreTrainedModel) -> str | None:
    """The reason why logits of `model` are not the same bits alone and in a batch where they should be; None if not.

    The first call for a class and configuration runs the model on a few tokens: a row alone without drafts, and the
    same in a padded batch with drafts, which takes other sizes of tiles.

    Raises:
        ValueError: an operation is not known to be batch-invariant, see `patching.batch_invariance`.
    """
    key = ("batch-invariant", *_kind_of(model))
    if key in _outcomes:
        return _outcomes[key]
    with torch.no_grad(), kept_rope_deltas(model):
        return keep(_outcomes, key, _compare_bits(without_hooks(model)))


def _compare_bits(model: PreTrainedModel) -> str | None:
    count = NUM_NEW_TOKENS["static"]
    lengths = [min(length, (stated_positions(model) or length + count) - count) for length in INVARIANT_LENGTHS]
    inputs = ordinary_prompts(model, lengths)
    alone = NoDrafter(model, batch_invariant=True)
    alone.is_equivalence_check = True
    expected = generate_greedily(
        model, {name: tensor[:1] for name, tensor in inputs.items()}, count, assistant_model=alone
    )
    answers = expected.tokens.expand(len(lengths), -1)
    drafter = ScriptedDrafter(model, "static", answers, lengths).configure(batch_invariant=True)
    generated = generate_greedily(model, inputs, count, assistant_model=drafter)
    if torch.equal(generated.logits[:, 0], expected.logits[:, 0]):
        return None
    share = (generated.logits[:, 0] != expected.logits[:, 0]).double().mean()
    return (
        f"{share:.0%} of the logits of {type(model).__name__} have other bits in a batch of a few tokens than alone on "
        "this device; expected the same"
    )


def _kind_of(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """The key of an outcome: class, configurations, variant, dtypes, kind of device, and how inputs are prepared."""
    prepare = model.prepare_inputs_for_generation
    by, dtypes = getattr(prepare, "__func__", prepare), (model.dtype, autocast_dtype(model))
    return type(model), by, dtypes, model.device.type, settings_of(model.config), variant_of(model)


def _compare(model: PreTrainedModel, engine: str, prompts_by_target: bool, is_padded: bool) -> str | None:
    """Compare `engine` with plain `generate()`: one row, and a padded batch if the engine runs rows together, whose
    rows plain `generate()` is given with their padding or each by itself.
    """
    inputs = _prompts(model)
    alone = {name: tensor[:1] for name, tensor in inputs.items()}
    count = NUM_NEW_TOKENS[engine]
    try:
        plain_alone = generate_greedily(model, alone, count)
        plain = generate_greedily(model, inputs, count)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise anything
        raise _PlainFails(error) from error
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
        plain = put_together(plain_alone, generate_greedily(model, _last_row(inputs), count))
    # Rows run one by one on the stock engine; packed ones are a row together.
    cases = [(alone, plain_alone, False), (inputs, plain, False), (inputs, plain, True)]
    is_packed = not prompts_by_target and packs_prompts(model)
    for given, expected, packs in cases[: 1 if engine == "stock" else 2 + is_packed]:
        lengths = given["attention_mask"].sum(dim=1).tolist()
        drafter = ScriptedDrafter(model, engine, expected.tokens, lengths)
        drafter.prompts_by_target, drafter.packs_prompts = prompts_by_target, packs
        try:
            generated = generate_greedily(model, given, count, assistant_model=drafter)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it fails there on a few tokens ({type(error).__name__}: {first_line(error)})"
        difference = difference_of(generated, expected, is_exact)
        if not difference <= limit:
            is_batch = len(lengths) > 1
            # Rows that plain generate() itself tells other things with padding cannot be right there.
            padding = why_not_separate_rows(model) if is_batch and is_padded else None
            if padding is not None:
                return f"{padding}; expected prompts of the same length, or one row"
            what = "a padded batch" if is_batch else "one row"
            return f"its logits for {what} of a few tokens differ there from plain generate()'s by {difference:.2g}"
    if engine == "stock":
        return _why_not_steps(model)
    longest_short = length_limits(model).long
    obstacle = None if longest_short is None else why_not_marked(model, longest_short, limit)
    return obstacle or (None if uses_attention_interface(model) else why_not_masked(model, limit))


def _why_not_steps(model: PreTrainedModel) -> str | None:
    """The reason why `model` computes a block of drafts differently from single tokens, where a few tokens may not
    show it; None if there is none that is known."""
    with suppress(Exception):  # a model may raise anything where its layers run under hooks
        if has_recurrent_layers(model) and why_not_supported(model) is None and bounds_steps(model):
            return (
                "its recurrent layers bound the time steps of several tokens at once, such as a block of drafts, and "
                "not those of single tokens"
            )
    return None


def _compare_rows(model: PreTrainedModel, is_padded: bool) -> str | None:
    """Compare plain `generate()` of a row in a batch, padded or not, with that of the row alone and without padding."""
    inputs, count = _prompts(model), NUM_NEW_TOKENS["stock"]
    if not is_padded:
        kept = int(inputs["attention_mask"].sum(dim=1).min())
        inputs = {name: tensor[:, -kept:] for name, tensor in inputs.items()}
    first = {name: tensor[:1] for name, tensor in inputs.items()}
    try:
        batch, unpadded, alone = (
            generate_greedily(model, given, count) for given in (inputs, first, _last_row(inputs))
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise anything
        raise _PlainFails(error) from error
    is_exact = is_exact_arithmetic(model, batch.logits)
    difference = difference_of(alone, Generated(batch.tokens[-1:], batch.logits[:, -1:]), is_exact)
    if difference <= limit_of(unpadded, batch, is_exact):
        return None
    what = "the padding of a row changes its logits" if is_padded else "a row has other logits in a batch than alone"
    return f"{what} in plain generate(), of a few tokens by {difference:.2g}"


def _compare_padded_rows(model: PreTrainedModel, _: bool) -> str | None:
    """Compare plain `generate()` of a padded batch with that of its rows, each with its padding.

    A row without padding has no mask alone, but one in a padded batch, which a class may treat differently.
    """
    inputs, count = _prompts(model), NUM_NEW_TOKENS["stock"]
    kept = int(inputs["attention_mask"].sum(dim=1).min())
    equal = {name: tensor[:, -kept:] for name, tensor in inputs.items()}
    rows = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(len(PROMPT_LENGTHS))]
    first = {name: tensor[:1] for name, tensor in equal.items()}
    try:
        batch, equal, first, *alone = (
            generate_greedily(model, given, count) for given in (inputs, equal, first, *rows)
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise anything
        raise _PlainFails(error) from error
    is_exact = is_exact_arithmetic(model, batch.logits)
    difference = difference_of(put_together(*alone), batch, is_exact)
    if difference <= limit_of(first, equal, is_exact):
        return None
    return (
        f"a row has other logits in a padded batch than alone in plain generate(), of a few tokens by {difference:.2g}"
    )


def _prompts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """`ordinary_prompts`, longer than any window of tokens of which `model` keeps keys."""
    return ordinary_prompts(model, [longest_window(model) + length for length in PROMPT_LENGTHS])


def _last_row(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The last of `_prompts`, without its padding."""
    is_token = inputs["attention_mask"][-1].bool()
    return {name: tensor[-1:, is_token] for name, tensor in inputs.items()}
