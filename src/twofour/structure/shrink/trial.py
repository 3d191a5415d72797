"""channels: trace what can be cut, cut it for a trial, and keep what computes what zeros would.

A trace knows axes, not the numbers that a forward brings along: `x.view(b, t, self.heads, 64)`. So each kind of
channels is cut from a copy, at random, and the copy is run: with no attribute changed, then with those whole numbers of
the modules concerned that equal a size that changed. What fits none of them stays whole, with what went wrong.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from twofour.structure.permutation.comparison import EXACT, outputs, outputs_in_float64
from twofour.structure.shrink.channels import COUNTED, Channels, Cuttable, Uncut
from twofour.structure.shrink.cut import Cut
from twofour.structure.shrink.sizes import is_known
from twofour.structure.shrink.surgery import apply, masked, require_dense

_log = logging.getLogger("twofour.structure.shrink")

CLOSE = 1e-5
"""Largest difference, relative to an output's largest value, that is not looked at again in float64."""

MOST_CHOICES = 8
"""Sets of attributes that are tried for one kind of channels."""

UNSHOWN = "the example does not show it: with random weights the outputs are no numbers, or the same without them"

Named = tuple[tuple[str, str], ...]


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
            for number in extent.index:
                self.extents.setdefault(number, []).append(extent)

    def settled(self) -> Channels:
        """Return what stood the trial."""
        kinds: dict[Any, list[Cuttable]] = {}
        for group in self.draft.groups:
            kinds.setdefault(group.kind, []).append(self._counting(group))
        claims = Counter(pair for groups in kinds.values() for group in groups for pair in group.attributes)
        # Two groups that one number counts may only shrink together, as queries and values do: each is tried by itself.
        easy = [
            groups
            for groups in kinds.values()
            if all(group.exact and all(claims[pair] == 1 for pair in group.attributes) for group in groups)
        ]
        if easy and self._fault([group for groups in easy for group in groups]) is None:
            good = {True: [group for groups in easy if len(easy) == 1 or self._shown(groups) for group in groups]}
        else:
            good = {}
        done = {group.name for group in good.get(True, [])}
        uncut = list(self.draft.uncut)
        for groups in kinds.values():
            if groups[0].name in done:
                continue
            found, fault = self._fitted(groups)
            together = [*good.get(groups[0].exact, []), *found]
            if found and groups[0].exact and (fault := self._fault(together)) is not None:
                found = []
            if found:
                good[groups[0].exact] = together
            uncut += [Uncut(_tensors(group), group.size, fault or "") for group in groups if not found]
        accepted = sorted((group for groups in good.values() for group in groups), key=lambda group: group.number)
        return self._channels(accepted, uncut)

    def _counting(self, group: Cuttable) -> Cuttable:
        """Return a group with the numbers that count it: groups of torch's own layers, heads of anybody's attention."""
        named = [
            (extent.module, name)
            for extent in self.extents.get(group.number, ())
            for name in COUNTED
            if extent.counted and getattr(self.modules[extent.module], name, None) == extent.size
        ]
        named += [pair for pair in self._candidates(group) if self._number(pair) == group.size]
        return replace(group, attributes=tuple(dict.fromkeys(named)))

    def _fitted(self, groups: Sequence[Cuttable]) -> tuple[list[Cuttable], str | None]:
        """Return groups of one kind with the attributes that their forwards need, or none and what went wrong."""
        options = {
            group.name: tuple(pair for pair in self._candidates(group) if pair not in group.attributes)
            for group in groups
        }
        names = sorted({self._rule(pair) for pairs in options.values() for pair in pairs})
        first: str | None = None
        choices = _choices(names)
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
            if fault is None:
                return attempt, None
            first = first or fault
        if next(choices, None) is not None:
            first = f"{first}; of the sets of numbers that could change with them {MOST_CHOICES} were tried, not all"
        return [], first

    def _number(self, pair: tuple[str, str]) -> int:
        return self.modules[pair[0]].__dict__[pair[1]]

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

    def _fault(self, groups: Sequence[Cuttable]) -> str | None:
        """Return what goes wrong when some of each group is cut, None where nothing does."""
        if any(group.size == 1 for group in groups):
            return "there is a single channel"
        try:
            plan = self._plan(groups)
            large = masked(self.twin, plan)
            reference = outputs(large, self.given)
            if not self._shows(reference):
                return UNSHOWN
            apply(large, plan)
            found = outputs(large, self.given)
        except Exception as error:  # whatever a forward of anybody's raises on sizes that it does not expect
            return f"the forward does not run without some of them: {cut(explained(error), 160)}"
        if not all(group.exact for group in groups):
            return _other_shapes(reference, found)
        difference = _other_shapes(reference, found) or largest_difference(found, reference)
        if isinstance(difference, str) or difference <= CLOSE:
            return difference if isinstance(difference, str) else None
        return self._fault_in_float64(plan, difference)

    def _plan(self, groups: Sequence[Cuttable]) -> Cut:
        """Return a cut of a third of each group, at random."""
        generator = torch.Generator().manual_seed(0)
        orders = {group.name: torch.randperm(group.size, generator=generator, device="cpu") for group in groups}
        kept = {name: order[max(1, len(order) // 3) :].sort().values for name, order in orders.items()}
        return self._channels(groups, []).plan(kept)

    def _shown(self, groups: Sequence[Cuttable]) -> bool:
        """Whether outputs depend on these channels, which others that were tried with them may have hidden."""
        return self._shows(outputs(masked(self.twin, self._plan(groups)), self.given))

    def _shows(self, reference: Sequence[torch.Tensor]) -> bool:
        """Whether outputs are numbers, and depend on what is masked by more than two ways to compute may differ."""
        self.whole = self.whole or outputs(self.twin, self.given)
        return (
            any(bool(leaf.isfinite().any()) for leaf in reference) and largest_difference(self.whole, reference) > CLOSE
        )

    def _fault_in_float64(self, plan: Cut, difference: float) -> str | None:
        try:
            large = masked(self.twin, plan).double()
            reference = outputs_in_float64(large, self.given)
            apply(large, plan)
            difference = largest_difference(outputs_in_float64(large, self.given), reference)
        except Exception as error:  # a forward in a dtype that it was not written for
            _log.info("the trial of a cut cannot be run in float64: %s", error)
        return None if difference <= EXACT else f"without some of them an output differs by {difference:.1e}"

    def _channels(self, groups: Sequence[Cuttable], uncut: Sequence[Uncut]) -> Channels:
        pairs = {pair for group in groups for pair in group.attributes}
        numbers = {(module, name): getattr(self.modules[module], name) for module, name in pairs}
        return replace(self.draft, groups=tuple(groups), uncut=tuple(uncut), numbers=numbers)


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


def _choices(names: Sequence[Any]) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    """Yield whether the numbers that count the channels change, and which others: few before many."""
    for counting in (True, False):
        for count in range(len(names) + 1):
            yield from ((counting, chosen) for chosen in itertools.combinations(names, count))


def _tensors(group: Cuttable) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.name for place in group.group.places))


def _other_shapes(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> str | None:
    was, now = ([tuple(tensor.shape) for tensor in found] for found in (before, after))
    return None if was == now else f"without some of them the outputs are {now}, not {was}"
