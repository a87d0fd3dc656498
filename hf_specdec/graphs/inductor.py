"""Options of torch's compiler for rounds, and the launch of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


class PlainLaunchOfCreation(CustomGraphPass):
    """A pass of torch's compiler that changes no graph: one that stores tensors which it creates from nothing, such as
    `full`, is compiled without programmatic dependent launch (PDL, see `kernels.dependent_launch`).

    With PDL a kernel starts while the one before it runs, and waits for that one after its first loads; when it has
    waited, all kernels before it have completed. The compiler gives no wait to a kernel that loads nothing (torch 2.11
    to 2.13, `_inductor/codegen/triton.py`), so the kernel after that could read what the one before it has not written
    yet.
    """

    def __call__(self, graph: fx.Graph) -> None:
        if _stores_created(graph):
            # Within the settings of this compilation, which torch restores after it.
            config.triton.enable_pdl = False

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _stores_created(graph: fx.Graph) -> bool:
    """Whether a kernel for `graph` may store what is computed from no tensor.

    What pointwise operators read besides other tensors is computed in their kernels.
    """
    created: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and _reads_nothing_but(created, node):
            created.add(node)
        elif not created.isdisjoint(node.all_input_nodes) and not _is_pointwise(node):
            return True
    return False


def _reads_nothing_but(created: set[fx.Node], node: fx.Node) -> bool:
    """Whether `node` makes a tensor of no other, of those in `created`, or of the shape of another."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    name = getattr(node.target, "__name__", "")
    is_like = name.split(".")[0].endswith("_like") or name.startswith("new_")
    tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), (torch.Tensor, tuple, list))]
    return is_like or created.issuperset(tensors)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether `node` is an operator that is computed element by element in the kernel of its result."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and torch.Tag.pointwise in node.target.tags and not node.target._schema.is_mutable


def options(same_everywhere: bool) -> dict[str, Any]:
    """Options of `torch.compile` for rounds, those that the installed version has.

    By default the compiler pads strides, those of kernels' inputs, too, which are launched with the strides that
    tracing has seen; and padding the few rows of a round costs time. Launching independent kernels together would save
    1 % of a round, but with torch 2.11 the drafts of a compiled copy of Qwen3-Next are wrong with it (2.2 tokens
    accepted instead of 6) and right without. Dependent launch takes 6 % off a step of an 8B model (one H200).

    The ranks of a split target must compile to the same kernels: `same_everywhere`.
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
