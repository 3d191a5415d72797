"""The protocol of a format: how a packed weight leaves its zeros out, whatever its values are written as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.packing.encodings import Encoding
from twofour.patterns import Pattern
from twofour.shapes import Int64, Shaped, UInt8

WRITE_AGAIN = "the file is damaged or was not written by twofour; write it again from the dense weights"


@dataclass(frozen=True)
class Format(ABC):
    """What is stored of one weight, seen as rows along its reduction axis; a subclass is final.

    Attributes:
        pattern: What the rows obey.
        encoding: How each kept value is written.
        rows: Reductions of the weight.
        reduction: Values of each, zeros included.
        taps: Rows of one output, one after the other: the positions of a convolution's kernel.
    """

    pattern: Pattern
    encoding: Encoding
    rows: int
    reduction: int
    taps: int = 1

    @staticmethod
    @abstractmethod
    def takes(pattern: Pattern) -> bool:
        """Tell whether a weight of this pattern can be stored so."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the stored values, "values", and of what says where they stand, "indices"."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Stored values of a row of "values"."""

    @property
    def of_rows(self) -> bool:
        """Whether a row of "values" is a row of the weight, with a scale of its own where values are whole numbers."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())

    @abstractmethod
    def places(self, weight: Shaped[Tensor, "rows reduction"]) -> Int64[Tensor, "rows groups kept"]:
        """Return where a weight (rows, reduction) that obeys the pattern has its kept values, as `positions` does."""

    @abstractmethod
    def write(self, places: Int64[Tensor, "rows groups kept"]) -> UInt8[Tensor, "rows bytes"]:
        """Write places as the part "indices"."""

    @abstractmethod
    def positions(self, indices: UInt8[Tensor, "rows bytes"]) -> Int64[Tensor, "rows groups kept"]:
        """Read "indices" back and validate every one: int64, the last axis the place of each kept value in its group.

        Raises:
            PackingError: An index is illegal.
        """

    @abstractmethod
    def validate(self, indices: UInt8[Tensor, "rows bytes"]) -> None:
        """Refuse what `positions` refuses, faster where there is a way."""

    def gather(
        self, weight: Shaped[Tensor, "rows reduction"], places: Int64[Tensor, "rows groups kept"]
    ) -> Shaped[Tensor, "rows groups*kept"]:
        """Return the values of a weight (rows, reduction) at the places: (rows, kept)."""
        return weight.view(*places.shape[:2], -1).gather(-1, places).flatten(1)

    def scatter(
        self,
        weight: Shaped[Tensor, "rows reduction"],
        places: Int64[Tensor, "rows groups kept"],
        values: Shaped[Tensor, "rows groups*kept"],
    ) -> Shaped[Tensor, "rows reduction"]:
        """Write values (rows, kept) at the places of a weight (rows, reduction), in place; return it."""
        weight.view(*places.shape[:2], -1).scatter_(-1, places, values.view(places.shape))
        return weight

    def require_sizes(self, **tensors: Tensor) -> None:
        """Refuse parts whose shape or dtype is not what the header implies.

        Raises:
            PackingError: They are not.
        """
        for part, (shape, dtype) in self.parts.items():
            tensor = tensors[part]
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise PackingError(
                    f"the sizes of a packed weight do not match its header: its {part}",
                    got=f"{tuple(tensor.shape)} {tensor.dtype}",
                    wanted=f"{shape} {dtype}",
                    remedy=WRITE_AGAIN,
                    code=f"{part}-size",
                )


def illegal(part: str, got: str, wanted: str) -> PackingError:
    """Build the error for indices that no weight is written with; `part` ends its code."""
    return PackingError(
        "the index stream of a packed weight is illegal",
        got=got,
        wanted=wanted,
        remedy=WRITE_AGAIN,
        code=f"indices-{part}",
    )
