"""shrink: a model of a size that is asked for, cut once, with its weights solved anew on calibration data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import nn

from twofour import calibration
from twofour.calibration import Batch, Statistics
from twofour.errors import ShrinkError, cut, integer_from
from twofour.layers import PrunableWeight, require_unwrapped, walk
from twofour.progress import Progress
from twofour.shrinking.budget import Budget, Prices, uses
from twofour.shrinking.by_time import chosen_by_time, multiple_of, timed
from twofour.shrinking.choose import choose, choose_layers
from twofour.shrinking.curves import Curve, Reader, columns_of, covariance, magnitude, second_order
from twofour.shrinking.depth import Energies, droppable, energies
from twofour.shrinking.reconstruct import norms_said, reconstruct, refit_norms
from twofour.shrinking.report import Report, Width, attach
from twofour.shrinking.uniform import sayable
from twofour.structure import shrink as structure
from twofour.structure.shrink import Channels, Cuttable
from twofour.structure.shrink.widths import widths_of

_log = logging.getLogger("twofour.shrinking")

SAMPLES = 128
"""Samples of calibration data, as SparseGPT takes (Frantar and Alistarh 2023)."""


def shrink(
    model: nn.Module,
    example: Any,
    budget: float | Budget = 0.5,
    *,
    data: Any = None,
    samples: int | None = None,
    streams: bool = False,
    multiple: int | None = None,
    least: float = 0.125,
    layers: Sequence[str] | Literal["auto"] = (),
    uniform: bool = False,
    progress: bool = True,
) -> nn.Module:
    """Return a smaller model: fewer channels, hidden units and heads, chosen once, within a budget.

    Every group of channels that can be cut without changing anything else (`structure.shrink.channels`) becomes
    narrower where the least is lost for what is saved. With data the loss is second-order, the weights that read the
    channels are solved anew for those that stay, and batch norms take their statistics anew: use it where you cannot
    train, and as the start where you can. Without data channels are ranked by magnitude, and training has to follow.

    Args:
        model: A trained dense model on the CPU or a GPU; it stays as it is.
        example: Input of one forward pass: a tensor, a tuple or list of positional or a dict of keyword arguments.
        budget: Fraction of the parameters that may stay, or a `Budget` of parameters, MACs, bytes or time. A budget of
            time compiles the model, its layers at several widths, and up to four small models.
        data: Calibration data, as in `prune`.
        samples: How many samples of them are used, at least 1. Default: 128.
        streams: Cut residual streams and widths of embeddings too, and channels that a normalisation runs along, which
            computes something else afterwards than with zeros in their place.
        multiple: Widths are multiples of it, and groups of fewer channels, such as heads, stay whole; default: 16 from
            128 channels on, 8 from 32 on, else 1.
        least: Least share of each group that stays, above 0 and at most 1.
        layers: Names of whole layers to drop, such as "encoder.layer.3"; or "auto": residual blocks and layers compete
            with channels by what they lose on the data for what they save, and as many go as the budget asks for.
        uniform: Give all layers the same widths, and leave whole what the configuration of a model of transformers
            cannot say, such as the heads of BERT: the folder that `small.save_pretrained` writes then loads with
            `from_pretrained`.
        progress: Show a progress bar while calibrating, on a terminal.

    Returns:
        The small model; `shrinking.report_of(small)` says what was cut and what it cost, `twofour.save` stores the cut.

    Example:
        >>> small = twofour.shrink(model, x, budget=0.5, data=loader)

    Raises:
        ShrinkError: An option is impossible, the budget cannot be met (of time to 3 %, as measured), nothing can be
            cut, the model does not run on the example, cannot be captured, or is masked.
        DataError: The data cannot be used.
    """
    require_unwrapped(model, ShrinkError)
    limit = Budget.of(budget)
    _require_options(multiple, least, samples, layers)
    count = SAMPLES if samples is None else samples
    batches = [] if data is None else calibration.take(model, data, count, tell=_log.warning)
    ways = _Ways(limit, streams, uniform, multiple, least, layers == "auto")
    with Progress(shown=progress and bool(batches)) as display:
        names = ways.layers(model, example, batches, display) if ways.auto else tuple(layers)
        twin = structure.cut(model, structure.Cut(layers=names))
        found = structure.channels(twin, example)
        work, unsaid = ways.work(twin, found, batches, display)
        curves, _ = ways.curves(work, example)
        widths, promised, timing = _chosen(found, curves, limit, (model, twin), example, uniform)
        plan = found.plan({name: curves[name].kept(width) for name, width in widths.items()})
        solved, skipped = reconstruct(twin, plan, work.weights, batches, display) if batches else ((), {})
    small = structure.cut(twin, plan, inplace=True)
    told = tuple(_width(group, curves[group.name], widths[group.name]) for group in work.groups)
    notes = norms_said(small, batches, refit_norms(small, batches) if batches else 0)
    further: dict[str, Any] = {"cut": plan, "reconstructed": solved, "skipped": tuple(skipped.items()), "notes": notes}
    further |= {"milliseconds": promised, "timing": timing, "unused": found.unused, "layers": names}
    report = _report(model, small, example, told, found.uncut + unsaid, further)
    _log.info("shrunk: %s", report)
    attach(small, report)
    return small


@dataclass(frozen=True)
class _Ways:
    """How a model may be cut: options of `shrink`."""

    limit: Budget
    streams: bool
    uniform: bool
    multiple: int | None
    least: float
    auto: bool

    def work(
        self, model: nn.Module, found: Channels, batches: Sequence[Batch], display: Progress
    ) -> tuple[_Work, tuple[structure.Uncut, ...]]:
        """Return the groups that are cut, to be ranked, and those that stay whole though they could be cut."""
        chosen, unsaid = _cuttable(model, found, self.streams, self.uniform)
        return _Work(model, chosen, walk(model, eligibility="any", tied="*").weights, batches, display), unsaid

    def widths(self, group: Cuttable) -> tuple[int, ...]:
        """Return the widths that a group may have; for a budget of time as vectors have lanes."""
        vectors = multiple_of(group) if self.limit.kind == "time" else None
        return widths_of(group.size, self.multiple or vectors, self.least)

    def curves(self, work: _Work, example: Any) -> tuple[dict[str, Curve], Energies]:
        """Return what each group loses, as a share of its layer's output where layers compete, and what layers give."""
        curves = work.curves(self)
        if not self.auto:
            return curves, Energies({}, {})
        gave = energies(work.model, droppable(work.model, example), work.weights, work.batches)
        return {group.name: gave.scaled(group, curves[group.name]) for group in work.groups}, gave

    def layers(self, model: nn.Module, example: Any, batches: Sequence[Batch], display: Progress) -> tuple[str, ...]:
        """Return the layers that the budget lets go, where they compete with channels."""
        if not batches:
            raise ShrinkError(
                "no layer can be chosen",
                got='layers="auto" without data',
                wanted="calibration data, which show what each layer adds",
                remedy='data=loader, or name the layers: layers=["encoder.layer.3"]',
            )
        twin = structure.cut(model, structure.Cut())
        found = structure.channels(twin, example)
        work, _ = self.work(twin, found, batches, display)
        curves, gave = self.curves(work, example)
        price, whole = _priced(found, curves, self.limit, (twin, twin), example)
        return choose_layers(Prices(found, price), curves, self.limit, whole, gave.losses(), self.uniform)


