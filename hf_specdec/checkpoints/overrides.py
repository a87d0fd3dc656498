"""Keywords of `AutoDrafter.from_pretrained` that override how a checkpoint is interpreted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict


class Overrides(TypedDict, total=False):
    """How a checkpoint is to be interpreted; what is absent or None is decided by the checkpoint and the rules.

    Attributes:
        aux_hidden_state_layer_ids, norm_before_residual, norm_output, final_norm: fields of `Eagle3Config`;
            `norm_output` also of `MtpConfig`.
        rope_theta: base of the draft layers' RoPE.
        rope_parameters: all RoPE parameters of the draft layers, `{"rope_type": ..., "rope_theta": ..., ...}`.
        share_embedding, share_head: True for the target's embedding or head, False for the checkpoint's own. None: the
            checkpoint's own if it has one that differs from the target's.
        parallel_drafting, mask_token_id: fields of `DrafterConfig`.
        hidden_first, norm_offset, zero_first_embedding, chaining: fields of `MtpConfig`.
        anchor_first, causal: fields of `DFlashConfig`.
    """

    aux_hidden_state_layer_ids: list[int] | None
    norm_before_residual: bool | None
    norm_output: bool | None
    final_norm: bool | None
    rope_theta: float | None
    rope_parameters: dict[str, Any] | None
    share_embedding: bool | None
    share_head: bool | None
    parallel_drafting: bool | None
    mask_token_id: int | None
    hidden_first: bool | None
    norm_offset: bool | None
    zero_first_embedding: bool | None
    chaining: str | None
    anchor_first: bool | None
    causal: bool | list[bool] | None


# Keywords that apply to MTP modules only, to MTP modules among others, to draft models, to drafters of blocks (DFlash,
# DSpark) only, and to these among others.
MTP_ONLY = frozenset({"chaining", "hidden_first", "norm_offset", "zero_first_embedding"})
MTP_OVERRIDES = MTP_ONLY | {"norm_output", "parallel_drafting", "share_embedding", "share_head"}
DRAFT_MODEL_OVERRIDES = frozenset({"mask_token_id", "parallel_drafting"})
BLOCK_ONLY = frozenset({"anchor_first", "causal"})
BLOCK_OVERRIDES = BLOCK_ONLY | {
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "rope_parameters",
    "rope_theta",
    "share_embedding",
    "share_head",
}


def without_none(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The overrides that were given: those with a value other than None."""
    return {name: value for name, value in (overrides or {}).items() if value is not None}


def check_not_given(names: Collection[str], overrides: Mapping[str, Any], name: str, family: str) -> None:
    """Check that `overrides` have none of the keywords `names`, which do not apply to the `family` of drafter `name`.

    Raises:
        ValueError: expected none of them; names those that were given.
    """
    given = sorted(set(names) & without_none(overrides).keys())
    if given:
        raise ValueError(f"{name} is a {family} drafter: it has no {', '.join(given)}.")


def check_rope_overrides(overrides: Mapping[str, Any]) -> None:
    """Check `rope_parameters` and `rope_theta` of `overrides`.

    Raises:
        ValueError: expected the complete `rope_parameters`, and at most one of the two keywords.
    """
    rope = overrides.get("rope_parameters")
    if rope is None:
        return
    if not isinstance(rope, Mapping) or not {"rope_type", "rope_theta"} <= rope.keys():
        raise ValueError(
            f"rope_parameters is {rope!r}; expected all RoPE parameters in transformers' form, such as "
            '{"rope_type": "default", "rope_theta": 10000.0}.'
        )
    if "rope_theta" in overrides:
        raise ValueError("rope_theta and rope_parameters are both given; expected one of them.")


def check_no_mask_token(name: str, overrides: Mapping[str, Any]) -> None:
    """Check that `overrides` do not ask an EAGLE-3 drafter called `name` to draft in parallel.

    Raises:
        ValueError: expected neither `parallel_drafting=True` nor `mask_token_id`, which only P-EAGLE drafters have.
    """
    if overrides.get("parallel_drafting"):
        raise ValueError(
            f"{name} is to draft in parallel, but it is an EAGLE-3 drafter: it has no tensor mask_hidden for "
            "positions without a token. Expected a P-EAGLE drafter, or no `parallel_drafting=True`."
        )
    if overrides.get("mask_token_id") is not None:
        raise ValueError(
            f"{name} was given mask_token_id {overrides['mask_token_id']}, but it is an EAGLE-3 drafter, which drafts "
            "token by token and has no mask token. Drop `mask_token_id=`."
        )
