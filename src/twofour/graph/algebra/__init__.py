"""algebra: a captured graph rewritten by rules that hold in real arithmetic, as long as that lowers its cost."""

from twofour.graph.algebra.rewriter import Outcome, Rewrite, rewrite
from twofour.graph.algebra.rule import CLOSE, EXACT, Rule, require_rules
from twofour.graph.algebra.rules import ALL_RULES

__all__ = ["ALL_RULES", "CLOSE", "EXACT", "Outcome", "Rewrite", "Rule", "require_rules", "rewrite"]
