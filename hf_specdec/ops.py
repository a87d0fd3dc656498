"""The ops of a round: Triton kernels where the device runs them, else their PyTorch references.

This module, `layer_ops` and `row_ops` are the only ones that import kernels and references; `kernels.types` is
imported elsewhere, too. Triton is imported when the first kernel is called.
"""

from __future__ import annotations

import torch

from .kernels import (
    attention_reference,
    draft_inputs_reference,
    draft_sampling_reference,
    experts_reference,
    kv_cache_reference,
    linear_reference,
    recurrence_reference,
    short_conv_reference,
    verify_block_reference,
    verify_greedy_reference,
    verify_sampling_reference,
)
from .kernels.draft_vocabulary import invert_draft_vocabulary, over_vocabulary
from .kernels.linear_tiles import (
    MANY_ROWS,
    MAX_ROWS,
    ROWS_OF_SHORT_PASSES,
    choose_invariant_tiles,
    choose_many_row_tiles,
    choose_tiles,
)
from .kernels.random_reference import exponential, exponential_sample, row_seeds, uniform
from .kernels.types import DraftInputs, RecurrenceRing, VerificationResult
from .op_choice import (
    batch_invariant,
    choose,
    has_kernels,
    is_batch_invariant,
    is_for_triton,
    note_attended,
    references,
    register_op,
)

__all__ = [
    "attention",
    "batch_invariant",
    "best_draft",
    "draw_draft",
    "expert_linear",
    "exponential",
    "exponential_sample",
    "has_fast_linear",
    "has_kernels",
    "invert_draft_vocabulary",
    "is_batch_invariant",
    "linear",
    "over_vocabulary",
    "plan_experts",
    "prepare_inputs",
    "recurrence",
    "references",
    "row_seeds",
    "short_conv",
    "uniform",
    "verify_block",
    "verify_greedy",
    "verify_sampling",
    "write_kv",
]


@register_op(
    "hf_specdec::attention",
    schema="(Tensor query, Tensor key, Tensor value, Tensor positions, float scaling, int? window, Tensor? sinks, "
    "float? softcap, Tensor? starts, Tensor? ends, int? num_splits, int? chunk) -> Tensor",
)
def _attention(query, key, value, positions, scaling, window, sinks, softcap, starts, ends, num_splits, chunk):
    if not is_for_triton(query):
        return attention_reference.attention(
            query, key, value, positions, scaling, window, sinks, softcap, starts, ends, chunk
        )
    from .kernels.attention import attention

    args = (query, key, value, positions, scaling, window, sinks, softcap, starts, ends, num_splits, chunk)
    return attention(*args, fixed_splits=is_batch_invariant())


@_attention.register_fake
def _(query, key, value, positions, scaling, window, sinks, softcap, starts, ends, num_splits, chunk):
    batch, heads, num_queries, _ = query.shape
    return query.new_empty(batch, num_queries, heads, value.shape[3])


@register_op(
    "hf_specdec::write_kv",
    mutates_args=("keys", "values"),
    schema="(Tensor(a!) keys, Tensor(b!) values, Tensor key_states, Tensor value_states, Tensor positions) -> ()",
)
def _write_kv(keys, values, key_states, value_states, positions):
    from .kernels.kv_cache import write_kv

    write_kv(keys, values, key_states, value_states, positions)


@register_op(
    "hf_specdec::prepare_inputs",
    mutates_args=("out_tokens", "out_slots", "out_positions", "out_sources"),
    schema="(Tensor tokens, Tensor lengths, Tensor committed, Tensor limits, Tensor finished, Tensor(a!) out_tokens, "
    "Tensor(b!) out_slots, Tensor(c!) out_positions, Tensor(d!) out_sources, int num_masks, int mask_token, int shift) "
    "-> ()",
)
def _prepare_inputs(
    tokens,
    lengths,
    committed,
    limits,
    finished,
    out_tokens,
    out_slots,
    out_positions,
    out_sources,
    num_masks,
    mask_token,
    shift,
):
    from .kernels.draft_inputs import prepare_inputs

    out = DraftInputs(out_tokens, out_slots, out_positions, out_sources)
    prepare_inputs(tokens, lengths, committed, limits, finished, out, num_masks, mask_token, shift)


