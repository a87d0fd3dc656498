"""Triton choice of experts; the reference is `router_reference.choose_experts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import kernel, wait_for_inputs


@kernel
def _choose_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    experts_ptr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALISES: tl.constexpr,
    EPS: tl.constexpr,
    SCALING: tl.constexpr,
):
    """With s = softmax(x), sigmoid(x) or x of a token's logits x: its K largest s + correction, one after the other,
    and w = s of each, or their softmax; then w = w / (sum of w + EPS) if NORMALISES; then w * SCALING.

    Grid: (tokens,). Reads a row of `logits` `[n, E]` and `correction` `[E]`; writes rows of `weights` and `experts`
    `[n, K]`. All is computed in float32.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < E
    wait_for_inputs()
    score = tl.load(logits_ptr + token * E + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SCORES == "softmax":
        score = tl.exp(score - tl.max(score, axis=0))
        score = tl.div_rn(score, tl.sum(score, axis=0))
    elif SCORES == "sigmoid":
        score = tl.div_rn(1.0, 1.0 + tl.exp(-score))
    choice = score
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    choice = tl.where(is_expert, choice, float("-inf"))
    place = tl.arange(0, K_BLOCK)
    weights = tl.full([K_BLOCK], float("-inf") if SCORES == "chosen" else 0.0, tl.float32)
    experts = tl.zeros([K_BLOCK], tl.int32)
    for number in tl.static_range(K):
        best = tl.argmax(choice, axis=0)
        experts = tl.where(place == number, best, experts)
        weights = tl.where(place == number, tl.sum(tl.where(expert == best, score, 0.0), axis=0), weights)
        choice = tl.where(expert == best, float("-inf"), choice)
    if SCORES == "chosen":
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = tl.div_rn(weights, tl.sum(weights, axis=0))
    if NORMALISES:
        weights = tl.div_rn(weights, tl.sum(weights, axis=0) + EPS)
    is_place = place < K
    tl.store(weights_ptr + token * K + place, (weights * SCALING).to(weights_ptr.dtype.element_ty), mask=is_place)
    tl.store(experts_ptr + token * K + place, experts.to(tl.int64), mask=is_place)


def choose_experts(logits, correction, top_k, dtype, kind):
    """See `router_reference.choose_experts`. One launch, whose results for a token depend on that token only."""
    num_tokens, num_experts = logits.shape
    assert 0 < top_k <= num_experts and (correction is None or correction.shape == (num_experts,)), "shapes must agree"
    weights = logits.new_empty(num_tokens, top_k, dtype=dtype)
    experts = logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    if num_tokens:
        _choose_kernel[(num_tokens,)](
            logits.contiguous(),
            None if correction is None else correction.contiguous(),
            weights,
            experts,
            E=num_experts,
            BLOCK=triton.next_power_of_2(num_experts),
            K=top_k,
            K_BLOCK=triton.next_power_of_2(top_k),
            SCORES=kind.scores,
            NORMALISES=kind.normalises,
            EPS=kind.eps,
            SCALING=kind.scaling,
            num_warps=1 if num_experts <= 256 else 4,
        )
    return weights, experts
