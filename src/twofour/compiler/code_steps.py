"""What operators between two Linears make of a number: the codes that the second one reads, to the bit.

Activations are functions of one number, the same for all outputs, so that a code changes at some numbers, which are
found by running the very operators. Where that is no more than rounding and clipping, as of ReLU, kernels round; else
they look a step of a table up. Equality is shown at `PROBES` numbers, about 1e-3 apart, and at each float around a
change between them: an operator that leaves a code and comes back to it between two probes is outside of what this
serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.bits_matmul import CodedAnswer, CodeSteps, float_of, order_of, step_of
from twofour.kernels.bits_matmul.coded import MOST_ROWS, MOST_STEPS, ROW
from twofour.kernels.problem import MaybeTensor
from twofour.kernels.quantization import Quantization, quantize_input

Apply = Callable[[Tensor], Tensor]
"""An operator on numbers, each by itself."""

PROBES, FAR_PROBES = 1 << 16, 1 << 13
"""Numbers on which codes are looked at: evenly spaced where they change, and over all that an answer can be."""

BESIDE, FAR_BESIDE = 512, 1 << 13
"""Floats on either side of a change of which each is looked at: of every one, and of one that goes on for longer."""

NANS = 33
"""As many are asked what becomes of NaN: more than torch's vectors hold, so that those behind them are too."""

AROUND = 32
"""Steps of the next one's inputs, beside all of its codes, in which an activation may still change a code."""


FORMULAS = ("gelu", "gelu_tanh", "silu")
"""Activations that kernels have a formula for; ReLU is a clip."""

FORMULA_ERROR, LEAST_ERROR, LEAST_MARGIN = 1.5e-6, 2e-8, 0.49
"""Relative error of a formula (epilogue_math.h says 1e-6) with that of its scaling, what it is off by far below zero,
and how much of a step it has to decide."""


class UnfitError(Exception):
    """Kernels do not make these codes; says why."""


@dataclass(frozen=True)
class _Change:
    """Where a code changes.

    Attributes:
        begin: Number of the first float from which on bits decide.
        below: Code of lesser numbers.
        above: Code of greater ones, behind the bits.
        bits: bool (rows, ROW).
    """

    begin: int
    below: int
    above: int
    bits: Tensor


def coded_answer(
    applied: Sequence[Apply], after: Quantization, bound: float, affine: MaybeTensor = None, activation: str = "none"
) -> CodedAnswer:
    """Return what makes codes of a product's answers.

    Args:
        applied: The operators between the product, or its normalisation, and what reads it, in order.
        after: Bits, levels and static range of what reads it.
        bound: The greatest magnitude of a number that they are applied to.
        affine: A normalisation in front of them: float32 (2, out).
        activation: What they are, where kernels have a formula for it: a key of `epilogue.ACTIVATIONS`.

    Raises:
        UnfitError: They answer NaN within the bound, a number where they are given NaN, or codes change at too many
            numbers.
    """

    def codes(numbers: Tensor) -> Tensor:
        for apply in applied:
            numbers = apply(numbers)
        if bool(numbers.isnan().any()):
            raise UnfitError("what stands between answers NaN")
        return quantize_input(numbers, after)[0]

    nan = torch.full((NANS,), math.nan, dtype=torch.float32, device="cpu")
    for apply in applied:
        nan = apply(nan)
    if not bool(nan.isnan().all()):  # a row is marked by the product's inputs, whatever stands behind it
        raise UnfitError("what stands between makes numbers of NaN")
    probes = _probes(after, bound)
    found = codes(float_of(probes))
    plain = _rounded(probes, found, codes, after, affine)
    if plain is not None:
        return plain
    changes = _changes(probes, found, codes)
    steps = _steps(changes, int(found[0]))
    begins = torch.tensor([change.begin for change in changes], dtype=torch.int64, device="cpu")
    beside = (begins[:, None] + torch.arange(-BESIDE, BESIDE, device="cpu")).flatten()
    for orders in (probes, beside, (probes[:-1] + probes[1:]) >> 1):
        numbers = float_of(orders)
        if not torch.equal(steps.codes(numbers), codes(numbers)):
            raise UnfitError("what stands between changes codes to and fro")
    margin = _margin(applied, after, float_of(probes)) if activation in FORMULAS and after.levels != "bipolar" else 0.0
    return CodedAnswer(after, 0, after.most, affine, steps, activation if margin else "none", margin)


