"""What a plan says of what was not measured and not done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from twofour import quantization
from twofour.compiler.choose import DEFAULT_TOKENS, QUICK_TOKENS
from twofour.compiler.computing import Computing, convolved
from twofour.compiler.plan import LayerPlan, Plan
from twofour.compiler.replaceable import is_convolution, is_linear
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


def of_the_type(
    model: nn.Module, layers: Sequence[LayerPlan], computing: Computing, **given: object
) -> tuple[str, ...]:
    """Say in the log and for the plan of which layers the computing type is not; `given`: as in `own_widths`."""
    return (*own_widths(model, computing, **given), *mostly_convolved(layers, computing))


def own_widths(model: nn.Module, computing: Computing, **given: object) -> tuple[str, ...]:
    """Say in the log and for the plan which layers keep the widths that they were quantised to, whatever the dtype.

    Args:
        model: The one that is compiled.
        computing: The type that was asked for.
        given: What the caller gave for that type alone, by name; None, False and "auto" ask for nothing.
    """
    low = quantization.of(model)
    if not low or computing.dtype == Computing().dtype:
        return ()
    widths = ", ".join(sorted({one.widths.name for one in low.values()}))
    image = convolved(computing) == computing
    takes = [name for name, one in model.named_modules() if is_linear(one) or (image and is_convolution(one))]
    others = len(set(takes) - low.keys())
    asked = [f"`{name}`" for name, value in given.items() if not any(value is no for no in (None, False, "auto"))]
    unread = f", so that {' and '.join(asked)} say nothing" if asked else ""
    rest = f"it is that of {_layers(others, 'other ')}" if others else f"no other layer takes it{unread}"
    said = (
        f'dtype="{computing.dtype}" does not change {_layers(len(low))} that {"was" if len(low) == 1 else "were"} '
        f"quantised, to widths of their own ({widths}); {rest}. For {computing.dtype} in all of them compile the float "
        "model"
    )
    logger.warning("%s", said)
    return (said,)


def _layers(count: int, which: str = "") -> str:
    return f"the {which}{count} layers" if count > 1 else f"the one {which}layer"


def mostly_convolved(layers: Sequence[LayerPlan], computing: Computing) -> tuple[str, ...]:
    """Say in the log and for the plan where a computing type is that of few layers, by their measured dense times."""
    kinds = [layer.kind.startswith("Conv") and "Hugging" not in layer.kind for layer in layers]
    measured = [layer.dense_ms or 0.0 for layer in layers]
    images = sum(ms for ms, image in zip(measured, kinds, strict=True) if image)
    if convolved(computing) == computing or images <= sum(measured) / 2:
        return ()
    said = (
        f'dtype="{computing.dtype}" is that of the Linear layers alone: there are no convolutions in it, so that the '
        f"{sum(kinds)} convolutions, {images:.3f} of the layers' {sum(measured):.3f} ms, run in float32. "
        'dtype="int8" measures them too; how long the others take in float32 was not measured'
    )
    logger.warning("%s", said)
    return (said,)


def without_example(plan: Plan, graph: bool | str) -> Plan:
    """Say in the log and in the plan what is left out without an example."""
    said = (
        "without an example there is no graph, the model's own token counts are unknown, and neither its answers nor "
        "its time are compared with the dense model's: compile(model, example), the input of one call, does all of it"
    )
    logger.log(logging.WARNING if graph else logging.INFO, "%s", said)
    return replace(plan, notes=(*plan.notes, said))
