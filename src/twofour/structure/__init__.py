"""Structure: which channels of a model belong together, changes of their axes, and orders that a mask fits better."""

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
