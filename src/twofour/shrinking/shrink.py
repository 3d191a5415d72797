"""shrink: a model of a size that is asked for, cut once, with its weights solved anew on calibration data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from twofour import calibration
from twofour.calibration import Batch, Statistics
from twofour.errors import ShrinkError, cut, integer_from
from twofour.layers import PrunableWeight, require_unwrapped, walk
from twofour.progress import Progress
from twofour.shrinking.budget import KINDS, Budget, Prices, uses
from twofour.shrinking.choose import choose
from twofour.shrinking.curves import Curve, Reader, columns_of, covariance, magnitude, second_order, widths_of
from twofour.shrinking.reconstruct import reconstruct, refit_norms
from twofour.shrinking.report import Report, Width, attach
from twofour.structure import shrink as structure
from twofour.structure.shrink import Channels, Cuttable

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
    layers: Sequence[str] = (),
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
        budget: Fraction of the parameters that may stay, or a `Budget` of parameters or MACs.
        data: Calibration data, as in `prune`.
        samples: How many samples of them are used. Default: 128.
        streams: Cut residual streams and widths of embeddings too, and channels that a normalisation runs along, which
            computes something else afterwards than with zeros in their place.
        multiple: Widths are multiples of it; default: 16 from 128 channels on, 8 from 32 on.
        least: Least share of each group that stays, above 0 and at most 1.
        layers: Names of whole layers to drop, such as "encoder.layer.3"; they are chosen by you.
        uniform: Give all layers the same widths, which a configuration of transformers can say: the folder that
            `small.save_pretrained` writes then loads with `from_pretrained`, where the model's class allows it.
        progress: Show a progress bar while calibrating, on a terminal.

    Returns:
        The small model; `shrinking.report_of(small)` says what was cut and what it cost, `twofour.save` stores the cut.

    Example:
        >>> small = twofour.shrink(model, x, budget=0.5, data=loader)

    Raises:
        ShrinkError: The budget is impossible or cannot be met, nothing can be cut, the model does not run on the
            example, cannot be captured, or is masked.
        DataError: The data cannot be used.
    """
    require_unwrapped(model, ShrinkError)
    limit = Budget.of(budget)
    _require_options(multiple, least)
    twin = structure.cut(model, structure.Cut(layers=tuple(layers)))
    found = structure.channels(twin, example)
    chosen = [g for g in found.groups if streams or (g.exact and not g.group.stream)]
    if not chosen:
        raise _nothing(found)
    batches = [] if data is None else calibration.take(twin, data, samples or SAMPLES, tell=_log.warning)
    with Progress(shown=progress and bool(batches)) as display:
        work = _Work(twin, chosen, walk(twin, eligibility="any", tied="*").weights, batches, display)
        curves = work.curves({group.name: widths_of(group.size, multiple, least) for group in chosen})
        costs = {kind: _costs(kind, found, uses(twin, example)) for kind in KINDS}
        wholes = {"parameters": _parameters(model), "macs": _macs(model, example)}
        widths = choose(Prices(found, costs[limit.kind]), curves, limit, wholes[limit.kind], uniform=uniform)
        plan = found.plan({name: curves[name].kept(width) for name, width in widths.items()})
        solved, skipped = reconstruct(twin, plan, work.weights, batches, display) if batches else ((), {})
    small = structure.cut(twin, plan, inplace=True)
    if batches:
        refit_norms(small, batches)
    told = tuple(_width(group, curves[group.name], widths[group.name]) for group in chosen)
    sizes = (wholes["parameters"], _parameters(small)), (wholes["macs"], _macs(small, example))
    report = Report(told, found.uncut, *sizes, solved, tuple(skipped.items()), plan, structure.configure(small))
    _log.info("shrunk: %s", report)
    attach(small, report)
    return small


@dataclass(eq=False)
class _Work:
    """A copy of the model whose groups are ranked."""

    model: nn.Module
    groups: Sequence[Cuttable]
    weights: Sequence[PrunableWeight]
    batches: Sequence[Batch]
    display: Progress

    def curves(self, widths: Mapping[str, tuple[int, ...]]) -> dict[str, Curve]:
        """Return what each group loses: second-order where the data show all of its readers, else by magnitude."""
        readers = self._readers() if self.batches else {}
        named = {weight.name: weight for weight in self.weights}
        tensors = dict(self.model.named_parameters())
        found: dict[str, Curve] = {}
        for group in self.groups:
            of_group = [readers[group.name, name] for name in group.group.consumers if (group.name, name) in readers]
            if of_group and len(of_group) == len(group.group.consumers):
                found[group.name] = second_order(group, of_group, widths[group.name])
            else:
                found[group.name] = magnitude(group, tensors, named, widths[group.name])
        return found

    def _readers(self) -> dict[tuple[str, str], Reader]:
        """Return what reads each group, with what the data say of its inputs."""
        columns = {
            (group.name, weight.name): found
            for group in self.groups
            for weight in self.weights
            if weight.name in group.group.consumers and (found := columns_of(group, weight)) is not None
        }
        readers: dict[tuple[str, str], Reader] = {}

        def visit(weight: PrunableWeight, statistics: Statistics) -> None:
            if statistics.rows:
                moments, _ = covariance(weight, statistics)
                for key, places in columns.items():
                    if key[1] == weight.name:
                        readers[key] = Reader.of(weight, places, moments)

        wanted = {name for _, name in columns}
        chosen = [weight for weight in self.weights if weight.name in wanted]
        calibration.calibrate(self.model, chosen, self.batches, "hessian", visit, display=self.display)
        return readers


def _width(group: Cuttable, curve: Curve, width: int) -> Width:
    return Width(group.name, group.size, width, curve.losses[curve.widths.index(width)], curve.source)


def _costs(kind: str, found: Channels, times: Mapping[str, int]) -> dict[str, int]:
    return {name: 1 if kind == "parameters" else times.get(name, 0) for name in found.shapes}


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _macs(model: nn.Module, example: Any) -> int:
    times = uses(model, example)
    return sum(parameter.numel() * times.get(name, 0) for name, parameter in model.named_parameters())


def _require_options(multiple: object, least: object) -> None:
    if multiple is not None:
        integer_from(1, "`multiple` is impossible", ShrinkError, "None takes what suits the width", multiple=multiple)
    if not isinstance(least, int | float) or isinstance(least, bool) or not 0 < least <= 1:
        raise ShrinkError("`least` is impossible", got=cut(repr(least), 40), wanted="a share above 0 and at most 1")


def _nothing(found: Channels) -> ShrinkError:
    return ShrinkError(
        "nothing can be cut",
        reasons=[str(uncut) for uncut in found.uncut],
        got=f"{len(found.groups)} groups of channels, all residual streams or normalised"
        if found.groups
        else "no group",
        wanted="channels between two layers",
        remedy="streams=True cuts residual streams too",
    )
