"""Rewrites of a captured graph: what computes nothing is removed, algebra shortens the rest, operators are fused."""

from twofour.graph.algebra import ALL_RULES, CLOSE, EXACT, Outcome, require_rules, rewrite
from twofour.graph.base import Product, Rule, Source
from twofour.graph.executor import Calls, Executor
from twofour.graph.outline import Outline, outline
from twofour.graph.precision import lower_activations
from twofour.graph.program import Program
from twofour.graph.ragged import NotRaggedError, Ragged, attention_masks, filled, pack
from twofour.graph.rules import ARRANGEMENTS, FUSIONS, SIMPLIFICATIONS, arrange, fuse, simplify
from twofour.graph.rules.fuse_convolutions import Convolution, Norm
from twofour.graph.rules.join_qkv import JOIN_QKV
from twofour.graph.widening import widen_activations

__all__ = [
    "ALL_RULES",
    "ARRANGEMENTS",
    "CLOSE",
    "EXACT",
    "FUSIONS",
    "JOIN_QKV",
    "SIMPLIFICATIONS",
    "Calls",
    "Convolution",
    "Executor",
    "Norm",
    "NotRaggedError",
    "Outcome",
    "Outline",
    "Product",
    "Program",
    "Ragged",
    "Rule",
    "Source",
    "arrange",
    "attention_masks",
    "filled",
    "fuse",
    "lower_activations",
    "outline",
    "pack",
    "require_rules",
    "rewrite",
    "simplify",
    "widen_activations",
]