@register_op("hf_specdec::verify_greedy", schema="(Tensor scores, Tensor drafts) -> (Tensor, Tensor, Tensor)")
def _verify_greedy(scores, drafts):
    from .kernels.verify_greedy import verify_greedy

    return tuple(verify_greedy(scores, drafts))


@register_op(
    "hf_specdec::verify_sampling",
    schema="(Tensor scores, Tensor drafts, Tensor? draft_probs, Tensor? draft_ids, Tensor seeds, Tensor lengths) "
    "-> (Tensor, Tensor, Tensor)",
)
def _verify_sampling(scores, drafts, draft_probs, draft_ids, seeds, lengths):
    from .kernels.verify_sampling import verify_sampling

    return tuple(verify_sampling(scores, drafts, draft_probs, draft_ids, seeds, lengths))


@register_op(
    "hf_specdec::verify_block",
    schema="(Tensor scores, Tensor drafts, Tensor draft_probs, Tensor? draft_ids, Tensor seeds, Tensor lengths, "
    "Tensor remaining) -> (Tensor, Tensor, Tensor)",
)
def _verify_block(scores, drafts, draft_probs, draft_ids, seeds, lengths, remaining):
    from .kernels.verify_block import verify_block

    return tuple(verify_block(scores, drafts, draft_probs, draft_ids, seeds, lengths, remaining))


@_verify_greedy.register_fake
@_verify_sampling.register_fake
@_verify_block.register_fake
def _(scores, drafts, *rest):
    batch, num_drafts = drafts.shape
    return drafts.new_empty(batch, num_drafts + 1), drafts.new_empty(batch), drafts.new_empty(batch)


@register_op("hf_specdec::best_draft", schema="(Tensor logits, Tensor? target_ids) -> Tensor")
def _best_draft(logits, target_ids):
    from .kernels.draft_sampling import best_draft

    return best_draft(logits, target_ids)


@_best_draft.register_fake
def _(logits, target_ids):
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


@register_op(
    "hf_specdec::draw_draft",
    schema="(Tensor logits, Tensor temperatures, Tensor seeds, Tensor lengths, int first) -> (Tensor, Tensor)",
)
def _draw_draft(logits, temperatures, seeds, lengths, first):
    from .kernels.draft_sampling import draw_draft

    return draw_draft(logits, temperatures, seeds, lengths, first)


@_draw_draft.register_fake
def _(logits, temperatures, seeds, lengths, first):
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64), logits.new_empty(logits.shape, dtype=torch.float32)


