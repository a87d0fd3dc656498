"""Piecewise compilation: equal decoder layers are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.fx.passes.split_module import split_module

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

# A graph is split after attention and recurrences, which a compiler cannot fuse with other operators; and after a write
# of keys and values that attention of a modeling file reads.
_ATTENTION, _RECURRENCE, _WRITE = "hf_specdec::attention", "hf_specdec::recurrence", "hf_specdec::write_kv"


def piecewise_backend(compiler: Compiler) -> Compiler:
    """A backend of `torch.compile` that splits a graph after attention and recurrences, and compiles equal pieces once.

    Nearly all layers of a target compile to the same kernels, but compiled as one graph every layer takes its time.
    vLLM splits graphs at attention, too, in order to run attention outside of its CUDA graphs (torch.compile
    integration, docs.vllm.ai). `compiler` is a backend for the pieces.
    """

    def compile_pieces(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        given = dict(zip((node.name for node in graph.graph.find_nodes(op="placeholder")), inputs, strict=True))
        nodes = list(graph.graph.nodes)
        names = [str(node.target).removesuffix(".default").replace(".", "::", 1) for node in nodes]
        last = _last_of_pieces(names)
        numbers, number = {}, 0
        for place, node in enumerate(nodes):
            numbers[node] = number
            number += place in last
        whole = split_module(graph, None, numbers.__getitem__, keep_original_order=True)
        compiled: dict[Hashable, Callable[..., Any]] = {}
        for name, piece in list(whole.named_children()):
            examples = _examples(piece, given)
            key = _structure(piece, examples)
            if key not in compiled:
                compiled[key] = _compiled(piece, examples, compiler)
            delattr(whole, name)  # a module cannot be replaced by a function
            setattr(whole, name, compiled[key])
        return whole.forward

    return compile_pieces


def _last_of_pieces(names: Sequence[str]) -> set[int]:
    """Places of the operators, by their `names`, after which a sequence of them is split: of a write of keys and values
    and attention that reads them, the last.
    """
    found = [place for place, name in enumerate(names) if name in (_ATTENTION, _RECURRENCE, _WRITE)]
    return {
        place
        for place, after in zip(found, [*found[1:], None], strict=False)
        if names[place] != _WRITE or after is None or names[after] != _ATTENTION
    }


def _compiled(piece: fx.GraphModule, examples: list[Any], compiler: Compiler) -> Callable[..., Any]:
    result = piece.graph.output_node()
    if isinstance(result.args[0], tuple):
        return compiler(piece, examples)
    # Backends want graphs that return tuples.
    result.args = ((result.args[0],),)
    piece.recompile()
    run = compiler(piece, examples)
    return lambda *inputs: run(*inputs)[0]


def _examples(piece: fx.GraphModule, given: dict[str, Any]) -> list[Any]:
    """Example inputs of a piece: fake tensors, or other values that were `given` to the whole graph."""
    values = [(node.target, node.meta["example_value"]) for node in piece.graph.find_nodes(op="placeholder")]
    return [value if isinstance(value, FakeTensor) else given.get(name, value) for name, value in values]


def _structure(graph: fx.GraphModule, examples: list[Any]) -> Hashable:
    """Equal for graphs which compile to the same code: operations, their arguments that are not tensors, shapes and
    layouts of inputs, and which of those share memory. An input of another kind, such as a tensor that is split over
    ranks, equals only itself.
    """
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    storages: dict[int, int] = {}
    inputs: list[Hashable] = []
    for example in examples:
        if isinstance(example, FakeTensor):
            storage = storages.setdefault(example.untyped_storage()._cdata, len(storages))
            layout = (example.shape, example.stride(), example.storage_offset(), storage)
            inputs.append((*layout, example.dtype, example.device, example.requires_grad))
        else:
            inputs.append(id(example))

    def described(argument: Any) -> Any:
        return f"node {places[argument]}" if isinstance(argument, fx.Node) else argument

    operations = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            continue
        # Tensors and modules that belong to the graph are compared by identity.
        own = id(graph.get_submodule(node.target)) if node.op == "call_module" else None
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            own = id(getattr(graph.get_submodule(owner), name))
        target = node.target if own is None else own
        operations.append((node.op, target, repr(map_aggregate((node.args, node.kwargs), described))))
    return tuple(inputs), tuple(operations)
