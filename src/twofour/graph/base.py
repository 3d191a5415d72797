"""What rules share: a rule, a product by a weight with its epilogue, and ways to look at nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.capture import attribute
from twofour.errors import cut
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue

aten = torch.ops.aten


KNOWN_SPACES = ("aten", "prims", "twofour")
"""Namespaces of operators whose answers come from their operands alone, but for random ones."""

NO_WEIGHT: Mapping[str, Any] = {"weight": ""}
"""What a constant notes that no product may take as its weight."""


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes:
        name: What the plan calls it.
        rewrite: Changes the graph in place; returns how many places it changed.
    """

    name: str
    rewrite: Callable[[fx.GraphModule], int]


class FailedRuleError(Exception):
    """A rewrite raised, and may have left the graph half changed.

    Attributes:
        rule: Its name.
        reason: What it raised, on one line.
    """

    def __init__(self, rule: str, error: Exception) -> None:
        self.rule, self.reason = rule, f"{type(error).__name__}: {cut(' '.join(str(error).split()), 200)}"
        super().__init__(f"`{rule}` raised {self.reason}")


@contextmanager
def rewriting(rule: str) -> Iterator[None]:
    """Name the rule in whatever is raised inside: a caller captures the graph again and goes on without that rule.

    Raises:
        FailedRuleError: Something was raised.
    """
    try:
        yield
    except FailedRuleError:
        raise
    except Exception as error:  # a rule meets models that nobody has seen, and may fail in any way
        raise FailedRuleError(rule, error) from error


@dataclass(frozen=True)
class Source:
    """Where the rows of a product's weight come from.

    Attributes:
        layer: Name of a layer that was kept whole, "" where the weight is a plain parameter.
        weight: State-dict name of the weight, "" for a layer.
        bias: State-dict name of the bias, "" without one or for a layer.
        rows: Rows of the weight.
        transposed: The stored weight is (in, out).
    """

    layer: str
    weight: str
    bias: str
    rows: int
    transposed: bool = False


@dataclass(frozen=True)
class Product:
    """epilogue(x W^T + bias): x is the node's first argument, the epilogue's operand its second where it has one.

    Attributes:
        sources: The parts whose rows, one below the other, are W; more than one after linears were joined.
        epilogue: What happens before the result is stored.
    """

    sources: tuple[Source, ...]
    epilogue: Epilogue = PLAIN_EPILOGUE

    def with_epilogue(self, activation: str | None = None, combine: str | None = None) -> Product:
        """Return the product with a part of its epilogue replaced."""
        epilogue = Epilogue(activation or self.epilogue.activation, combine or self.epilogue.combine)
        return replace(self, epilogue=epilogue)


def product(x: Tensor, other: Tensor | None = None) -> Tensor:
    """Mark a product in a graph; what it is stands in the node's `meta["product"]`. It is replaced before running."""
    raise AssertionError(f"a product that was not replaced: x {tuple(x.shape)}, other {other is not None}")


def product_of(node: Any) -> Product | None:
    """Return the product a node stands for."""
    return node.meta.get("product") if isinstance(node, fx.Node) else None


def value(node: Any) -> Any:
    """Return the node's tensor as tracing saw it: without data, its sizes numbers or symbols."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def is_float32(node: Any) -> bool:
    """Tell whether the node is a float32 tensor."""
    found = value(node)
    return isinstance(found, Tensor) and found.dtype is torch.float32


def same_size(a: Any, b: Any) -> bool:
    """Tell whether two nodes' tensors have one shape, whatever the symbols stand for."""
    x, y = value(a), value(b)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and same_axes(x.shape, y.shape)


def same_axes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Tell whether two lists of sizes, numbers or symbols, are equal whatever the symbols stand for."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def calls(graph: fx.Graph, *targets: Any) -> list[Any]:
    """Return the nodes that call one of `targets`, in order; as Any, because fx types their arguments too widely."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


ACTIVATION_CALLS = (aten.relu.default, aten.relu_.default, aten.gelu.default, aten.silu.default, aten.silu_.default)
"""What a product or a convolution does before it stores: see `activation_name`."""


def activation_name(node: fx.Node) -> str:
    """Return the key of `epilogue.ACTIVATIONS` for one of `ACTIVATION_CALLS`."""
    if node.target is aten.gelu.default:
        return "gelu_tanh" if argument(node, 1, "approximate", "none") == "tanh" else "gelu"
    return "relu" if node.target in (aten.relu.default, aten.relu_.default) else "silu"


def swaps_heads(node: Any) -> bool:
    """Tell whether a node swaps the two middle axes of four, as heads are put before tokens and back."""
    target = getattr(node, "target", None)
    if target is aten.permute.default:
        return [axis % 4 for axis in node.args[1]] == [0, 2, 1, 3]
    return target is aten.transpose.int and {axis % 4 for axis in node.args[1:3]} == {1, 2} and value(node).ndim == 4


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument given by position or by keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def named_argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator by its name in the schema; None where it has none of that name."""
    schema = getattr(node.target, "_schema", None)
    for index, known in enumerate(schema.arguments if schema is not None else ()):
        if known.name == name:
            return node.kwargs.get(name, node.args[index] if index < len(node.args) else known.default_value)
    return None


def escapes(node: fx.Node) -> bool:
    """Tell whether the node's memory, or a view of it, may be an output of the graph."""
    return any(user.op == "output" or (may_view(user) and escapes(user)) for user in node.users)


def may_view(node: fx.Node) -> bool:
    """Tell whether what a node returns may lie in its input's memory."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        views = any(returned.alias_info for returned in target._schema.returns)
        return views or target in (aten.dropout.default, aten.feature_dropout.default)
    return target is operator.getitem


def replace_with(node: fx.Node, new: fx.Node) -> None:
    """Let the users of `node` use `new`, and remove it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def place(module: fx.GraphModule, node: fx.Node, name: str, layer: nn.Module) -> None:
    """Let a layer, held by the graph's module under `name`, do what a node stands for."""
    module.add_submodule(name, layer)
    with module.graph.inserting_before(node):
        new = module.graph.call_module(name, node.args)
    new.meta = {"val": node.meta["val"]}
    replace_with(node, new)


def constant(
    module: fx.GraphModule, before: fx.Node, name: str, held: Tensor, like: Any, meta: Mapping[str, Any] = NO_WEIGHT
) -> fx.Node:
    """Add a tensor to the graph's module, and a node that reads it.

    Args:
        module: The graph's; a tensor that it has under that name stays as it is.
        before: The node in front of which the new one stands.
        name: With dots, as in a state dict, or without.
        held: The tensor.
        like: What tracing would see.
        meta: More to note; `weight` is its state-dict name where products may take it as their weight.
    """
    with module.graph.inserting_before(before):
        new = attribute(module.graph, module, name, held)
    new.meta = {"val": like, **meta}
    return new


def insert(before: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node, **meta: Any) -> fx.Node:
    """Add a call whose result looks like `like`'s."""
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, args)
    new.meta = {"val": like.meta.get("val"), **meta}
    return new
