"""Structure: which channels belong together, changes of their axes, orders that a mask fits better, smaller models."""

from twofour.structure.apply import AxisChanges
from twofour.structure.coupling import Coupling, Group, Place, Refusal, trace
from twofour.structure.permutation import Gain, Permutation, Report, permute, search

__all__ = [
    "AxisChanges",
    "Coupling",
    "Gain",
    "Group",
    "Permutation",
    "Place",
    "Refusal",
    "Report",
    "permute",
    "search",
    "trace",
]