@register_op(
    "hf_specdec::recurrence",
    mutates_args=("state", "ring_keys", "ring_updates", "ring_decays"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor(a!) state, "
    "Tensor(b!) ring_keys, Tensor(c!) ring_updates, Tensor(d!) ring_decays, Tensor base, Tensor certain, "
    "Tensor positions, int dummy, bool delta, bool normalize, float scale, Tensor? rates) -> Tensor",
)
def _recurrence(
    query,
    key,
    value,
    decay,
    beta,
    state,
    ring_keys,
    ring_updates,
    ring_decays,
    base,
    certain,
    positions,
    dummy,
    delta,
    normalize,
    scale,
    rates,
):
    from .kernels.recurrence import recurrence

    ring = RecurrenceRing(ring_keys, ring_updates, ring_decays)
    kind = {"delta": delta, "normalize": normalize, "scale": scale, "rates": rates}
    return recurrence(query, key, value, decay, beta, state, ring, base, certain, positions, dummy, **kind)


@_recurrence.register_fake
def _(query, key, value, *rest):
    return value.new_empty(value.shape)


@register_op(
    "hf_specdec::short_conv",
    mutates_args=("ring",),
    schema="(Tensor inputs, Tensor(a!) ring, Tensor positions, int dummy, Tensor weight, Tensor? bias, bool silu) "
    "-> Tensor",
)
def _short_conv(inputs, ring, positions, dummy, weight, bias, silu):
    from .kernels.short_conv import short_conv

    return short_conv(inputs, ring, positions, dummy, weight, bias, silu)


@_short_conv.register_fake
def _(inputs, *rest):
    return inputs.new_empty(inputs.shape)


@register_op("hf_specdec::plan_experts", schema="(Tensor expert_ids, int num_experts, int rows) -> Tensor")
def _plan_experts(expert_ids, num_experts, rows):
    from .kernels.experts import plan_experts

    return plan_experts(expert_ids, num_experts, rows)


@_plan_experts.register_fake
def _(expert_ids, num_experts, rows):
    return expert_ids.new_empty(4, expert_ids.numel(), dtype=torch.int32)


@register_op(
    "hf_specdec::expert_linear",
    schema="(Tensor inputs, Tensor weight, Tensor? bias, Tensor plan, int rows, bool is_transposed) -> Tensor",
)
def _expert_linear(inputs, weight, bias, plan, rows, is_transposed):
    # The reference reads the plan on the host, which `torch.compile` cannot trace; so it is called inside the op.
    if not is_for_triton(inputs):
        return experts_reference.expert_linear(inputs, weight, bias, plan, rows, is_transposed)
    from .kernels.experts import expert_linear

    return expert_linear(inputs, weight, bias, plan, rows, is_transposed)


@_expert_linear.register_fake
def _(inputs, weight, bias, plan, rows, is_transposed):
    return inputs.new_empty(plan.shape[1], weight.shape[2 if is_transposed else 1])


@register_op("hf_specdec::linear", schema="(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor")
def _linear(inputs, weight, bias):
    if is_batch_invariant():
        tiles = choose_invariant_tiles(len(inputs), *weight.shape, inputs.itemsize)
    else:
        tiles = choose_tiles(len(inputs), *weight.shape)
    if tiles is None or not len(inputs) or not is_for_triton(inputs):
        return linear_reference.linear(inputs, weight, bias)
    if tiles.rows >= MANY_ROWS and len(inputs) not in ROWS_OF_SHORT_PASSES:
        from .kernels import linear_many_rows

        if linear_many_rows.takes(inputs, weight):
            return linear_many_rows.linear(inputs, weight, bias, choose_many_row_tiles(tiles))
    from .kernels.linear import linear

    return linear(inputs, weight, bias, tiles)


@_linear.register_fake
def _(inputs, weight, bias):
    return inputs.new_empty(len(inputs), len(weight))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    num_splits: int | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """See `kernels.attention_reference.attention`; a Triton kernel on GPUs."""
    note_attended(key, value)
    args = (query, key, value, positions, scaling, window, sinks, softcap, starts, ends)
    # The reference for packed prompts reads the starts on the host; so it is called inside the op.
    if is_for_triton(query) or is_batch_invariant() or (starts is not None and starts.dim() == 2):
        return _attention(*args, num_splits, chunk)
    return attention_reference.attention(*args, chunk)


def write_kv(keys: torch.Tensor, *args: torch.Tensor) -> None:
    """See `kernels.kv_cache_reference.write_kv`; a Triton kernel on GPUs."""
    choose(_write_kv, kv_cache_reference.write_kv, keys)(keys, *args)


def prepare_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    out: DraftInputs,
    num_masks: int,
    mask_token: int,
    shift: int,
) -> None:
    """See `kernels.draft_inputs_reference.prepare_inputs`; a Triton kernel on GPUs."""
    if is_for_triton(tokens):
        _prepare_inputs(tokens, lengths, committed, limits, finished, *out, num_masks, mask_token, shift)
    else:
        draft_inputs_reference.prepare_inputs(
            tokens, lengths, committed, limits, finished, out, num_masks, mask_token, shift
        )


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> VerificationResult:
    """See `kernels.verify_greedy_reference.verify_greedy`; a Triton kernel on GPUs."""
    return VerificationResult(*choose(_verify_greedy, verify_greedy_reference.verify_greedy, scores)(scores, drafts))


