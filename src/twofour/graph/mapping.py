"""Mapping types: how an operator's output is indexed by its inputs, and what two of them make when they are fused.

DNNFusion (Niu et al. 2021, arXiv 2108.13342), section 3: tables 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class MappingType(Enum):
    """The five types; `value` is the paper's name."""

    ONE_TO_ONE = "One-to-One"
    """y[d] = f(x[d], ...): each value is read once, at its own place, or at one that a bijection gives."""

    ONE_TO_MANY = "One-to-Many"
    """A value of the input is read for several of the output: broadcasts, gathers."""

    MANY_TO_MANY = "Many-to-Many"
    """Several values of the input make one of the output: products, convolutions, reductions, normalisations."""

    REORGANIZE = "Reorganize"
    """The same values in the same flattened order under another shape."""

    SHUFFLE = "Shuffle"
    """The same values in another order, by a permutation of the axes."""


COMPLEXITY = (
    MappingType.ONE_TO_ONE,
    MappingType.REORGANIZE,
    MappingType.SHUFFLE,
    MappingType.ONE_TO_MANY,
    MappingType.MANY_TO_MANY,
)
"""From the simplest: an operator of several inputs has the type of the most complex of them (section 3.1)."""


class Fusion(Enum):
    """What table 3 says of a pair; `value` is the paper's colour."""

    ALWAYS = "green"
    """Legal, and worth it wherever it can be done."""

    MEASURE = "yellow"
    """Legal; whether it is worth it is measured."""

    NEVER = "red"
    """Not done: reading through an expansion or computing twice costs more than memory saves."""


@dataclass(frozen=True)
class Cell:
    """One cell of table 3.

    Attributes:
        fusion: Whether the pair is fused.
        mapping: Type of what it makes, None where it is not.
    """

    fusion: Fusion
    mapping: MappingType | None


_NAMES = {"OtO": MappingType.ONE_TO_ONE, "OtM": MappingType.ONE_TO_MANY, "MtM": MappingType.MANY_TO_MANY}
_NAMES |= {"Reorg": MappingType.REORGANIZE, "Shuf": MappingType.SHUFFLE}

_TABLE = """
           OtO          OtM          MtM          Reorg        Shuf
    OtO    green OtO    green OtM    green MtM    green Reorg  green Shuf
    OtM    green OtM    yellow OtM   red -        yellow OtM   yellow OtM
    MtM    green MtM    yellow MtM   red -        yellow MtM   yellow MtM
    Reorg  green Reorg  yellow OtM   yellow MtM   green Reorg  green Reorg
    Shuf   green Shuf   yellow OtM   yellow MtM   green Reorg  green Shuf
"""
"""Table 3: a row is the first operator, a column the one that reads its result."""


def _read(text: str) -> dict[tuple[MappingType, MappingType], Cell]:
    columns, *rows = (line.split() for line in text.strip().splitlines())
    return {
        (_NAMES[first], _NAMES[second]): Cell(Fusion(colour), _NAMES.get(made))
        for first, *cells in rows
        for second, colour, made in zip(columns, cells[::2], cells[1::2], strict=True)
    }


COMBINATIONS = _read(_TABLE)
"""(first, second) -> what fusing them makes: 25 cells."""


def combine(first: MappingType, second: MappingType) -> Cell:
    """Return what table 3 says of an operator and one that reads its result."""
    return COMBINATIONS[first, second]


def most_complex(mappings: Iterable[MappingType]) -> MappingType:
    """Return the type of an operator from those of its inputs; One-to-One where it has none."""
    return max(mappings, key=COMPLEXITY.index, default=MappingType.ONE_TO_ONE)
