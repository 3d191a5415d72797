"""Which layer bears which pattern: what each loses alone, and the recipe that loses least within a budget."""

from twofour.allocation.allocate import Allocation, Budget, allocate, trade_off, uniform
from twofour.allocation.confirm import confirm
from twofour.allocation.plot import plot
from twofour.allocation.records import Candidate, LayerSensitivity, Loss, Sensitivities
from twofour.allocation.sensitivity import PATTERNS, sensitivity
from twofour.allocation.times import timed
from twofour.recipe import DENSE

__all__ = [
    "DENSE",
    "PATTERNS",
    "Allocation",
    "Budget",
    "Candidate",
    "LayerSensitivity",
    "Loss",
    "Sensitivities",
    "allocate",
    "confirm",
    "plot",
    "sensitivity",
    "timed",
    "trade_off",
    "uniform",
]
