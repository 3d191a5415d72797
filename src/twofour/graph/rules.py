"""The order of the rewrites."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from twofour.graph.activations import ACTIVATIONS
from twofour.graph.attention import ATTENTION
from twofour.graph.base import Rule
from twofour.graph.combines import COMBINES
from twofour.graph.constants import CONSTANTS
from twofour.graph.convolutions import CONVOLUTIONS, UNFOLDED
from twofour.graph.cuts import CUTS
from twofour.graph.gelu_formula import GELU_FORMULA
from twofour.graph.heads import HEADS
from twofour.graph.identities import IDENTITIES
from twofour.graph.joins import JOINS
from twofour.graph.masks import MASKS
from twofour.graph.norms import NORMS
from twofour.graph.products import PRODUCTS
from twofour.graph.splits import SPLITS

SIMPLIFICATIONS: tuple[Rule, ...] = (IDENTITIES, CONSTANTS, CUTS, GELU_FORMULA, SPLITS)
"""Rewrites that leave only operators of torch."""

FUSIONS: tuple[Rule, ...] = (CONVOLUTIONS, PRODUCTS, ACTIVATIONS, COMBINES, JOINS, ATTENTION, MASKS, NORMS)
"""Rewrites that bring in our own. A product takes its activation first: it stands before a sum in the epilogue."""


ARRANGEMENTS: tuple[Rule, ...] = (HEADS,)
"""Rewrites of a graph whose products have their kernels."""


def simplify(module: fx.GraphModule) -> dict[str, int]:
    """Remove what computes nothing; returns how many places each rule changed."""
    return _apply(module, SIMPLIFICATIONS)


def fuse(module: fx.GraphModule, *, copies: bool = True) -> dict[str, int]:
    """Fuse operators; products remain marked (`base.product`) until they are given a kernel.

    Args:
        module: The graph; it is changed.
        copies: Whether rewrites may need a weight beside the layers' own: a folded or a joined one.
    """
    if copies:
        return _apply(module, FUSIONS)
    return _apply(module, [UNFOLDED if rule is CONVOLUTIONS else rule for rule in FUSIONS if rule is not JOINS])


def arrange(module: fx.GraphModule) -> dict[str, int]:
    """Let operators read each other's results in place; the last rewrite."""
    return _apply(module, ARRANGEMENTS)


def _apply(module: fx.GraphModule, rules: Sequence[Rule]) -> dict[str, int]:
    counts = {}
    for rule in rules:
        counts[rule.name] = rule.rewrite(module)
        module.graph.eliminate_dead_code()
        module.graph.lint()
    return counts
