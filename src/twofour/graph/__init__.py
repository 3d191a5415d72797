"""Rewrites of a captured graph: first what computes nothing is removed, then operators are fused."""

from twofour.graph.base import Product, Rule, Source
from twofour.graph.executor import Calls, Executor
from twofour.graph.outline import Outline, outline
from twofour.graph.precision import lower_activations
from twofour.graph.program import Program
from twofour.graph.rules import ARRANGEMENTS, FUSIONS, SIMPLIFICATIONS, arrange, fuse, simplify
from twofour.graph.rules.fuse_convolutions import Convolution, Norm
from twofour.graph.rules.join_qkv import JOIN_QKV

__all__ = [
    "ARRANGEMENTS",
    "FUSIONS",
    "JOIN_QKV",
    "SIMPLIFICATIONS",
    "Calls",
    "Convolution",
    "Executor",
    "Norm",
    "Outline",
    "Product",
    "Program",
    "Rule",
    "Source",
    "arrange",
    "fuse",
    "lower_activations",
    "outline",
    "simplify",
]
