"""The rules, one idea a file; docs/rewriting.md lists them."""

from __future__ import annotations

from twofour.graph.algebra.rule import Rule
from twofour.graph.algebra.rules.chains import CHAINS
from twofour.graph.algebra.rules.common import COMMON
from twofour.graph.algebra.rules.distribution import DISTRIBUTION
from twofour.graph.algebra.rules.identities import IDENTITIES
from twofour.graph.algebra.rules.layout import LAYOUT
from twofour.graph.algebra.rules.powers import POWERS
from twofour.graph.algebra.rules.products import LINEARS, PRODUCTS
from twofour.graph.algebra.rules.reductions import REDUCTIONS

ALL_RULES: tuple[Rule, ...] = (
    *IDENTITIES,
    *COMMON,
    *LAYOUT,
    *DISTRIBUTION,
    *POWERS,
    *REDUCTIONS,
    *PRODUCTS,
    *LINEARS,
    *CHAINS,
)