@dataclass(eq=False)
class _Work:
    """A copy of the model whose groups are ranked."""

    model: nn.Module
    groups: Sequence[Cuttable]
    weights: Sequence[PrunableWeight]
    batches: Sequence[Batch]
    display: Progress

    def curves(self, ways: _Ways) -> dict[str, Curve]:
        """Return what each group loses: second-order where the data show all of its readers, else by magnitude."""
        readers = self._readers() if self.batches else {}
        named = {name: weight for weight in self.weights for name in weight.names}
        tensors = dict(self.model.named_parameters())
        found: dict[str, Curve] = {}
        for group in self.groups:
            of_group = [readers[group.name, name] for name in group.group.consumers if (group.name, name) in readers]
            if of_group and len(of_group) == len(group.group.consumers):
                found[group.name] = second_order(group, of_group, ways.widths(group))
            else:
                found[group.name] = magnitude(group, tensors, named, ways.widths(group))
        return found

    def _readers(self) -> dict[tuple[str, str], Reader]:
        """Return what reads each group, with what the data say of its inputs."""
        columns = {
            (group.name, name): (weight, found)
            for group in self.groups
            for weight in self.weights
            for name in weight.names
            if name in group.group.consumers and (found := columns_of(group, weight)) is not None
        }
        readers: dict[tuple[str, str], Reader] = {}

        def visit(weight: PrunableWeight, statistics: Statistics) -> None:
            if statistics.rows:
                moments, _ = covariance(weight, statistics)
                for key, (_, places) in columns.items():
                    if key[1] in weight.names:
                        readers[key] = Reader.of(weight, places, moments)

        wanted = {weight.name for weight, _ in columns.values()}
        chosen = [weight for weight in self.weights if weight.name in wanted]
        calibration.calibrate(self.model, chosen, self.batches, "hessian", visit, display=self.display)
        return readers


