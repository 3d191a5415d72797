"""Rewrites of a captured graph: first what computes nothing is removed, then operators are fused."""

from twofour.graph.base import Product, Rule, Source
from twofour.graph.convolutions import Convolution, Norm
from twofour.graph.program import Program
from twofour.graph.rules import FUSIONS, SIMPLIFICATIONS, fuse, simplify

__all__ = [
    "FUSIONS",
    "SIMPLIFICATIONS",
    "Convolution",
    "Norm",
    "Product",
    "Program",
    "Rule",
    "Source",
    "fuse",
    "simplify",
]
