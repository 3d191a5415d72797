"""Prune once: lay a recipe over a dense model, choose the masks, attach them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from twofour import calibration, criteria, masks, reconstruction, simplification
from twofour.criteria import Choice, Criterion, Outcome, Solved
from twofour.errors import LayerError, RecipeError
from twofour.layers import compiled_parts, describe_attached, require_module, require_unwrapped
from twofour.patterns import Pattern
from twofour.progress import Progress
from twofour.recipe import Assignment, Recipe
from twofour.structure import permutation

_log = logging.getLogger("twofour.pruning")

_OUTCOMES = "_twofour_outcomes"
"""Attribute of a pruned model: its tuple of outcomes."""
_REPORT = "_twofour_permutation"
"""Attribute of a pruned model: what permuting it won."""

_RECONSTRUCTED = "_twofour_reconstruction"
"""Attribute of a pruned model: what reconstruction won."""

WITHOUT_DATA = (
    'no data: pruned by "magnitude"; with data=, a few hundred inputs without targets, "admm" loses less before any '
    'training. criterion="magnitude" says that it is meant'
)

_Permute = Callable[..., permutation.Report]


def prune(
    model: nn.Module,
    pattern: str | Pattern | Mapping[str, str | Pattern] | Recipe = "2:4",
    *,
    criterion: str | Criterion | None = criteria.AUTO,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
    data: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    samples: int | None = None,
    progress: bool = True,
    permute: bool = False,
    simplify: bool = False,
    example: Any = None,
    reconstruct: bool | None = None,
) -> nn.Module:
    """Make a model sparse, in place: choose a mask for each eligible weight and keep the weight to it from now on.

    An error or interruption leaves the model as it was. A weight whose zeros obey its pattern already keeps its values,
    whatever the criterion; where all do, nothing runs. What stays dense is logged with its reason. Biases, norms and
    embeddings always stay dense (Mishra et al. 2021). `outcomes` tells afterwards what each weight's output lost.

    Args:
        model: The trained dense model, on any device.
        pattern: "2:4" or another N:M for every eligible layer, a mapping from layer globs to patterns or "dense"
            (first match wins), or a `Recipe`.
        criterion: Which values of a group stay: "magnitude", "random", "wanda", "ria", "sparsegpt", "sparsegpt-mask",
            "admm", "taylor" or "learned", with options as in "sparsegpt:dampening=0.05"; or an object. "auto": a
            recipe's own; else "admm" with data, and "magnitude" for weights whose inputs the data do not show; else
            "magnitude", and a warning says that data would bring more. The log says which was taken.
        skip: Globs of layers to leave dense.
        eligibility: "asp" prunes a weight only if its rows are a multiple of 8 and its reduction axis is one of 16;
            "any" prunes whatever the pattern's group divides.
        data: Calibration data, for all criteria but "magnitude" and "random", which with data only report what the
            outputs lose: an iterable of inputs (a tensor, a tuple of positional or a dict of keyword arguments) or of
            pairs (input, target). A tuple of two is a pair if there is a loss, or if the model's forward can be called
            with one argument; else its entries are two arguments. Tokens that an attention mask hides do not count.
        loss: `loss(output, target)`, for "taylor" and "learned".
        samples: How many samples of `data` are used, spread over a list. Default: 128; for criteria that rank by inputs
            as many more as give weights eight rows an input, and up to 1,024 to reconstruct by where those cost little.
        progress: Show a progress bar while calibrating, on a terminal.
        permute: Search for an order of the channels that the patterns fit better and put the model in it first; its
            outputs stay what they were. With data the weights are pruned in both orders, and the one whose outputs lose
            less on a fifth of the data, held back, stands. `permutation_report` tells what that won. See
            docs/permutation.md.
        simplify: Merge what algebra makes one product before anything is pruned (`twofour.simplify`): unmerged
            adapters, layers in a row. Afterwards it would make sparse weights dense. See docs/rewriting.md.
        example: Input of one forward pass to trace the model with, for `permute` and `simplify`: a tensor, a tuple of
            positional or a dict of keyword arguments. Default for `permute`: the first two samples of `data`.
        reconstruct: Solve the kept values, biases and norms together afterwards, block by block and then for the whole
            model's answers (`twofour.reconstruction`); kept where answers to a fifth of the data, held back, come
            nearer to the dense model's. `reconstruction_report` tells what that won. Default: where there are data and
            nobody names a criterion.

    Returns:
        The same model; with `simplify` a new one where weights were merged, and `model` stays as it is.

    Example:
        >>> model = twofour.prune(model, "2:4", skip=["head"])

    Raises:
        LayerError: Nothing can be pruned, a rule asks for a layer that cannot be, the model is compiled, a training
            scheme is attached to it, or the data reach no layer.
        DataError: The data cannot be used, or the model does not run on them.
        PatternError: A pattern does not parse, or a weight holds NaN or infinity.
        RecipeError: A rule or option is malformed, planned, or matches no layer; data or a loss are missing, or
            the dense model that `reconstruct=True` follows: all weights obey their patterns already.
        PermutationError: The model cannot be traced, or its outputs changed with the order of its channels.
    """
    model = _dense(model, permute, simplify, example, data, samples=samples, reconstruct=reconstruct)
    unnamed = criterion in (None, criteria.AUTO) and not isinstance(pattern, Recipe)
    recipe = _recipe(pattern, criterion, data, skip=skip, eligibility=eligibility)
    criteria.require_given(recipe.criterion, data, loss)
    assignment, settled = _assigned(model, recipe, permute)
    if not assignment.weights:
        return _left(model, assignment, settled, reconstruct)
    asked = False if reconstruct is None and not (unnamed and data is not None) else reconstruct
    wanted = partial(criteria.wanted, criterion=recipe.criterion, cheap=asked is not False)
    data = _taken(model, assignment, wanted if samples is None else samples, data, loss)
    example = _traced_on(model, assignment, example, data) if permute else example
    _log_criterion(recipe.criterion, unnamed=unnamed, data=data)
    attach = partial(_attach, model, settled, reconstruction.prepared(model, data, asked=asked, progress=progress))
    given: dict[str, Any] = {"data": data, "samples": sum(batch.samples for batch in data or ()) or criteria.SAMPLES}
    scores = partial(criteria.importance, model, criterion=recipe.criterion, **given)
    order = partial(_permute, model, assignment, scores, example, progress)
    given |= {"loss": loss, "progress": progress, "unseen": criteria.Magnitude() if unnamed else None}
    solving = partial(criteria.solve, model, assignment.weights, recipe.criterion, **given)
    if permute and data is not None:
        solved = _better_order(model, order, data, solving, attach)
    else:
        with _permuted(model, order if permute else None):
            attach(solved := solving())
    return _told(model, assignment, solved)


def _recipe(pattern: Any, criterion: str | Criterion | None, data: Any, **options: Any) -> Recipe:
    """Return what was asked for as a recipe; "auto" is a recipe's own criterion, or what the data allow."""
    own = isinstance(pattern, Recipe) and criterion in (None, criteria.AUTO)
    return Recipe.parse(pattern, criterion=None if own else criteria.resolve(criterion, data), **options)


