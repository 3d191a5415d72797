"""coupling: which channels of a model have to be permuted together, traced on the graph of its forward."""

from twofour.structure.coupling.group import Coupling, Group, Place, Refusal
from twofour.structure.coupling.tracer import trace

__all__ = ["Coupling", "Group", "Place", "Refusal", "trace"]
