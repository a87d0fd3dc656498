"""PyTorch reference of preparing the inputs of a drafter's first forward pass in a round; see also `draft_inputs`."""

from __future__ import annotations

import torch

from .types import DraftInputs


def prepare_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    width: int,
    num_masks: int,
    mask_token: int,
    shift: int,
) -> DraftInputs:
    """Lay out the rows of a drafter's first forward pass after a round: `[padding | kept tokens | masks]`.

    Every row ends with `num_masks` mask columns. Before them are the tokens that the round kept, as many as the row
    committed, the newest last; the columns in front of these are padding. So the newest kept token of every row is in
    the same column, and the logits of the `1 + num_masks` draft tokens come from the last `1 + num_masks` columns.

    Slots are consecutive: the newest kept token has slot `length - 1 - shift`, and the masks have the slots after it. A
    kept column holds the token `shift` places after its slot. A column predicts the token `1 + shift` places after its
    slot; if that is at the length limit or beyond, the column is padding. So the newest kept token of a row that has
    reached its limit is padding as well. So are columns with a negative slot, and all columns of a finished row. A
    padding column holds token 0 at position 0 and writes the dummy slot, the last one, so that it changes no live slot.

    Masks are valid for one round: the next round writes its kept tokens from the slot where the masks of this one
    began, and its own masks after them; no query sees what is left beyond those.

    Args:
        tokens: `[B, slots]` int64, committed tokens; the last column belongs to the dummy slot.
        lengths: `[B]` int64, committed tokens of each row.
        committed: `[B]` int64, how many of them the last round added; counts accepted tokens, not drafted ones. Clamped
            to 0 to `W - num_masks`, the most that a round keeps.
        limits: `[B]` int64, the length at which a row ends, less than `slots`.
        finished: `[B]` bool.
        width: W, columns of each row: of tokens that the round kept, and of masks.
        num_masks: 0 for sequential drafting, K - 1 for parallel drafting.
        mask_token: token id of mask columns.
        shift: 1 if slot p holds token p + 1 beside the hidden state at p (EAGLE), 0 if it holds token p.
    """
    num_kept = width - num_masks
    column = torch.arange(width, device=tokens.device)
    slot = (lengths - shift - num_kept)[:, None] + column
    source = column - (num_kept - committed.clamp(0, num_kept))[:, None]
    is_mask = column >= num_kept
    is_kept = (source >= 0) & ~is_mask
    is_live = (is_kept | is_mask) & (slot >= 0) & (slot + 1 + shift < limits[:, None]) & ~finished[:, None]
    kept = tokens.gather(1, (slot + shift).clamp(0, tokens.shape[1] - 1))
    return DraftInputs(
        torch.where(is_live, torch.where(is_mask, mask_token, kept), 0),
        torch.where(is_live, slot, tokens.shape[1] - 1),
        torch.where(is_live, slot, 0),
        torch.where(is_live & is_kept, source, -1),
    )