def _assigned(model: nn.Module, recipe: Recipe, permute: bool) -> tuple[Assignment, list[Choice]]:
    """Return the weights to prune and those that need not be, logged; refuse a model without either.

    Another order of the channels asks all of them anew.
    """
    assignment = recipe.assign(model)
    if not assignment.weights:
        _log_plan(assignment)
        raise assignment.empty()
    settled = [] if permute else assignment.settled(model, recipe.criterion)
    _log_plan(assignment)
    assignment.tell_settled(model, settled, _log)
    return assignment.but(settled), settled


def _left(model: nn.Module, assignment: Assignment, settled: Sequence[Choice], reconstruct: bool | None) -> nn.Module:
    """Mask a model that obeys its patterns already; its values and reports stay, and nothing runs."""
    reconstruction.require_dense(reconstruct, len(settled))
    masks.attach_all([(choice.weight, choice.keep, choice.pattern) for choice in settled])
    return _told(model, assignment, Solved(settled=settled))


def _told(model: nn.Module, assignment: Assignment, solved: Solved) -> nn.Module:
    """Note the outcomes in the model and say what was pruned: aloud where weights saw too few data."""
    model.__dict__[_OUTCOMES] = tuple(choice.outcome for choice in solved.masked)
    _log.log(logging.WARNING if solved.fitted else logging.INFO, "%s", solved.told(len(assignment.skipped)))
    return model


