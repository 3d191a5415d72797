"""The order of the rewrites."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from twofour.graph.base import Rule, rewriting
from twofour.graph.rules.attention_formula import ATTENTION_FORMULA
from twofour.graph.rules.attention_windows import ATTENTION_WINDOWS
from twofour.graph.rules.cut_projections import CUT_PROJECTIONS
from twofour.graph.rules.fold_constants import CONSTANTS
from twofour.graph.rules.fuse_attention import ATTENTION
from twofour.graph.rules.fuse_convolutions import CONVOLUTIONS, UNFOLDED
from twofour.graph.rules.fuse_epilogue import ACTIVATIONS, COMBINATIONS
from twofour.graph.rules.fuse_heads import FUSE_HEADS
from twofour.graph.rules.fuse_norms import NORMS
from twofour.graph.rules.gates import GATES
from twofour.graph.rules.gelu_formula import GELU_FORMULA
from twofour.graph.rules.join_qkv import JOIN_QKV
from twofour.graph.rules.mark_products import MARK_PRODUCTS
from twofour.graph.rules.position_masks import POSITION_MASKS
from twofour.graph.rules.remove_identities import IDENTITIES
from twofour.graph.rules.rotations import ROTATIONS
from twofour.graph.rules.shared_heads import SHARED_HEADS
from twofour.graph.rules.sums_of_permuted import SUMS_OF_PERMUTED
from twofour.graph.rules.view_splits import VIEW_SPLITS

SIMPLIFICATIONS: tuple[Rule, ...] = (IDENTITIES, CONSTANTS, CUT_PROJECTIONS, GELU_FORMULA, VIEW_SPLITS)
"""Rewrites that leave only operators of torch."""

FUSIONS: tuple[Rule, ...] = (
    CONVOLUTIONS,
    MARK_PRODUCTS,
    ATTENTION_WINDOWS,
    ACTIVATIONS,
    SUMS_OF_PERMUTED,
    COMBINATIONS,
    JOIN_QKV,
    ATTENTION,
    ATTENTION_FORMULA,
    SHARED_HEADS,
    POSITION_MASKS,
    NORMS,
)
"""Rewrites that bring in our own. A product takes its activation first: it stands before a sum in the epilogue."""


ARRANGEMENTS: tuple[Rule, ...] = (ROTATIONS, GATES, FUSE_HEADS)
"""Rewrites of a graph whose products have their kernels."""


def simplify(module: fx.GraphModule, without: Collection[str] = ()) -> dict[str, int]:
    """Remove what computes nothing; returns how many places each rule changed.

    Args:
        module: The graph; it is changed.
        without: Names of rules to leave out.

    Raises:
        FailedRuleError: A rule raised.
    """
    return _apply(module, SIMPLIFICATIONS, without)


def fuse(module: fx.GraphModule, *, copies: bool = True, without: Collection[str] = ()) -> dict[str, int]:
    """Fuse operators; products remain marked (`base.product`) until they are given a kernel.

    Args:
        module: The graph; it is changed.
        copies: Whether rewrites may need a weight beside the layers' own: a folded or a joined one.
        without: As in `simplify`.

    Raises:
        FailedRuleError: A rule raised.
    """
    if copies:
        return _apply(module, FUSIONS, without)
    fewer = [UNFOLDED if rule is CONVOLUTIONS else rule for rule in FUSIONS if rule is not JOIN_QKV]
    return _apply(module, fewer, without)


def arrange(module: fx.GraphModule, without: Collection[str] = ()) -> dict[str, int]:
    """Let operators read each other's results in place; the last rewrite. Arguments and errors as in `simplify`."""
    return _apply(module, ARRANGEMENTS, without)


def _apply(module: fx.GraphModule, rules: Sequence[Rule], without: Collection[str]) -> dict[str, int]:
    counts = {}
    for rule in rules:
        if rule.name in without:
            continue
        with rewriting(rule.name):
            counts[rule.name] = rule.rewrite(module)
            module.graph.eliminate_dead_code()
            module.graph.lint()
    return counts
