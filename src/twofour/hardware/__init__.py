"""What a machine that is not here would take for a product and for a model, dense and 2:4."""

from twofour.hardware.costs import Costs, costs, explain, gemm, price
from twofour.hardware.estimate import Estimate, Row, estimate
from twofour.hardware.fitted import FITTED, Fitted
from twofour.hardware.machine import DTYPES, Machine
from twofour.hardware.machines import MACHINES, ampere_like, machine, sme_core
from twofour.hardware.plot import plot
from twofour.hardware.training_estimate import VARIANTS, Sparse, StepRow, TrainingEstimate, Variant
from twofour.hardware.work import cut

__all__ = [
    "DTYPES",
    "FITTED",
    "MACHINES",
    "VARIANTS",
    "Costs",
    "Estimate",
    "Fitted",
    "Machine",
    "Row",
    "Sparse",
    "StepRow",
    "TrainingEstimate",
    "Variant",
    "ampere_like",
    "costs",
    "cut",
    "estimate",
    "explain",
    "gemm",
    "machine",
    "plot",
    "price",
    "sme_core",
]
