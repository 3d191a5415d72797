"""Recurrent layers: LSTM, GRU and RNN, all steps of a direction in one native call."""

from twofour.kernels.recurrent.cpu import Direction, Factor, RecurrentProblem, recurrent
from twofour.kernels.recurrent.operator import HeldLayers, through_operator
from twofour.kernels.recurrent.reference import CELLS, recurrent_reference

__all__ = [
    "CELLS",
    "Direction",
    "Factor",
    "HeldLayers",
    "RecurrentProblem",
    "recurrent",
    "recurrent_reference",
    "through_operator",
]
