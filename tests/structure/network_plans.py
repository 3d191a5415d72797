"""What is searched in a whole model, and what moved, for the tests of this folder."""

from torch import nn

from twofour import layers, patterns
from twofour.structure.permutation import Report


def plan(model: nn.Module, pattern: str = "2:4", eligibility: str = "any") -> list:
    """Every weight that the pattern's groups divide."""
    parsed = patterns.parse(pattern)
    found = layers.walk(model, eligibility=eligibility).weights
    return [(weight, parsed) for weight in found if weight.reduction % parsed.group == 0]


def moved(report: Report) -> dict[str, tuple[int, int]]:
    """Consumer -> (blocks, size) of the groups that gained."""
    return {name: (g.blocks, g.size) for g in report.groups if g.after > g.before for name in g.consumers}
