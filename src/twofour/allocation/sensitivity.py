"""sensitivity: what a model loses when one layer alone is given a pattern, for every layer and candidate pattern."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calibration, criteria, masks, patterns
from twofour.allocation.records import Candidate, LayerSensitivity, Sensitivities
from twofour.allocation.task import Score, task
from twofour.calibration import Batch, Statistics
from twofour.calibration.gradients import require_function
from twofour.calibration.passes import calibrating
from twofour.criteria import Criterion, Layerwise
from twofour.errors import DataError, LayerError, RecipeError, cut
from twofour.layers import (
    PrunableWeight,
    compiled_parts,
    describe_attached,
    is_distributed,
    remedy_for,
    require_module,
    walk,
)
from twofour.patterns import Pattern
from twofour.progress import Progress
from twofour.recipe import DENSE

_log = logging.getLogger("twofour.allocation")

PATTERNS = (DENSE, "2:4", "4:8", "1:4")
"""The candidates where none are named."""


def sensitivity(
    model: nn.Module,
    data: Any,
    patterns: Sequence[str | Pattern] = PATTERNS,
    *,
    criterion: str | Criterion = "magnitude",
    loss: Callable[[Any, Any], Tensor] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    samples: int | None = None,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
    progress: bool = True,
) -> Sensitivities:
    """Measure what each layer loses with each candidate pattern, all other layers dense; the model stays as it is.

    One pass over the data gives the relative error of every layer's output with every pattern. With `evaluate` or
    `loss` the task is measured as well, once for each layer and pattern. An error or interruption leaves the model as
    it was.

    Args:
        model: The trained dense model, on any device.
        data: Calibration data, as `prune` takes it; pairs (input, target) where a loss is given.
        patterns: Candidates: patterns, and "dense" for layers that may stay so. One that does not fit a layer is no
            candidate of it.
        criterion: Which values of a group stay, as in `prune`, "auto" as well; not "learned", which trains. The recipe
            of an allocation names it, so that `prune` takes what was measured.
        loss: `loss(output, target)`, smaller is better: its mean over the samples tells what a layer costs the task,
            unless there is `evaluate`. "taylor" needs it.
        evaluate: `evaluate(model)` -> a number such as accuracy, larger is better; called in evaluation mode without
            gradients.
        samples: How many samples of `data` are used; 128 where it is None, with a warning that says which are not.
        skip: Globs of layers to leave out.
        eligibility: "asp" or "any", as in `prune`.
        progress: Show a progress bar on a terminal.

    Example:
        >>> found = twofour.allocation.sensitivity(model, images, evaluate=accuracy)
        >>> chosen = twofour.allocation.allocate(found, Budget(density=0.5))
        >>> model = twofour.prune(model, chosen.recipe)

    Raises:
        LayerError: No layer is eligible or reached by the data, or the model is masked or compiled already.
        DataError: The data cannot be used, the model does not run on them, or the task's loss is no finite number.
        RecipeError: The criterion cannot be used here, or the candidates hold no pattern.
        PatternError: A pattern does not parse, or a weight holds NaN or infinity.
    """
    candidates = _candidates(patterns)
    chosen = _criterion(criterion, loss)
    _require_dense(model)
    found = walk(model, skip=skip, eligibility=eligibility)
    fitting, skipped = _fitting(found.weights, candidates)
    skipped = {**{entry.name: entry.reason for entry in found.skipped}, **skipped}
    if not fitting:
        raise _nothing("no layer of the model is eligible", skipped)
    tell, count = (_log.warning, criteria.SAMPLES) if samples is None else (_log.info, samples)
    batches = calibration.take(model, data, count, paired=loss is not None, tell=tell)
    with Progress(progress) as display, calibrating(model), torch.no_grad():
        display.begin("sensitivity of weights", len(fitting))
        run, refused = _run(model, fitting, chosen, batches, loss, evaluate, display)
    weights = [weight for weight, _ in fitting]
    refused = _whole_layers(weights, refused)
    measured = [weight for weight in weights if weight.name not in refused]
    if not measured:
        raise _nothing("no layer can be calibrated", refused)
    layers = _grouped(measured, run.found, DENSE in candidates)
    answered = -run.baseline if evaluate is not None and run.baseline is not None else run.baseline
    reasons = tuple((skipped | refused).items())
    return Sensitivities(layers, tuple(candidates), chosen.name, eligibility, answered, reasons)


def _run(
    model: nn.Module,
    fitting: Sequence[tuple[PrunableWeight, list[Pattern]]],
    criterion: Layerwise,
    batches: Sequence[Batch],
    loss: Callable[[Any, Any], Tensor] | None,
    evaluate: Callable[[nn.Module], float] | None,
    display: Progress,
) -> tuple[_Run, dict[str, str]]:
    """Try every pattern on every weight; return what was found, and the weights left out with their reasons."""
    weights = [weight for weight, _ in fitting]
    follows = loss if criterion.need == "gradients" else None
    slopes = calibration.gradients(model, weights, batches, follows, display) if follows else {}
    refused = {weight.name: criteria.NO_GRADIENT for weight in weights if follows and weight.name not in slopes}
    weights = [weight for weight in weights if weight.name not in refused]
    score = task(model, batches, loss, evaluate)
    display.say("the dense model")
    baseline = None if score is None else score()
    run = _Run(criterion, {weight.name: fit for weight, fit in fitting}, score, baseline, slopes, display)
    need = criterion.need if criterion.need in ("norms", "hessian") else "sample"
    return run, refused | calibration.calibrate(model, weights, batches, need, run.visit, display=display)


@dataclass(eq=False)
class _Run:
    """One sensitivity run: what is done when a weight's inputs are known."""

    criterion: Layerwise
    fitting: dict[str, list[Pattern]]
    score: Score | None
    baseline: float | None
    slopes: dict[str, Tensor]
    display: Progress
    found: dict[str, list[Candidate]] = field(default_factory=dict)

    def visit(self, weight: PrunableWeight, statistics: Statistics) -> None:
        """Try every pattern on one weight; it has its own values again afterwards."""
        before = weight.parameter.detach().clone()
        values = calibration.matrix(weight, before)
        if weight.name in self.slopes:
            statistics.gradient = calibration.matrix(weight, self.slopes.pop(weight.name))
        self.found[weight.name] = [
            self._candidate(weight, before, values, pattern, statistics) for pattern in self.fitting[weight.name]
        ]

    def _candidate(
        self, weight: PrunableWeight, before: Tensor, values: Tensor, pattern: Pattern, statistics: Statistics
    ) -> Candidate:
        solution = criteria.solve_one(values, weight, weight.lay(pattern), self.criterion, statistics)
        keep, new = solution.keep, solution.applied(values)
        error, change = statistics.error(values, new), None
        if self.score is not None and self.baseline is not None:
            self.display.say(f"the task with {weight.name} at {pattern.name}")
            try:
                weight.parameter.copy_(calibration.from_matrix(weight, new))
                torch.clear_autocast_cache()
                change = self.score() - self.baseline
            except DataError as found:
                raise found.for_layer(weight.name) from None
            finally:
                weight.parameter.copy_(before)
                torch.clear_autocast_cache()
        _log.info("`%s` at %s: error %.4f, change %s", weight.name, pattern.name, error, change)
        sparse = weight.reduction % 4 == 0 and patterns.parse("2:4").check(keep).ok
        return Candidate(pattern.name, int(keep.sum()), error, change, sparse)


