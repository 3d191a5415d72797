"""channels: trace what can be cut, cut it for a trial, and keep what computes what zeros would.

A trace knows axes, not the numbers that a forward brings along: `x.view(b, t, self.heads, 64)`. So each kind of
channels is cut from a copy, at random, and the copy is run: with no attribute changed, then with those whole numbers of
the modules concerned that equal a size that changed. What fits none of them stays whole, with what went wrong.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from twofour import calls, capture
from twofour.errors import CompileError, ShrinkError, cut, explained
from twofour.layers import require_unwrapped, walk
from twofour.measure.distance import largest_difference
from twofour.structure import coupling
from twofour.structure.coupling import Coupling, Extent
from twofour.structure.permutation.comparison import outputs
from twofour.structure.shrink.agreement import CLOSE, fault, out_of_memory
from twofour.structure.shrink.channels import COUNTED, Channels, Cuttable, Uncut, joined_by
from twofour.structure.shrink.cut import Cut
from twofour.structure.shrink.sizes import bare_size, is_known, number
from twofour.structure.shrink.surgery import masked, require_dense

MOST_CHOICES = 8
"""Sets of attributes that are tried for one kind of channels."""

UNSHOWN = "the example does not show it: with random weights the outputs are no numbers, or the same without them"

Named = tuple[tuple[str, str], ...]
Names = tuple[str, ...]


def channels(model: nn.Module, example: Any) -> Channels:
    """Find the channels of a model that can be cut.

    Args:
        model: A dense model in any mode; it is not changed.
        example: Input of one forward pass: a tensor, a tuple or list of positional or a dict of keyword arguments. A
            forward that the deployed model takes; what this one does not use stays whole.

    Raises:
        ShrinkError: The model does not run on the example, cannot be captured as a graph, or is masked, compiled or of
            low bits.
    """
    require_unwrapped(model, ShrinkError)
    require_dense(model)
    remedy = "call the model on it yourself: an example is what one forward pass takes"
    with calls.explaining(ShrinkError, "the example", wanted=calls.FORMS, remedy=remedy):
        arguments = calls.Example.of(example)
        given = capture.arguments(model, arguments.args, arguments.kwargs)
        with calls.without_cache(model):
            outputs(model, given)
    with calls.without_cache(model):
        return _Trial(model, given, _drafted(model, given)).settled()


def _drafted(model: nn.Module, given: Mapping[str, Any]) -> Channels:
    weights = walk(model, eligibility="any", tied="*", empty=True).weights
    try:
        found = coupling.channels(model, given, weights)
    except CompileError as error:
        raise ShrinkError(
            "nothing can be cut: the model cannot be captured as a graph",
            reasons=error.reasons,
            wanted=error.wanted,
            remedy="change the forward; whole layers can be cut without a graph: cut(model, Cut(layers=...))",
        ) from error
    groups = [Cuttable(name, found.groups[number], number) for number, name in enumerate(_names(found))]
    uncut = [Uncut(refusal.consumers, refusal.size, refusal.reason) for refusal in found.refused]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Channels(tuple(groups), tuple(uncut), found.extents, {}, shapes, found.unused)


def _names(found: Coupling) -> Iterator[str]:
    """Yield a name for each group: its first place, and how many named before it have the same."""
    taken: dict[str, int] = {}
    for group in found.groups:
        first = f"{group.places[0].name}:{group.places[0].axis}"
        taken[first] = taken.get(first, 0) + 1
        yield first if taken[first] == 1 else f"{first}#{taken[first]}"


class _Trial:
    def __init__(self, model: nn.Module, given: Mapping[str, Any], draft: Channels) -> None:
        self.model, self.given, self.draft = model, given, draft
        self.twin = _random(model)
        self.whole: list[torch.Tensor] | None = None
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.extents: dict[int, list[Extent]] = {}
        for extent in draft.extents:
            for group in extent.index:
                self.extents.setdefault(group, []).append(extent)

    def settled(self) -> Channels:
        """Return what stood the trial."""
        kinds: dict[Any, list[Cuttable]] = {}
        for group in self.draft.groups:
            kinds.setdefault(group.kind, []).append(self._counting(group))
        good, tied, wrong = self._easy(list(kinds.values())), list[Names](), dict[str, str]()
        for groups in kinds.values():
            done = {group.name for group in good}
            if groups[0].name in done:
                continue
            found, fault = self._fitted(groups)
            units: list[Names] = []
            if fault:
                beside = self._beside(groups, [several for several in kinds.values() if several[0].name not in done])
                units = self._units(beside)
                found = beside if units and not self._fault(beside, units) else []
            if found and good and (together := self._fault([*good, *found], [*tied, *units])):
                found, fault = [], together
            if found:
                good, tied = [*good, *found], [*tied, *units]
            wrong |= {group.name: fault for group in groups}
        done = {group.name for group in good}
        uncut = [Uncut(_tensors(g), g.size, wrong[g.name]) for g in self.draft.groups if g.name not in done]
        accepted = tuple(sorted(good, key=lambda group: group.number))
        return self._channels(accepted, [*self.draft.uncut, *uncut], tied)

    def _easy(self, kinds: Sequence[list[Cuttable]]) -> list[Cuttable]:
        """Return the groups that stand one trial together, none where one of them does not.

        Two groups that one number counts may only shrink together, as queries and values do: each is tried by itself.
        """
        claims = Counter(pair for groups in kinds for group in groups for pair in group.attributes)
        easy = [
            groups
            for groups in kinds
            if all(group.exact and all(claims[pair] == 1 for pair in group.attributes) for group in groups)
        ]
        if not easy or self._fault([group for groups in easy for group in groups]):
            return []
        return [group for groups in easy if len(easy) == 1 or self._shown(groups) for group in groups]

    def _counting(self, group: Cuttable) -> Cuttable:
        """Return a group with the numbers that count it by their names: groups of torch's layers, heads of anybody's.

        They follow also where this example's forward does not need them. Channels that stand at one place each are no
        heads, though there may be as many.
        """
        named = [
            (extent.module, name)
            for extent in self.extents.get(group.number, ())
            for name in COUNTED
            if extent.counted and getattr(self.modules[extent.module], name, None) == extent.size
        ]
        named += [
            (extent.module, held)
            for extent in self.extents.get(group.number, ())
            if len(extent.index) == 1 and extent.size == group.size
            if (held := bare_size(self.modules.get(extent.module)))
        ]
        if any(int((place.index >= 0).sum()) >= 2 * group.size for place in group.group.places):
            named += [
                pair
                for pair in self._candidates(group)
                if self._number(pair) == group.size and pair[1].endswith(("head", "heads", "groups"))
            ]
        return replace(group, attributes=tuple(dict.fromkeys(named)))

    def _fitted(self, groups: Sequence[Cuttable]) -> tuple[list[Cuttable], str]:
        """Return groups of one kind with the fewest attributes that their forwards need, or none and why not."""
        options = {
            group.name: tuple(pair for pair in self._candidates(group) if pair not in group.attributes)
            for group in groups
        }
        names = sorted({self._rule(pair) for pairs in options.values() for pair in pairs})
        first = ""
        choices = _choices(names, any(pair[1] not in COUNTED for group in groups for pair in group.attributes))
        for counting, chosen in itertools.islice(choices, MOST_CHOICES):
            attempt = [
                replace(
                    group,
                    attributes=tuple(
                        pair
                        for pair in group.attributes + options[group.name]
                        if self._rule(pair) in chosen or (pair in group.attributes and (counting or pair[1] in COUNTED))
                    ),
                )
                for group in groups
            ]
            fault = self._fault(attempt)
            if not fault:
                return attempt, ""
            first = first or fault
        if next(choices, None) is not None:
            first = f"{first}; of the sets of numbers that could change with them {MOST_CHOICES} were tried, not all"
        return [], first

    def _beside(self, groups: Sequence[Cuttable], kinds: Sequence[list[Cuttable]]) -> list[Cuttable]:
        """Return groups with all others of these kinds that stand along axes beside them, and are as many."""
        held = [group for several in kinds for group in several]
        units = joined_by(held, self._axes_beside)
        found = {group.name for group in groups}
        while True:
            more = {member.name for unit in units if any(one.name in found for one in unit) for member in unit}
            more |= {one.name for several in kinds if any(one.name in more for one in several) for one in several}
            if more <= found:
                return [group for group in held if group.name in found]
            found |= more

    def _units(self, groups: Sequence[Cuttable]) -> list[Names]:
        """Return the names of groups that stand along one axis and are as many, which may be halves of it."""
        return [tuple(one.name for one in unit) for unit in joined_by(groups, self._axes_beside) if unit[1:]]

    def _axes_beside(self, group: Cuttable) -> list[tuple[int, int]]:
        """Return the axes along which a group stands with others, each with the group's size."""
        return [(id(extent), group.size) for extent in self.extents.get(group.number, ()) if len(extent.index) > 1]

    def _number(self, pair: tuple[str, str]) -> int | None:
        return number(self.modules[pair[0]], pair[1])

    def _rule(self, pair: tuple[str, str]) -> tuple[str, str]:
        return type(self.modules[pair[0]]).__qualname__, pair[1]

    def _candidates(self, group: Cuttable) -> Named:
        """Return the whole numbers of modules that equal the size of an axis which gets shorter."""
        found: list[tuple[str, str]] = []
        for extent in self.extents.get(group.number, ()):
            module = self.modules.get(extent.module)
            if module is None or is_known(module) or extent.counted or extent.size == 1:
                continue
            found += [(extent.module, n) for n, v in module.__dict__.items() if type(v) is int and v == extent.size]
        return tuple(dict.fromkeys(found))

    def _fault(self, groups: Sequence[Cuttable], tied: Sequence[Names] = ()) -> str:
        """Return what goes wrong when some of each group is cut, "" where nothing does."""
        if any(group.size == 1 for group in groups):
            return "there is a single channel"
        try:
            for plan in self._plans(groups, tied):
                reference, wrong = fault(
                    masked(self.twin, plan), plan, self.given, exact=all(group.exact for group in groups)
                )
                if not self._shows(reference):
                    return UNSHOWN
                if wrong:
                    return f"without some of them {wrong}"
        except Exception as error:  # whatever a forward of anybody's raises on sizes that it does not expect
            if out_of_memory(error):
                raise
            return f"the forward does not run without some of them: {cut(explained(error), 160)}"
        return ""

    def _plans(self, groups: Sequence[Cuttable], tied: Sequence[Names]) -> Iterator[Cut]:
        """Yield cuts of about a third of each group, at random, of different shares wherever they may differ.

        Where two groups stand along one axis, equal shares would hide that the forward takes halves of it. Of two
        groups of two channels each one stays whole the first time.
        """
        found = self._channels(groups, [], tied)
        bound = found.bound
        units = [*bound, *([group] for group in groups if all(group not in unit for unit in bound))]
        generator = torch.Generator().manual_seed(0)
        left = list(units)
        while left:
            gone = self._shares(left, units)
            kept: dict[str, torch.Tensor] = {}
            for unit, count in zip([*left, *(unit for unit in units if unit not in left)], gone, strict=True):
                for group in unit if count else ():
                    order = torch.randperm(group.size, generator=generator, device="cpu")
                    kept[group.name] = order[count:].sort().values
            yield found.plan(kept)
            left = [unit for unit in left if unit[0].name not in kept]

    def _shares(self, first: Sequence[Sequence[Cuttable]], units: Sequence[Sequence[Cuttable]]) -> list[int]:
        """Return how many channels of each unit go: near a third, and other shares along one axis.

        Two channels apart at least: the rounding of a half may hide a single one.
        """
        taken: Counter[tuple[int, int]] = Counter()
        along: dict[Hashable, list[float]] = {}
        chosen: list[int] = []
        for unit in [*first, *(unit for unit in units if unit not in first)]:
            size, axes = unit[0].size, {axis for group in unit for axis, _ in self._axes_beside(group)}
            beside = [share * size for axis in axes for share in along.get(axis, ())]
            apart = {count: min((abs(count - other) for other in beside), default=size) for count in range(size)}
            enough = min(max(2, size // 4), max(apart.values()))
            free = [count for count in range(size) if apart[count] >= enough and (beside or count)]
            count = min(free, key=lambda count: (count == 0, taken[size, count], abs(3 * count - size)))
            taken[size, count] += 1
            for axis in axes:
                along.setdefault(axis, []).append(count / size)
            chosen.append(count)
        return chosen

    def _shown(self, groups: Sequence[Cuttable]) -> bool:
        """Whether outputs depend on these channels, which others that were tried with them may have hidden."""
        return all(self._shows(outputs(masked(self.twin, p), self.given)) for p in self._plans(groups, ()))

    def _shows(self, reference: Sequence[torch.Tensor]) -> bool:
        """Whether outputs are numbers, and depend on what is masked by more than two ways to compute may differ."""
        self.whole = self.whole or outputs(self.twin, self.given)
        return (
            any(bool(leaf.isfinite().any()) for leaf in reference) and largest_difference(self.whole, reference) > CLOSE
        )

    def _channels(self, groups: Sequence[Cuttable], uncut: Sequence[Uncut], tied: Sequence[Names]) -> Channels:
        pairs = {pair for group in groups for pair in group.attributes}
        numbers = {pair: held for pair in pairs if (held := self._number(pair)) is not None}
        return replace(self.draft, groups=tuple(groups), uncut=tuple(uncut), numbers=numbers, tied=tuple(tied))


@torch.no_grad()
def _random(model: nn.Module) -> nn.Module:
    """Return a copy with random weights, each layer as loud as the next: a trained one may hardly change an output."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            scale = (parameter[0].numel() ** -0.5) if parameter.ndim > 1 else 0.5
            parameter.copy_(values * scale + (parameter.ndim < 2))
    return twin


def _choices(names: Sequence[Any], named: bool) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    """Yield whether the numbers change that are named for what they count, and which others: few before many."""
    for counting in (True, False) if named else (True,):
        for count in range(len(names) + 1):
            yield from ((counting, chosen) for chosen in itertools.combinations(names, count))


def _tensors(group: Cuttable) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.name for place in group.group.places))
