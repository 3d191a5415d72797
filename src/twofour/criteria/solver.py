"""Criteria over a whole model: masks and new values for every weight, and what each weight's output lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calibration
from twofour.calibration import Batch, Statistics
from twofour.calibration.gradients import Loss, require_function
from twofour.criteria.base import Criterion, Layerwise, Solution
from twofour.criteria.learned import Learned
from twofour.criteria.outcome import Choice, Outcome, Solved
from twofour.criteria.shares import over_model
from twofour.criteria.trust import trusted
from twofour.errors import DataError, LayerError, PatternError, RecipeError
from twofour.layers import PrunableWeight, full_tensor, is_distributed
from twofour.native import waiting
from twofour.patterns import Hybrid, Pattern
from twofour.patterns.base import is_finite, non_finite
from twofour.progress import Progress

_log = logging.getLogger("twofour.criteria")

SAMPLES = 128
"""Samples taken from the calibration data, as in SparseGPT and Wanda."""
NO_GRADIENT = "the loss does not depend on it: no batch gives it a gradient to rank its values by"
"""Why a criterion that follows a loss leaves a weight dense."""
DEAD = "every input is zero in the calibration data"
"""Why a criterion that ranks by inputs comes down to the magnitude."""


def solve(
    model: nn.Module,
    weights: Sequence[tuple[PrunableWeight, Pattern]],
    criterion: Criterion,
    *,
    data: Any = None,
    loss: Loss | None = None,
    samples: int = SAMPLES,
    progress: bool = True,
    unseen: Layerwise | None = None,
) -> Solved:
    """Choose the mask of every weight, and its new values if the criterion updates them.

    With data, each weight is pruned as soon as its inputs are known, so that those after it see what the pruned model
    puts out. An error or interruption brings all values back; to that end the old values are kept until the end.

    A weight whose inputs are not seen stays dense, its reason in `Solved.refused`, if the criterion ranks by inputs and
    there is no other for such weights; else it is pruned and no error reported. "taylor" and "learned" leave dense what
    the loss does not depend on.

    Args:
        model: The dense model.
        weights: What to prune, and the pattern of each.
        criterion: How.
        data: Calibration data: inputs, or pairs (input, target); see `calibration.take`.
        loss: `loss(output, target)`, for criteria that follow a loss.
        samples: How many samples of the data are used.
        progress: Show how far it is on standard error.
        unseen: Prunes weights whose inputs are not seen, by their values alone.

    Raises:
        RecipeError: The criterion needs data or a loss that are missing.
        DataError: The data cannot be used, or the model does not run on them.
        LayerError: No weight is reached by the data.
        PatternError: A weight holds NaN or infinity.
    """
    require_given(criterion, data, loss)
    _require_inputs(criterion, weights, data)
    solved = Solved()
    if data is None:
        solved.choices = _by_values(model, weights, criterion)
        return solved
    require_unsharded(weights)
    batches = calibration.take(model, data, samples, paired=loss is not None)
    try:
        waiting.warn()
        with Progress(progress) as display:
            display.begin("pruning weights", len(weights))
            run = _Run(criterion, {weight.name: pattern for weight, pattern in weights}, solved, unseen)
            run.weights.update((weight.name, weight) for weight, _ in weights)
            _calibrated(model, run, [weight for weight, _ in weights], batches, loss, display)
    except BaseException:
        solved.undo()
        raise
    if not solved.choices:
        solved.undo()
        raise LayerError(
            "no weight can be calibrated",
            got=f"{len(solved.refused)} weights to prune, all left out",
            reasons=[f"`{name}`: {reason}" for name, reason in solved.refused.items()],
            wanted="data that reach at least one layer to prune",
            remedy='"magnitude" needs no data',
        )
    return solved


def _by_values(
    model: nn.Module, weights: Sequence[tuple[PrunableWeight, Pattern]], criterion: Criterion
) -> list[Choice]:
    """Choose every mask from the weights' values alone."""
    assert isinstance(criterion, Layerwise), "others need data"
    if criterion.over == "model":
        weights = over_model(model, weights, criterion)
    return [_choose(weight, pattern, criterion) for weight, pattern in weights]


def _choose(weight: PrunableWeight, pattern: Pattern, criterion: Layerwise) -> Choice:
    """Choose the mask of one weight from its values alone."""
    values = calibration.matrix(weight, full_tensor(weight.parameter.detach()))
    solution = solve_one(values, weight, pattern, criterion, None)
    outcome = Outcome(weight.name, pattern.name, criterion.name, note=solution.note)
    return Choice(weight, pattern, calibration.from_matrix(weight, solution.keep), outcome)


