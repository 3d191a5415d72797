"""VersaGNN: blocked systolic arrays for both phases of graph networks, Strassen for dense, condensing for sparse."""

from twofour.hardware.versagnn.condense import ORDERS, Condensed, Strips, condense, strips
from twofour.hardware.versagnn.engine import MODES, Engine
from twofour.hardware.versagnn.networks import (
    GraphLayer,
    Inference,
    Phase,
    Term,
    gcn_graph,
    gin_graph,
    mean_graph,
    reference,
    run,
)
from twofour.hardware.versagnn.sparse import Sparse
from twofour.hardware.versagnn.stepped import SteppedSlots, step_slots
from twofour.hardware.versagnn.strassen import Counts, counts, strassen
from twofour.hardware.versagnn.work import Energy, Work

__all__ = [
    "MODES",
    "ORDERS",
    "Condensed",
    "Counts",
    "Energy",
    "Engine",
    "GraphLayer",
    "Inference",
    "Phase",
    "Sparse",
    "SteppedSlots",
    "Strips",
    "Term",
    "Work",
    "condense",
    "counts",
    "gcn_graph",
    "gin_graph",
    "mean_graph",
    "reference",
    "run",
    "step_slots",
    "strassen",
    "strips",
]
