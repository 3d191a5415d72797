"""What may be zero: patterns, their masks and their checks."""

from twofour.patterns.base import Conformity, Pattern
from twofour.patterns.groups import project_reference
from twofour.patterns.nm import NM
from twofour.patterns.pairs import PairedNM
from twofour.patterns.parse import parse
from twofour.patterns.transposable import Transposable, project_tiles_reference
from twofour.patterns.vnm import VNM

__all__ = [
    "NM",
    "VNM",
    "Conformity",
    "PairedNM",
    "Pattern",
    "Transposable",
    "parse",
    "project_reference",
    "project_tiles_reference",
]
