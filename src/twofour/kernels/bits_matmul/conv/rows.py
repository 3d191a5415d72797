"""Native convolutions of codes on the CPU: rows of bits_conv.inc."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Prepared, Row, rows_of
from twofour.kernels.bits_matmul.codes import BitWeight, Levels
from twofour.kernels.bits_matmul.conv.codes import CodedImages, Requantised
from twofour.kernels.bits_matmul.layout import from_layout, panel_of, to_layout
from twofour.kernels.bits_matmul.lookup_layouts import zero_code
from twofour.kernels.conv import Geometry, Images, channels_last, require_image, too_many_taps
from twofour.kernels.native_product import foreign
from twofour.kernels.problem import MaybeTensor
from twofour.kernels.quantization import Quantization
from twofour.shapes import Float32

LOOKUPS = "bits_lookups"
"""The layout of the row that looks up sums of codes."""


def lookups() -> tuple[int, int]:
    """Return codes that are looked up together, and the greatest code (bits_conv.h)."""
    return native.extension().bits_lookups


LARGEST = 2**31
"""Bytes that the codes of an image with its zeros, and tables of a row of windows, stay below: places are int32."""


@dataclass(frozen=True, eq=False)
class AfterConv:
    """What becomes of a real answer: relu(answer * scale + shift + other), its product and first sum rounded once.

    Attributes:
        affine: float32 (2, out), scales and shifts of a normalisation; None: there is none.
        relu: Whether the least of an answer is zero.
        pool: 1 where the means of an image's pixels alone are the answer, 2 of the greatest of 2 x 2; 0 elsewhere.
    """

    affine: Float32[Tensor, "two out"] | None = None
    relu: bool = False
    pool: int = 0


PLAIN = AfterConv()


@dataclass(frozen=True)
class BitsConvProblem:
    """What a convolution of codes computes.

    Attributes:
        geometry: Sizes, without groups.
        quantization: Bits, levels and range of the inputs; a dynamic range is that of an image.
        answer: How sums become codes; None: the answer is real. The range of the inputs is static then.
        coded: How the codes of the input stand, where it is of codes.
        after: What becomes of a real answer.
    """

    geometry: Geometry
    quantization: Quantization
    answer: Requantised | None = None
    coded: CodedImages | None = None
    after: AfterConv = PLAIN


@dataclass(frozen=True)
class BitsConv(Row):
    """One row of bits_conv.inc: y = conv(x, W) + bias, W codes of 1 to 8 bits, x rounded to codes of 1 to 8 bits.

    Sums are exact: all rows give the same bits, those of `bits_conv_reference`. The layout is that of a product whose
    inputs are taps times the codes of a pixel, the sums of an output's values at each tap behind it.

    Attributes:
        index: Its place in the table.
    """

    index: int

    @property
    def planes(self) -> bool:
        """Whether it reads codes in planes of bits, else in bytes."""
        return self.layout == "bits_planes"

    @property
    def unit(self) -> int:
        """Channels of a pixel that it reads together, zeros behind the last."""
        return lookups()[0] if self.layout == LOOKUPS else 64 if self.planes else 4

    @property
    def panel(self) -> int:
        """Outputs of a panel."""
        return panel_of(self.layout)

    def refuses(self, geometry: Geometry, levels: Levels, quantization: Quantization, images: Images) -> str | None:
        """Return why this row cannot run such a convolution of such images, or None when it can."""
        if (reason := self.unavailable() or too_many_taps(geometry)) is not None:
            return reason
        if geometry.groups != 1:
            return f"convolves all channels together, not in {geometry.groups} groups"
        if geometry.columns > (longest := levels.longest(quantization)):
            return f"sums of {geometry.columns} inputs may exceed int32; at most {longest}"
        if self.layout == LOOKUPS:
            _, code = lookups()
            if quantization.most > code:
                return f"looks up sums of codes of at most {code.bit_length()} bits, inputs have {quantization.bits}"
        if not self.holds(geometry, quantization.bits, images[1], images[2]):
            return f"the codes of an image of {images[1]} x {images[2]} pixels take 2 GB"
        return None

    def holds(self, geometry: Geometry, bits: int, height: int, width: int) -> bool:
        """Tell whether the codes of an image with its zeros take less than `LARGEST` bytes."""
        sizes = zip(geometry.sizes(height, width), geometry.stride, geometry.kernel, geometry.dilation, strict=True)
        reach = [n * stride + kernel * dilation for n, stride, kernel, dilation in sizes]
        stood = CodedImages(self.planes, geometry.in_channels, bits, reach[0], reach[1])
        tables = 64 * -(-geometry.in_channels // self.unit) if self.layout == LOOKUPS else 0
        fits = geometry.kernel[0] * geometry.dilation[0] * reach[1] * tables < LARGEST
        return fits and reach[0] * reach[1] * stood.pixel_bytes < LARGEST

    def prepare(self, weight: BitWeight, geometry: Geometry) -> Prepared:
        """Return a weight as this row reads it behind a 64-byte header: uint8.

        Args:
            weight: Codes (out, in_channels * taps), in the order of a Conv2d's weight.
            geometry: Of the convolution.
        """
        out, taps = len(weight.codes), geometry.kernel[0] * geometry.kernel[1]
        codes = weight.codes.view(out, geometry.in_channels, taps).transpose(1, 2)
        looked_up = self.layout == LOOKUPS
        zero = zero_code(weight.levels) if looked_up else 0  # what stands there may meet codes of the next pixel
        codes = functional.pad(codes, (0, self._zeros(geometry)), value=zero)
        if looked_up:
            codes = codes.reshape(out, -1, self.unit)[:, self._order(geometry)]
        values = weight.values().view(out, geometry.in_channels, taps)
        tap_sums = functional.pad(values.sum(1, dtype=torch.int32).t(), (0, -out % self.panel)).contiguous()
        of_rows = values.sum((1, 2), dtype=torch.int32)
        padded = BitWeight(codes.reshape(out, -1), weight.levels, weight.scales)
        buffer = to_layout(padded, self.layout, of_rows, tap_sums.nbytes)
        buffer[-tap_sums.nbytes :] = tap_sums.view(torch.uint8).flatten()
        return Prepared(self, buffer)

    def restore(self, prepared: Prepared, geometry: Geometry) -> BitWeight:
        """Return the weight that `prepare` was given."""
        held, taps = from_layout(prepared.tensor), geometry.kernel[0] * geometry.kernel[1]
        codes = held.codes
        if self.layout == LOOKUPS:
            codes = codes.view(len(codes), -1, self.unit)[:, self._order(geometry).argsort()]
        codes = codes.reshape(len(codes), taps, -1)[..., : geometry.in_channels].transpose(1, 2).flatten(1)
        return BitWeight(codes.contiguous(), held.levels, held.scales)

    def _zeros(self, geometry: Geometry) -> int:
        """Return the zeros behind the channels of a tap: none of so few that bytes gather windows (bits_conv.h)."""
        gathered = self.unit == 4 and geometry.in_channels < 4
        return 0 if gathered else -geometry.in_channels % self.unit

    def _order(self, geometry: Geometry) -> Tensor:
        """Return which inputs that are looked up together, by taps and channels, stand at each place of a weight."""
        step = -(-geometry.in_channels // self.unit)
        order = native.extension().bits_lookup_order(*geometry.kernel, step)
        return torch.tensor(order, dtype=torch.int64, device="cpu")

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: BitsConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve.

        Args:
            x: float32 (images, in_channels, height, width), any strides; channels last is not copied. Or codes as this
                row reads them, uint8 (images, bytes).
            weight: What `prepare` returned for the problem's geometry.
            bias: float32 (out,) or None; None for an answer of codes, which has it in its thresholds.
            problem: What is computed.
            other: float32 of the answer's shape, added to a real answer as the problem's `after` says; or None.

        Returns:
            float32 (images, out, height, width) in torch.channels_last, or codes as the problem's `answer` says, uint8
            (images, bytes). Means are (images, out, 1, 1).

        Raises:
            KernelError: Operands do not fit, or the weight was prepared for another row or geometry.
        """
        geometry, quantization, answer, coded = problem.geometry, problem.quantization, problem.answer, problem.coded
        assert answer is None or (bias is None and other is None)
        self._require_own(problem)
        if coded is None:
            size, x = require_image(x, geometry, None), channels_last(x)
            image = x.shape[2], x.shape[3]
        else:
            image = coded.height, coded.width
            size = geometry.output(*image)
        numbers = None if answer is None else answer.numbers(self.panel)
        after, other = problem.after, None if other is None else channels_last(other)
        y = self._empty(len(x), geometry, answer, (1, 1) if after.pool else size)
        axes = [(geometry.kernel[i], geometry.stride[i], geometry.before[i], geometry.dilation[i]) for i in range(2)]
        to = (0, int(not after.pool), after.pool or 1)
        to = to if answer is None else (int(answer.planes), len(answer.thresholds), answer.pool)
        options = quantization.most, quantization.factor, quantization.levels != "unsigned"
        fits = native.extension().bits_conv(
            *(self.index, x, weight.tensor, bias, numbers, after.affine, other, y),
            *(geometry.in_channels, geometry.out_channels, *axes, image, size, to),
            *(*quantization.codes[:3], *options, after.relu, native.threads()),
        )
        if not fits:
            raise foreign(self, weight.tensor, geometry.out_channels, geometry.columns)
        return y

    @staticmethod
    def _empty(count: int, geometry: Geometry, answer: Requantised | None, size: tuple[int, int]) -> Tensor:
        if answer is not None:
            return torch.empty((count, answer.images(*size).image_bytes), dtype=torch.uint8, device="cpu")
        shape = count, geometry.out_channels, *size
        return torch.empty(shape, dtype=torch.float32, memory_format=torch.channels_last, device="cpu")

    def _require_own(self, problem: BitsConvProblem) -> None:
        """Refuse thresholds and codes of another convolution, which whole panels and words may hide."""
        geometry, bits, answer, coded = problem.geometry, problem.quantization.bits, problem.answer, problem.coded
        got = ""
        if answer is not None and len(answer.flips) != geometry.out_channels:
            got = f"thresholds of {len(answer.flips)} outputs"
        elif coded is not None:
            stands = coded.planes, coded.channels, coded.bits
            got = "" if stands == (self.planes, geometry.in_channels, bits) else str(coded)
        if got:
            raise KernelError(
                f"{self.name} was given codes of another convolution",
                got=got,
                wanted=f"{geometry.in_channels} channels of {bits} bits, thresholds of {geometry.out_channels} outputs",
            )


def bits_conv_rows() -> list[BitsConv]:
    """Return the rows of bits_conv.inc in their order there."""
    return rows_of(BitsConv, "bits_conv")
