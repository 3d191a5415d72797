"""The border between tensors and kernels: every function of the extension, its operands of any kind.

A call that is not refused must do what it does with contiguous operands of the same values, and write nothing beside
them: each lies between bytes that are looked at after the call. Under the sanitizers it lies alone, so that they see
reads as well. Where two operands are one tensor, what is written goes where it is read: nothing is compared then.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.fuzz.cursor import NUMBERS, Cursor
from tests.fuzz.native_calls import Call, calls_by_name, good_calls, operations
from twofour.errors import KernelError

TRACED = ("twofour.native", "tests.fuzz.targets.native")
SEEDS = tuple(bytes([5 * number, number]) for number in range(50))

REFUSED = (TypeError, ValueError, IndexError, OverflowError)
"""What the binding itself raises for arguments of no tensor; operands are refused with a KernelError."""

GUARD = b"" if "libasan" in os.environ.get("LD_PRELOAD", "") else b"\xa5" * 64
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.bool, torch.int64, torch.float16)
DTYPES += (torch.float64, torch.int32, torch.int16, torch.complex64, torch.float8_e4m3fn)
SMALL = [number for number in NUMBERS if -(1 << 63) <= number < 1 << 63]
FAKE = FakeTensorMode()
FAKE.from_tensor(torch.zeros(1))  # imports half of torch, a second that no input shall pay for
REALS = (0.0, -1.0, 1e-5, 1e30, float("nan"), float("inf"))


class Placed:
    """A tensor's bytes in memory of their own between guards."""

    def __init__(self, template: Tensor, dtype: torch.dtype | None = None, late: int = 0) -> None:
        count, width = template.numel(), template.itemsize
        self.memory = torch.empty(len(GUARD) * 2 + late + count * width, dtype=torch.uint8)
        self.guards = [self.memory[: len(GUARD)], self.memory[len(self.memory) - len(GUARD) :]]
        for guard in self.guards:
            guard.fill_(0xA5)
        flat = self.memory[len(GUARD) + late : len(GUARD) + late + count * width]
        flat.copy_(template.as_strided((count,), (1,)).view(torch.uint8))
        if dtype is not None:
            flat = flat[: count * width // dtype.itemsize * dtype.itemsize]
        try:
            whole = flat.view(dtype or template.dtype)
            self.tensor = whole if dtype else whole.as_strided(template.shape, template.stride())
        except RuntimeError:  # torch does not view bytes that are not aligned so
            self.tensor = flat

    def require_guards(self) -> None:
        """Require that nothing was written beside the tensor."""
        for guard in self.guards:
            assert guard.numpy().tobytes() == GUARD, "a kernel wrote beside its operand"


def build(data: bytes) -> tuple[Call, Cursor]:
    """Return a good call, and the choices of what is changed of it."""
    cursor = Cursor(data)
    return cursor.pick(cursor.pick(calls_by_name())), cursor


def run(built: tuple[Call, Cursor]) -> str:
    """Make the call with some arguments changed; where it is not refused, compare."""
    call, cursor = built
    arguments, placed = list(call.arguments), []
    changed = {cursor.number(len(arguments)) for _ in range(cursor.number(3))}
    for position, template in enumerate(call.arguments):
        if isinstance(template, Tensor):
            late = 1 + cursor.number(8) if position in changed and cursor.number(4) == 0 else 0
            kind = cursor.pick(DTYPES) if position in changed and cursor.number(4) == 0 else None
            placed.append(Placed(template, kind, late))
            arguments[position] = placed[-1].tensor
    for position in changed:
        arguments[position] = _changed(cursor, call, position, arguments)
    before = [one.clone() if _is_plain(one) else one for one in arguments]
    function = operations()[call.name]
    try:
        answer = function(*arguments)
    except REFUSED:
        return f"{call.name} refused"
    except MemoryError as error:  # of a kernel's workspace; what the allocator says of anything else is a finding
        assert "no memory for the workspace of this call" in str(error), error
        return f"{call.name} without memory"
    finally:
        for one in placed:
            one.require_guards()
    if _are_apart(arguments) and any(_is_plain(one) and not one.is_contiguous() for one in arguments):
        again = [one.contiguous() if _is_plain(one) else one for one in before]
        with suppress(KernelError):  # an order of memory that it asks for, channels last
            same = _same(function(*again), answer) and all(map(_same, again, arguments))
            assert same, f"{call.name} does otherwise where its operands are contiguous"
    return call.name


def _changed(cursor: Cursor, call: Call, position: int, arguments: list[Any]) -> Any:
    given = arguments[position]
    if isinstance(given, Tensor):
        return _changed_tensor(cursor, given, arguments)
    if isinstance(given, bool):
        return not given
    if isinstance(given, int):
        if position == len(arguments) - 1:
            return 1 + cursor.number(2)  # threads
        if position == 0:  # a row of the table, of those that this machine can run, or none
            known = [other.arguments[0] for other in good_calls() if other.name == call.name]
            return cursor.pick([*known, -1, 1 << 30])
        if call.name.startswith("nm_stripes"):
            return given  # says how long to search
        return given + cursor.number(9) - 4 if cursor.number(2) else cursor.pick(SMALL)
    if isinstance(given, float):
        return cursor.pick(REALS)
    if isinstance(given, list | tuple) and given:
        whole = list(given)
        place = cursor.number(len(whole))
        whole[place] = cursor.pick(SMALL) if cursor.number(2) else cursor.number(8)
        return type(given)(whole) if cursor.number(8) else whole[:-1]
    return cursor.pick([given, None, 0, "x"])


def _changed_tensor(cursor: Cursor, given: Tensor, arguments: list[Any]) -> Any:
    """Return another view of the operand's bytes, other bytes, another operand, or what is none."""
    action, axis = cursor.number(16), cursor.number(max(1, given.ndim))
    if action < 4 and given.numel():
        flat = given.view(-1).view(torch.uint8) if given.is_contiguous() else given.flatten().view(torch.uint8)
        for _ in range(1 + cursor.number(8)):
            flat[cursor.number(1 << 16) % flat.numel()] = cursor.number(256)
        return given
    if given.ndim and given.shape[axis] and action < 9:
        size = given.shape[axis]
        return (
            given.narrow(axis, cursor.number(size), 1) if action == 4 else
            given.narrow(axis, 0, cursor.number(size)) if action == 5 else
            given.transpose(axis, cursor.number(given.ndim)) if action == 6 else
            given[(slice(None),) * axis + (slice(None, None, 2),)] if action == 7 else
            given.narrow(axis, 0, 1).expand_as(given)
        )  # fmt: skip
    if action == 9:
        return given.flatten()
    if action == 10:
        return given.unsqueeze(axis)
    if action == 11:
        return cursor.pick([one for one in arguments if isinstance(one, Tensor)])
    if action == 12:
        return given.new_empty((0,) * cursor.number(5))
    return _foreign(cursor, given)


def _foreign(cursor: Cursor, given: Tensor) -> Any:
    """Return a tensor without memory that kernels may read, or no tensor at all."""
    kind = cursor.number(10)
    if kind == 0:
        return torch.empty(given.shape, dtype=given.dtype, device="meta")
    if kind == 1:
        emptied = given.clone()
        emptied.untyped_storage().resize_(0)
        return emptied
    if kind == 2:
        return FAKE.from_tensor(given.clone())
    if kind == 3 and given.dtype.is_floating_point:
        return torch._efficientzerotensor(tuple(given.shape), dtype=given.dtype)
    if kind == 4 and given.dtype is torch.float32:
        return torch._neg_view(given)
    if kind == 5 and given.ndim == 2 and given.dtype is torch.float32:
        return given.to_sparse()
    if kind == 6 and given.dtype is torch.float32:
        return torch.nn.Parameter(given)
    return (None, 3, "x", np.zeros(4, np.float32))[kind % 4]


def _is_plain(one: Any) -> bool:
    plain = type(one) is Tensor and one.layout is torch.strided and one.device.type == "cpu"
    return plain and not one.is_neg() and not one._is_zerotensor() and (not one.numel() or one.data_ptr() != 0)


def _are_apart(arguments: list[Any]) -> bool:
    whole = [one for one in arguments if type(one) in (Tensor, torch.nn.Parameter)]
    strided = [one for one in whole if one.layout is torch.strided and one.device.type == "cpu"]
    places = [one.untyped_storage().data_ptr() for one in strided if not one._is_zerotensor()]
    return len(set(places)) == len(places)


def _same(one: Any, other: Any) -> bool:
    if not _is_plain(one) or not _is_plain(other):
        return one is other or isinstance(one, Tensor) or bool(one == other)
    if one.dtype is torch.bool:  # a copy of a byte that is neither 0 nor 1 holds 1
        return torch.equal(one, other)
    return one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))