def _dense(model: nn.Module, permute: bool, simplify: bool, example: Any, data: Any, **options: Any) -> nn.Module:
    """Return the model to prune, simplified where that is asked for; refuse what cannot be pruned, or pruned so."""
    _require_dense(model)
    calibration.require_usable(() if data is None else data, options["samples"])
    reconstruction.require_asked(options["reconstruct"])
    _require_example(permute, simplify, example, data)
    return simplification.simplify(model, example) if simplify else model


def _attach(
    model: nn.Module, settled: Sequence[Choice], reconstructed: reconstruction.Reconstruct | None, solved: Solved
) -> None:
    """Reconstruct, where that is asked for, and attach the masks; what fails inside brings all values back."""
    solved.settled = settled
    try:
        report = reconstructed(solved) if reconstructed is not None else None
    except BaseException:
        solved.undo()
        raise
    for name, reason in solved.refused.items():
        _log.warning("`%s` stays dense: %s", name, reason)
    try:
        masks.attach_all([(choice.weight, choice.keep, choice.pattern) for choice in solved.masked])
    except BaseException:
        solved.undo()
        raise
    model.__dict__[_RECONSTRUCTED] = report


def outcomes(model: nn.Module) -> tuple[Outcome, ...]:
    """Return what the last `prune` of this model did to each weight, the error of its output included.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    return model.__dict__.get(_OUTCOMES, ())


def permutation_report(model: nn.Module) -> permutation.Report | None:
    """Return what `permute=True` won in the last `prune` of this model that changed it, or None.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    return model.__dict__.get(_REPORT)


