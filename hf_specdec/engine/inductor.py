"""Options of torch's compiler for rounds, and the launch of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

# Operators that take a tensor for its shape and type only, besides those that take none.
_LIKE = ("_like", "new_")


class PlainLaunchOfCreation(CustomGraphPass):
    """A pass of torch's compiler that changes no graph: one that creates tensors from nothing, such as `full`, is
    compiled without programmatic dependent launch (PDL, see `kernels.dependent_launch`).

    With PDL a kernel starts while the one before it runs, and waits for that one after its first loads; when it has
    waited, all kernels before it have completed. The compiler gives no wait to a kernel that loads nothing (torch 2.11
    to 2.13, `_inductor/codegen/triton.py`), so the kernel after that could read what the one before it has not written
    yet. Operators become such a kernel only in graphs with some that create tensors.
    """

    def __call__(self, graph: fx.Graph) -> None:
        if any(map(_creates, graph.nodes)):
            # Within the settings of this compilation, which torch restores after it.
            config.triton.enable_pdl = False

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _creates(node: fx.Node) -> bool:
    """Whether `node` makes a tensor that holds nothing of another."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    name = getattr(node.target, "__name__", "")
    is_like = name.split(".")[0].endswith(_LIKE[0]) or name.startswith(_LIKE[1])
    return is_like or not any(isinstance(one.meta.get("val"), torch.Tensor) for one in node.all_input_nodes)


def options(same_everywhere: bool) -> dict[str, Any]:
    """Options of `torch.compile` for rounds, those that the installed version has.

    By default the compiler pads strides, those of kernels' inputs, too, which are launched with the strides that
    tracing has seen; and padding the few rows of a round costs time. Launching independent kernels together would save
    1 % of a round, but with torch 2.11 the drafts of a compiled copy of Qwen3-Next are wrong with it (2.2 tokens
    accepted instead of 6) and right without. Dependent launch takes 6 % off a step of an 8B model (one H200).

    Args:
        same_everywhere: whether the ranks of a split target must compile to the same kernels.
    """
    chosen: dict[str, Any] = {
        "comprehensive_padding": False,
        "shape_padding": False,
        "combo_kernels": False,
        "triton.enable_pdl": True,
        "post_grad_custom_post_pass": PlainLaunchOfCreation(),
    }
    if same_everywhere:
        # No autotuning of reductions: another order of summation could draft another token.
        chosen["deterministic"] = True
    return {name: chosen[name] for name in chosen.keys() & set(torch._inductor.list_options())}
