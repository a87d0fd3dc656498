"""Training of block drafters on hidden states whose channels are scaled to about the same size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import parametrize

from hf_specdec.drafters.cached import CachedDrafter
from hf_specdec.drafters.dflash import DFlashDrafter

# The smallest channel size, as a share of the median, so that rounding errors are not scaled up.
LEAST_RMS = 1e-3


class _Divided(nn.Module):
    """Parametrization of a weight `[H, width]` by a weight for states that are divided by `divisors` `[width]`."""

    def __init__(self, divisors: torch.Tensor):
        super().__init__()
        self.register_buffer("divisors", divisors)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / self.divisors

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.divisors


@torch.no_grad()
def channel_sizes(states: Iterable[torch.Tensor]) -> torch.Tensor:
    """RMS `[width]` float32 of the channels of `states`, each `[n, width]`, as the nearest powers of two, which divide
    and multiply without rounding."""
    total, count = 0.0, 0
    for one in states:
        total = total + one.float().square().sum(dim=0)
        count += len(one)
    rms = (total / count).sqrt()
    rms = rms.clamp(min=LEAST_RMS * rms.median()).masked_fill(rms == 0, 1.0)
    return rms.log2().round().exp2()


@torch.no_grad()
def divide_channels(drafter: CachedDrafter, states: Iterable[torch.Tensor], is_trained: bool) -> None:
    """Let a block drafter learn from states that are divided by the sizes of their channels, which are measured on
    auxiliary hidden `states`, each `[n, width]`. Other drafters do not change.

    `fc` of block drafters reads the target's states unscaled, and in some targets a few channels are hundreds of times
    as large as most. So `fc.weight` times the divisors is trained, by a parametrization of torch, which is part of the
    training's checkpoint; `folded_weights` gives the published format. With `is_trained` the outputs of `fc` do not
    change; without it the present weight becomes the weight for divided states.
    """
    if not isinstance(drafter, DFlashDrafter):
        return
    initial = drafter.fc.weight.clone()
    divisors = channel_sizes(states).to(initial)
    parametrize.register_parametrization(drafter.fc, "weight", _Divided(divisors))
    if not is_trained:
        drafter.fc.parametrizations.weight.original.copy_(initial)


def folded_weights(drafter: CachedDrafter) -> dict[str, torch.Tensor]:
    """`drafter.state_dict()` in the published format: with `fc.weight` for states that are not divided."""
    weights = drafter.state_dict()
    if isinstance(drafter, DFlashDrafter) and parametrize.is_parametrized(drafter.fc, "weight"):
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("fc.parametrizations.")}
        weights["fc.weight"] = drafter.fc.weight.detach()
    return weights