def reconstruction_report(model: nn.Module) -> reconstruction.Report | None:
    """Return what reconstruction won in the last `prune` of this model that changed it, or None.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    return model.__dict__.get(_RECONSTRUCTED)


def hand_on(pruned: nn.Module, model: nn.Module) -> None:
    """Tell of a model what is told of a `pruned` copy, whose values and masks it has now."""
    model.__dict__.update({name: pruned.__dict__.get(name) for name in (_OUTCOMES, _REPORT, _RECONSTRUCTED)})


@contextmanager
def _permuted(model: nn.Module, order: _Permute | None) -> Iterator[None]:
    """Permute first, where that is asked for; what fails inside puts the channels back."""
    report = order() if order else None
    try:
        yield
    except BaseException:
        if report is not None:
            report.undo()
        raise
    model.__dict__[_REPORT] = report.final() if report is not None else None


def _better_order(
    model: nn.Module,
    order: _Permute,
    batches: Sequence[calibration.Batch],
    solving: Callable[..., Solved],
    attach: Callable[[Solved], None],
) -> Solved:
    """Prune in the old order and in the new one, and attach what loses less on data held back."""
    used, held = calibration.hold_back(model, batches)
    plain, before = _judged(model, held, solving, used)
    values = plain.values()
    plain.undo()
    report = order(data=used)
    try:
        solved, after = _judged(model, held, solving, used)
        report = replace(report, judged=(before, after), kept=after <= before)
        if not report.kept:
            solved.undo()
            report.undo()
            solved = plain
            for parameter, new in values:
                solved.write(parameter, new)
        attach(solved)
    except BaseException:
        report.undo()
        raise
    _log.info("judged on %d samples held back: %s", held.samples, str(report).splitlines()[1].strip())
    model.__dict__[_REPORT] = report.final()
    return solved


def _judged(
    model: nn.Module, held: calibration.Held, solving: Callable[..., Solved], used: Sequence[calibration.Batch]
) -> tuple[Solved, float]:
    """Prune, without masks yet, and return what the outputs lose on data held back."""
    solved = solving(data=used)
    try:
        return solved, held.lost(model)
    except BaseException:
        solved.undo()
        raise


def _permute(
    model: nn.Module,
    assignment: Assignment,
    scores: Callable[..., dict[str, Tensor]],
    example: Any,
    progress: bool,
    **data: Any,
) -> permutation.Report:
    """Rank the values by the data, and search for the order of the channels that keeps most."""
    with Progress(progress) as display:
        display.begin("ranking weights for the order of channels", len(assignment.weights))
        found = scores([weight for weight, _ in assignment.weights], display=display, **data)
        return permutation.permute(model, example, assignment.weights, scores=found, display=display)


def _taken(
    model: nn.Module, assignment: Assignment, samples: int | Callable[..., Any], data: Any, loss: Any
) -> list[calibration.Batch] | None:
    """Return the samples that are used, and say which are not: aloud where nobody asked for a number."""
    if data is None:
        return None
    criteria.require_unsharded(assignment.weights)
    tell = _log.warning if callable(samples) and isinstance(data, Sized) else _log.info  # a stream goes on
    count = samples(model, [weight for weight, _ in assignment.weights]) if callable(samples) else samples
    taken = calibration.take(model, data, count, paired=loss is not None, tell=tell)
    _log.info("calibrated on %d samples", sum(batch.samples for batch in taken))
    return taken


def _log_criterion(criterion: Criterion, *, unnamed: bool, data: Any) -> None:
    """Say which criterion decides, and why where nobody named it: aloud where data would have brought a better one."""
    if unnamed and data is None:
        _log.warning("%s", WITHOUT_DATA)
    best = f"the best of one shot {'without' if data is None else 'with'} data; criterion= names another"
    _log.info("criterion: %s (%s)", criterion.name, best if unnamed else "as asked")


def _log_plan(assignment: Assignment) -> None:
    """Say what stays dense, and where blocks are too few."""
    for skipped in assignment.skipped:
        _log.info("`%s` stays dense: %s", skipped.name, skipped.reason)
    assignment.tell_unreached(_log)


def _traced_on(model: nn.Module, assignment: Assignment, example: Any, data: Any) -> Any:
    """Return the example to permute by, the first samples of the data where there is none; refuse what cannot be."""
    _require_unmasked(model)
    permutation.require_unsharded(assignment.weights)
    if example is None:
        inputs = calibration.take(model, data, 2)[0].inputs
        return calibration.to_device(inputs, next(model.parameters()).device)
    return example


def _require_unmasked(model: nn.Module) -> None:
    if masked := masks.of(model):
        raise LayerError(
            "a model that carries masks cannot be permuted",
            got=f"{len(masked)} masks, `{next(iter(masked))}` first",
            wanted="a dense model",
            remedy="twofour.masks.detach(model) first, or prune without permute=True",
        )


def _require_example(permute: bool, simplify: bool, example: Any, data: Any) -> None:
    for name, asked in (("permute", permute), ("simplify", simplify)):
        if not isinstance(asked, bool):
            raise RecipeError(
                f"`{name}` is neither True nor False",
                got=repr(asked),
                wanted="True, with an example" + (" or data" if name == "permute" else "") + ", or False",
                remedy=f"{name}=True, example=x",
            )
    traced = permute or simplify
    if traced == (example is not None) or (permute and not simplify and data is not None):
        return
    given = " and ".join(name for name, asked in (("permute=True", permute), ("simplify=True", simplify)) if asked)
    raise RecipeError(
        "an example and permute=True or simplify=True go together",
        got=f"{given or 'permute=False'} {'without' if traced else 'with'} an example",
        wanted="permute=True or simplify=True, example=x: the model is traced on it and compared with itself",
        remedy="give an input of one forward pass" + (", or data=, whose first is taken" if permute else "")
        if traced
        else "leave the example out",
    )


def _require_dense(model: Any) -> None:
    if not isinstance(model, nn.Module):
        remedy = "build the model first; the command line takes files: twofour prune SOURCE"
        raise LayerError(
            "there is no model to prune", got=type(model).__name__, wanted="a torch.nn.Module", remedy=remedy
        )
    require_unwrapped(model)
    if found := compiled_parts(model):
        raise LayerError(
            "a compiled model cannot be pruned",
            got=found,
            wanted="the dense model that it was compiled from, or one that is masked",
            remedy="prune that one and compile again, or twofour.load(path, model, masked=True) a saved file",
        )
    if found := describe_attached(model):
        raise LayerError(
            "a model that something is attached to for training cannot be pruned",
            got=found,
            wanted="a plain model",
            remedy="end it first: finish() of a scheme keeps what was trained, remove() of SDGP's handle its weights;"
            " of low bits, prune first and quantise then, or twofour.quantization.remove(model)",
        )
