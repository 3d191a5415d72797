"""Rewrites of a captured graph: first what computes nothing is removed, then operators are fused."""

from twofour.graph.base import Product, Rule, Source
from twofour.graph.convolutions import Convolution, Norm
from twofour.graph.joins import JOINS
from twofour.graph.precision import lower_activations
from twofour.graph.program import Program
from twofour.graph.rules import ARRANGEMENTS, FUSIONS, SIMPLIFICATIONS, arrange, fuse, simplify

__all__ = [
    "ARRANGEMENTS",
    "FUSIONS",
    "JOINS",
    "SIMPLIFICATIONS",
    "Convolution",
    "Norm",
    "Product",
    "Program",
    "Rule",
    "Source",
    "arrange",
    "fuse",
    "lower_activations",
    "simplify",
]
