"""The sums at which the codes of a next layer change: normalisation, ReLU and rounding folded to thresholds.

Feng et al. 2021 ("APNN-TC", arXiv 2106.12169, section 5.2) solve the formula for the sum. Here the sums are searched by
halving with torch's own operators, so that a code changes where their rounded floats make it change, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.bits_matmul.conv import MOST_BITS, BitsConvProblem, Requantised, requantise
from twofour.kernels.problem import MaybeTensor
from twofour.kernels.quantization import Quantization, quantize_input

Apply = Callable[[Tensor], Tensor]
"""An operator on (images, channels, height, width)."""

PROBES = 64
"""Sums of each channel on which thresholds are compared with the operators, besides those beside a threshold."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Whole sums of a convolution, and what becomes of them on the way to the next one's codes.

    Attributes:
        problem: The convolution.
        weight: Its weight.
        bias: float32 (out,) or None.
        applied: What is applied to its answer, in order; each monotone, channel by channel.
        after: Bits, levels and range of the next one's inputs.
    """

    problem: BitsConvProblem
    weight: BitWeight
    bias: MaybeTensor
    applied: Sequence[Apply]
    after: Quantization

    @property
    def unfit(self) -> str:
        """Why kernels do not compare, "" where they do: ranges are static, and thresholds few."""
        if self.problem.quantization.dynamic or self.after.dynamic:
            return "inputs without a learned step: a range is found at each call"
        if self.after.bits > MOST_BITS:
            return f"codes of {self.after.bits} bits, thresholds are for at most {MOST_BITS}"
        return ""

    @property
    def largest(self) -> int:
        """The greatest magnitude of a sum."""
        return self.problem.geometry.columns * self.weight.levels.largest * self.problem.quantization.most

    def values(self, sums: Tensor) -> Tensor:
        """Return what the operators make of sums, int64 (count, out): float32 (count, out)."""
        scale = torch.tensor(self.problem.quantization.x_scale, dtype=torch.float32, device="cpu")
        y = sums.float() * (scale * self.weight.scales)
        y = (y if self.bias is None else y + self.bias)[:, :, None, None]
        for apply in self.applied:
            y = apply(y)
        return y.flatten(1)

    def codes(self, sums: Tensor) -> Tensor:
        """Return the codes that sums become."""
        return quantize_input(self.values(sums), self.after)[0]

    def thresholds(self, planes: bool, pool: int) -> Requantised | None:
        """Return them; None where the operators answer NaN, or do not agree with thresholds.

        Args:
            planes: How the next convolution reads codes.
            pool: 1, or 2 for the greatest of 2 x 2 codes.
        """
        out, most = len(self.weight.codes), self.after.most
        ends = torch.tensor([-self.largest, self.largest], dtype=torch.int64, device="cpu")[:, None].expand(2, out)
        first, last = self.codes(ends).int()
        if bool(self.values(ends).isnan().any()):
            return None
        flips = torch.where(first > last, -1, 0)
        low = torch.full((most, out), -self.largest - 1, dtype=torch.int64, device="cpu")
        high = torch.full((most, out), self.largest + 1, dtype=torch.int64, device="cpu")
        levels = torch.arange(1, most + 1, device="cpu")[:, None]
        while bool((low < high).any()):
            middle = (low + high) >> 1
            reached = self.codes(middle ^ flips) >= levels
            low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
        bounds = torch.iinfo(torch.int32)
        found = Requantised(flips.int(), low.clamp(bounds.min, bounds.max).int(), planes, pool)
        return found if self._agrees(found) else None

    def _agrees(self, found: Requantised) -> bool:
        """Compare thresholds with the operators on sums beside each threshold and evenly spaced between the ends."""
        beside = torch.cat([found.thresholds + step for step in (-2, -1, 0, 1)]).long() ^ found.flips.long()
        spread = torch.linspace(-1, 1, PROBES, dtype=torch.float64, device="cpu").mul(self.largest).long()
        sums = torch.cat([beside, spread[:, None].expand(PROBES, len(found.flips))]).clamp(-self.largest, self.largest)
        want = self.codes(sums)
        got = requantise(sums[:, :, None, None], Requantised(found.flips, found.thresholds, found.planes))
        return torch.equal(got.flatten(1), want)
