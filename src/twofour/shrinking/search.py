"""search: which layers go and how wide every group becomes, within a budget; what it finds is noted step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, Literal

from torch import Tensor, nn

from twofour import calibration
from twofour.calibration import Batch, Statistics
from twofour.errors import ShrinkError
from twofour.journal import Journal
from twofour.layers import PrunableWeight, walk
from twofour.progress import Progress
from twofour.shrinking.budget import Budget, Prices, UnmetError, macs, parameters, size, uses
from twofour.shrinking.by_time import Step, chosen_by_time, multiple_of, timed
from twofour.shrinking.choose import choose, choose_layers
from twofour.shrinking.curves import Curve, Reader, columns_of, covariance, magnitude, second_order, shown
from twofour.shrinking.cuttable import Streams, channels_without, cuttable, of_several_widths
from twofour.shrinking.depth import Energies, droppable, energies, together
from twofour.shrinking.room import Room
from twofour.shrinking.shown import count, nothing
from twofour.structure import shrink as structure
from twofour.structure.shrink import Channels, Cut, Cuttable, Uncut
from twofour.structure.shrink.widths import widths_of

_log = logging.getLogger("twofour.shrinking")

TRIES, DOUBT, LEAST_GAIN = 4, 0.9, 0.01
"""How many sets of layers are tried against a budget of time; and by what the predicted gain of narrower channels is
multiplied while it asks for a set that was tried, down to what."""


@dataclass(frozen=True)
class Options:
    """How a model may be cut: see `shrink`."""

    limit: Budget
    streams: Streams
    uniform: bool
    multiple: int | None
    least: float
    layers: tuple[str, ...] | Literal["auto"]


@dataclass(frozen=True, eq=False)
class Choice:
    """What goes.

    Attributes:
        layers: Whole layers, by their names in the large model.
        twin: A copy of the model without them.
        plan: The cut of the twin.
        groups: Groups of the twin that could be cut.
        curves: What each of them loses.
        widths: The width of each.
        weights: Of the twin.
        uncut: Channels that stay whole, with the reason.
        unused: Parameters that the example's forward does not use.
        milliseconds: Before and after, where time is the budget, and how they were taken.
        notes: Sentences about what the search had to do.
    """

    layers: tuple[str, ...]
    twin: nn.Module
    plan: Cut
    groups: Sequence[Cuttable]
    curves: Mapping[str, Curve]
    widths: Mapping[str, int]
    weights: Sequence[PrunableWeight]
    uncut: tuple[Uncut, ...]
    unused: tuple[str, ...]
    milliseconds: tuple[float, float] | None
    timing: str
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Search:
    """A search within a budget.

    Attributes:
        model: The large model; it stays as it is.
        example: Input of one forward pass.
        batches: Calibration data, none where channels go by magnitude.
        options: How the model may be cut.
        journal: Notes what was found, and has what a stopped run found.
        display: Shows progress.
    """

    model: nn.Module
    example: Any
    batches: Sequence[Batch]
    options: Options
    journal: Journal
    display: Progress

    def run(self) -> tuple[Choice, ...]:
        """Return what may go: without residual streams where that is enough, else, where they may, with them.

        Where layers compete with channels and some go, what goes of channels alone comes second, if that is enough:
        shares of the outputs of layers say less than the model's outputs do.

        Raises:
            ShrinkError: The budget cannot be met, with the least that can be, or nothing can be cut.
        """
        auto = self.options.streams == "auto"
        try:
            return self._within(False if auto else self.options.streams)
        except ShrinkError as error:
            if not auto or not self._exact_streams:
                raise
            refused = error
        _log.info("residual streams are cut too: without them %s", refused)
        try:
            found = self._within("auto")
        except UnmetError as error:
            raise min(error, refused, key=lambda one: getattr(one, "least", 1.0)) from None
        least = getattr(refused, "least", 1.0)
        note = f"residual streams were cut too, since {least:.3f} of the {self.options.limit.kind} is the least without"
        return tuple(replace(one, notes=(note,)) for one in found)

    @cached_property
    def _exact_streams(self) -> bool:
        return any(group.exact and group.group.stream for group in structure.channels(self.model, self.example).groups)

    def _within(self, streams: Streams) -> tuple[Choice, ...]:
        """Return what goes of layers, where they compete with channels, and of channels.

        Where those that were chosen by predicted times do not suffice as measured, layers are chosen anew, and
        narrower channels are held to save as little as they did.
        """
        if self.options.layers != "auto":
            return (self._widths(self.options.layers, streams),)
        chosen = self._depth(streams)
        refused: UnmetError | None = None
        gain, tried = 1.0, set[tuple[str, ...]]()
        for _ in range(TRIES):
            try:
                while (names := chosen(gain)) in tried and gain > LEAST_GAIN:
                    gain *= DOUBT
            except UnmetError as error:  # no more can go
                raise refused or error from None
            if names in tried:
                break
            tried.add(names)
            try:
                found = self._widths(names, streams)
                return (found, *self._channels_alone(streams)) if names else (found,)
            except UnmetError as error:
                if self.options.limit.kind != "time":
                    raise
                gain = min(gain, error.gain)
                refused = error if refused is None or error.least < refused.least else refused
        assert refused is not None
        raise refused

    def _channels_alone(self, streams: Streams) -> tuple[Choice, ...]:
        """Return what goes of channels where no layer does, nothing where that is not enough."""
        try:
            return (self._widths((), streams),)
        except UnmetError as error:
            _log.info("layers have to go: %s", error)
            return ()

    def _depth(self, streams: Streams) -> Callable[[float], tuple[str, ...]]:
        """Return what says which layers go, where they compete with channels.

        It is given the share of what narrower channels are predicted to save that they save.
        """
        if not self.batches:
            raise ShrinkError(
                "no layer can be chosen",
                got='layers="auto" without data',
                wanted="calibration data, which show what each layer adds",
                remedy='data=loader, or name the layers: layers=["encoder.layer.3"]',
            )
        part = self._part((), streams)
        gave = part.gave
        part.require_room(tuple(gave.layers))
        curves = {group.name: gave.scaled(group, part.curves[group.name]) for group in part.groups}
        price, whole = part.priced()
        limit, uniform, shapes = self.options.limit, self.options.uniform, part.found.shapes

        def chosen(gain: float) -> tuple[str, ...]:
            def held(name: str, sizes: tuple[int, ...]) -> float:
                full = price(name, shapes[name])
                return full - gain * (full - price(name, sizes))

            names = choose_layers(Prices(part.found, held), curves, limit, whole, gave.losses(), uniform)
            return together(part.twin, names, self.example)

        return chosen

    def _widths(self, layers: tuple[str, ...], streams: Streams) -> Choice:
        """Return what goes of the channels of a model without some layers."""
        part = self._part(layers, streams)
        part.require_room()
        curves = part.curves
        widths, promised, timing = part.chosen(curves)
        plan = part.found.plan({name: curves[name].kept(width) for name, width in widths.items()})
        if layers:
            structure.verify(self.model, Cut(layers=layers), self.example)
        structure.verify(part.twin, plan, self.example, part.found)
        uncut, unused = part.found.uncut + part.unsaid, part.found.unused
        return Choice(
            *(layers, part.twin, plan, part.groups, curves, widths, part.weights, uncut, unused, promised, timing)
        )

    def _part(self, layers: tuple[str, ...], streams: Streams) -> _Part:
        twin = structure.cut(self.model, Cut(layers=layers))
        found = channels_without(self.model, twin, layers, self.example)
        allowed, unsaid = cuttable(twin, found, streams, self.options.uniform)
        groups, alone = of_several_widths(allowed, found, self.widths)
        unsaid += alone
        without = f", without {', '.join(layers)}" if layers else ""
        return _Part(self, twin, found, allowed, groups, unsaid, without, f", streams {streams}")

    def widths(self, group: Cuttable) -> tuple[int, ...]:
        """Return the widths that a group may have; for a budget of time as vectors have lanes."""
        vectors = multiple_of(group) if self.options.limit.kind == "time" else None
        return widths_of(group.size, self.options.multiple or vectors, self.options.least)


@dataclass(eq=False)
class _Part:
    """A copy of the model, perhaps without some layers, whose groups are ranked.

    Attributes:
        of: The search.
        twin: The copy.
        found: Its channels.
        allowed: Those that may be cut, were every width allowed.
        groups: Those that may be cut.
        unsaid: Those that stay whole though they could be cut.
        without: Names the layers that the copy lacks, in the steps of the journal.
        among: Names the groups that may be cut, there.
    """

    of: Search
    twin: nn.Module
    found: Channels
    allowed: Sequence[Cuttable]
    groups: Sequence[Cuttable]
    unsaid: tuple[Uncut, ...]
    without: str
    among: str

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """Note a step about this copy and these groups."""
        return self.of.journal.step(f"{name}{self.without}{self.among}", make)

    @cached_property
    def weights(self) -> Sequence[PrunableWeight]:
        """The weights of the copy."""
        return walk(self.twin, eligibility="any", tied="*").weights

    @cached_property
    def gave(self) -> Energies:
        """What layers and weights give on the data."""

        def measured() -> dict[str, Any]:
            layers = [one for one in droppable(self.twin, self.of.example) if self._goes_alone(one)]
            return energies(self.twin, layers, self.weights, self.of.batches).to_dict()

        return Energies.from_dict(self.of.journal.step(f"what layers give{self.without}", measured))

    def require_room(self, layers: Sequence[str] | None = None) -> None:
        """Refuse, before anything is ranked, a budget of sizes that the narrowest widths do not meet.

        Args:
            layers: That may go, where they compete with channels.
        """
        options = self.of.options
        if options.limit.kind == "time":  # is known once it was measured
            return

        def narrow(multiple: int | None, least: float) -> dict[str, tuple[Cuttable, tuple[int, ...]]]:
            groups, _ = of_several_widths(
                self.allowed, self.found, lambda group: widths_of(group.size, multiple, least)
            )
            return {group.name: (group, widths_of(group.size, multiple, least)) for group in groups}

        price, whole = self.priced()
        room = Room(self.found, price, options.limit, whole, layers, options.uniform, narrow)
        room.require(options.multiple, options.least)

    def _goes_alone(self, layer: str) -> bool:
        """Whether what follows a layer takes nothing from it but its output, nor from its place in the list."""
        try:
            structure.verify(self.twin, Cut(layers=(layer,)), self.of.example)
        except ShrinkError as error:
            _log.info("`%s` stays: %s", layer, error)
            return False
        return True

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """What each group loses: second-order where the data show all of its readers, else by magnitude."""
        names = {group.name: f"what `{group.name}` loses{self.without}" for group in self.groups}
        found: dict[str, Curve] = {}

        def note(group: Cuttable, readers: Sequence[Reader]) -> None:
            told = self.of.journal.step(names[group.name], partial(self._curve, group, readers))
            found[group.name] = Curve.from_dict(told)

        unknown = [group for group in self.groups if names[group.name] not in self.of.journal.done]
        if self.of.batches and unknown:
            silent = self._read(unknown, note)
            if silent and not found and len(unknown) == len(self.groups):
                rows, name = max((rows, name) for name, rows in silent.items())
                raise nothing(f"{count(self.of.batches)} samples; all {rows} rows that `{name}` reads are the same")
        for group in self.groups:
            if group.name not in found:
                note(group, ())
        return {group.name: found[group.name] for group in self.groups}

    def _curve(self, group: Cuttable, readers: Sequence[Reader]) -> dict[str, Any]:
        widths = self.of.widths(group)
        if readers:
            return second_order(group, readers, widths).to_dict()
        named = {name: weight for weight in self.weights for name in weight.names}
        return magnitude(group, dict(self.twin.named_parameters()), named, widths).to_dict()

    def _read(self, groups: Sequence[Cuttable], note: Callable[[Cuttable, Sequence[Reader]], None]) -> dict[str, int]:
        """Note what reads each group, with what the data say of its inputs, as soon as all of it was seen.

        Readers hold a weight and an inverse in float64: those of all groups together would not fit in memory. A group
        is left out that is read by what the data do not show.

        Returns:
            The rows of each weight whose inputs are all the same.
        """
        silent: dict[str, int] = {}
        columns: dict[str, dict[str, tuple[PrunableWeight, Tensor]]] = {}
        for group in groups:
            read = {
                name: (weight, found)
                for weight in self.weights
                for name in weight.names
                if name in group.group.consumers and (found := columns_of(group, weight)) is not None
            }
            if read and len(read) == len(group.group.consumers):
                columns[group.name] = read
        held: dict[str, dict[str, Reader]] = {name: {} for name in columns}

        def visit(weight: PrunableWeight, statistics: Statistics) -> None:
            if not shown(statistics):
                silent[weight.name] = statistics.rows
                return
            moments, _ = covariance(weight, statistics)
            for group in groups:
                read = columns.get(group.name, {})
                for name in (name for name in weight.names if name in read):
                    held[group.name][name] = Reader.of(weight, read[name][1], moments, statistics.rows)
                    if len(held[group.name]) == len(read):
                        readers = held.pop(group.name)
                        note(group, [readers[consumer] for consumer in group.group.consumers])

        wanted = {weight.name for read in columns.values() for weight, _ in read.values()}
        chosen = [weight for weight in self.weights if weight.name in wanted]
        calibration.calibrate(self.twin, chosen, self.of.batches, "hessian", visit, display=self.of.display)
        return silent

    def chosen(self, curves: Mapping[str, Curve]) -> tuple[dict[str, int], tuple[float, float] | None, str]:
        """Return the width of each group; milliseconds before and after, and how they were taken, where they count."""
        limit, uniform, models = self.of.options.limit, self.of.options.uniform, (self.of.model, self.twin)
        if limit.kind == "time":
            return chosen_by_time(self.found, curves, limit, models, self.of.example, uniform, self.step)
        price, whole = self.priced()
        return choose(Prices(self.found, price), curves, limit, whole, uniform=uniform), None, ""

    def priced(self) -> tuple[Callable[[str, tuple[int, ...]], float], float]:
        """Return what a tensor of some sizes costs of the budget, and what the large model does."""
        model, example, kind = self.of.model, self.of.example, self.of.options.limit.kind
        if kind == "time":
            step: Step = self.step
            _, of_layers, whole = timed(self.found, self.curves, (model, self.twin), example, step)
            return of_layers.price, whole
        whole, each = {
            "parameters": lambda: (parameters(model), dict.fromkeys(self.found.shapes, 1)),
            "macs": lambda: (macs(model, example), uses(self.twin, example)),
            "bytes": lambda: (size(model), {name: p.element_size() for name, p in self.twin.named_parameters()}),
        }[kind]()
        return (lambda name, sizes: prod(sizes) * each.get(name, 0)), whole
