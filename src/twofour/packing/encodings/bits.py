"""Whole numbers of 1 to 8 bits, written as bit planes; ternary ones also five a byte.

A value is stored as an unsigned code u, and every number system is affine in it, v = alpha u + beta (Feng et al. 2021,
"APNN-TC", arXiv 2106.12169, section 3: a product of p by q bits is a sum of products of planes). So one exact product
of codes serves all of them: sum v w = alpha_v alpha_w sum(u t) + alpha_v beta_w sum(u) + beta_v alpha_w sum(t)
+ K beta_v beta_w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.encodings.base import Encoding, Flaw, nonzero_scales
from twofour.patterns import Hybrid, PairedNM, Pattern
from twofour.shapes import Float32, Int, UInt8

NumberSystem = Literal["unsigned", "twos", "bipolar", "ternary"]

WIDEST = 8
"""Bits of a code at most."""

IN_A_BYTE = 5
"""Ternary codes that one byte holds in base 3: 3^5 = 243 of 256 values (Ma et al. 2024, arXiv 2402.17764, has 1.58 bits
a value; five a byte are 1.6)."""


@dataclass(frozen=True)
class Bits(Encoding):
    """Codes of `bits` bits; plane s of a row holds bit s of every code.

    Attributes:
        levels: "unsigned": v = u. "twos" (two's complement): v = u - 2^(bits - 1). "bipolar", odd levels without a
            zero: v = 2 u - (2^bits - 1); one bit is {-1, 1}. "ternary": v = u - 1, u of 0, 1, 2.
        in_a_byte: Codes of a byte in base 3; 0: bit planes.
    """

    levels: NumberSystem = "twos"
    in_a_byte: int = 0

    @property
    def alpha(self) -> int:
        """Step of the values: v = alpha u + beta."""
        return 2 if self.levels == "bipolar" else 1

    @property
    def beta(self) -> int:
        """Value of code 0."""
        top = 1 << self.bits
        return {"unsigned": 0, "twos": -top // 2, "bipolar": 1 - top, "ternary": -1}[self.levels]

    @property
    def largest_code(self) -> int:
        """The greatest code; 0 is the least."""
        return 2 if self.levels == "ternary" else (1 << self.bits) - 1

    @property
    def bounds(self) -> tuple[int, int]:
        """See `Encoding.bounds`."""
        return self.beta, self.alpha * self.largest_code + self.beta

    @property
    def has_zero(self) -> bool:
        """Whether a value is zero; bipolar levels go from -1 to 1."""
        return self.levels != "bipolar"

    def width(self, count: int) -> int:
        """Return the bytes of a row: a whole number for each plane, or one for each five codes."""
        return -(-count // self.in_a_byte) if self.in_a_byte else self.bits * -(-count // 8)

    def takes(self, pattern: Pattern) -> bool:
        """See `Encoding.takes`: all but pairs, which hardware reads in int4, and hybrids."""
        return not isinstance(pattern, PairedNM | Hybrid)

    def store(self, values: Int[Tensor, "rows count"]) -> UInt8[Tensor, "rows width"]:
        """Write whole numbers as planes, bit 0 first, value i of a row in bit i % 8 of byte i / 8 of each plane."""
        codes = self.codes_of(values)
        if self.in_a_byte:
            return _fives(codes)
        planes = [np.packbits((codes >> bit & 1).numpy(), axis=1, bitorder="little") for bit in range(self.bits)]
        return torch.as_tensor(np.concatenate(planes, axis=1), dtype=torch.uint8, device="cpu")

    def read(self, stored: UInt8[Tensor, "rows width"], count: int) -> Int[Tensor, "rows {count}"]:
        """Return the values again: int16; see `Encoding.read`."""
        return self.read_codes(stored, count).to(torch.int16) * self.alpha + self.beta

    def read_codes(self, stored: UInt8[Tensor, "rows width"], count: int) -> UInt8[Tensor, "rows {count}"]:
        """Return the codes of `count` values of each row, which a product multiplies by."""
        if self.in_a_byte:
            digits = [torch.div(stored, 3**place, rounding_mode="floor") % 3 for place in range(self.in_a_byte)]
            return torch.stack(digits, -1).flatten(1)[:, :count].contiguous()
        planes = stored.cpu().reshape(len(stored), self.bits, -1).numpy()
        codes = np.zeros((len(stored), count), np.uint8)
        for bit in range(self.bits):
            codes |= np.unpackbits(planes[:, bit], axis=1, count=count, bitorder="little") << bit
        return torch.as_tensor(codes, dtype=torch.uint8, device="cpu")

    def codes_of(self, values: Int[Tensor, "rows count"]) -> UInt8[Tensor, "rows count"]:
        """Return the codes of whole numbers.

        Raises:
            PackingError: One of them is none of the encoding's values.
        """
        codes = torch.div(values.to(torch.int32) - self.beta, self.alpha, rounding_mode="floor")
        wrong = (codes < 0) | (codes > self.largest_code) | (codes * self.alpha + self.beta != values)
        if wrong.any():
            least, most = self.bounds
            low, high = int(values[wrong][0]), int(wrong.sum())
            raise PackingError(
                f"the weight cannot be written as {self.name}",
                got=f"{high} values it has not, the first {low}",
                wanted=f"{'odd' if self.alpha == 2 else 'whole'} numbers from {least} to {most}",
                remedy=None if self.has_zero else f"{self.name} has no zero: two's complement and ternary have one",
            )
        return codes.to(torch.uint8)

    def flaw(self, stored: UInt8[Tensor, "rows width"], count: int) -> Flaw | None:
        """See `Encoding.flaw`: what lies behind the last value must be zero, and ternary codes below 3."""
        if self.in_a_byte:
            last = 3 ** (count - (stored.shape[1] - 1) * self.in_a_byte)
            if bool((stored[:, -1] >= last).any()) or bool((stored >= 3**self.in_a_byte).any()):
                return Flaw("code", f"a byte of more than {count} ternary codes of a row", "bytes below 3^5 = 243")
            return None
        planes = stored.reshape(len(stored), self.bits, -1)
        if count % 8 and bool((planes[..., -1] >> count % 8).any()):
            return Flaw("padding", f"bits behind {count} {self.name} values of a plane", "zero bits")
        if self.levels == "ternary" and bool((planes[:, 0] & planes[:, 1]).any()):
            return Flaw("code", "a ternary code of 3", "codes 0, 1 and 2")
        return None

    def quantize(
        self, values: Float32[Tensor, "rows count"], per_scale: int = 0, symmetric: bool = True
    ) -> tuple[Int[Tensor, "rows count"], Float32[Tensor, "rows runs"], Float32[Tensor, "rows runs"] | None]:
        """Round runs of values; see `Encoding.quantize`.

        One bipolar bit: s = mean |w| and q = sign(w), zero counting as positive (Rastegari et al. 2016, "XNOR-Net",
        arXiv 1603.05279, section 3.1: the best of all scales). Ternary: s = mean |w|, q = round(w / s) cut to -1..1 (Ma
        et al. 2024, section 2). Else s = max |w| / the largest level. Without symmetry, and where the levels lie on one
        side of zero (unsigned, s1), s = (max - min) / (2^bits - 1) over the run and zero, and z = least -
        round(min / s), so that zero is exact.

        Raises:
            PackingError: Zero points are asked for where the levels have none.
        """
        runs = values.reshape(len(values), -1, per_scale or values.shape[1])
        least, most = self.bounds
        if not symmetric and self.levels in ("bipolar", "ternary"):
            raise PackingError(
                f"{self.name} has no zero points",
                got="symmetric=False",
                wanted="an encoding whose levels follow each other by one: u1 to u8, s1 to s8",
                remedy="leave `symmetric` out",
            )
        if not symmetric or not least < 0 < most:
            low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
            scales = nonzero_scales((high - low) / self.largest_code)
            zeros = least - (low / scales).round()
            whole = ((runs / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(least, most)
            return whole.to(torch.int16).view_as(values), scales, zeros
        if self.levels == "ternary" or (self.levels == "bipolar" and self.bits == 1):
            scales = runs.abs().mean(-1)
            if not bool(scales.isfinite().all()):  # a sum of float32 that is more than float32 holds
                scales = torch.where(scales.isfinite(), scales, runs.double().abs().mean(-1).float())
        else:
            scales = runs.abs().amax(-1) / max(most, 1)
        # Without a zero among the levels those of a run of zeros are the nearest to it that there are.
        scales = nonzero_scales(scales) if self.has_zero else scales.clamp(min=torch.finfo(torch.float32).tiny)
        return self.nearest(runs / scales.unsqueeze(-1)).to(torch.int16).view_as(values), scales, None

    def nearest(self, values: Float32[Tensor, "*axes"]) -> Float32[Tensor, "*axes"]:
        """Return the level that is nearest to each value, in float32; half-way to the even code, of one bit to 1."""
        if self.levels == "bipolar" and self.bits == 1:
            return torch.where(values < 0, -1.0, 1.0)
        if self.alpha == 1:  # rounded before anything is added, which could round a first time
            return values.round().clamp(*self.bounds)
        return ((values - self.beta) / self.alpha).round().clamp(0, self.largest_code) * self.alpha + self.beta


def _fives(codes: Tensor) -> Tensor:
    """Write ternary codes five a byte, the first in the lowest place of base 3."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % IN_A_BYTE)).view(len(codes), -1, IN_A_BYTE)
    places = torch.tensor([3**place for place in range(IN_A_BYTE)], dtype=torch.int32, device=codes.device)
    return (padded.to(torch.int32) * places).sum(-1).to(torch.uint8)


def _of(letter: str, levels: NumberSystem) -> tuple[Bits, ...]:
    return tuple(
        Bits(f"{letter}{bits}", torch.int16, bits, scaled=True, any_group=True, levels=levels)
        for bits in range(WIDEST, 0, -1)
    )


UNSIGNED = _of("u", "unsigned")
TWOS = _of("s", "twos")
BIPOLAR = _of("b", "bipolar")
TERNARY = Bits("ternary", torch.int16, 2, scaled=True, any_group=True, levels="ternary")
TERNARY5 = Bits("ternary5", torch.int16, 2, scaled=True, any_group=True, levels="ternary", in_a_byte=IN_A_BYTE)

LOW_BITS = (*UNSIGNED, *TWOS, *BIPOLAR, TERNARY, TERNARY5)
"""Every encoding of whole numbers of 1 to 8 bits."""