def _candidates(given: Sequence[str | Pattern]) -> dict[str, Pattern | None]:
    """Parse the candidates; None is dense."""
    if not isinstance(given, str | Pattern | Iterable):
        raise RecipeError(
            "the candidates are no patterns",
            got=f"patterns={cut(repr(given), 80)}",
            wanted="patterns or their texts",
            remedy=f"the default is {PATTERNS}",
        )
    listed = (given,) if isinstance(given, str | Pattern) else tuple(given)
    parsed = [None if entry == DENSE else patterns.parse(entry) for entry in listed]
    found = {DENSE if pattern is None else pattern.name: pattern for pattern in parsed}
    if not any(found.values()):
        raise RecipeError(
            "the candidates hold no pattern",
            got=", ".join(map(repr, listed)) or "none",
            wanted='at least one pattern besides "dense"',
            remedy=f"the default is {PATTERNS}",
        )
    return found


def _criterion(criterion: str | Criterion, loss: Any) -> Layerwise:
    chosen = criteria.resolve(criterion, ())  # data there always are
    if not isinstance(chosen, Layerwise):
        raise RecipeError(
            f'the criterion "{chosen.kind}" cannot rank single layers',
            got="a criterion that trains the model's masks together",
            wanted="a criterion that decides weight by weight",
            remedy='"magnitude", "wanda" or "sparsegpt"',
        )
    if chosen.over != "weight":
        raise RecipeError(
            "the sensitivity of a layer is that of the layer alone",
            got=f"criterion {chosen.name}",
            wanted="a criterion that ranks each weight by itself",
            remedy=f"leave over={chosen.over} out: `allocate` chooses the shares of the layers",
        )
    criteria.require_given(chosen, (), loss if chosen.need == "gradients" else None)  # data are looked at by `take`
    if loss is not None:
        require_function(loss)
    return chosen


