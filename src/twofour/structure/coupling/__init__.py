"""coupling: which channels of a model have to be permuted or cut together, traced on the graph of its forward."""

from twofour.structure.coupling.channels import channels
from twofour.structure.coupling.group import Coupling, Extent, Group, Place, Refusal
from twofour.structure.coupling.tracer import trace

__all__ = ["Coupling", "Extent", "Group", "Place", "Refusal", "channels", "trace"]
