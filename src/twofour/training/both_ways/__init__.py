"""Training with weights that are 2:4 along both axes: forward product and data gradient on 2:4 kernels."""

from __future__ import annotations

from twofour.training.both_ways.attach import attach
from twofour.training.both_ways.finish import finish
from twofour.training.both_ways.handle import BothWays
from twofour.training.both_ways.saving import Saving, saving
from twofour.training.sparse_linear import Choice, LayerPlan, Plan
from twofour.training.step_clock import PARTS, timed

__all__ = ["PARTS", "BothWays", "Choice", "LayerPlan", "Plan", "Saving", "attach", "finish", "saving", "timed"]