def _margin(applied: Sequence[Apply], after: Quantization, probes: Tensor) -> float:
    """Return how far from a whole number a formula's answer says a code, 0 where it seldom would.

    Of the operators the error is measured, and counts twice.
    """
    found, want, most = probes, probes.double(), after.codes[1] * (after.most + 1)
    for apply in applied:
        found, want = apply(found), apply(want)
    within = want.isfinite() & found.isfinite() & (want.abs() <= most)
    error = (found.double() - want).abs()[within].max().item()
    margin = 0.5 - (2 * error + FORMULA_ERROR * most + LEAST_ERROR) / after.codes[1]
    return margin if margin > LEAST_MARGIN else 0.0


def _probes(after: Quantization, bound: float) -> Tensor:
    """Return the numbers of floats that are looked at, in order: int64."""
    scale = after.codes[1]
    near = min(bound, scale * (after.most * after.factor + AROUND) + AROUND)
    even = torch.linspace(-near, near, PROBES, dtype=torch.float64, device="cpu").float()
    ends = torch.tensor([-bound, bound], dtype=torch.float32, device="cpu")
    low, high = order_of(ends).tolist()
    far = torch.linspace(low, high, FAR_PROBES, dtype=torch.float64, device="cpu").long().clamp(low, high)
    return torch.cat([order_of(even).long(), order_of(ends).long(), far]).unique()


def _rounded(
    probes: Tensor, found: Tensor, codes: Apply, after: Quantization, affine: MaybeTensor
) -> CodedAnswer | None:
    """Return the answer of rounding and clipping alone, None where operators do more."""
    least, most = sorted((int(found[0]), int(found[-1])))
    if after.levels == "bipolar" or bool((found[1:] < found[:-1]).any()):
        return None
    answer = CodedAnswer(after, least, most, affine)
    halves = (torch.arange(after.most, device="cpu") + 0.5 - after.zero) * after.codes[1]
    beside = order_of(halves.float())[:, None].long() + torch.arange(-BESIDE, BESIDE, device="cpu")
    numbers = float_of(beside.flatten().clamp(int(probes[0]), int(probes[-1])))
    same = torch.equal(answer.rounded(float_of(probes)), found) and torch.equal(answer.rounded(numbers), codes(numbers))
    return answer if same else None


def _changes(probes: Tensor, found: Tensor, codes: Apply) -> list[_Change]:
    """Return where codes change, in order, by halving between probes."""
    at = (found[1:] != found[:-1]).nonzero().flatten()
    low, high, left, right = probes[at], probes[at + 1], found[at], found[at + 1]
    places: set[int] = set()
    while len(low):
        if len(low) + len(places) > MOST_STEPS:
            raise UnfitError("what stands between changes codes too often")
        begin, end = low.clone(), high.clone()
        while bool((end - begin > 1).any()):
            middle = (begin + end) >> 1
            same = codes(float_of(middle)) == left
            begin, end = torch.where(same, middle, begin), torch.where(same, end, middle)
        places |= set(end.tolist())
        code = codes(float_of(end))
        more = code != right
        low, high, left, right = end[more], high[more], code[more], right[more]
    changes: list[_Change] = []
    for place, around in zip(sorted(places), _around(sorted(places), BESIDE, codes), strict=True):
        if changes and place < changes[-1].begin + changes[-1].bits.numel():
            continue  # one of those that go to and fro
        change = _change(place, around) or _change(place, _around([place], FAR_BESIDE, codes)[0])
        if change is None:
            raise UnfitError("what stands between changes codes to and fro")
        changes.append(change)
    return changes


