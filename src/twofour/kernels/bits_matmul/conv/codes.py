"""Images of codes as they go from one convolution to the next, and how whole sums become such codes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from twofour import native
from twofour.errors import KernelError
from twofour.shapes import Int32, UInt8


def codes_head() -> int:
    """Return the bytes before an image's codes.

    The first says whether pixels were computed from NaN, and a byte for each behind the codes which: what reads them is
    NaN.
    """
    return native.extension().bits_codes_head


MOST_BITS = 4
"""Bits of a code that is found by comparing with thresholds: 15 of them."""


@dataclass(frozen=True)
class CodedImages:
    """How the codes of images stand in bytes (bits_conv.h, PixelCodes).

    Attributes:
        planes: Planes of 64-bit words for each pixel, the lowest first; else bytes, filled up to a multiple of four.
        channels: Of a pixel.
        bits: Of a code.
        height: Pixels.
        width: Pixels.
    """

    planes: bool
    channels: int
    bits: int
    height: int
    width: int

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel."""
        return self.bits * -(-self.channels // 64) * 8 if self.planes else -(-self.channels // 4) * 4

    @property
    def image_bytes(self) -> int:
        """Bytes of an image with its head, and the marks of its pixels."""
        return codes_head() + self.height * self.width * (self.pixel_bytes + 1)

    def pack(self, codes: UInt8[Tensor, "images channels height width"]) -> Tensor:
        """Return codes as they stand: uint8 (images, image_bytes); none was computed from NaN."""
        pixels = codes.permute(0, 2, 3, 1)
        if self.planes:
            padded = functional.pad(pixels, (0, -self.channels % 64)).contiguous().numpy()
            planes = [np.packbits(padded >> p & 1, axis=-1, bitorder="little") for p in range(self.bits)]
            stood = torch.as_tensor(np.stack(planes, -2), dtype=torch.uint8, device="cpu")
        else:
            stood = functional.pad(pixels, (0, -self.channels % 4))
        return functional.pad(stood.flatten(1), (codes_head(), self.height * self.width))

    def unpack(self, data: UInt8[Tensor, "images bytes"]) -> Tensor:
        """Return the inverse of `pack`: uint8 (images, channels, height, width)."""
        pixels = data[:, codes_head() : self.image_bytes - self.height * self.width].reshape(
            len(data), self.height, self.width, -1
        )
        if self.planes:
            planes = pixels.reshape(len(data), self.height, self.width, self.bits, -1).contiguous().numpy()
            ones = np.unpackbits(planes, axis=-1, bitorder="little")
            codes = (ones << np.arange(self.bits, dtype=np.uint8)[:, None]).sum(-2, dtype=np.uint8)
            pixels = torch.as_tensor(codes, dtype=torch.uint8, device="cpu")
        return pixels[..., : self.channels].permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Requantised:
    """How whole sums become codes: that of a sum v is how many thresholds v, or where flipped -v - 1, reaches.

    Scale, bias, batch normalisation, ReLU and rounding are each monotone in a sum, rounding of floats included, so what
    they make of it changes at `2^bits - 1` sums (Feng et al. 2021, arXiv 2106.12169, section 5.2). So does the greatest
    of 2 x 2 codes commute with them.

    Attributes:
        flips: int32 (out,), -1 where the code falls as the sum grows, else 0.
        thresholds: int32 (2^bits - 1, out).
        planes: How the codes stand: see `CodedImages`.
        pool: 1, or 2 for the greatest of every 2 x 2 pixels; a last odd row or column is left out.

    Raises:
        KernelError: Sizes do not fit, or there are more than 4 bits.
    """

    flips: Int32[Tensor, " out"]
    thresholds: Int32[Tensor, "levels out"]
    planes: bool
    pool: int = 1
    _numbers: dict[int, Tensor] = field(default_factory=lambda: {}, repr=False)

    def __post_init__(self) -> None:
        most, whole = len(self.thresholds), self.thresholds.dtype is self.flips.dtype is torch.int32
        fits = most in (1, 3, 7, 15) and self.pool in (1, 2) and whole
        if not fits or self.flips.shape != self.thresholds[0].shape:
            raise KernelError(
                "the thresholds of a requantised answer do not fit",
                got=f"{tuple(self.thresholds.shape)} of {self.thresholds.dtype}, pool {self.pool}",
                wanted="int32 (1, 3, 7 or 15, out), flips (out,), a pool of 1 or 2",
            )

    @property
    def bits(self) -> int:
        """Of a code."""
        return len(self.thresholds).bit_length()

    def numbers(self, panel: int) -> Tensor:
        """Return flips and thresholds as a row of panels of so many outputs reads them: uint8, flat."""
        if panel not in self._numbers:
            rows = functional.pad(torch.cat([self.flips[None], self.thresholds]), (0, -len(self.flips) % panel))
            self._numbers[panel] = rows.contiguous().view(torch.uint8).flatten()
        return self._numbers[panel]

    def images(self, height: int, width: int) -> CodedImages:
        """Return how an answer of so many pixels before its pooling stands."""
        return CodedImages(self.planes, len(self.flips), self.bits, height // self.pool, width // self.pool)


def requantise(sums: Tensor, answer: Requantised) -> Tensor:
    """Return the codes of whole sums (images, out, height, width): uint8, the reference of the kernels' comparisons."""
    flipped = sums ^ answer.flips.to(sums.dtype).view(-1, 1, 1)
    reached = [flipped >= row.to(sums.dtype).view(-1, 1, 1) for row in answer.thresholds]
    return pool_codes(torch.stack(reached).sum(0, dtype=torch.uint8), answer.pool)


def pool_codes(codes: Tensor, pool: int) -> Tensor:
    """Return the greatest of every pool x pool codes (images, channels, height, width)."""
    height, width = (size // pool * pool for size in codes.shape[2:])
    return reduce(torch.maximum, [codes[..., i:height:pool, j:width:pool] for i in range(pool) for j in range(pool)])