@torch.no_grad()
def solve_one(
    values: Tensor, weight: PrunableWeight, pattern: Pattern, criterion: Layerwise, statistics: Statistics | None
) -> Solution:
    """Return what a criterion decides for one weight, laid out as `calibration.matrix` does.

    Raises:
        PatternError: The weight or its scores hold NaN or infinity.
        RecipeError: The criterion cannot be laid over it.
    """
    try:
        said = "" if statistics is None else trusted(values, pattern, statistics, criterion, weight.name)
        found = criterion.solve(values, pattern, statistics, weight.name)
        return replace(found, note=f"{found.note}; {said}".removeprefix("; ")) if said else found
    except (PatternError, RecipeError) as error:
        parameter = full_tensor(weight.parameter.detach())
        # Said in the weight's own coordinates where it is the weight that cannot be ranked.
        error = error if is_finite(parameter) else non_finite("the weight", parameter)
        raise error.for_layer(weight.name) from None


def _calibrated(
    model: nn.Module,
    run: _Run,
    listed: list[PrunableWeight],
    batches: Sequence[Batch],
    loss: Loss | None,
    display: Progress,
) -> None:
    criterion, solved = run.criterion, run.solved
    if loss is not None:
        if isinstance(criterion, Learned):
            weights = [(weight, run.patterns[weight.name]) for weight in listed]
            run.learned = criterion.learn(model, weights, batches, loss, display)
        else:
            run.slopes = calibration.gradients(model, listed, batches, loss, display)
        solved.refused = {w.name: NO_GRADIENT for w in listed if w.name not in {**run.learned, **run.slopes}}
        listed = [weight for weight in listed if weight.name not in solved.refused]
    if isinstance(criterion, Layerwise) and criterion.over == "model":
        pairs = [(weight, run.patterns[weight.name]) for weight in listed]
        pairs = over_model(model, pairs, criterion, data=batches, slopes=run.slopes)
        run.patterns |= {weight.name: pattern for weight, pattern in pairs}
    need = criterion.need if criterion.need in ("norms", "hessian") else "sample"
    unseen = calibration.calibrate(model, listed, batches, need, run.visit, display=display)
    if criterion.need in ("sample", "norms", "hessian"):
        if run.unseen is None:
            solved.refused |= unseen
            return
        names = ", ".join(f"`{name}`" for name in unseen)
        if unseen:
            _log.warning(
                'by "%s", since the data do not show what they are multiplied with: %s', run.unseen.kind, names
            )
        run.criterion = run.unseen
    for weight in listed:
        if weight.name in unseen:
            run.decide(weight, unseen[weight.name])


@dataclass(eq=False)
class _Run:
    """One calibrated run: what is done when a weight's inputs are known."""

    criterion: Criterion
    patterns: dict[str, Pattern]
    solved: Solved
    unseen: Layerwise | None = None
    slopes: dict[str, Tensor] = field(default_factory=dict)
    learned: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, PrunableWeight] = field(default_factory=dict)
    shared: dict[str, Solution] = field(default_factory=dict)

    def visit(self, weight: PrunableWeight, statistics: Statistics) -> None:
        """Prune a weight and note what its output lost."""
        values = calibration.matrix(weight, weight.parameter.detach())
        solution = self._solution(weight, values, statistics)
        new = solution.applied(values)
        if statistics.dead:
            ranked = "kept by magnitude" if self.criterion.need in ("norms", "hessian") else "its error is not known"
            _log.warning("`%s`: %s: %s", weight.name, DEAD, ranked)
            note = f"{solution.note}; {DEAD}: {ranked}".removeprefix("; ")
            self._write(weight, replace(solution, note=note), new, None, statistics)
            return
        error = statistics.error(values, new)
        self._write(weight, solution, new, error, statistics)
        _log.info("`%s`: relative error of its output %.4f over %d rows", weight.name, error, statistics.rows)

    @torch.no_grad()
    def decide(self, weight: PrunableWeight, reason: str) -> None:
        """Prune a weight whose inputs are not known, by a criterion that does not ask for them."""
        values = calibration.matrix(weight, weight.parameter.detach())
        solution = self._solution(weight, values, nothing := Statistics("gradients"))
        note = f"{solution.note}; {reason}".removeprefix("; ")
        self._write(weight, replace(solution, note=note), values.masked_fill(~solution.keep, 0.0), None, nothing)
        _log.info("`%s`: pruned, what its output loses is not known: %s", weight.name, reason)

    def _solution(self, weight: PrunableWeight, values: Tensor, statistics: Statistics) -> Solution:
        if not isinstance(self.criterion, Layerwise):
            return Solution(self.learned.pop(weight.name))
        if weight.name not in self.shared and len(together := self._readers(weight, statistics)) > 1:
            self._share(together, statistics)
        if weight.name in self.shared:
            return self.shared.pop(weight.name)
        if weight.name in self.slopes:
            statistics.gradient = calibration.matrix(weight, self.slopes.pop(weight.name))
            if share := (statistics.gradient == 0).float().mean().item():
                _log.info("`%s`: %.1f %% of its values have no gradient: by magnitude", weight.name, 100 * share)
        return solve_one(values, weight, self.patterns[weight.name], self.criterion, statistics)

    def _readers(self, weight: PrunableWeight, statistics: Statistics) -> list[PrunableWeight]:
        """Return the weights whose dense groups are chosen together with those of one: of its input and pattern."""
        pattern = self.patterns[weight.name]
        if not isinstance(pattern, Hybrid) or getattr(self.criterion, "over", "") != "input":
            return []
        return [self.weights[name] for name in statistics.readers if self.patterns[name] == pattern]

    @torch.no_grad()
    def _share(self, together: Sequence[PrunableWeight], statistics: Statistics) -> None:
        """Solve weights that read one input as one weight, each of its rows an output of it."""
        assert isinstance(self.criterion, Layerwise), self.criterion
        parts = [calibration.matrix(weight, weight.parameter.detach()) for weight in together]
        sizes, names = [part.shape[1] for part in parts], [weight.name for weight in together]
        if any(name in self.slopes for name in names):
            slopes = [calibration.matrix(weight, self.slopes.pop(weight.name)) for weight in together]
            statistics.gradient = torch.cat(slopes, 1)
        pattern = self.patterns[names[0]]
        named = next((weight for weight in together if not is_finite(weight.parameter.detach())), together[0])
        found = solve_one(torch.cat(parts, 1), named, pattern, self.criterion, statistics)
        keeps = found.keep.split(sizes, 1)
        values = [None] * len(parts) if found.values is None else found.values.split(sizes, 1)
        note = f"{found.note}; dense groups chosen with {', '.join(names)}".removeprefix("; ")
        for name, keep, new in zip(names, keeps, values, strict=True):
            self.shared[name] = Solution(keep, new, note)
        _log.info("one choice of dense groups: %s", ", ".join(f"`{name}`" for name in names))

    def _write(
        self, weight: PrunableWeight, solution: Solution, new: Tensor, error: float | None, statistics: Statistics
    ) -> None:
        pattern, ranks = self.patterns[weight.name], self.criterion.need in ("norms", "hessian")
        inputs = new.shape[-1] if ranks else 0
        said = pattern.name, self.criterion.name, error, statistics.rows, solution.note, inputs
        outcome = Outcome(weight.name, *said).with_doubt()
        keep = calibration.from_matrix(weight, solution.keep)
        self.solved.write(weight.parameter, calibration.from_matrix(weight, new))
        self.solved.choices.append(Choice(weight, pattern, keep, outcome))


