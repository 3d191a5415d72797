"""permute: put the channels of a model in an order that its patterns fit better; its outputs stay what they were."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls, capture
from twofour.errors import CompileError, PatternError, PermutationError, cut
from twofour.layers import PrunableWeight, is_distributed
from twofour.measure.machine import free_memory_bytes
from twofour.patterns import NM, Block, PairedNM, Pattern
from twofour.progress import Progress
from twofour.structure import coupling
from twofour.structure.apply import AxisChanges, require_nothing_beside
from twofour.structure.coupling import Group
from twofour.structure.permutation.blocks import search_blocks
from twofour.structure.permutation.comparison import Arithmetic, outputs, outputs_in_float64, require_same
from twofour.structure.permutation.matrices import Consumer, matrices
from twofour.structure.permutation.report import Gain, Report
from twofour.structure.permutation.stripes import kept, search

_log = logging.getLogger("twofour.structure.permutation")

CACHED = 'leave the cache of keys and values out: example={"input_ids": ids, "use_cache": False}'
"""What to try where a language model of Hugging Face answers with its cache, as it does unless told otherwise."""

Scores = Mapping[str, Tensor]


def permute(
    model: nn.Module,
    example: Any,
    plan: Sequence[tuple[PrunableWeight, Pattern]],
    *,
    scores: Scores | None = None,
    escapes: int | None = None,
    seed: int = 0,
    window: int | None = None,
    display: Progress | None = None,
) -> Report:
    """Permute the channels of a model in place, so that the patterns of `plan` keep more of the scores.

    Channels that several weights share move together (`coupling.trace`): the input axes of the weights that sum over
    them and whatever makes them, biases, normalisations and running statistics included. The model is run on the
    example before and after; if an output differs by more than the sums in another order explain, all is undone.

    Args:
        model: A dense model, in any mode.
        example: Input of one forward pass: a tensor, a tuple or list of positional or a dict of keyword arguments.
        plan: The weights to be pruned and their patterns; other tensors move along.
        scores: Importance of the values by name of the weight, of its shape, not negative; else |weight|.
        escapes: As for `search`.
        seed: As for `search`.
        window: As for `search`.
        display: Shows progress; None: the search shows its own.

    Returns:
        What was won, group by group, and what stayed as it was and why.

    Raises:
        PermutationError: The model does not run on the example, cannot be captured, a weight is sharded, or outputs
            changed: then it is as it was.
        PatternError: A weight holds NaN or infinity, or its groups do not divide it.
    """
    _require_plan(plan, scores)
    require_unsharded(plan)
    shown = display or Progress(shown=False)
    shown.begin("capturing the model for the order of channels")
    remedy = "call the model on it yourself: an example is what one forward pass takes"
    with calls.explaining(PermutationError, "the example", wanted=calls.FORMS, remedy=remedy):
        arguments = calls.Example.of(example)
        given = capture.arguments(model, arguments.args, arguments.kwargs)
        reference = outputs(model, given)
    known = {name: score.detach().clone() for name, score in (scores or {}).items()}
    traced = _trace(model, given, plan)
    require_nothing_beside(model, traced.groups)
    before = _share(plan, known)
    changes = AxisChanges(model, known)
    shown.begin("ordering channels, groups", len(traced.groups))
    try:
        gains = _ordered(traced.groups, plan, changes, known, (escapes, seed, window), display)
        shown.move(len(traced.groups), what="comparing answers")
        arithmetic = Arithmetic(len(plan), max(weight.reduction for weight, _ in plan))
        error = require_same(reference, outputs(model, given), arithmetic, lambda: _exactly(model, given, changes))
    except BaseException:
        changes.undo()
        raise
    after = _share(plan, known)
    shares = (before[0], after[0], before[1], after[1])
    report = Report(tuple(gains), traced.refused, traced.unused, *shares, error, undo=changes.undo)
    _log.info("permuted: %s", report)
    return report


def _require_plan(plan: object, scores: object) -> None:
    pairs = list(plan) if isinstance(plan, Sequence) else [None]
    if not all(isinstance(pair, tuple | list) and [*map(_kind, pair)] == [PrunableWeight, Pattern] for pair in pairs):
        raise PermutationError(
            "the plan is no list of weights and their patterns",
            got=cut(repr(plan), 80),
            wanted="pairs (PrunableWeight, Pattern)",
            remedy="[(weight, twofour.patterns.parse('2:4')) for weight in twofour.layers.walk(model).weights]",
        )
    if scores is not None and not isinstance(scores, Mapping):
        raise PermutationError(
            "the scores are no mapping",
            got=type(scores).__name__,
            wanted="names of weights and tensors of their shapes",
        )


def _kind(value: object) -> type:
    return next((kind for kind in (PrunableWeight, Pattern) if isinstance(value, kind)), type(value))


def _exactly(model: nn.Module, given: Mapping[str, Any], changes: AxisChanges) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a copy in float64 answers with the channels as they were, and as they are now.

    Raises:
        MemoryError: A copy in float64 would take more than half of the free memory.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    needed, free = 8 * sum(tensor.numel() for tensor in tensors.values()), free_memory_bytes()
    if free is not None and needed > free // 2:
        raise MemoryError(f"{needed >> 20} MB for a copy, {free >> 20} MB are free")
    exact = copy.deepcopy(model).double()
    after = outputs_in_float64(exact, given)
    changes.of_copy(exact).undo()
    return outputs_in_float64(exact, given), after


def _ordered(
    groups: Sequence[Group],
    plan: Sequence[tuple[PrunableWeight, Pattern]],
    changes: AxisChanges,
    known: Scores,
    options: tuple[int | None, int, int | None],
    display: Progress | None,
) -> list[Gain]:
    """Search for the orders of all groups and move them, those of blocks last and together."""
    whole, gains = [group for group in groups if _in_blocks(group, plan)], list[Gain]()
    for group in groups:
        if group not in whole:
            gains.append(_improve(group, plan, changes, known, options, display))
            if display is not None:
                display.advance()
    return gains + _improve_blocks(whole, plan, changes, known, options[1])


def _improve(
    group: Group,
    plan: Sequence[tuple[PrunableWeight, Pattern]],
    changes: AxisChanges,
    known: Scores,
    options: tuple[int | None, int, int | None],
    display: Progress | None,
) -> Gain:
    """Search for the orders of one group and move it."""
    names = set(group.consumers)
    consumers = [
        Consumer(weight, pattern, known.get(weight.name, weight.parameter.detach().abs()))
        for weight, pattern in plan
        if weight.name in names
    ]
    gain = Gain(group.consumers, group.producers, group.size, group.blocks)
    found = matrices(group, consumers)
    if isinstance(found, str):
        return replace(gain, reason=found)
    pattern, blocks = found
    escapes, seed, window = options
    how: dict[str, Any] = {"progress": True if display is None else display.say}
    results = [search(block, pattern, escapes=escapes, seed=seed, window=window, **how) for block in blocks]
    orders = torch.stack([result.order for result in results])
    total = sum(result.total for result in results) or 1.0
    before, after = (sum(getattr(result, name) for result in results) for name in ("before", "after"))
    bound = sum(result.bound for result in results)
    if after > before:
        changes.apply(group, orders)
    efficacy = (after - before) / (bound - before) if bound > before else 0.0
    return replace(gain, before=before / total, after=after / total, efficacy=efficacy)


def _in_blocks(group: Group, plan: Sequence[tuple[PrunableWeight, Pattern]]) -> bool:
    """Return whether a group is searched for whole blocks: a pattern of values along its axis has the first say."""
    patterns = {weight.name: pattern for weight, pattern in plan}
    summed = [patterns.get(name) for name in group.consumers]
    held = [patterns.get(place.name) for place in group.places]
    return any(isinstance(pattern, Block) for pattern in held) and not any(
        isinstance(pattern, NM | PairedNM) for pattern in summed
    )


def _improve_blocks(
    groups: Sequence[Group],
    plan: Sequence[tuple[PrunableWeight, Pattern]],
    changes: AxisChanges,
    known: Scores,
    seed: int,
) -> list[Gain]:
    """Search for the orders of groups whose weights are to have blocks, all together, and move them."""
    if not groups:
        return []
    consumers = [
        Consumer(weight, pattern, known.get(weight.name, weight.parameter.detach().abs()))
        for weight, pattern in plan
        if isinstance(pattern, Block)
    ]
    orders, gains = search_blocks(consumers, groups, seed)
    if any(gain.after != gain.before for gain in gains):
        for group, order in zip(groups, orders, strict=True):
            changes.apply(group, order)
    return gains


def _share(plan: Sequence[tuple[PrunableWeight, Pattern]], known: Scores) -> tuple[float, float]:
    """Return the share of |weight| and of the scores that the patterns keep, over all weights."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for weight, pattern in plan:
        magnitude = weight.parameter.detach().abs()
        for pair, values in zip(sums, (magnitude, known.get(weight.name, magnitude)), strict=True):
            last = weight.reduction_last(values).to("cpu", torch.float32)
            matrix = last if isinstance(pattern, Block) else last.flatten(0, -2)
            try:
                pair[0] += kept(matrix, pattern)
            except PatternError as error:
                raise error.for_layer(weight.name) from None
            pair[1] += matrix.sum(dtype=torch.float64).item()
    return sums[0][0] / (sums[0][1] or 1.0), sums[1][0] / (sums[1][1] or 1.0)


def _trace(
    model: nn.Module, given: Mapping[str, Any], plan: Sequence[tuple[PrunableWeight, Pattern]]
) -> coupling.Coupling:
    try:
        return coupling.trace(model, given, [weight for weight, _ in plan])
    except CompileError as error:
        raise PermutationError(
            "the channels cannot be permuted: the model cannot be captured as a graph",
            reasons=error.reasons,
            wanted=error.wanted,
            remedy=CACHED if any("Cache" in reason for reason in error.reasons) else "prune without permute=True",
        ) from error


def require_unsharded(plan: Sequence[tuple[PrunableWeight, Pattern]]) -> None:
    """Refuse weights that are sharded over processes, whose channels do not lie here.

    Raises:
        PermutationError: One is.
    """
    for weight, _ in plan:
        if is_distributed(weight.parameter):
            raise PermutationError(
                "the channels of a sharded weight cannot be permuted",
                got="a DTensor",
                wanted="whole weights",
                remedy="permute before fully_shard",
                layer=weight.name,
            )