def _around(places: Sequence[int], beside: int, codes: Apply) -> Tensor:
    """Return the codes of floats on either side of places: (places, 2 * beside)."""
    orders = torch.tensor(places, dtype=torch.int64, device="cpu")[:, None] + torch.arange(
        -beside, beside, device="cpu"
    )
    return codes(float_of(orders.flatten())).view(orders.shape)


def _change(place: int, around: Tensor) -> _Change | None:
    """Return the change at a place, None where it goes on beyond what is looked at, or there is another."""
    below, above, beside = int(around[0]), int(around[-1]), len(around) // 2
    reached = around == above
    first = int(reached.nonzero()[0])
    rows = max(-(-(int((~reached).nonzero()[-1]) + 1 - first) // ROW), 1) if below != above else 0
    clear = beside // 4 <= first and first + rows * ROW <= 2 * beside
    if not rows or not clear or not bool((reached | (around == below)).all()):
        return None
    return _Change(place - beside + first, below, above, reached[first : first + rows * ROW].view(rows, ROW))


def _steps(changes: Sequence[_Change], first: int) -> CodeSteps:
    """Return the widest steps with at most one change in each; `first`: the code of the least number."""
    if not changes:
        raise UnfitError("what stands between makes one code of all numbers")
    begins = torch.tensor([change.begin for change in changes], dtype=torch.int64, device="cpu")
    lengths = torch.tensor([change.bits.numel() for change in changes], dtype=torch.int64, device="cpu")
    begin, end = float_of(begins), float_of(begins + lengths)
    gaps = (begin[1:] - end[:-1]).double()
    factor = 1.0 / (gaps.min().item() if len(gaps) else 1.0)
    while 0 < factor < math.inf:
        offset = 1.0 - begin[0].item() * factor
        lower, upper = (step_of(numbers, factor, offset) for numbers in (begin, end))
        count = int(upper[-1]) + 2
        if count > MOST_STEPS:
            break
        if bool((lower[1:] > upper[:-1]).all()) and lower[0] >= 1:
            return _table(changes, factor, offset, count, (lower.long(), upper.long()), first)
        factor *= 1.1
    raise UnfitError(f"what stands between changes codes too close to each other: a table has {MOST_STEPS} steps")


def _table(
    changes: Sequence[_Change], factor: float, offset: float, count: int, places: tuple[Tensor, Tensor], first: int
) -> CodeSteps:
    """Return steps of which each has the change that lies in it, or one code."""
    entries = [(torch.iinfo(torch.int32).min, first, first, 0, 1)] * count
    rows = [torch.ones(1, ROW, dtype=torch.bool, device="cpu")]
    for change, lower, upper in zip(changes, *(place.tolist() for place in places), strict=True):
        plain = bool(change.bits.all())
        row = 0 if plain else sum(map(len, rows))
        if not plain:
            rows.append(change.bits)
        entries[lower : upper + 1] = [(change.begin, change.below, change.above, row, len(change.bits))] * (
            upper + 1 - lower
        )
        entries[upper + 1 :] = [(entries[0][0], change.above, change.above, 0, 1)] * (count - upper - 1)
    if sum(map(len, rows)) > MOST_ROWS:
        raise UnfitError("what stands between changes codes to and fro")
    begin, below, above, row, length = torch.tensor(entries, dtype=torch.int64, device="cpu").unbind(1)
    one = torch.tensor([factor, offset], dtype=torch.float32, device="cpu")
    codes = below.to(torch.uint8), above.to(torch.uint8)
    lines = row.to(torch.uint8), length.to(torch.uint8)
    return CodeSteps(one[0].item(), one[1].item(), begin.to(torch.int32), *codes, *lines, torch.cat(rows))