def verify_sampling(scores: torch.Tensor, *args: torch.Tensor | None) -> VerificationResult:
    """See `kernels.verify_sampling_reference.verify_sampling`; a Triton kernel on GPUs."""
    return VerificationResult(
        *choose(_verify_sampling, verify_sampling_reference.verify_sampling, scores)(scores, *args)
    )


def verify_block(scores: torch.Tensor, *args: torch.Tensor | None) -> VerificationResult:
    """See `kernels.verify_block_reference.verify_block`; a Triton kernel on GPUs."""
    return VerificationResult(*choose(_verify_block, verify_block_reference.verify_block, scores)(scores, *args))


def best_draft(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """See `kernels.draft_sampling_reference.best_draft`; a Triton kernel on GPUs."""
    return choose(_best_draft, draft_sampling_reference.best_draft, logits)(logits, target_ids)


def draw_draft(logits: torch.Tensor, *args: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.draft_sampling_reference.draw_draft`; a Triton kernel on GPUs."""
    return choose(_draw_draft, draft_sampling_reference.draw_draft, logits)(logits, *args)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    ring: RecurrenceRing,
    base: torch.Tensor,
    certain: torch.Tensor,
    positions: torch.Tensor,
    dummy: int,
    *,
    delta: bool,
    normalize: bool,
    scale: float,
    rates: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.recurrence_reference.recurrence`; a Triton kernel on GPUs."""
    inputs, bounds = (query, key, value, decay, beta, state), (base, certain, positions, dummy)
    if is_for_triton(query):
        return _recurrence(*inputs, *ring, *bounds, delta, normalize, scale, rates)
    return recurrence_reference.recurrence(
        *inputs, ring, *bounds, delta=delta, normalize=normalize, scale=scale, rates=rates
    )


def short_conv(inputs: torch.Tensor, *args: torch.Tensor | int | None) -> torch.Tensor:
    """See `kernels.short_conv_reference.short_conv`; a Triton kernel on GPUs."""
    return choose(_short_conv, short_conv_reference.short_conv, inputs)(inputs, *args)


def plan_experts(expert_ids: torch.Tensor, num_experts: int, rows: int) -> torch.Tensor:
    """See `kernels.experts_reference.plan_experts`; a Triton kernel on GPUs."""
    return choose(_plan_experts, experts_reference.plan_experts, expert_ids)(expert_ids, num_experts, rows)


def expert_linear(inputs: torch.Tensor, *args: torch.Tensor | int | None) -> torch.Tensor:
    """See `kernels.experts_reference.expert_linear`; a Triton kernel on GPUs."""
    return _expert_linear(inputs, *args)


def has_fast_linear(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` of `[n, in]` by `[out, in]` is faster than PyTorch's, and computes what that computes.

    In the context `batch_invariant`: whether it computes that.
    """
    if is_batch_invariant():
        return not torch.is_autocast_enabled(inputs.device.type) and inputs.dtype == weight.dtype
    if len(inputs) > MAX_ROWS or inputs.dtype not in (torch.bfloat16, torch.float16) or not is_for_triton(inputs):
        return False
    if inputs.dtype != weight.dtype or not inputs.stride(1) == weight.stride(1) == 1:
        return False
    return choose_tiles(len(inputs), *weight.shape) is not None and not torch.is_autocast_enabled(inputs.device.type)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `kernels.linear_reference.linear`; a Triton kernel on GPUs, where `has_fast_linear` says so."""
    return choose(_linear, linear_reference.linear, inputs)(inputs, weight, bias)
