"""The constants of an ONNX file, and the way from a node's operand back to the constant it comes from.

Initialisers are TensorProto in onnx.proto; external data are read by memory map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofour.checker.weights import FIRST, KINDS
from twofour.checkpoints import MOST_AXES, Entry
from twofour.errors import FormatError, cut
from twofour.files import reason, require_plain
from twofour.layers import Reduction
from twofour.packing import LARGEST_WEIGHT

_FLOATS = {
    "FLOAT": torch.float32,
    "DOUBLE": torch.float64,
    "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "FLOAT8E4M3FN": torch.float8_e4m3fn,
    "FLOAT8E5M2": torch.float8_e5m2,
}
_WHOLE = {"INT8": torch.int8, "UINT8": torch.uint8}
_HALVES = {"INT4": torch.int8, "UINT4": torch.uint8}
"""Two values a byte, the first in the low half."""


@dataclass(frozen=True)
class Initializer:
    """A constant of a graph.

    Attributes:
        name: Its name.
        shape: Its shape.
        kind: Its type by ONNX's name, "FLOAT16".
        proto: The message that holds it.
        file: The model's file, which external data is beside.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    proto: Any
    file: Path

    @classmethod
    def of(cls, proto: Any, file: Path, name: str = "") -> Initializer:
        """Describe a TensorProto.

        Raises:
            FormatError: Its shape or type is impossible.
        """
        from onnx import TensorProto  # pyright: ignore[reportMissingImports]

        called = name or proto.name
        if len(proto.dims) > MOST_AXES:  # before their product, which takes time quadratic in their number
            raise _malformed(called, f"{len(proto.dims)} axes", f"at most {MOST_AXES}")
        shape = tuple(proto.dims)
        if min(shape, default=0) < 0 or prod(shape) > LARGEST_WEIGHT:
            raise _malformed(called, f"shape {shape}", "dimensions of 0 or more, at most 2^40 values")
        if proto.data_type not in TensorProto.DataType.values():
            raise _malformed(called, f"data type {proto.data_type}", "a type of onnx.proto")
        return cls(called, shape, TensorProto.DataType.Name(proto.data_type), proto, file)

    @property
    def is_weight(self) -> bool:
        """Whether its type is one that weights have."""
        return self.kind in _FLOATS or self.is_integer

    @property
    def is_integer(self) -> bool:
        """Whether it holds whole numbers of 8 or 4 bits."""
        return self.kind in _WHOLE or self.kind in _HALVES

    def read(self) -> Tensor:
        """Return its values; each 4-bit one takes a byte.

        Raises:
            FormatError: The values are not there, or fewer or more than its shape says.
        """
        dtype = {**_FLOATS, **_WHOLE, **_HALVES}[self.kind]
        count = prod(self.shape)
        nbytes = (count + 1) // 2 if self.kind in _HALVES else count * dtype.itemsize
        if self.proto.data_location == self.proto.EXTERNAL:
            stored = self._external(nbytes)
        elif self.proto.HasField("raw_data"):
            if len(self.proto.raw_data) != nbytes:
                raise _malformed(self.name, f"{len(self.proto.raw_data)} bytes", f"{nbytes} for shape {self.shape}")
            stored = torch.from_numpy(np.frombuffer(bytearray(self.proto.raw_data), np.uint8))
        else:
            return self._fields(nbytes, dtype)
        if self.kind in _HALVES:
            return _apart(stored, dtype, count).view(self.shape)
        return stored.view(dtype).view(self.shape)

    def _external(self, nbytes: int) -> Tensor:
        said = {entry.key: entry.value for entry in self.proto.external_data}
        offset, length = _number(self.name, said, "offset", 0), _number(self.name, said, "length", nbytes)
        location = said.get("location", "")
        place = Path(location)
        if not location or place.is_absolute() or ".." in place.parts or "\0" in location:
            raise _malformed(
                self.name, f"external data in {cut(repr(location), 120)}", "a file beside the model, or below"
            )
        if length != nbytes:
            raise _malformed(self.name, f"{length} bytes of external data", f"{nbytes} for shape {self.shape}")
        self._require_beside(location)
        return Entry(self.name, (nbytes,), "U8", self.file.parent / place, offset, nbytes).bytes()

    def _require_beside(self, location: str) -> None:
        """Refuse external data that is no plain file, or that a link takes out of the folders of the model.

        The hub's cache has links in one folder to files in another: those beside the file that the model's own link
        stands for are taken.
        """
        file = self.file.parent / location
        try:
            require_plain(file)
            real, folders = file.resolve(), (self.file.parent.resolve(), self.file.resolve().parent)
        except (OSError, RuntimeError) as error:
            got = f"external data in {cut(repr(location), 120)}: {reason(error)}"
            raise _malformed(self.name, got, "a file that can be read") from error
        if not any(real.is_relative_to(folder) for folder in folders):
            raise _malformed(
                self.name, f"external data in {cut(repr(location), 120)}, a link to elsewhere", "a file beside it"
            )

    def _fields(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Read values that stand in the message's typed fields, each type in its own."""
        from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

        try:
            values = np.ascontiguousarray(numpy_helper.to_array(self.proto))
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise _malformed(
                self.name, f"{type(error).__name__}: {error}", f"the values of shape {self.shape}"
            ) from error
        if self.kind in _HALVES:
            return torch.from_numpy(values.astype(np.int8)).to(dtype).view(self.shape)
        stored = torch.from_numpy(values.reshape(-1).view(np.uint8).copy())
        if stored.numel() != nbytes:
            raise _malformed(self.name, f"{stored.numel()} bytes", f"{nbytes} for shape {self.shape}")
        return stored.view(dtype).view(self.shape)


def _number(name: str, said: Mapping[str, str], key: str, default: int) -> int:
    text = said.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise _malformed(name, f"external data with {key} {cut(repr(text), 40)}", "a whole number of bytes")
    return int(text)


def _apart(stored: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    both = torch.stack((stored & 15, stored >> 4), -1).flatten()[:count]
    return both if dtype is torch.uint8 else torch.where(both > 7, both.to(torch.int8) - 16, both.to(torch.int8))


def _malformed(name: str, got: str, wanted: str) -> FormatError:
    return FormatError(
        "an initialiser of the ONNX file is malformed",
        got=f"`{cut(name, 120)}`: {got}",
        wanted=wanted,
        remedy="export the model again; onnx.checker.check_model says more",
    )


THROUGH = ("Identity", "Cast", "Transpose", "QuantizeLinear", "DequantizeLinear")
"""Operators behind which a weight is still looked for: none of them makes a zero another value."""

_STANDARD = ("", "ai.onnx")

MOST_COMPUTING = 64
"""Names on the way from constants to an operand that are looked at; what lies beyond is not."""

Axis = tuple[str, Reduction] | str
"""Kind and reduction axis of an operand, or the reason why it has none."""


@dataclass(frozen=True)
class Operand:
    """What a node multiplies with.

    Attributes:
        position: Its place among the node's inputs.
        axis: (shape, attributes) -> kind and reduction axis of it, or the reason why there is none.
        zero: The place of its zero point, where whole numbers go in themselves.
        per: The axis that a zero point of one axis belongs to.
        laid_out: Whether Slice, Concat and Unsqueeze lay out its rows first.
    """

    position: int
    axis: Callable[[tuple[int, ...], Mapping[str, Any]], Axis]
    zero: int | None = None
    per: int = 0
    laid_out: bool = False


def _conv(shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Axis:
    return (KINDS[len(shape)], Reduction(1)) if 3 <= len(shape) <= 5 else f"shape {shape} is no convolution weight"


def _conv_transpose(shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Axis:
    groups = attributes.get("group", 1)
    if not 3 <= len(shape) <= 5:
        return f"shape {shape} is no convolution weight"
    if type(groups) is not int or groups < 1 or shape[0] % groups:
        return f"{shape[0]} input channels do not divide into {groups!r} groups"
    return FIRST[len(shape)], Reduction(0, groups)


def _gemm(second: bool, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Axis:
    if len(shape) != 2:
        return f"shape {shape} is no matrix"
    turned = bool(attributes.get("transB" if second else "transA", 0))
    return "gemm", Reduction(1 if turned == second else 0)


def _matmul(second: bool, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Axis:
    if len(shape) < 2:
        return f"shape {shape} is no matrix"
    return "matmul", Reduction(len(shape) - (2 if second else 1))


def _recurrent(kind: str, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Axis:
    return (kind, Reduction(len(shape) - 1)) if 2 <= len(shape) <= 3 else f"shape {shape} is no recurrent weight"


_GEMM, _MATMUL = ([partial(way, second) for second in (False, True)] for way in (_gemm, _matmul))
OPERANDS: dict[str, tuple[Operand, ...]] = {
    "Conv": (Operand(1, _conv),),
    "ConvTranspose": (Operand(1, _conv_transpose),),
    "Gemm": (Operand(0, _GEMM[0]), Operand(1, _GEMM[1])),
    "MatMul": (Operand(0, _MATMUL[0]), Operand(1, _MATMUL[1])),
    "ConvInteger": (Operand(1, _conv, zero=3),),
    "MatMulInteger": (Operand(0, _MATMUL[0], zero=2, per=-2), Operand(1, _MATMUL[1], zero=3, per=-1)),
    "QLinearConv": (Operand(3, _conv, zero=5),),
    "QLinearMatMul": (Operand(0, _MATMUL[0], zero=2, per=-2), Operand(3, _MATMUL[1], zero=5, per=-1)),
    **{
        kind.upper(): tuple(Operand(at, partial(_recurrent, kind), laid_out=True) for at in (1, 2))
        for kind in ("lstm", "gru", "rnn")
    },
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
        computed: The constant, where nodes make other values of it that nothing here can judge.
    """

    name: str
    reason: str
    computed: Initializer | None = None


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
    """Say that nodes compute an operand from constants, and from nothing else: a weight times its mask, say."""
    weight, seen = None, set[str]()
    waiting = list(node.input)[::-1]
    while waiting and len(seen) < MOST_COMPUTING:
        name = waiting.pop()  # depth first, the first operand first: of `w + one` the weight is w
        if not name or name in seen:
            continue
        seen.add(name)
        if (constant := scope.constant(name)) is not None:
            weight = weight or (constant if len(constant.shape) > 1 else None)
        elif (maker := scope.maker(name)) is None:
            return None  # an input of the graph: no constant computes it
        else:
            waiting += list(maker.input)[::-1]
    if weight is None:
        return None
    return Lost(
        weight.name, f"`{weight.name}` goes through {node.op_type} first, which is computed at run time", weight
    )


def _way(constant: Initializer, steps: Sequence[Any]) -> Way | str:
    order: Sequence[int] = range(len(constant.shape))
    zero, per, block = None, 0, 0
    for node in reversed(steps):  # from the constant on: `order` maps the axes of what came so far to the constant's
        if node.op_type == "Transpose":
            turned = attributes_of(node).get("perm", list(range(len(order)))[::-1])
            if not isinstance(turned, list) or sorted(turned) != list(range(len(order))):
                return f"its Transpose has perm {turned}, which does not fit shape {constant.shape}"
            order = [order[axis] for axis in turned]
        elif node.op_type == "DequantizeLinear" and constant.is_integer:
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
