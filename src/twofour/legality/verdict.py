"""What a finding comes to, in one sentence."""

from __future__ import annotations

from twofour.legality.report import Finding
from twofour.patterns import parse

# One group in a hundred may be spoilt by later training before a wrong axis is no longer recognised.
WRONG_AXIS_FRACTION = 0.99


def verdict(finding: Finding) -> str:
    """Say what was found, the gravest first."""
    name = finding.judged
    start = f"{name} broken: " if finding.promised else ""
    if finding.broken:
        return f"{start}{finding.broken} values are NaN or infinite"
    if finding.legal:
        return _kept(finding, start)
    if finding.promised and (columns := _does_not_divide(finding)):
        return f"{start}{columns}"
    wrong = finding.wrong_fraction or 0.0
    if wrong >= WRONG_AXIS_FRACTION and finding.zeros > 0 and wrong > finding.legal_fraction:
        return f"{start}pruned along the wrong axis: {name} lies along {finding.wrong_axis}, not along {finding.axis}"
    if finding.promised:
        values = " ".join(f"{value:.4g}" for value in finding.values)
        return f"{start}{1 - finding.legal_fraction:.2%} of groups, the first at {finding.first}: {values}"
    if finding.satisfies:
        return f"{finding.satisfies[0]}, though nothing promised it"
    return "dense" if finding.zeros < 0.01 else f"dense pattern, {finding.zeros:.0%} zeros"


def _kept(finding: Finding, start: str) -> str:
    if finding.outside:
        return f"{start}every group is legal, but {finding.outside} values lie outside the mask"
    if finding.zeros == 1.0:
        return "every value is zero"
    return f"{finding.judged} kept" if finding.promised else f"{finding.judged}, though nothing promised it"


def _does_not_divide(finding: Finding) -> str:
    group = parse(finding.judged).group
    if int(finding.axis.rsplit(" ", 1)[1]) % group:
        return f"{finding.axis} is not a multiple of {group}"
    return "" if finding.first else f"the rows of {finding.shape} are not a multiple of {group}"