def wanted(
    model: nn.Module, weights: Sequence[PrunableWeight], criterion: Criterion, *, cheap: bool = False
) -> int | Callable[[Batch], int]:
    """Return how many samples are used where nobody says, for `calibration.take`.

    `SAMPLES`, and more for criteria that rank by inputs where a sample brings few rows, or, where all that are `cheap`
    are asked for, where more cost little: see `calibration.Enough`.
    """
    return calibration.Enough(model, weights, SAMPLES, cheap) if criterion.need in ("norms", "hessian") else SAMPLES


def require_given(criterion: Criterion, data: Any, loss: Loss | None) -> None:
    """Require data and a loss where the criterion needs them, and no loss where it does not.

    Raises:
        RecipeError: One is missing, the loss is no function of two arguments, or nothing follows it.
    """
    wants_loss = criterion.need in ("gradients", "training")
    if criterion.need is not None and data is None:
        raise RecipeError(
            f'the criterion "{criterion.kind}" needs calibration data',
            got="data=None",
            wanted="data: an iterable of inputs" + (" and targets" if wants_loss else ", as the model takes them"),
            remedy='a few hundred samples of the training set will do; "magnitude" needs no data',
        )
    if wants_loss and loss is None:
        raise RecipeError(
            f'the criterion "{criterion.kind}" needs a loss',
            got="loss=None",
            wanted="loss(output, target) -> scalar tensor, as finetune takes it",
            remedy="for instance loss=torch.nn.functional.cross_entropy with data of (input, target) pairs",
        )
    if wants_loss:
        require_function(loss)
    if loss is not None and not wants_loss:
        raise RecipeError(
            f'the criterion "{criterion.kind}" follows no loss',
            got="a loss",
            wanted='loss=None, or the criterion "taylor" or "learned"',
            remedy="leave the loss out",
        )


def _require_inputs(criterion: Criterion, weights: Sequence[tuple[PrunableWeight, Pattern]], data: Any) -> None:
    """Require data and dense groups where those are to be chosen for all weights of one input."""
    if getattr(criterion, "over", "") == "input" and (
        data is None or not any(isinstance(pattern, Hybrid) for _, pattern in weights)
    ):
        raise RecipeError(
            "nothing can be chosen over the weights of one input",
            got="no data" if data is None else f"over=input with {', '.join({p.name: 0 for _, p in weights})}",
            wanted='data, which show what layers read, and a pattern with dense groups, "2:4+25%"',
            remedy="leave over=input out, or pass both",
        )


def require_unsharded(weights: Sequence[tuple[PrunableWeight, Pattern]]) -> None:
    """Refuse weights that are sharded over processes: their inputs cannot be summed here.

    Raises:
        DataError: One is.
    """
    for weight, _ in weights:
        if is_distributed(weight.parameter):
            raise DataError(
                "calibration of sharded weights is planned, not built yet",
                got=f"`{weight.name}` is a DTensor",
                wanted="a model whose weights are whole",
                remedy="prune before sharding, or by magnitude",
            )
