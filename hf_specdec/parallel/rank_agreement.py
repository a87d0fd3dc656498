"""What threads of the ranks that run one model together agree on between two rounds, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from .tensor_parallel import is_first_rank, tensor_parallel_group


class RankAgreement:
    """A process group of the CPUs of the ranks that run `model`, which one thread of each uses.

    All ranks make one at the same time, and call the same methods in the same order.

    Args:
        model: a target that is sharded over ranks.
        timeout: seconds after which a rank that waits for another one raises an error; None for torch's own number.

    Attributes:
        is_first: whether this is the first of the ranks.
    """

    def __init__(self, model: PreTrainedModel, timeout: float | None):
        ranks = dist.get_process_group_ranks(tensor_parallel_group(model))
        self.is_first = is_first_rank(model)
        self._first = ranks[0]
        self._group = dist.new_group(
            ranks,
            timeout=None if timeout is None else timedelta(seconds=timeout),
            backend="gloo",
            # Other ranks of the world run other copies of the model, or none.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest that any rank has of each of `values`."""
        shared = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return shared.tolist()

    def from_first(self, value: Any) -> Any:
        """A copy of the first rank's `value`, which can be pickled; `value` itself on that rank."""
        holder = [value if self.is_first else None]
        dist.broadcast_object_list(holder, src=self._first, group=self._group, device=torch.device("cpu"))
        return value if self.is_first else holder[0]

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group(self._group)
