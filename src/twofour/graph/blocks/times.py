"""Whether fusing pays: blocks and operators timed on the example's sizes, each once per machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, fx

from twofour.graph.base import value
from twofour.graph.blocks.candidate import Candidate, number
from twofour.measure.cache import Cache
from twofour.measure.chooser import race

FUSED, APART = "block", "operators"
"""What a candidate is timed as."""

SECONDS, ROUNDS = 0.03, 5
"""Time box and rounds of one race."""


class Times(Protocol):
    """Seconds of candidates."""

    def seconds(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds as one call, `FUSED`, and operator by operator, `APART`."""
        ...


class Measured:
    """Times that are measured here, or were, by the cache of all measured times."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def seconds(self, candidate: Candidate) -> dict[str, float]:
        """Return the seconds as one call and operator by operator."""
        return self.cache.times(self.case(candidate), (FUSED, APART), lambda: _race(candidate))

    def case(self, candidate: Candidate) -> str:
        """Return what the cache calls a candidate."""
        case = hashlib.sha256(candidate.key.encode()).hexdigest()[:16]
        return self.cache.key(f"fused_block/{case}")


class Always:
    """Times by which fusing always pays: for what must not depend on a clock."""

    def seconds(self, candidate: Candidate) -> dict[str, float]:
        """Return less for the block."""
        return {FUSED: 1e-9 * (1 + 1e-3 * len(candidate)), APART: 1.0 * len(candidate)}


def pays(times: Times, whole: Candidate, parts: Sequence[Candidate]) -> bool:
    """Tell whether a block is faster than its parts: each a block or an operator by itself, whichever is faster."""
    apart = 0.0
    for part in parts:
        found = times.seconds(part)
        apart += min(found.values()) if len(part) > 1 else found[APART]
    return times.seconds(whole)[FUSED] < apart


def example_of(node: fx.Node) -> Tensor:
    """Return numbers in the layout of a node's tensor: from 0.1 to 1, or truths."""
    found = value(node)
    shape, strides = ([number(n) for n in sizes] for sizes in (found.shape, found.stride()))
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") * 0.9 + 0.1
    kind = found.dtype
    numbers = (numbers > 0.5) if kind is torch.bool else (numbers * 100).to(kind) if kind is torch.uint8 else numbers
    return numbers.to(kind).as_strided(shape, strides)


def _race(candidate: Candidate) -> tuple[dict[str, float], float]:
    """Race a block's native call, which is what a replay of the graph makes of it, with the operators."""
    operands = [example_of(node) for node in candidate.sources]
    block = candidate.block
    with torch.inference_mode():
        answer = block(*operands)
        outputs = [answer] if isinstance(answer, Tensor) else answer
        calls = {FUSED: block.bound(operands, outputs), APART: lambda: block.unfused(*operands)}
        return race(calls, repeats=ROUNDS, seconds=SECONDS)