def _require_dense(model: Any) -> None:
    require_module(model)
    masked = list(masks.of(model))
    found = describe_attached(model) or compiled_parts(model)
    if masked or found:
        raise LayerError(
            "sensitivity is measured on the dense model",
            got=found or f"masks on {', '.join(f'`{name}`' for name in masked[:4])}",
            wanted="a model without masks or training schemes that is not compiled",
            remedy="measure before pruning; scheme.remove() and twofour.masks.detach(model) make it plain",
        )


def _fitting(
    weights: Sequence[PrunableWeight], candidates: dict[str, Pattern | None]
) -> tuple[list[tuple[PrunableWeight, list[Pattern]]], dict[str, str]]:
    """Return the patterns that fit each weight, and why the weights without any are left out."""
    fitting: list[tuple[PrunableWeight, list[Pattern]]] = []
    skipped: dict[str, str] = {}
    for weight in weights:
        if is_distributed(weight.parameter):
            raise DataError(
                "the sensitivity of sharded weights is planned, not built yet",
                got=f"`{weight.name}` is a DTensor",
                wanted="a model whose weights are whole",
                remedy="measure before sharding",
            )
        fit = [pattern for pattern in candidates.values() if pattern and not weight.unfit(pattern)]
        if fit:
            fitting.append((weight, fit))
        else:
            skipped[weight.name] = f"reduction axis {weight.reduction}: none of {', '.join(candidates)} fits"
    return fitting, skipped


def _whole_layers(weights: Sequence[PrunableWeight], refused: dict[str, str]) -> dict[str, str]:
    """Add the other weights of a layer to those that were refused: its pattern would be theirs, at an unknown loss."""
    found = dict(refused)
    for other in weights:
        for weight in weights:
            if other.name in refused and weight.name not in refused and set(weight.layers) & set(other.layers):
                found.setdefault(weight.name, f"its layer also has {other.name}: {refused[other.name]}")
    return found


def _grouped(
    weights: Sequence[PrunableWeight], found: dict[str, list[Candidate]], dense: bool
) -> tuple[LayerSensitivity, ...]:
    """Put the weights of one layer together, since a recipe gives a layer one pattern."""
    groups: dict[str, list[PrunableWeight]] = {}
    for weight in weights:
        name = next((first for first, held in groups.items() if set(held[0].layers) & set(weight.layers)), weight.layer)
        groups.setdefault(name, []).append(weight)
    layers = []
    for name, held in groups.items():
        values = sum(weight.parameter.numel() for weight in held)
        everywhere = [[entry.pattern for entry in found[weight.name]] for weight in held]
        shared = [pattern for pattern in everywhere[0] if all(pattern in listed for listed in everywhere)]
        parts = [[entry for weight in held for entry in found[weight.name] if entry.pattern == p] for p in shared]
        candidates = [_together(entries) for entries in parts]
        if dense:
            change = None if candidates and candidates[0].change is None else 0.0
            candidates.insert(0, Candidate(DENSE, values, change=change))
        names = tuple(dict.fromkeys(layer for weight in held for layer in weight.layers))
        layers.append(LayerSensitivity(name, names, values, tuple(candidates)))
    return tuple(layers)


def _together(entries: Sequence[Candidate]) -> Candidate:
    changes = [entry.change for entry in entries if entry.change is not None]
    return Candidate(
        entries[0].pattern,
        sum(entry.kept for entry in entries),
        math.sqrt(math.fsum(entry.error**2 for entry in entries)),
        math.fsum(changes) if changes else None,
        all(entry.sparse for entry in entries),
    )


def _nothing(what: str, reasons: dict[str, str]) -> LayerError:
    return LayerError(
        what,
        reasons=[f"`{name}`: {reason}" for name, reason in reasons.items()]
        or ["the model has no parameter with two or more axes"],
        wanted="at least one layer that a pattern fits and the data reach",
        remedy=remedy_for(reasons.values()),
    )
