"""Which weights matter: criteria turn a weight into scores, larger meaning more important."""

from twofour.criteria.base import Criterion
from twofour.criteria.magnitude import Magnitude
from twofour.criteria.parse import parse

__all__ = ["Criterion", "Magnitude", "parse"]
