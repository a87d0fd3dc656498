"""Seeds of a call: a key for the random numbers of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops import row_seeds


@dataclass
class Randomness:
    """The arguments of a call that its random numbers are derived from.

    Attributes:
        seeds: 64-bit integers, one for each row; or a single one, from which the seeds of all rows are derived.
        generator: source of a single seed if `seeds` is None; None for torch's global CPU generator.
    """

    seeds: int | Sequence[int] | torch.Tensor | None = None
    generator: torch.Generator | None = None

    @property
    def is_given(self) -> bool:
        return self.seeds is not None or self.generator is not None

    def row_seeds(self, batch: int, temperature: float | None) -> torch.Tensor:
        """Keys of the rows' random numbers, `[batch]` int64. Without `seeds` one number is drawn from `generator`, or
        none in greedy decoding (`temperature` is None). Raises `ValueError` if both were given, or if `seeds` are not
        64-bit integers, a single one or one for each row."""
        if self.seeds is not None and self.generator is not None:
            raise ValueError("Both seeds and generator were given; expected one of them.")
        if not isinstance(self.generator, torch.Generator | None):
            raise ValueError(f"generator is {self.generator!r}; expected a torch.Generator, or a seed as seeds=.")
        if self.seeds is None:
            if temperature is None:
                return torch.zeros(batch, dtype=torch.int64)
            device = None if self.generator is None else self.generator.device
            seed = torch.randint(0, 2**63 - 1, (1,), generator=self.generator, device=device)
            return row_seeds(seed, batch)
        try:
            seeds = torch.as_tensor(self.seeds).cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"seeds is {self.seeds!r}; expected integers of 64 bits.") from error
        if seeds.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"seeds is {self.seeds!r}; expected integers of 64 bits.")
        if seeds.dim() == 0:
            return row_seeds(seeds[None].long(), batch)
        if seeds.shape != (batch,):
            raise ValueError(
                f"seeds has shape {tuple(seeds.shape)}, but the call has {batch} rows (prompts times "
                "num_return_sequences); expected one seed for each, or a single int."
            )
        return seeds.long()
