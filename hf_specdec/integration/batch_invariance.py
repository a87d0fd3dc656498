"""Whether a call can be batch-invariant: see `Drafter.configure`."""

from __future__ import annotations

import torch

from ..device_policy import policy_of
from ..engine.equivalence import why_not_batch_invariant
from ..engine.request import Request
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.layer_kinds import Use, first_reason
from ..patching.support import cache_layers, parts

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_batch_invariant(request: Request, engine: str) -> None:
    """Check a call with a drafter that is to be batch-invariant.

    The first one for a class and configuration runs the target on a few tokens. Operations that are not known to be
    batch-invariant are refused where they are called, see `patching.batch_invariance`.

    Args:
        request: of the call.
        engine: that is to run it, `"static"` or `"stock"`.

    Raises:
        ValueError: names what of target or call is not batch-invariant.
    """
    reason = _why_not(request, engine)
    if reason is not None:
        raise ValueError(
            f"batch_invariant=True, but {reason}. Set drafter.configure(batch_invariant=False) to generate all the "
            "same; docs/batch-invariance.md says what is supported."
        )


def _why_not(request: Request, engine: str) -> str | None:
    """The reason why the call cannot be batch-invariant; None if it can."""
    model, name = request.model, type(request.model).__name__
    if not policy_of(model.device).batch_invariant:
        return f"{name} is on a device of type {model.device.type}; expected a GPU, which the kernels are for"
    if model.dtype not in _DTYPES:
        return f"{name} is in {model.dtype}; expected torch.bfloat16, torch.float16 or torch.float32"
    if (reason := cache_layers(model).why_not(Use.BATCH_INVARIANCE)) is not None:
        return f"{name} has {reason}"
    if engine != "static":
        return f"the call runs on the {engine} engine ({request.reason}); expected the static engine"
    if request.inputs is not None:
        return f"{name} itself runs the prompts of this call, in one padded batch; expected prompts of tokens only"
    longest = request.config.max_length - 1
    if (reason := first_reason(part.why_not_alone(model, longest) for part in parts(model))) is not None:
        return f"{reason}; expected shorter texts"
    group = tensor_parallel_group(model)
    if group is not None:
        return f"{name} is split over {group.size()} processes; expected a target on one GPU"
    return why_not_batch_invariant(model)
