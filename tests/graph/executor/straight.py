"""Stand-ins for Python programs, and both programs of an executor held against each other, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import twofour
from twofour.graph import Calls, Executor
from twofour.kernels.attention import attention
from twofour.kernels.norm import norm
from twofour.kernels.problem import Problem
from twofour.kernels.table import available
from twofour.packing import pack

WIDTH = 16


class Straight:
    """A stand-in for a Python program: a function, and what it refers to."""

    def __init__(self, function: Callable[..., tuple[Any, ...]], **names: Any) -> None:
        self.function, self.names, self.labels = function, names, ["one"] * 3

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        return self.function(*leaves)


def poisoned(executor: Executor) -> Executor:
    """Fill the memory between runs with NaN."""
    for arena in executor._arenas:
        arena.buffer.fill_(255)
    return executor


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a == b
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


def agree(executor: Executor, *leaves: Any) -> Calls:
    """Run both programs on inputs; return what the native one calls."""
    with torch.inference_mode():
        calls = executor.prepare(leaves)
        assert not calls.reason, calls.reason
        others = [torch.randn_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for given_leaves in (others, leaves):
            got, want = poisoned(executor)(*given_leaves), executor.python(*given_leaves)
            assert all(same(a, b) for a, b in zip(got, want, strict=True))
            arenas = {arena.buffer.untyped_storage().data_ptr() for arena in executor._arenas}
            assert not any(isinstance(y, Tensor) and y.untyped_storage().data_ptr() in arenas for y in got)
    return calls


SCALE, SHIFT = torch.randn(WIDTH), torch.randn(WIDTH)

ROW = next(row for row in available("nm_matmul") if row.dtype == "float32" and row.pattern == "2:4")

PRODUCT = ROW.prepare(pack(twofour.prune(torch.nn.Linear(WIDTH, WIDTH), "2:4").weight.detach(), "2:4", "float32"))


def product(x: Tensor) -> Tensor:
    return ROW.run(x.reshape(-1, WIDTH), PRODUCT, SHIFT, Problem(WIDTH)).view(x.shape)


def heads(x: Tensor) -> Tensor:
    split = x.reshape(1, -1, 2, WIDTH // 2).transpose(1, 2)
    return attention(split, split, split).transpose(1, 2).reshape(x.shape)


def simple(x: Tensor) -> tuple[Tensor, ...]:
    return norm(x, SCALE, None, 1e-5), x, x[1:], None  # type: ignore[return-value]
