"""Short texts by plain `generate()`, the difference between the logits of two texts, and what is known of targets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from .. import ops
from ..calls.first_pass import kept_rope_deltas
from ..errors import failure_of
from ..host.generation import GenerationMixin, default_settings
from ..modules.module_hooks import without_hooks
from ..modules.signature import keep, looked_at_once, signature_of
from ..modules.weights import may_round_inputs
from ..patching.mask_rules import PROMPT_LENGTHS, ordinary_prompts
from ..patching.support import configured_layers

# Number of new tokens, by engine: two rounds cover everything on a static cache. The stock engine crops its cache after
# every round, which takes more rounds to cover.
NUM_NEW_TOKENS = {"static": 5, "stock": 8}

# Largest difference of logits, relative to their spread, that counts as rounding; a wrong mask exceeds it. In reduced
# precision ten times the target's own difference between batch sizes is allowed, but at most the third number.
EXACT_LIMIT, ROUNDED_LIMIT, LARGEST_LIMIT = 1e-3, 0.05, 0.25

Inputs = dict[str, torch.Tensor]


class PlainFails(Exception):
    """Plain `generate()` raised an error. This outcome is not kept: the next time it may succeed."""


def outcome_of(
    model: PreTrainedModel, key: Hashable, find: Callable[[], str | None], references: bool = True
) -> str | None:
    """The outcome of `find` for `model`, run once for a class and configuration, dtypes, kind of device and preparation
    of inputs; with `references` ops run their references. If plain `generate()` fails, its error."""
    prepare = model.prepare_inputs_for_generation
    by = getattr(prepare, "__func__", prepare)
    facts, key = signature_of(model).facts, (key, by, model.dtype, autocast_dtype(model), model.device.type)
    if key in facts:
        return facts[key]
    ops.start_compiler(model.device)  # the check runs references meanwhile
    try:
        used = ops.references() if references else nullcontext()
        # What is looked up here is not kept for the rest of the call.
        with torch.no_grad(), used, kept_rope_deltas(model), looked_at_once(), _without_cudnn_attention():
            return keep(facts, key, find())
    except PlainFails as error:
        return str(error)


@contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Context in which torch's attention does not use cuDNN, which prepares each shape that it first sees for 60 ms or
    more: 0.8 of the 3.4 s of a process' first call with an 8B target (one H200, torch 2.11)."""
    flags = torch.backends.cuda
    before = flags.cudnn_sdp_enabled()
    flags.enable_cudnn_sdp(before and not flags.math_sdp_enabled())
    try:
        yield
    finally:
        flags.enable_cudnn_sdp(before)


def autocast_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The dtype of matrix products under autocast on the device of `model`; None without autocast."""
    kind = model.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def is_exact_arithmetic(model: PreTrainedModel, logits: torch.Tensor) -> bool:
    """Whether equal computations of `model`, which gave `logits`, agree up to rounding errors of float32. Under
    autocast, as in trainers' mixed precision, a `forward` rounds whatever the dtype of the weights is."""
    if autocast_dtype(model) not in (None, torch.float32):
        return False
    if any(torch.equal(logits, logits.to(dtype).to(logits)) for dtype in (torch.bfloat16, torch.float16)):
        return False
    if model.dtype != torch.float32 or (model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32):
        return False
    return not any(map(may_round_inputs, model.modules()))


class Generated(NamedTuple):
    """New tokens `[B, n]` int64, and the logits `[n, B, V]` that they were chosen from."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def row(self, number: int) -> Generated:
        """Row `number` as a batch of one row."""
        return Generated(self.tokens[number : number + 1], self.logits[:, number : number + 1])


def generate_greedily(model: PreTrainedModel, inputs: dict[str, Any], count: int, **options: Any) -> Generated:
    """`count` greedy tokens of `model`, whatever its own generation settings are."""
    own, defaults = model.generation_config, default_settings(model.generation_config)
    kept = ("assistant", "lookbehind", "transformers_version")
    names = [name for name in vars(own) if not name.startswith("_") and all(one not in name for one in kept)]
    settings = {name: defaults.get(name) for name in names} | {
        "max_length": None,
        "do_sample": False,
        "max_new_tokens": count,
        "return_dict_in_generate": True,
        "output_logits": True,
        "use_cache": True,
        "disable_compile": True,
    }
    out = GenerationMixin.generate(model, **inputs, **settings, **options)
    return Generated(out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits))


def plain_texts(model: PreTrainedModel, count: int, *inputs: Inputs) -> list[Generated]:
    """The output of plain `generate()` after each of `inputs`; raises `PlainFails` for any error in it."""
    try:
        return [generate_greedily(model, one, count) for one in inputs]
    except Exception as error:
        raise PlainFails(f"plain generate() fails on a few tokens ({failure_of(error)})") from error


def limit_of(alone: Generated, batch: Generated, is_exact: bool) -> float:
    """The largest difference that counts as rounding; `alone` is the first row of `batch`, which has no padding."""
    noise = difference_of(alone, batch.row(0), is_exact)
    return max(EXACT_LIMIT if is_exact else ROUNDED_LIMIT, min(10 * noise, LARGEST_LIMIT))


class _RoundedOtherwise(TorchFunctionMode):
    """Context in which this thread's embeddings are up to one rounding larger or smaller."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function not in (torch.embedding, torch.nn.functional.embedding) or type(out) is not torch.Tensor:
            return out
        signs = 2.0 * torch.randint(0, 2, out.shape, generator=self._generator, device="cpu") - 1
        return out * (1 + torch.finfo(out.dtype).eps / 2 * signs.to(out))


