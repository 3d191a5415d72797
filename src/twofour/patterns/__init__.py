"""What may be zero: patterns, their masks and their checks."""

from twofour.patterns.base import Conformity, Pattern
from twofour.patterns.block import Block
from twofour.patterns.dense import DENSE, Dense
from twofour.patterns.groups import project_reference
from twofour.patterns.hybrid import Hybrid
from twofour.patterns.nm import NM
from twofour.patterns.nonzero import COUNTED_DTYPES, GroupCounts, GroupStrides, NonzeroBits, ties, ties_reference
from twofour.patterns.pairs import PairedNM
from twofour.patterns.parse import add, parse
from twofour.patterns.transposable import Transposable, project_tiles_reference
from twofour.patterns.vnm import VNM

__all__ = [
    "COUNTED_DTYPES",
    "DENSE",
    "NM",
    "VNM",
    "Block",
    "Conformity",
    "Dense",
    "GroupCounts",
    "GroupStrides",
    "Hybrid",
    "NonzeroBits",
    "PairedNM",
    "Pattern",
    "Transposable",
    "add",
    "parse",
    "project_reference",
    "project_tiles_reference",
    "ties",
    "ties_reference",
]
