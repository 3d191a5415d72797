"""How a product's implementation is chosen: by measuring, what is packed in every step included in the time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor

from twofour.kernels import Kernel
from twofour.measure.chooser import fault, race
from twofour.training.sparse_linear import implementations
from twofour.training.sparse_linear.implementations import TORCH
from twofour.training.sparse_linear.plan import AT_KEPT_PLACES, Choice
from twofour.training.sparse_linear.source import EXACT, Call, Source

_log = logging.getLogger("twofour.training")

POLICIES = ("auto", "sparse", "dense")
"""Those of a `Chooser`."""

WRONG = 0.05
"""Relative error of a 16-bit product beyond which it is wrong: rounding leaves about 0.005."""

LEAST = 1 << 22
"""Multiply-adds of a product from which a `Chooser` measures: below, calling a kernel costs as much as it saves."""


def measured(call: Call, source: Source, seconds: float, more: Mapping[str, float] | None = None) -> Choice:
    """Time the implementations of one product against each other, interleaved, and choose.

    On a GPU its own clock times them, and the libraries are checked first: what fails or is wrong is left out, with a
    log line.

    Args:
        call: The product, with its operands.
        source: Makes the operands; only its trials are used.
        seconds: Time box.
        more: Name of the row -> milliseconds of a step that the call does not show.
    """
    kernels, why = source.kernels(call)
    dense = {name: partial(_run_dense, name, call, source) for name in call.implementations()}
    sparse = {kernel.name: partial(_run_sparse, kernel, call, source) for kernel in kernels}
    if gpu := implementations.on_gpu(call.a.device):
        reference = cast(Tensor, next(iter(dense.values()))())
        faults = {name: fault(run, reference, WRONG if source.same else math.inf) for name, run in sparse.items()}
        for name, reason in faults.items():
            if reason:
                _log.warning("%s is left out: %s", name, reason)
                del sparse[name]
    ways: dict[str, Callable[[], object]] = {**dense, **sparse}
    taken, _ = race(ways, seconds=seconds, repeats=20, gpu=gpu)
    times = {name: 1e3 * took + (more or {}).get(name, 0.0) for name, took in taken.items()}
    best = min(dense, key=times.__getitem__)
    if not sparse:
        return _exact({name: times[name] for name in dense}, why or "exact")
    found = min(sparse, key=times.__getitem__)
    gain = times[best] / times[found]
    if gain <= 1:
        return Choice(best, False, f"2:4 would take {1 / gain:.2f} times as long", best, times[best], times[found])
    return Choice(found, True, f"{gain:.2f} times as fast", best, times[best], times[found])


def _exact(times: Mapping[str, float], why: str) -> Choice:
    """Choose among exact implementations: dense ones, and perhaps one at kept places alone."""
    kept = next((name for name in times if name.startswith(AT_KEPT_PLACES)), "")
    plain = min((name for name in times if name != kept), key=times.__getitem__)
    if not kept:
        return Choice(plain, False, why, plain, times[plain])
    gain = times[plain] / times[kept]
    if gain <= 1:
        said = f"{why}, at kept places it would take {1 / gain:.2f} times as long"
        return Choice(plain, False, said, plain, times[plain], kept_ms=times[kept])
    return Choice(kept, False, f"{why}, {gain:.2f} times as fast", plain, times[plain], kept_ms=times[kept])


def _run_dense(name: str, call: Call, source: Source) -> Tensor:
    return call.implementations()[name](*source.trial().dense(call))


def _run_sparse(kernel: Kernel, call: Call, source: Source) -> Tensor:
    source = source.trial()
    return source.multiply(kernel, source.packed(kernel, call), call)


class Chooser:
    """Chooses in the first training step of a size, on its own operands, once for all layers of a shape.

    Attributes:
        policy: "auto": what is measured to be fastest; "sparse": a 2:4 kernel wherever one fits, torch's own product
            elsewhere; "dense": torch's own.
        seconds: Time box of measuring one product at one size.
        known: What was measured so far. It holds for this machine and is neither copied nor pickled.
    """

    def __init__(self, policy: str, seconds: float) -> None:
        self.policy, self.seconds = policy, seconds
        self.known: dict[tuple[object, ...], Choice] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "known": {}}

    def choose(self, call: Call, source: Source, shape: tuple[int, int], tokens: int) -> Choice:
        """Return how a call runs; sizes up to a factor of two in the tokens share what was measured."""
        kernels, why = source.kernels(call)
        if self.policy == "sparse" and kernels:
            return Choice(kernels[0].name, True, "asked for, not measured")
        if reason := self._unmeasured(call.a, tokens * math.prod(shape)):
            return Choice(TORCH, False, why or reason)
        names = tuple(call.implementations())
        if source is EXACT and len(names) == 1:
            return Choice(TORCH, False, "the one exact way here")
        key = (call.product, *shape, tokens.bit_length(), call.a.dtype, why, *names, *call.kind)
        if key not in self.known:
            self.known[key] = measured(call, source, self.seconds)
        return self.known[key]

    def _unmeasured(self, a: Tensor, work: int) -> str | None:
        """Return why torch's own product is taken without measuring, or None."""
        if self.policy != "auto":
            return "not measured"
        known = a.is_cpu or implementations.on_gpu(a.device)
        if not known or a.dtype not in implementations.types(a.device):
            return f"{str(a.dtype).removeprefix('torch.')} on {a.device.type}: torch's own way"
        if work < LEAST:
            return f"fewer than {LEAST / 1e6:.1f} million multiply-adds, not worth measuring"
        return None
