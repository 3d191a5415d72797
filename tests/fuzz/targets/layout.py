"""Weights in a kernel's own order of bytes, changed: as a pickle or an exported program brings them from outside."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import twofour.kernels.operator  # noqa: F401 - registers it
from tests.fuzz.cursor import NUMBERS, Cursor
from tests.fuzz.native_calls import COLUMNS, ROWS, prepared_weights
from twofour.compiler.layer import PreparedWeights
from twofour.errors import KernelError, PackingError
from twofour.kernels.base import Prepared
from twofour.kernels.problem import Problem

TRACED = ("twofour.kernels", "twofour.packing", "twofour.compiler.layer", "twofour.native")
SEEDS = tuple(bytes([number]) for number in range(0, 250, 5))

HEAD = struct.Struct("<4sHH12s12s16sqq")
TEXTS = (
    b"2:4",
    b"1:2",
    b"block",
    b"blocks",
    b"float32",
    b"bfloat16",
    b"int8",
    b"int4",
    b"pairs",
    b"panels",
    b"rows",
    b"\xff\xfe",
    b"",
)
LONGS = [number for number in NUMBERS if -(1 << 63) <= number < 1 << 63]
USES = ("run", "restore", "columns", "refill", "operator", "pickle")
REACH = 1e30


@dataclass(frozen=True, eq=False)
class Use:
    """A kernel, bytes for it, and what is done with them."""

    kernel: Any
    buffer: Tensor
    how: str
    dispatch: str


@cache
def weights() -> list[tuple[Any, Prepared]]:
    """Return every kernel with a good weight."""
    torch.manual_seed(0)
    return prepared_weights()


def build(data: bytes) -> Use:
    """Return the use of a weight whose header, bytes or length are changed."""
    cursor = Cursor(data)
    kernel, prepared = cursor.pick(weights())
    how, buffer = cursor.pick(USES), prepared.tensor.clone()
    dispatch = f"*={kernel.name}"
    for _ in range(6):
        if cursor.empty:
            break
        action = cursor.number(8)
        if action < 4:
            for _ in range(1 + cursor.number(16)):
                buffer[64 + cursor.number(1 << 16) % (len(buffer) - 64)] = cursor.number(256)
        elif action == 4:
            buffer[64:] = cursor.number(256)
        elif action == 5:
            _change_header(cursor, buffer)
        elif action == 6:
            buffer = buffer[: max(65, len(buffer) - 1 - cursor.number(256))].clone()
        elif cursor.number(2):
            buffer = torch.cat((buffer, buffer[: cursor.number(256)]))
        else:
            other = cursor.pick(weights())[0].name
            dispatch = cursor.pick(
                ("", "*=", "*=x", "1=", f"{dispatch};{dispatch}", f"3={other};{dispatch}", f"-1={dispatch}")
            )
    return Use(kernel, buffer, how, dispatch)


def _change_header(cursor: Cursor, buffer: Tensor) -> None:
    fields = list(HEAD.unpack(buffer[:64].numpy().tobytes()))
    place = cursor.number(len(fields))
    if isinstance(fields[place], bytes):
        fields[place] = cursor.pick(TEXTS)
    elif place < 3:
        fields[place] = cursor.number(1 << 16)
    else:
        fields[place] = cursor.pick(LONGS) if cursor.number(2) else cursor.number(256)
    buffer[:64] = torch.frombuffer(bytearray(HEAD.pack(*fields)), dtype=torch.uint8)


def run(built: Use) -> str:
    """Use it; what is not refused has the right shape, and a product is that of the weight that the bytes hold."""
    kernel, buffer = built.kernel, built.buffer
    prepared = Prepared(kernel, buffer)
    x = torch.linspace(-1, 1, 3 * COLUMNS).view(3, COLUMNS).sin()
    if built.how == "restore":
        _ = kernel.restore(prepared)
    elif built.how == "pickle":
        pickle.loads(pickle.dumps(PreparedWeights([prepared]))).source()
    elif built.how == "operator":
        y = torch.ops.twofour.linear(x, [buffer], None, built.dispatch, ROWS)
        assert tuple(y.shape) == (3, ROWS), y.shape
    elif built.how == "columns" and kernel.layout in ("panels", "pairs", "bf16_panels"):
        assert tuple(kernel.run_columns(x.T, prepared, ROWS).shape) == (ROWS, 3)
    elif built.how == "refill" and kernel.layout in ("panels", "pairs", "bf16_panels"):
        kernel.refill(prepared, torch.ones(ROWS, COLUMNS))
        require_product(prepared, x)
    else:
        require_product(prepared, x)
    return built.how


def require_product(prepared: Prepared, x: Tensor) -> None:
    """Require a product of the right shape, and of the weight that the bytes hold where packing writes them so."""
    kernel = prepared.kernel
    y = kernel.run(x, prepared, None, Problem(ROWS)).double()
    assert tuple(y.shape) == (3, ROWS), y.shape
    try:
        packed = kernel.restore(prepared)
        again = kernel.prepare(packed)
    except (PackingError, KernelError):
        return
    if not torch.equal(again.tensor, prepared.tensor):
        return  # bytes of no weight: what was not refused stays within its bounds
    dense = packed.unpack().double()
    if kernel.dtype == "int8" or not float(dense.abs().max()) < REACH:
        return  # its bytes say the range of x too; or sums overflow
    reach = x.double().abs() @ dense.abs().T
    assert ((y - x.double() @ dense.T).abs() <= 0.05 * reach + 1e-30).all(), kernel.name
