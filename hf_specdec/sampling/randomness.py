"""Where the random numbers of a call come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops import (
    row_seeds,
)


@dataclass
class Randomness:
    """Where the random numbers of a call come from, as the caller said.

    Attributes:
        seeds: one for every row; or one int, from which those of all rows are made.
        generator: draws that one int if there are no seeds; torch's global CPU generator if None.
    """

    seeds: int | Sequence[int] | torch.Tensor | None = None
    generator: torch.Generator | None = None

    @property
    def is_given(self) -> bool:
        return self.seeds is not None or self.generator is not None

    def row_seeds(self, batch: int, temperature: float | None) -> torch.Tensor:
        """`[batch]` int64 keys for the rows' random numbers; one number is drawn, by greedy decoding none.

        Raises:
            ValueError: `seeds` and `generator` were both given, or not one seed a row, or no integers.
        """
        if self.seeds is not None and self.generator is not None:
            raise ValueError("Both seeds and generator were given; expected one of them.")
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
