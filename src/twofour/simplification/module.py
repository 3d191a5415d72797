"""A captured graph as a module: parameters under the names they had, linear layers and convolutions as torch's own."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from twofour.capture import Graph, Guard, Structure, bind
from twofour.errors import LayerError
from twofour.graph import Outcome
from twofour.simplification.layers import Layers


class Simplified(nn.Module):
    """A model after `simplify`; each has a class of its own, for the signature of its forward.

    Attributes:
        simplification: What was rewritten, with error bounds, and what was not, with why.
    """

    signature: inspect.Signature
    simplification: Outcome

    def _prepare(self, graph: Graph, rewritten: fx.Graph, outcome: Outcome) -> None:
        """Take the graph: calls of this module's own layers and of torch's operators."""
        code = rewritten.python_code("self")
        self._guard, self._outputs = Guard(graph), graph.outputs
        self._text, self._globals = code.src, dict(code.globals)
        self._run: Callable[..., Sequence[Any]] | None = None
        self.simplification = outcome

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = bind(type(self).signature, self, args, kwargs)
        leaves = self._guard.leaves(given)
        if leaves is None:
            name, why = self._guard.unlike(given)
            raise LayerError(
                "the simplified model does not hold for this call",
                got=f"`{name}`: {why}",
                wanted="arguments as in the example that it was simplified with",
                remedy="simplify the original model with an example like this call",
            )
        run = self._run or self._compiled()
        outputs: Structure = self._outputs
        return outputs.value(run(self, *leaves))

    def _compiled(self) -> Callable[..., Sequence[Any]]:
        names = dict(self._globals)
        exec(self._text, names)  # text that torch.fx wrote from the graph's operators, nothing from a file
        self._run = names["forward"]
        return names["forward"]

    def __getstate__(self) -> dict[str, Any]:
        modules = {name: held.__name__ for name, held in self._globals.items() if isinstance(held, types.ModuleType)}
        return {**self.__dict__, "_run": None, "_globals": {**self._globals, **modules}, "_imported": [*modules]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state["_globals"]
        modules = {name: importlib.import_module(held[name]) for name in state["_imported"]}
        super().__setstate__({**state, "_globals": {**held, **modules}})

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (type(self).signature,), self.__getstate__()


def _blank(signature: inspect.Signature) -> Simplified:
    """Return a module without a graph whose forward has the given signature."""

    def forward(self: Simplified, *args: Any, **kwargs: Any) -> Any:
        return self._answer(args, kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    made = type("Simplified", (Simplified,), {"forward": forward, "signature": signature})()
    return made


def simplified(model: nn.Module, graph: Graph, outcome: Outcome) -> tuple[Simplified, list[str]]:
    """Return a rewritten graph as a module, with copies of the model's parameters and buffers.

    With it come the names of weights that `prune` would see in the model, or that were merged, and does not see in it.

    Args:
        model: The captured model: which of its tensors are parameters, and which of them train.
        graph: Captured and rewritten; its nodes are changed.
        outcome: What was rewritten.
    """
    own = inspect.signature(type(model).forward)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in own.parameters.values()]
    made = _blank(own.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    layers = Layers(made, model, graph.module)
    for node in list(graph.module.graph.nodes):
        layers.place(node)
    for node in list(graph.module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.module.graph.erase_node(node)
        elif node.op == "get_attr":
            node.target = layers.hold(node)
    made._prepare(graph, graph.module.graph, outcome)
    return made, layers.lost()