def limit_of_rounding(model: PreTrainedModel, inputs: Inputs, expected: Generated) -> float:
    """The largest difference that counts as rounding where embeddings round otherwise; `expected` is plain text.

    In a mixture of experts a rounding may route a token to other experts, which other sizes of a batch may not show. It
    takes a call of plain `generate()`, so it is for what another limit has refused.
    """
    with _RoundedOtherwise():
        (generated,) = plain_texts(model, expected.tokens.shape[1], inputs)
    return min(5 * difference_of(generated, expected, False), LARGEST_LIMIT)


def difference_of(generated: Generated, expected: Generated, is_exact: bool) -> float:
    """Difference of logits relative to their spread, over the steps after equal tokens.

    It is the maximum over steps and rows if arithmetic `is_exact`; otherwise the median, since rounding may route a
    token to other experts. Where rounds are wrong, texts differ from the second step on, while the first step, after
    the prompt, is right. So of an even number of steps the larger one in the middle counts if it is no rounding.
    """
    # Logits are compared up to the first different token, which may be due to a tie.
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


def few_tokens(model: PreTrainedModel, is_padded: bool = True) -> tuple[Inputs, Inputs, Inputs]:
    """Prompts longer than any window of tokens that `model` keeps keys of: a batch, whose last row is padded (or whose
    rows are all as short); its first row; its last row without padding."""
    batch = ordinary_prompts(model, [configured_layers(model).longest_window + length for length in PROMPT_LENGTHS])
    is_token = batch["attention_mask"][-1].bool()
    if not is_padded:
        batch, is_token = {name: tensor[:, is_token] for name, tensor in batch.items()}, is_token[is_token]
    first = {name: tensor[:1] for name, tensor in batch.items()}
    return batch, first, {name: tensor[-1:, is_token] for name, tensor in batch.items()}


def why_not_separate_rows(model: PreTrainedModel, is_padded: bool = True) -> str | None:
    """The reason why plain `generate()` of a row in a batch differs from that of the row alone; None if it does not."""

    def find() -> str | None:
        checked = without_hooks(model)
        batch, first, last = plain_texts(checked, NUM_NEW_TOKENS["stock"], *few_tokens(checked, is_padded))
        is_exact = is_exact_arithmetic(checked, batch.logits)
        difference = difference_of(last, batch.row(len(batch.tokens) - 1), is_exact)
        if difference <= limit_of(first, batch, is_exact):
            return None
        alone = (
            "the padding of a row changes its logits" if is_padded else "a row has other logits in a batch than alone"
        )
        return f"{alone} in plain generate(), of a few tokens by {difference:.2g}"

    return outcome_of(model, ("separate rows", is_padded), find, references=False)


def why_not_padded_rows(model: PreTrainedModel) -> str | None:
    """The reason why plain `generate()` of a padded batch differs from that of its rows, each with its padding, e.g.
    since a row without padding has no mask when alone; None if it does not differ."""

    def find() -> str | None:
        checked = without_hooks(model)
        padded, *_ = few_tokens(checked, True)
        rows = [{name: tensor[row : row + 1] for name, tensor in padded.items()} for row in range(len(PROMPT_LENGTHS))]
        equal, first, _ = few_tokens(checked, False)
        batch, unpadded, alone, *apart = plain_texts(checked, NUM_NEW_TOKENS["stock"], padded, equal, first, *rows)
        is_exact = is_exact_arithmetic(checked, batch.logits)
        pairs = [(text, batch.row(row)) for row, text in enumerate(apart)]
        difference = max(difference_of(text, together, is_exact) for text, together in pairs)
        if difference <= limit_of(alone, unpadded, is_exact):
            return None
        what = "a row has other logits in a padded batch than alone"
        return f"{what} in plain generate(), of a few tokens by {difference:.2g}"

    return outcome_of(model, "padded rows", find, references=False)
