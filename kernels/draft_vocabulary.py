"""Maps between the target's vocabulary and a smaller draft vocabulary, in plain PyTorch on every device.

`target_ids` `[V_d]` has the target's token of each draft token (d2t as token ids); `draft_ids` `[V]` is the inverse.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def invert_draft_vocabulary(target_ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`[V]` int64: the index in the draft vocabulary of each of the target's `vocabulary` tokens, or -1; `target_ids`
    is `[V_d]` int64."""
    draft_ids = torch.full((vocabulary,), -1, dtype=torch.int64, device=target_ids.device)
    return draft_ids.index_copy_(0, target_ids, torch.arange(len(target_ids), device=target_ids.device))


def over_vocabulary(
    values: torch.Tensor, draft_ids: torch.Tensor | None, vocabulary: int, fill: float = 0.0
) -> torch.Tensor:
    """`[..., V]`: `values` `[..., V_d]` of the draft vocabulary, and `fill` for the target's other tokens. `draft_ids`
    is from `invert_draft_vocabulary`; None if the draft vocabulary is the first V_d tokens."""
    if draft_ids is None:
        return pad(values, (0, vocabulary - values.shape[-1]), value=fill)
    return torch.where(draft_ids >= 0, values[..., draft_ids.clamp(min=0)], fill)
