"""Layer: one convolution or product as SCALE-Sim describes it, with its N:M sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.errors import HardwareError
from twofour.hardware.sizes import integer


@dataclass(frozen=True)
class Layer:
    """A convolution without padding; a product is one whose window is a row of its input.

    Attributes:
        name: Its name.
        height: Rows of the input.
        width: Columns of the input.
        filter_height: Rows of the window.
        filter_width: Columns of the window.
        channels: Input channels.
        filters: Output channels.
        stride: Step of the window, both ways.
        kept: Weights kept in each group along the reduction, the N of N:M.
        group: Weights in a group, the M of N:M; 1:1 is dense.
    """

    name: str
    height: int
    width: int
    filter_height: int
    filter_width: int
    channels: int
    filters: int
    stride: int = 1
    kept: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        sizes = ("height", "width", "filter_height", "filter_width", "channels", "filters", "stride", "kept", "group")
        wrong = [f"{size}={getattr(self, size)}" for size in sizes if integer(getattr(self, size)) is None]
        if not wrong and (self.filter_height > self.height or self.filter_width > self.width):
            wrong.append(f"a {self.filter_height} x {self.filter_width} window on a {self.height} x {self.width} input")
        if not wrong and self.kept > self.group:
            wrong.append(f"{self.kept} kept of {self.group}")
        if wrong:
            raise _impossible(self.name, wrong)

    @classmethod
    def gemm(cls, name: str, m: int, n: int, k: int, kept: int = 1, group: int = 1) -> Layer:
        """Return the product of (m, k) by (k, n), its weight N:M sparse along k.

        Raises:
            HardwareError: A size is not a whole number from 1, or N is above M.
        """
        if wrong := [f"{size}={value}" for size, value in (("M", m), ("N", n), ("K", k)) if integer(value) is None]:
            raise _impossible(name, wrong)
        return cls(name, m, k, 1, k, 1, n, 1, kept, group)

    @property
    def out_height(self) -> int:
        """Rows of the output; SCALE-Sim counts a last window that hangs over the edge."""
        return -(-(self.height - self.filter_height + self.stride) // self.stride)

    @property
    def out_width(self) -> int:
        """Columns of the output, counted in the same way."""
        return -(-(self.width - self.filter_width + self.stride) // self.stride)

    @property
    def m(self) -> int:
        """Rows of the product: output pixels."""
        return self.out_height * self.out_width

    @property
    def n(self) -> int:
        """Columns of the product: output channels."""
        return self.filters

    @property
    def k(self) -> int:
        """Reduction: values in a window."""
        return self.filter_height * self.filter_width * self.channels


def _impossible(name: str, wrong: list[str]) -> HardwareError:
    return HardwareError(
        f"the layer `{name}` cannot exist",
        got=", ".join(wrong),
        wanted="sizes from 1, a window within its input, N:M with N <= M",
        remedy="correct its row of the topology",
    )
