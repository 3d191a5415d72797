"""What calibration data say about each weight's inputs: a streaming pass, block by block where there are blocks."""

from twofour.calibration.batches import Batch, part, pieces, read, require_usable, take, to_device
from twofour.calibration.enough import Enough
from twofour.calibration.finite import not_finite
from twofour.calibration.gradients import gradients
from twofour.calibration.held import Held, hold_back, judged
from twofour.calibration.inputs import from_matrix, matrix
from twofour.calibration.passes import calibrate
from twofour.calibration.statistics import PER_INPUT, Need, Statistics
from twofour.calls import call

__all__ = [
    "PER_INPUT",
    "Batch",
    "Enough",
    "Held",
    "Need",
    "Statistics",
    "calibrate",
    "call",
    "from_matrix",
    "gradients",
    "hold_back",
    "judged",
    "matrix",
    "not_finite",
    "part",
    "pieces",
    "read",
    "require_usable",
    "take",
    "to_device",
]
