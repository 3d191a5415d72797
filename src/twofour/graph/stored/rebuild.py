"""A graph of a file on the model that it is loaded into: checked, and every size in it computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.node import map_arg
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from twofour.capture import KEPT, TRACING, Graph, Structure, attribute
from twofour.errors import cut
from twofour.graph.base import aten
from twofour.graph.operators import find, nbytes
from twofour.graph.stored import inputs
from twofour.graph.stored.check import require_graph
from twofour.graph.stored.values import DTYPES, GETITEM, LARGEST, SIZES, UnfitError, decode, find_target

MOST_FLOPS, MOST_BYTES = 1 << 43, 1 << 32
"""Of one run on the example, and of the results that it holds at a time: a large encoder on thousands of tokens."""

TOO_MUCH = "one run on the example of the file would take too much"

MOST_WRITTEN = 1 << 38
"""Bytes of all results of one run."""

_CONVOLUTIONS = (aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding)


@dataclass(frozen=True)
class Rebuilt:
    """A graph of a file.

    Attributes:
        graph: As `capture` would return it, but for the structure of its outputs, which is that of `answers` leaves.
        leaves: An example like that of the file.
        answers: How many leaves it answers with.
    """

    graph: Graph
    leaves: tuple[Any, ...]
    answers: int


def rebuild(found: Any, model: nn.Module, kept: Mapping[str, tuple[int, ...]]) -> Rebuilt:
    """Return the graph that `describe` wrote, for a model that holds its weights.

    Args:
        found: JSON that nobody vouches for.
        model: With compiled layers; the graph reads its parameters and buffers.
        kept: The layers that are single nodes here, as for `capture`; where the file has one as operators, or
            operators as one, they are exchanged.

    Raises:
        UnfitError: It is malformed, asks for too much, or belongs to another model, torch or library.
    """
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    exchanged = {f"{name}.{part}" for name in kept for part in ("weight", "bias")}
    require_graph(found, held.keys() | exchanged)
    try:
        with TRACING, torch.no_grad(), enable_python_dispatcher():  # as export does: its operators know of symbols
            return _Builder(found, model, held, kept).built()
    except (UnfitError, MemoryError):
        raise
    except Exception as error:  # torch's operators refuse arguments in any way they like
        raise UnfitError(f"{type(error).__name__}: {cut(' '.join(str(error).split()), 200)}") from error


class _Builder:
    """Makes a graph of what `require_graph` has found well formed."""

    def __init__(
        self,
        found: Mapping[str, Any],
        model: nn.Module,
        held: Mapping[str, Tensor],
        kept: Mapping[str, tuple[int, ...]],
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # with sympy a second: files without a graph go on
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.found, self.model, self.held, self.kept = found, model, held, kept
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=False, export=True)
        self.graph, self.root = fx.Graph(), nn.Module()
        self.attributes: dict[str, fx.Node] = {}
        self.nodes: list[fx.Node] = []
        self.seen: dict[object, Any] = {}
        self.flops = self.written = 0

    def built(self) -> Rebuilt:
        """Return the graph, its leaves first."""
        structure = inputs.read_structure(self.found["inputs"])
        symbols = {name: self.symbol(*fields) for name, fields in self.found["symbols"].items()}
        pairs = [self.leaf(index, leaf, symbols) for index, leaf in enumerate(self.found["leaves"])]
        axes = [getattr(leaf, "ndim", 0) for leaf, _ in pairs]
        guards = inputs.read_guards(self.found["guards"], structure, axes)
        for entry in self.found["nodes"]:
            self.nodes.append(self.node(entry))
        answer = decode(self.found["answer"], self.refer)
        if any(isinstance(_value(entry), list | tuple) for entry in answer):
            raise UnfitError("an answer is several values")
        _require_memory(self.nodes, self.graph.output(tuple(answer)))
        if self.environment.replacements:
            raise UnfitError("a size that was free is fixed by an operator here")
        graph = Graph(
            fx.GraphModule(self.root, self.graph),
            tuple(captured for _, captured in pairs),
            Structure(tree_flatten(structure)[1]),
            {index: leaf for index, (leaf, _) in enumerate(pairs) if not isinstance(leaf, Tensor)},
            Structure(tree_flatten(list(range(len(answer))))[1]),
            (*guards, *self.further_guards(structure, symbols)),
            self.found["dynamic"],
            cut(self.found["reason"], 300),
        )
        return Rebuilt(graph, tuple(leaf for leaf, _ in pairs), len(answer))

    def further_guards(self, structure: Any, symbols: Mapping[str, Any]) -> Iterator[str]:
        """Yield what operators assumed of sizes here, which the graph then holds for alone, as `Guard` reads it."""
        import sympy
        from torch.utils._sympy.printers import PythonPrinter

        names = [f"L{keystr(path)}" for path, _ in tree_flatten_with_path(structure)[0]]
        sizes = {
            symbols[size].node.expr: sympy.Symbol(f"{name}.size()[{axis}]", integer=True)
            for name, leaf in zip(names, self.found["leaves"], strict=True)
            for axis, size in enumerate(leaf.get("shape", ()))
            if isinstance(size, str)
        }
        for guard in self.environment.guards:
            yield PythonPrinter().doprint(guard.expr.xreplace(sizes))

    def symbol(self, hint: int, most: int | None) -> Any:
        """Return a symbol for a size: what it was when the graph was captured, and its largest."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"stored_{len(self.environment.backed_var_to_val)}")
        symbol: Any = self.environment.create_symbol(hint, source, DimDynamic.DYNAMIC)
        if most is not None:
            self.environment.constrain_symbol_range(symbol, 2, most)
        return self.environment.create_symintnode(symbol, hint=hint, source=source)

    def leaf(self, index: int, leaf: Any, symbols: Mapping[str, Any]) -> tuple[Any, Any]:
        """Add an input; returns its value in the example, and in what the graph was captured with."""
        node = self.graph.placeholder(f"input_{index}")
        self.nodes.append(node)
        if "value" in leaf:
            node.meta["val"] = value = decode(leaf["value"], self.refer)
            return value, value
        dtype, span = DTYPES[leaf["dtype"]], leaf["range"]
        shape = [symbols.get(size, size) for size in leaf["shape"]]
        captured = [size if isinstance(size, int) else int(size.node.hint) for size in shape]
        inputs.require_affordable([(dtype, leaf["example"]), (dtype, captured)])
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="cpu")
        return tuple(inputs.example(dtype, sizes, span, index) for sizes in (leaf["example"], captured))  # type: ignore

    def node(self, entry: list[Any]) -> fx.Node:
        """Add what a file calls: a layer by its name, or an operator."""
        if entry[0] == "layer":
            return self.layer(entry[1], decode(entry[2], self.refer))
        target = find_target(entry[0])
        if name := self.whole(target, entry[1]):
            return self.layer(name, decode(entry[1][0], self.refer))
        args = tuple(decode(entry[1], self.refer))
        return self.call(target, args, {key: decode(value, self.refer) for key, value in entry[2].items()})

    def whole(self, target: Any, args: list[Any]) -> str:
        """Return the name of the layer that a call of the file does the work of, "" where it is no layer here."""
        if target not in (aten.linear.default, aten.conv1d.default, aten.conv2d.default) or len(args) < 2:
            return ""
        weight = args[1].get("weight") if isinstance(args[1], dict) else None
        name = weight.removesuffix(".weight") if isinstance(weight, str) else ""
        bias = args[2] if len(args) > 2 else None
        return name if name in self.kept and bias in (None, {"weight": f"{name}.bias"}) else ""

    def layer(self, name: str, x: Any) -> fx.Node:
        """Add a layer of the model: one node where it is compiled, an operator where it is torch's own."""
        if not isinstance(x, fx.Node) or not isinstance(x.meta["val"], Tensor):
            raise UnfitError("a layer is malformed")
        if name in self.kept:
            width, *axes = self.kept[name]
            return self.call(KEPT, (x, name, width, axes), {})
        module = dict(self.model.named_modules(remove_duplicate=False)).get(name)
        if type(module) not in (nn.Linear, nn.Conv1d, nn.Conv2d) or getattr(module, "padding_mode", "zeros") != "zeros":
            raise UnfitError(f"`{cut(name, 80)}` is no layer of the model that runs by itself")
        assert isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
        weight = self.refer("weight", f"{name}.weight")
        bias = None if module.bias is None else self.refer("weight", f"{name}.bias")
        if isinstance(module, nn.Linear):
            return self.call(aten.linear.default, (x, weight, *([] if bias is None else [bias])), {})
        target = aten.conv1d if isinstance(module, nn.Conv1d) else aten.conv2d
        geometry = [list(module.stride), module.padding, list(module.dilation), module.groups]
        if isinstance(module.padding, str):
            return self.call(target.padding, (x, weight, bias, *geometry), {})
        return self.call(target.default, (x, weight, bias, geometry[0], list(module.padding), *geometry[2:]), {})

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Add a call and compute what its result looks like."""
        given = map_arg((args, kwargs), lambda node: node.meta["val"])
        if target in SIZES.values() or target is find_target(GETITEM):
            _require_sizes(target, given[0], given[1])
        node = self.graph.call_function(target, args, kwargs)
        looks = target, _looks(given[0]), _looks(sorted(given[1].items()))
        if looks not in self.seen:  # layers are alike: each kind of call is made once
            # Which of torch's convolutions would run is asked of sizes, and changes none of the result.
            unbound = self.environment.suppress_guards() if target in _CONVOLUTIONS else nullcontext()
            with self.mode, unbound:
                self.seen[looks] = target(*given[0], **given[1])
        node.meta["val"] = self.seen[looks]
        self.require_affordable(node)
        return node

    def require_affordable(self, node: fx.Node) -> None:
        """Refuse results that no size is known of, or that are larger than a file may ask for."""
        value = node.meta["val"]
        entries = value if isinstance(value, tuple | list) else [value]
        for entry in entries:
            sizes = entry.shape if isinstance(entry, Tensor) else [entry]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    if not size.node.has_hint() or abs(int(size.node.hint)) > LARGEST:
                        raise UnfitError("a size is not known, or is beyond every limit")
                elif not (size is None or isinstance(size, bool | int | float)) or abs(size or 0) > LARGEST:
                    raise UnfitError("a call answers with neither tensors nor sizes")
        row = find(node)
        if isinstance(value, Tensor):
            work = row.flops(node) if row else 2 * prod(map(_hint, value.shape)) * _hint(_given_width(node))
            self.flops += work
        self.written += nbytes(node)
        if nbytes(node) > MOST_BYTES or self.flops > MOST_FLOPS or self.written > MOST_WRITTEN:
            raise UnfitError(TOO_MUCH)

    def refer(self, kind: str, word: Any) -> fx.Node:
        """Return the node of an earlier call, of a weight, or of a constant."""
        if kind == "node":
            return self.nodes[word]
        if kind == "weight":
            if word not in self.held:
                raise UnfitError(f"{cut(repr(word), 80)} is of a layer that is compiled, and read outside of it")
            return self.attribute(word, self.held[word])
        found = self.found["constants"][word]
        value = torch.tensor(found["values"], dtype=DTYPES[found["dtype"]], device="cpu").reshape(found["shape"])
        return self.attribute(f"stored_constant_{word}", value)

    def attribute(self, name: str, value: Tensor) -> fx.Node:
        """Return the node that reads a tensor."""
        if name not in self.attributes:
            self.attributes[name] = node = attribute(self.graph, self.root, name, value)
            with self.mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return self.attributes[name]


def _require_memory(nodes: Sequence[fx.Node], answer: fx.Node) -> None:
    """Refuse results that together take too much at some time of a run; a view holds all of what it shows."""
    roots: dict[fx.Node, fx.Node] = {}
    ends: dict[fx.Node, int] = {}
    for place, node in enumerate((*nodes, answer)):
        sources = node.all_input_nodes
        row = find(node)
        view = row is not None and not row.writes and sources and isinstance(node.meta["val"], Tensor | tuple | list)
        roots[node] = roots.get(sources[0], sources[0]) if view else node
        ends |= {roots.get(used, used): place for used in (node, *sources)}
    changes = [0] * (len(nodes) + 2)
    for place, node in enumerate(nodes):
        if roots[node] is node:
            changes[place] += nbytes(node)
            changes[ends[node] + 1] -= nbytes(node)
    if max(accumulate(changes)) > MOST_BYTES:
        raise UnfitError(TOO_MUCH)


def _looks(value: Any) -> object:
    """Return what the result of a call depends on: types, sizes and strides of tensors, everything else itself."""
    if isinstance(value, Tensor):
        return value.dtype, _looks(tuple(value.shape)), _looks(value.stride())
    if isinstance(value, list | tuple):
        return type(value) is tuple, *map(_looks, value)
    return value.node.expr if isinstance(value, torch.SymInt) else (type(value), value)


def _value(entry: Any) -> Any:
    return entry.meta["val"] if isinstance(entry, fx.Node) else entry


def _given_width(node: fx.Node) -> Any:
    """Return the last size of what a layer is given."""
    source: Any = node.args[0]
    return source.meta["val"].shape[-1] if source.meta["val"].ndim else 1


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _require_sizes(target: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse arithmetic on anything but sizes, and parts of anything but several results."""
    whole = all(type(n) in (int, torch.SymInt) for n in args)
    several = len(args) == 2 and isinstance(args[0], list | tuple) and type(args[1]) is int
    if kwargs or len(args) != 2 or not (several if target is find_target(GETITEM) else whole):
        raise UnfitError("arithmetic on what are no sizes")
