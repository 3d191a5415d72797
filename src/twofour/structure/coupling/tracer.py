"""trace: which channels of a model's weights have to move together, read off the graph of its forward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour import calls, capture
from twofour.errors import LayerError
from twofour.layers import PrunableWeight
from twofour.structure.coupling.axes import Atom, Axis, Companions, Coordinates, DoesNotDivide, coordinates, fix, leaves
from twofour.structure.coupling.axes import size as size_of
from twofour.structure.coupling.call import RULES, Axes, Call, Notes, Value, fix_all, fresh, module_of, named_arguments
from twofour.structure.coupling.group import Coupling, Group, Place, Refusal, along
from twofour.structure.coupling.sums import pointwise
from twofour.structure.coupling.views import reshape

_log = logging.getLogger("twofour.structure.coupling")

assert RULES["aten::view"] is reshape  # the rules register themselves

MAKERS = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "embedding", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
}
"""Operators whose answer is made anew: a sum of two such answers is a residual sum, or one of branches."""


def trace(model: nn.Module, example: Mapping[str, Any], weights: Sequence[PrunableWeight]) -> Coupling:
    """Find the channels that the weights sum over, and all that has to move with them.

    A part of the model that has no rule keeps its order, and so does what is coupled to it, with the reason; the rest
    may move. Inputs and outputs of the model keep theirs.

    Args:
        model: Any module that torch.export can follow; it is not changed.
        example: Values of the parameters of its forward, as from `capture.arguments`.
        weights: The weights whose input channels are asked for.

    Raises:
        CompileError: The model cannot be captured.
        LayerError: A weight is not of this model.
    """
    return followed(model, example).coupling(weights)


def followed(model: nn.Module, example: Mapping[str, Any]) -> Tracer:
    """Return a tracer that has followed every node of the model's forward.

    Raises:
        CompileError: The model cannot be captured.
    """
    with capture.TRACING:
        with calls.evaluating(model):
            graph = capture.capture(model, example, dynamic=False)
        tracer = Tracer(model)
        for node in graph.module.graph.nodes:
            tracer.follow(node)
        return tracer


class Tracer:
    """The axes of every tensor of a forward, node by node."""

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.tensors: dict[str, Tensor] = dict(named)
        self.parameters = [name for name, _ in model.named_parameters()]
        self.first = {id(tensor): name for name, tensor in reversed(named)}
        self.values: dict[fx.Node, Value] = {}
        self.weights: dict[str, Axes] = {}
        self.notes = Notes()
        self.streams: list[Axis] = []
        self.extents: list[tuple[str, Axis]] = []
        self._made_by: dict[fx.Node, frozenset[fx.Node]] = {}

    def follow(self, node: fx.Node) -> None:
        """Give the axes of a node's value."""
        self._follow(node)
        made_by = frozenset[fx.Node]().union(*(self._made_by.get(given, ()) for given in node.all_input_nodes))
        name = getattr(node.target, "__name__", "").partition(".")[0]
        self._made_by[node] = frozenset([node]) if node.op == "placeholder" or (made_by and name in MAKERS) else made_by
        for given in (*node.all_input_nodes, node) if node.op == "call_function" else ():
            self.extents += [(module_of(node), axis) for axes in self._tensors(given) for axis in axes]
        if name in ("add", "add_"):
            self._note_streams(node)

    def _follow(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self._fixed(node.meta.get("val"), "an input of the model")
        elif node.op == "get_attr":
            self.values[node] = self._weight(node)
        elif node.op == "output":
            for given in node.all_input_nodes:
                for axes in self._tensors(given):
                    for axis in axes:
                        fix(axis, "an output of the model")
        elif getattr(node.target, "__name__", "") == "getitem":
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
        else:
            self.values[node] = self._operator(node)

    def _note_streams(self, node: fx.Node) -> None:
        """Note the axes along which what two layers made is added; a bias, or a term of an activation, is none."""
        terms = [(self._made_by[given], self._tensors(given)) for given in node.all_input_nodes]
        if len(terms) != 2 or terms[0][0] <= terms[1][0] or terms[1][0] <= terms[0][0]:
            return
        for first, second in zip(*(reversed(axes[0]) for _, axes in terms), strict=False):
            if size_of(first) == size_of(second) != 1:
                self.streams.append(first)

    def _tensors(self, node: fx.Node) -> list[Axes]:
        value = self.values.get(node, [])
        return [value] if isinstance(node.meta.get("val"), Tensor) else value  # type: ignore[list-item,return-value]

    @staticmethod
    def _fixed(value: Any, reason: str) -> Axes:
        return [fresh(int(size), reason) for size in value.shape] if isinstance(value, Tensor) else []

    def _weight(self, node: fx.Node) -> Axes:
        name = node.meta.get("weight", "")
        tensor = self.tensors.get(name)
        if tensor is None:
            return self._fixed(node.meta.get("val", getattr(node.graph.owning_module, str(node.target))), "a constant")
        name = self.first[id(tensor)]
        if name not in self.weights:
            self.weights[name] = [fresh(size) for size in tensor.shape]
        return self.weights[name]

    def _operator(self, node: fx.Node) -> Value:
        known = isinstance(node.target, torch._ops.OpOverload)
        call = Call(node, named_arguments(node) if known else {}, self.values, self.notes)
        name = node.target._schema.name if known else str(node.target)  # type: ignore[union-attr]
        rule = RULES.get(name)
        if rule is None and known and torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
            rule = pointwise
        if known and not node.target._schema.returns:  # type: ignore[union-attr]
            return []  # an assertion
        label = f"`{name.removeprefix('aten::')}`"
        if not any(isinstance(given.meta.get("val"), Tensor) for given in node.all_input_nodes) and rule is None:
            return fix_all(call, f"values of {label}")
        if rule is None:
            return fix_all(call, f"no rule for the operator {label}")
        try:
            return rule(call)
        except DoesNotDivide as error:
            return fix_all(call, f"{label} divides the channels in a way that is not followed: {error}")

    def coupling(self, weights: Sequence[PrunableWeight]) -> Coupling:
        """Collect the groups once all nodes were followed."""
        companions = Companions()
        self.settle()
        for axes in [*self.weights.values(), *(axes for node in self.values for axes in self._tensors(node))]:
            companions.add(axes)
        barred = {(a, b) for first, second in self.notes.bars for a in leaves(first) for b in leaves(second)}
        consumers: dict[Atom, list[str]] = {}
        for weight in weights:
            name = self.first.get(id(weight.parameter))
            if name is None:
                raise LayerError(
                    "the weight is not a parameter of the model that is traced",
                    got=f"{len(self.parameters)} parameters, none of them this one",
                    wanted="weights as layers.walk(model) finds them in the same model",
                    remedy="walk that model again",
                    layer=weight.name,
                )
            axes = self.weights.get(name)
            for leaf in reduction_leaves(weight, axes or []):
                consumers.setdefault(leaf, []).append(weight.name)
        groups, refused = [], []
        movable = [leaf for leaf in consumers if not leaf.fixed]
        beside = {leaf: companions.of[leaf] - {b for a, b in barred if a is leaf} for leaf in movable}
        context = set().union(*beside.values()) if beside else set()
        position = {leaf: index for index, leaf in enumerate(companions.of)}
        for leaf, names in consumers.items():
            if leaf.fixed:
                refused.append(Refusal(tuple(names), leaf.size, leaf.fixed))
            elif leaf in context:
                refused.append(Refusal(tuple(names), leaf.size, "it numbers the blocks of channels that may move"))
            else:
                groups.append(self.group(leaf, sorted(beside[leaf], key=position.__getitem__), names))
        return Coupling(tuple(groups), tuple(refused), self.unused)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the parameters that no node reads."""
        return tuple(name for name in self.parameters if name not in self.weights)

    def settle(self) -> None:
        """Fix what stands twice in an axis, since no single order can hold for both, and what shares memory."""
        for name, axes in self.weights.items():
            for axis in axes:
                try:
                    coordinates(axis)
                except DoesNotDivide as error:
                    fix(axis, f"`{name}` has {error}")
        self._fix_shared_memory()

    def _fix_shared_memory(self) -> None:
        seen: dict[int, str] = {}
        for name, axes in self.weights.items():
            tensor = self.tensors[name]
            address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
            if address and (other := seen.setdefault(address, name)) != name:
                for axis in [*axes, *self.weights[other]]:
                    fix(axis, f"`{name}` shares memory with `{other}` without being the same tensor")

    def group(self, leaf: Atom, beside: list[Atom], names: list[str]) -> Group:
        """Return the group of an atom whose order may differ with the index of those `beside` it."""
        places = []
        for name, axes in self.weights.items():
            found = [coordinates_or_none(axis) for axis in axes]
            for axis, own in enumerate(found):
                if leaf in own:
                    block, scale = [], 1
                    for other in beside:
                        where = axis if other in own else next(i for i, they in enumerate(found) if other in they)
                        block.append((where, found[where][other].index.clamp(min=0) * scale))
                        scale *= other.size
                    places.append(Place(name, axis, own[leaf].index, own[leaf].stride, tuple(block)))
        return Group(leaf.size, prod(other.size for other in beside), tuple(places), tuple(names))


def coordinates_or_none(axis: list[Atom]) -> dict[Atom, Coordinates]:
    """Return the coordinates of every leaf of an axis, none where one stands there twice."""
    try:
        return coordinates(axis)
    except DoesNotDivide:
        return {}


def reduction_leaves(weight: PrunableWeight, axes: Axes) -> list[Atom]:
    """Return the atoms whose neighbouring channels are neighbours along the reduction axis of a weight.

    Others there only number blocks of them: the heads of an attention.
    """
    shape = weight.parameter.shape
    found: list[Atom] = []
    for index, axis in enumerate(axes):
        here = along(torch.arange(shape[index], device="cpu"), index, len(shape))
        last = weight.reduction_last(here.expand(shape))
        line = last[(0,) * (last.ndim - 1)]
        if line.numel() > 1 and int(line[0]) != int(line[-1]):
            found += [
                leaf for leaf, own in coordinates_or_none(axis).items() if (own.stride == 1).any() and leaf not in found
            ]
    return found
