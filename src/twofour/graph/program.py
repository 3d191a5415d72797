"""A graph as one Python function: straight-line calls, weights and layers bound, values dropped after their use."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from twofour.capture import KEPT
from twofour.graph.base import aten
from twofour.graph.outline import label

METHODS: dict[Any, str] = {
    aten.view.default: "reshape",  # a rule before it may have changed the strides, of which a view is not always there
    aten.reshape.default: "reshape",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.unsqueeze.default: "unsqueeze",
    aten.expand.default: "expand",
    aten.select.int: "select",
    aten.contiguous.default: "contiguous",
    aten.sym_size.int: "size",
    aten.to.dtype: "to",
    torch.narrow: "narrow",
    aten.narrow.default: "narrow",
}
"""Operators called as methods: a microsecond less each than through the operator's Python object."""

OPERATORS: dict[Any, str] = {
    aten.add.Tensor: "+",
    aten.mul.Tensor: "*",
    aten.sub.Tensor: "-",
    aten.div.Tensor: "/",
}
"""The same for arithmetic of two operands."""


LONG_SECONDS = 1.0
"""Seconds after which two runs are enough to time the calls of a program: a large model takes one for each."""


class Program:
    """Straight-line Python made from a graph module; holds what the text refers to and no graph.

    Args:
        module: The graph with its weights and layers; products have their kernels.
        layers: Layers that `KEPT` nodes stand for, by name.
        timed: Take the time after each call; see `seconds`.
    """

    def __init__(
        self, module: fx.GraphModule, layers: Mapping[str, nn.Module] | None = None, *, timed: bool = False
    ) -> None:
        writer = _Writer(module, layers or {})
        last = _last_uses(module.graph)
        inputs = ", ".join(node.name for node in module.graph.nodes if node.op == "placeholder")
        clock = ["    __times.append(__clock())"] if timed else []
        lines = [f"def __run({inputs}):", *clock]
        self.labels: list[str] = []
        for node in module.graph.nodes:
            if (line := writer.line(node)) is None:
                continue
            lines.append(f"    {line}")
            if node.op != "output":
                self.labels.append(label(module, node))
                lines += clock
            if dead := [value.name for value in last.get(node, ()) if value.op != "get_attr"]:
                lines.append(f"    del {', '.join(dead)}")
        self.text, self.names = "\n".join(lines), writer.names
        self._run: Callable[..., tuple[Any, ...]] | None = None

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Return the output leaves for input leaves."""
        run = self._run or self._compiled({})
        return run(*leaves)

    def seconds(self, leaves: Sequence[Any], repeats: int = 5) -> list[tuple[str, float]]:
        """Return the operator of each call of a `timed` program, with its median seconds.

        Args:
            leaves: Inputs.
            repeats: Runs that count, two at least in `LONG_SECONDS`; one more goes before them.
        """
        times: list[float] = []
        # One thread's processor time is honest on a shared machine; several threads take wall time.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        run = self._compiled({"__times": times, "__clock": clock})
        runs: list[list[float]] = []
        begin = time.perf_counter()
        while len(runs) <= repeats and (len(runs) < 3 or time.perf_counter() - begin < LONG_SECONDS):
            times.clear()
            run(*leaves)
            runs.append([after - before for before, after in pairwise(times)])
        medians = [statistics.median(column) for column in zip(*runs[1:], strict=True)]
        return list(zip(self.labels, medians, strict=True))

    def _compiled(self, extra: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
        names = {**self.names, **extra}
        exec(
            self.text, names
        )  # text written above from torch's operators; of a file's graph, finite literals and names
        self._run = names["__run"]
        return names["__run"]

    def __getstate__(self) -> dict[str, Any]:
        # torch's operators cannot be pickled: their names can.
        plain = {
            name: _Operator(value._schema.name, value._overloadname) if isinstance(value, OpOverload) else value
            for name, value in self.names.items()
        }
        return {**self.__dict__, "names": plain, "_run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = {
            name: value.found() if isinstance(value, _Operator) else value for name, value in state["names"].items()
        }
        self.__dict__.update({**state, "names": names})


@dataclass(frozen=True)
class _Operator:
    """An operator of torch by name."""

    name: str
    overload: str

    def found(self) -> OpOverload:
        space, _, name = self.name.partition("::")
        return getattr(getattr(getattr(torch.ops, space), name), self.overload)


class _Writer:
    """Writes one line per node; what is not a literal becomes a global name."""

    def __init__(self, module: fx.GraphModule, layers: Mapping[str, nn.Module]) -> None:
        self.module, self.layers = module, layers
        self.names: dict[str, Any] = {}

    def line(self, node: fx.Node) -> str | None:
        """Return the statement, or None where there is nothing to run."""
        if node.op == "placeholder":
            return None
        if node.op == "get_attr":
            self.names[node.name] = getattr(self.module, str(node.target))
            return None
        if node.op == "output":
            outputs: Any = node.args[0]
            return f"return {self.text(tuple(outputs))}"
        return f"{node.name} = {self.call(node)}"

    def call(self, node: fx.Node) -> str:
        target = node.target
        plain = not node.kwargs
        if node.op == "call_method" or (target in METHODS and plain):
            first, *rest = node.args
            name = METHODS.get(target, str(target))
            return f"{self.text(first)}.{name}({self.arguments(tuple(rest), node.kwargs)})"
        if target in OPERATORS and plain and len(node.args) == 2:
            a, b = node.args
            return f"{self.text(a)} {OPERATORS[target]} {self.text(b)}"
        if target is KEPT:
            layer = self.layers[str(node.args[1])]
            return f"{self.constant(layer)}({self.text(node.args[0])})"
        if node.op == "call_module":
            layer = self.module.get_submodule(str(target))
            hooked = layer._forward_hooks or layer._forward_pre_hooks
            return f"{self.constant(layer if hooked else layer.forward)}({self.arguments(node.args, node.kwargs)})"
        return f"{self.constant(target)}({self.arguments(node.args, node.kwargs)})"

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{name}={self.text(value)}" for name, value in kwargs.items())])

    def text(self, value: Any) -> str:
        """Write a value: nodes by name, literals as they are, anything else as a global."""
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, tuple):
            return f"({''.join(self.text(entry) + ', ' for entry in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        literal = value is None or isinstance(value, bool | int | str)
        if literal or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self.constant(value)

    def constant(self, value: Any) -> str:
        """Return a global name for `value`, with underscores before it that no parameter or buffer has."""
        name = f"__constant_{len(self.names)}"
        self.names[name] = value
        return name


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that are used for the last time, by the node that uses them; the answer's are not listed."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node  # a value nobody uses is dropped at once
        for source in node.all_input_nodes:
            last[source] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        if user.op not in ("output", "placeholder", "get_attr"):
            found.setdefault(user, []).append(value)
    return found
