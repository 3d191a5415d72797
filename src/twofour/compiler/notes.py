"""What a plan says of what was not measured and not done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from twofour.compiler.choose import DEFAULT_TOKENS, QUICK_TOKENS
from twofour.compiler.plan import LayerPlan, Plan
from twofour.measure.effort import Effort

logger = logging.getLogger("twofour.compiler")


def unmeasured(how: Effort, tokens: Sequence[int], layers: Sequence[LayerPlan]) -> str:
    """Return what a small effort leaves out: counts at which some layer was not measured, on the example neither."""
    counts = ""
    if tokens is DEFAULT_TOKENS:
        measured = [layer.times for layer in layers if layer.times.keys() >= {*QUICK_TOKENS}]
        left = [str(count) for count in tokens if any(count not in times for times in measured)]
        said = f"; {', '.join(left)} tokens were not measured and take the kernel of the nearest count that was"
        counts = said if left else ""
    return f'effort="{how.name}": at most {how.rounds} short rounds a case{counts}; effort="full" measures the rest'


def without_example(plan: Plan, graph: bool | str) -> Plan:
    """Say in the log and in the plan what is left out without an example."""
    said = (
        "without an example there is no graph, the model's own token counts are unknown, and neither its answers nor "
        "its time are compared with the dense model's: compile(model, example), the input of one call, does all of it"
    )
    logger.log(logging.WARNING if graph else logging.INFO, "%s", said)
    return replace(plan, notes=(*plan.notes, said))
