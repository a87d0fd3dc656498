"""PyTorch references of the linear layers of a mixture of experts.

A token and one of its k experts are a pair; n tokens have n * k pairs, and pair i is of token i // k.
"""

from __future__ import annotations

import torch

from .linear_reference import linear
from .types import StoredWeight


def plan_experts(expert_ids: torch.Tensor, num_experts: int, rows: int) -> torch.Tensor:
    """Sort the (token, expert) pairs by expert and cut them into blocks of one expert each, for `expert_linear`.

    The sort is stable. A block has up to `rows` consecutive pairs of one expert, in sorted order.

    Args:
        expert_ids: `[n, k]` int64. Ids of `num_experts` and above mean "no expert" and count as one more expert.
        num_experts: number of experts.
        rows: largest number of pairs in a block.

    Returns:
        `[4, n * k]` int32: the pair at each index of the sorted order; then, for each block, its expert, its first
        sorted index and its end, with -1, n * k and n * k after the last block.
    """
    ids = expert_ids.reshape(-1).clamp(max=num_experts)
    num_pairs = len(ids)
    index = torch.arange(num_pairs, device=ids.device)
    pairs = ids.argsort(stable=True)
    counts = (ids[:, None] == torch.arange(num_experts + 1, device=ids.device)).sum(0)
    blocks = -(counts // -rows)
    block_ends = blocks.cumsum(0)
    experts = (block_ends <= index[:, None]).sum(1)
    is_block = experts <= num_experts
    experts = experts.clamp(max=num_experts)
    ends = counts.cumsum(0)[experts]
    begins = ends - counts[experts] + (index - block_ends[experts] + blocks[experts]) * rows
    begins, ends = begins.where(is_block, num_pairs), ends.minimum(begins + rows).where(is_block, num_pairs)
    return torch.stack([pairs, experts.where(is_block, -1), begins, ends]).int()


def sum_experts(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        outputs: `[n * k, H]`, in the order of the pairs.
        weights: `[n, k]`, of the same or another dtype.

    Returns:
        `[n, H]` in the dtype of products of both, to which products are rounded; they are summed in float32.
    """
    return (outputs.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def expert_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    bias: torch.Tensor | None,
    plan: torch.Tensor,
    rows: int,
    is_transposed: bool,
) -> torch.Tensor:
    """The linear layer of each pair's expert.

    Args:
        inputs: `[n, in]`, one row per token, or `[n * k, in]`, one row per pair.
        weight: `[experts, out, in]`, plain or a `StoredWeight`; `[experts, in, out]` if `is_transposed`.
        bias: `[experts, out]` or None.
        plan: from `plan_experts`, with the same `rows` and the number of `experts`.
        rows: largest number of pairs in a block.
        is_transposed: whether weight[e] is `[in, out]`.

    Returns:
        `[n * k, out]` in the dtype of `inputs`, in the order of the pairs; 0 for pairs without an expert.
    """
    out = inputs.new_zeros(plan.shape[1], weight.shape[2 if is_transposed else 1])
    tokens = plan[0].long() // (plan.shape[1] // len(inputs))
    with torch.autocast(inputs.device.type, enabled=False):
        for expert, begin, end in plan[1:].t().tolist():
            if not 0 <= expert < weight.shape[0]:
                continue
            rows = inputs[tokens[begin:end]]
            if isinstance(weight, StoredWeight):
                result = linear(rows, weight._replace(values=weight.values[expert], scales=weight.scales[expert]))
            else:
                result = rows @ (weight[expert] if is_transposed else weight[expert].t())
            out[plan[0, begin:end].long()] = result if bias is None else result + bias[expert]
    return out
