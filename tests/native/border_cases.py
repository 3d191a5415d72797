"""The child of test_border: each row of each native operation, its tensors replaced by what no kernel reads.

One process imports torch, on one thread, and forks for every 32 calls: a crash ends that child, whose last line
names the call. A fork copies the tables of all of torch's memory, which takes longer than a call's refusals.
Prints how many calls and how many refusals there were.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.native.calls import calls
from twofour.errors import KernelError


class Wrapper(Tensor):
    """A tensor whose numbers stand elsewhere."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        """Make one of that shape and dtype."""
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        """Refuse every operator."""
        raise NotImplementedError


def freed(tensor: Tensor) -> Tensor:
    """Return a copy whose storage was given back, as FSDP and offloading do."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


BAD: dict[str, Callable[[Tensor], Any]] = {
    "meta": lambda t: t.to("meta"),
    "fake": FakeTensorMode().from_tensor,
    "functional": torch._to_functional_tensor,  # pyright: ignore[reportPrivateImportUsage]
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),  # pyright: ignore
    "wrapper": Wrapper,
    "freed": freed,
    "of complex numbers": lambda t: t.to(torch.complex128),
    "sparse": lambda t: t.to_sparse(),
    "a number": lambda t: 5,
    "an address": lambda t: t.data_ptr(),
    "small": lambda t: t.flatten()[: t.numel() // 2].clone(),
    "empty": lambda t: t.flatten()[:0],
    "a scalar": lambda t: t.flatten()[0],
}
"""Kinds of tensors that every operand of every call is refused in."""

SIZES = ("small", "empty", "a scalar")

OF_ROWS = (*SIZES, "freed", "of complex numbers")
"""Kinds whose numbers a row's own sizes and types decide on; the others are told before it is known which row."""

ANY_SIZE = {("nm_nonzero", 1), ("nm_stripes_refine", 2), ("nm_stripes_assign", 2)}
"""Operands that may be shorter: pieces of a weight, and of an order of columns."""

BROADCAST = {("fused_block", 1), ("fused_block", 2)}
"""Operands that may be one number."""

ODD: dict[str, Callable[[Tensor], Any]] = {
    "spread": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "turned": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t.flatten()[:1].expand(t.shape),
}
"""Kinds that are read as they stand or refused."""


EACH = 32
"""Calls of one child."""


def refusals(function: Callable[..., Any], arguments: list[Any], kinds: dict[str, Callable[[Tensor], Any]]) -> int:
    """Return how many bad operands the call refused; ends the process where one was taken."""
    assert function(*arguments) is not False or function.__name__ == "nm_mask", "the call itself is refused"
    count = 0
    for place, given in enumerate(arguments):
        if not isinstance(given, Tensor):
            continue
        for kind, make in kinds.items():
            print(f"{named(function, arguments)}, argument {place}, {kind}", file=sys.stderr, flush=True)
            bad = make(given)
            try:
                taken = function(*arguments[:place], bad, *arguments[place + 1 :]) is not False
            except KernelError as error:
                assert error.got and error.wanted, str(error)
                taken = False
            except ValueError:  # numbers that the operand does not agree with
                taken = False
            allowed = kind in ODD or (kind in SIZES and (function.__name__, place) in ANY_SIZE)
            allowed |= kind == "a scalar" and (function.__name__, place) in BROADCAST
            assert not taken or allowed, "a bad operand was taken"
            count += not taken
    return count


def named(function: Callable[..., Any], arguments: list[Any]) -> str:
    """Return what a call is called: the function and its row."""
    return f"{function.__name__} {arguments[0] if isinstance(arguments[0], int) else ''}"


def main() -> None:
    """Fork for every few calls; without "all" the first of each function and of its operands alone has every kind."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for make in BAD.values():
        make(torch.zeros(2, 2))  # what their first use imports is imported once
    called = total = 0
    every, seen, few_kinds = calls(), set[Any](), {kind: BAD[kind] for kind in OF_ROWS} | ODD
    while few := list(itertools.islice(every, EACH)):
        kinds = []
        for function, arguments in few:
            known = function.__name__, *(getattr(one, "dtype", None) for one in arguments)
            kinds.append(few_kinds if known in seen and "all" not in sys.argv else BAD | ODD)
            seen.add(known)
        called += len(few)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, str(sum(refusals(*one, of) for one, of in zip(few, kinds, strict=True))).encode())
            os._exit(0)
        os.close(writing)
        status = os.waitpid(child, 0)[1]
        found = os.read(reading, 100)
        os.close(reading)
        if status != 0 or not found:
            sys.exit(f"a child of {named(*few[0])} to {named(*few[-1])} ended with {status}")
        total += int(found)
    print(called, total)


if __name__ == "__main__":
    main()
