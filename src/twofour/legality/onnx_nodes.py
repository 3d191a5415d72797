"""From the operand of a node back to the constant it comes from, and the axis of it that the node sums over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twofour.checkpoints import MOST_AXES
from twofour.layers import Reduction
from twofour.legality.onnx_values import Initializer

THROUGH = ("Identity", "Cast", "Transpose", "QuantizeLinear", "DequantizeLinear")
"""Operators behind which a weight is still looked for: none of them makes a zero another value."""

_CONVOLUTIONS = {3: "conv1d", 4: "conv2d", 5: "conv3d"}
_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class Operand:
    """What a node multiplies with.

    Attributes:
        position: Its place among the node's inputs.
        axis: (shape, attributes) -> kind and reduction axis of it, or the reason why there is none.
        zero: The place of its zero point, where whole numbers go in themselves.
        per: The axis that a zero point of one axis belongs to.
    """

    position: int
    axis: Callable[[tuple[int, ...], Mapping[str, Any]], tuple[str, Reduction] | str]
    zero: int | None = None
    per: int = 0


def _conv(shape: tuple[int, ...], attributes: Mapping[str, Any]) -> tuple[str, Reduction] | str:
    kind = _CONVOLUTIONS.get(len(shape))
    return (kind, Reduction(1)) if kind else f"shape {shape} is no convolution weight"


def _conv_transpose(shape: tuple[int, ...], attributes: Mapping[str, Any]) -> tuple[str, Reduction] | str:
    kind, groups = _CONVOLUTIONS.get(len(shape)), attributes.get("group", 1)
    if not kind:
        return f"shape {shape} is no convolution weight"
    if type(groups) is not int or groups < 1 or shape[0] % groups:
        return f"{shape[0]} input channels do not divide into {groups!r} groups"
    return kind.replace("conv", "conv_transpose"), Reduction(0, groups)


def _gemm(second: bool) -> Callable[[tuple[int, ...], Mapping[str, Any]], tuple[str, Reduction] | str]:
    def axis(shape: tuple[int, ...], attributes: Mapping[str, Any]) -> tuple[str, Reduction] | str:
        if len(shape) != 2:
            return f"shape {shape} is no matrix"
        turned = bool(attributes.get("transB" if second else "transA", 0))
        return "gemm", Reduction(1 if turned == second else 0)

    return axis


def _matmul(second: bool) -> Callable[[tuple[int, ...], Mapping[str, Any]], tuple[str, Reduction] | str]:
    def axis(shape: tuple[int, ...], attributes: Mapping[str, Any]) -> tuple[str, Reduction] | str:
        if len(shape) < 2:
            return f"shape {shape} is no matrix"
        return "matmul", Reduction(len(shape) - (2 if second else 1))

    return axis


OPERANDS: dict[str, tuple[Operand, ...]] = {
    "Conv": (Operand(1, _conv),),
    "ConvTranspose": (Operand(1, _conv_transpose),),
    "Gemm": (Operand(0, _gemm(False)), Operand(1, _gemm(True))),
    "MatMul": (Operand(0, _matmul(False)), Operand(1, _matmul(True))),
    "ConvInteger": (Operand(1, _conv, zero=3),),
    "MatMulInteger": (Operand(0, _matmul(False), zero=2, per=-2), Operand(1, _matmul(True), zero=3, per=-1)),
    "QLinearConv": (Operand(3, _conv, zero=5),),
    "QLinearMatMul": (Operand(0, _matmul(False), zero=2, per=-2), Operand(3, _matmul(True), zero=5, per=-1)),
}
"""Operator of ONNX's own domain -> the operands that may be weights (ONNX operator reference)."""


@dataclass(frozen=True)
class Scope:
    """What names mean in a graph: its own constants and nodes, then those of the graphs around it."""

    constants: Mapping[str, Initializer]
    makers: Mapping[str, Any]
    around: Scope | None = None

    def constant(self, name: str) -> Initializer | None:
        """Return the constant of a name."""
        if name in self.constants:
            return self.constants[name]
        return self.around.constant(name) if self.around and name not in self.makers else None

    def maker(self, name: str) -> Any:
        """Return the node whose output a name is."""
        if name in self.makers:
            return self.makers[name]
        return self.around.maker(name) if self.around and name not in self.constants else None


@dataclass(frozen=True)
class Way:
    """The way from a constant to an operand.

    Attributes:
        constant: Where it starts.
        order: Axis of the operand -> axis of the constant.
        through: The operators on the way, the operand's first.
        zero: Name of the zero point of the first DequantizeLinear whose input is whole numbers, None without one.
        per: The axis of the constant that a zero point of one axis belongs to.
        block: How many values along `per` share a zero point; 0: one each.
    """

    constant: Initializer
    order: tuple[int, ...]
    through: tuple[str, ...] = ()
    zero: str | None = None
    per: int = 0
    block: int = 0


@dataclass(frozen=True)
class Lost:
    """A constant on the way to an operand that is not its weight.

    Attributes:
        name: The constant's name.
        reason: Why not.
    """

    name: str
    reason: str


def trace(name: str, scope: Scope) -> Way | Lost | None:
    """Follow an operand back to its constant.

    Returns:
        The way; None where the operand is no constant; or a constant on the way and why it is not its weight.
    """
    steps: list[Any] = []
    while (constant := scope.constant(name)) is None:
        node = scope.maker(name)
        if node is None or len(steps) > 32:
            return None
        if node.op_type not in THROUGH or node.domain not in _STANDARD or not node.input:
            return _computed(node, scope)
        steps.append(node)
        name = node.input[0]
    way = _way(constant, steps)
    return way if isinstance(way, Way) else Lost(constant.name, way)


def _computed(node: Any, scope: Scope) -> Lost | None:
    """Say that a node computes an operand from constants, and from nothing else: a weight times its mask, say."""
    found = [scope.constant(given) for given in node.input]
    weight = next((one for one in found if one is not None and len(one.shape) > 1), None)
    if weight is None or None in found:
        return None
    return Lost(weight.name, f"`{weight.name}` goes through {node.op_type} first, which is computed at run time")


def _way(constant: Initializer, steps: Sequence[Any]) -> Way | str:
    order: Sequence[int] = range(len(constant.shape))
    zero, per, block = None, 0, 0
    for node in reversed(steps):  # from the constant on: `order` maps the axes of what came so far to the constant's
        if node.op_type == "Transpose":
            turned = attributes_of(node).get("perm", list(range(len(order)))[::-1])
            if not isinstance(turned, list) or sorted(turned) != list(range(len(order))):
                return f"its Transpose has perm {turned}, which does not fit shape {constant.shape}"
            order = [order[axis] for axis in turned]
        elif node.op_type == "DequantizeLinear" and constant.is_whole:
            given = attributes_of(node)
            axis, block = given.get("axis", 1), given.get("block_size", 0)
            if type(axis) is not int or type(block) is not int:
                return f"its DequantizeLinear has axis {axis} and block_size {block}, which are no whole numbers"
            per = order[axis] if -len(order) <= axis < len(order) else 0
            zero = node.input[2] if len(node.input) > 2 and node.input[2] else None
    return Way(constant, tuple(order), tuple(node.op_type for node in steps), zero, per, block)


def attributes_of(node: Any) -> dict[str, Any]:
    """Return a node's whole-number attributes and lists of them."""
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type == attribute.INT:
            found[attribute.name] = attribute.i
        elif attribute.type == attribute.INTS:
            found[attribute.name] = list(attribute.ints[: 2 * MOST_AXES])  # pads have two numbers an axis
    return found
