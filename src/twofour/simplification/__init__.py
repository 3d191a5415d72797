"""simplification: a dense model with fewer products, before it is pruned."""

from twofour.simplification.module import Simplified
from twofour.simplification.simplify import simplify

__all__ = ["Simplified", "simplify"]