def _width(group: Cuttable, curve: Curve, width: int) -> Width:
    return Width(group.name, group.size, width, curve.losses[curve.widths.index(width)], curve.source)


def _chosen(
    found: Channels,
    curves: Mapping[str, Curve],
    limit: Budget,
    models: tuple[nn.Module, nn.Module],
    example: Any,
    uniform: bool,
) -> tuple[dict[str, int], tuple[float, float] | None, str]:
    """Return the width of each group, and milliseconds before and after and how they were taken where they count."""
    if limit.kind == "time":
        return chosen_by_time(found, curves, limit, models, example, uniform)
    price, whole = _priced(found, curves, limit, models, example)
    return choose(Prices(found, price), curves, limit, whole, uniform=uniform), None, ""


def _priced(
    found: Channels,
    curves: Mapping[str, Curve],
    limit: Budget,
    models: tuple[nn.Module, nn.Module],
    example: Any,
) -> tuple[Callable[[str, tuple[int, ...]], float], float]:
    """Return what a tensor of some sizes costs of a budget, and what the large model does."""
    model, twin = models
    if limit.kind == "time":
        _, of_layers, whole = timed(found, curves, models, example)
        return of_layers.price, whole
    whole, each = {
        "parameters": lambda: (_parameters(model), dict.fromkeys(found.shapes, 1)),
        "macs": lambda: (_macs(model, example), uses(twin, example)),
        "bytes": lambda: (_bytes(model), {name: p.element_size() for name, p in twin.named_parameters()}),
    }[limit.kind]()
    return (lambda name, sizes: prod(sizes) * each.get(name, 0)), whole


def _report(
    large: nn.Module,
    small: nn.Module,
    example: Any,
    widths: tuple[Width, ...],
    uncut: tuple[structure.Uncut, ...],
    further: Mapping[str, Any],
) -> Report:
    """Return the report of a small model, with its sizes beside the large one's, and let its configuration say them."""
    counts = _parameters, lambda model: _macs(model, example), _bytes
    parameters, macs, size = ((count(large), count(small)) for count in counts)
    return Report(widths, uncut, parameters, macs, size, config=structure.configure(small), **further)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _macs(model: nn.Module, example: Any) -> int:
    times = uses(model, example)
    return sum(parameter.numel() * times.get(name, 0) for name, parameter in model.named_parameters())


def _require_options(multiple: object, least: object, samples: object, layers: object) -> None:
    if multiple is not None:
        integer_from(1, "`multiple` is impossible", ShrinkError, "None takes what suits the width", multiple=multiple)
    if samples is not None:
        integer_from(1, "`samples` is impossible", ShrinkError, f"None takes {SAMPLES}", samples=samples)
    named = isinstance(layers, list | tuple) and all(isinstance(name, str) for name in layers)
    if not named and layers != "auto":
        raise ShrinkError(
            "`layers` is impossible",
            got=cut(repr(layers), 40),
            wanted='a list or tuple of names of layers, or "auto"',
            remedy='layers=["encoder.layer.3"]',
        )
    if not isinstance(least, int | float) or isinstance(least, bool) or not 0 < least <= 1:
        raise ShrinkError("`least` is impossible", got=cut(repr(least), 40), wanted="a share above 0 and at most 1")


def _cuttable(
    model: nn.Module, found: Channels, streams: bool, uniform: bool
) -> tuple[list[Cuttable], tuple[structure.Uncut, ...]]:
    """Return the groups that may be cut, and those that stay whole since a configuration cannot say them.

    Raises:
        ShrinkError: There is none.
    """
    chosen = [group for group in found.groups if streams or (group.exact and not group.group.stream)]
    chosen, unsaid = sayable(model, found, chosen) if uniform and chosen else (chosen, ())
    if chosen:
        return chosen, unsaid
    raise ShrinkError(
        "nothing can be cut",
        reasons=[str(uncut) for uncut in found.uncut + unsaid],
        got=f"{len(found.groups)} groups of channels, all residual streams or normalised"
        if found.groups
        else "no group",
        wanted="channels between two layers",
        remedy="streams=True cuts residual streams too",
    )
