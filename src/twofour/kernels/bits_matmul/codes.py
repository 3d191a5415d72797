"""Weights as unsigned codes: every number system of 1 to 8 bits is affine in its code, value = alpha * u + beta."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.quantization import Quantization
from twofour.shapes import Float32, Int8, UInt8

INT32_LARGEST = (1 << 31) - 1

TWO_OF_FOUR = "2:4"
"""The pattern that kernels of codes skip the zeros of."""

_LOOKED_AT = 64
"""Outputs of a weight that are looked at before all of it: one of random codes is found to be dense by these."""


@dataclass(frozen=True)
class Levels:
    """What codes 0 ... 2^bits - 1 stand for (Feng et al. 2021, arXiv 2106.12169, cases I to III; two's complement).

    Attributes:
        bits: Bits of a code, 1 to 8.
        alpha: Step from one level to the next.
        beta: Level of the code 0.
    """

    bits: int
    alpha: int = 1
    beta: int = 0

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9) or self.alpha not in (1, 2) or self.beta not in range(-255, 1):
            raise KernelError(
                "there are no such levels",
                got=f"{self.bits} bits, value = {self.alpha} u + {self.beta}",
                wanted="1 to 8 bits, steps of 1 or 2, the lowest level from -255 to 0",
            )

    @property
    def most(self) -> int:
        """The greatest number of so many bits."""
        return (1 << self.bits) - 1

    @property
    def largest_code(self) -> int:
        """The greatest code that stands for a level: one less than `most` of ternary ones."""
        return 2 if (self.bits, self.alpha, self.beta) == (2, 1, -1) else self.most

    @property
    def largest(self) -> int:
        """The greatest magnitude of a level."""
        return max(-self.beta, self.alpha * self.most + self.beta)

    @property
    def fits_bytes(self) -> bool:
        """Whether levels are one apart and bytes of two's complement hold them all: then zero is one of them."""
        return self.alpha == 1 and self.beta >= -128 and self.most + self.beta <= 127

    def longest(self, quantization: Quantization, *, shifted: bool = False) -> int:
        """Return how many products with such inputs surely fit an int32 sum; `shifted`: of weights with zero points.

        An input is factor * u - zero, from -most to most whatever its levels, so that a sum of n products is at most
        n * largest * most; an input that stays real is multiplied in bytes of -128 to 127 (groups.h). A zero point is a
        level, so that values less theirs are at most alpha * (2^bits - 1). What is summed on the way wraps around
        modulo 2^32, and so is exact when the end is.
        """
        largest = self.alpha * self.most if shifted else max(self.largest, 1)
        return INT32_LARGEST // (largest * (128 if quantization.real else quantization.most))


def unsigned(bits: int) -> Levels:
    """Return the levels 0 ... 2^bits - 1."""
    return Levels(bits)


def twos(bits: int) -> Levels:
    """Return the levels -2^(bits - 1) ... 2^(bits - 1) - 1: the code is two's complement with its top bit flipped."""
    return Levels(bits, 1, -(1 << (bits - 1)))


def bipolar(bits: int) -> Levels:
    """Return the odd levels -(2^bits - 1) ... 2^bits - 1; of one bit -1 and 1."""
    return Levels(bits, 2, 1 - (1 << bits))


TERNARY = Levels(2, 1, -1)
"""-1, 0 and 1: codes 0, 1 and 2."""


@dataclass(frozen=True, eq=False)
class BitWeight:
    """A weight of codes.

    Attributes:
        codes: uint8 (out, in), each at most `levels.largest_code`.
        levels: What they stand for.
        scales: float32 (out,), or (out, groups) where runs of inputs have their own: real = scale * value.
        zeros: int8 of the shape of the scales, or None: the level that stands for zero, which a value is less by.

    Raises:
        KernelError: Sizes, dtypes or codes do not fit each other, a scale is zero, NaN or infinite, or a zero point is
            beyond the levels.
    """

    codes: UInt8[Tensor, "out in"]
    levels: Levels
    scales: Float32[Tensor, "out ..."]
    zeros: Int8[Tensor, "out ..."] | None = None

    def __post_init__(self) -> None:
        codes, scales, zeros = self.codes, self.scales, self.zeros
        fits = codes.dtype is torch.uint8 and codes.ndim == 2 and codes.numel() > 0 and codes.is_cpu
        fits = fits and scales.dtype is torch.float32 and scales.shape[:1] == codes.shape[:1] and scales.ndim in (1, 2)
        fits = fits and (scales.ndim == 1 or (scales.shape[1] > 0 and codes.shape[1] % scales.shape[1] == 0))
        fits = fits and (zeros is None or (zeros.dtype is torch.int8 and zeros.shape == scales.shape))
        if fits and (odd := int((~torch.isfinite(scales) | (scales == 0)).sum())):
            raise KernelError(
                "a scale of a weight of codes is no scale",
                got=f"{odd} of {len(scales)} are zero, NaN or infinite",
                wanted="finite scales other than zero",
            )
        least, most = self.levels.beta, self.levels.alpha * self.levels.most + self.levels.beta
        if fits and zeros is not None and not least <= int(zeros.min()) <= int(zeros.max()) <= most:
            raise KernelError(
                "a zero point of a weight of codes is no level",
                got=f"zero points from {int(zeros.min())} to {int(zeros.max())}",
                wanted=f"{least} to {most}",
            )
        if not fits or int(codes.max()) > self.levels.largest_code:
            raise KernelError(
                "a weight of codes does not fit its levels",
                got=f"codes {tuple(codes.shape)} of {codes.dtype}, scales {tuple(scales.shape)} of {scales.dtype}",
                wanted=f"uint8 (out, in) on the CPU, codes from 0 to {self.levels.largest_code}, a float32 scale for "
                "each row, or for each of equal groups of inputs",
            )

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.codes.shape

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all of a row."""
        return self.shape[1] // self.scales.shape[1] if self.scales.ndim == 2 else 0

    @property
    def shifted(self) -> bool:
        """Whether it has zero points."""
        return self.zeros is not None

    @cached_property
    def pattern(self) -> str:
        """The pattern of its values: "2:4" where every four of inputs has at most two that are not zero, or "dense".

        Of weights with zero points and those whose levels no byte holds it is "dense".
        """
        if self.shifted or not self.levels.fits_bytes:
            return "dense"

        def keeps_two(codes: Tensor) -> bool:
            kept = torch.nn.functional.pad(codes != -self.levels.beta, (0, -codes.shape[1] % 4))
            return int(kept.view(-1, 4).sum(1, dtype=torch.uint8).max()) <= 2

        return TWO_OF_FOUR if keeps_two(self.codes[:_LOOKED_AT]) and keeps_two(self.codes) else "dense"

    def values(self) -> Tensor:
        """Return the whole numbers that the codes stand for, less their zero points: int32 (out, in)."""
        values = self.codes.int() * self.levels.alpha + self.levels.beta
        return values if self.zeros is None else values - self._wide(self.zeros.int())

    def real(self) -> Tensor:
        """Return the real numbers that they stand for, values times scales in float32: (out, in)."""
        return self.values().float() * self._wide(self.scales)

    def _wide(self, of_groups: Tensor) -> Tensor:
        return of_groups.view(self.shape[0], -1).repeat_interleave(self.group or self.shape[1], dim=1)
