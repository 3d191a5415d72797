"""build: what a search chose becomes a small model, and data that are held back judge it where they are few."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from twofour.calibration import Batch, hold_back, judged
from twofour.journal import Journal
from twofour.progress import Progress
from twofour.shrinking.reconstruct import norms_said, reconstruct, refit_norms, tensors_of
from twofour.shrinking.search import Choice
from twofour.shrinking.shown import LEAST_SAMPLES, count, few
from twofour.structure import shrink as structure

_log = logging.getLogger("twofour.shrinking")


@dataclass(frozen=True, eq=False)
class Built:
    """A small model.

    Attributes:
        choice: What went.
        model: What is left.
        reconstructed: Weights that were solved anew for the channels that stay.
        skipped: Weights that were not, with the reason.
        notes: Sentences about what was done, and what the model still needs.
    """

    choice: Choice
    model: nn.Module
    reconstructed: tuple[str, ...]
    skipped: Mapping[str, str]
    notes: tuple[str, ...]


@torch.no_grad()
def build(choice: Choice, large: nn.Module, batches: Sequence[Batch], display: Progress, journal: Journal) -> Built:
    """Cut the twin of a choice, its weights solved anew and its batch norms' statistics taken on the data.

    Where the data are too few for least squares, some are held back, and what they show to be nearer the large model is
    taken: solved or unsolved weights. Of a handful of samples nothing is solved.

    Args:
        choice: What goes; its twin is changed.
        large: The large model.
        batches: Calibration data, none where channels went by magnitude.
        display: Shows progress.
        journal: Keeps what is solved.
    """
    samples = count(batches)
    said = few(choice.curves, choice.widths, samples) if batches else ""
    judging = bool(said) and samples >= LEAST_SAMPLES
    used, held = hold_back(large, batches) if judging else (batches, None)
    before = {name: value.clone() for name, value in tensors_of(choice.weights, choice.plan).items()} if held else {}
    solved: tuple[str, ...] = ()
    skipped: Mapping[str, str] = {}
    if batches and (judging or not said):
        solved, skipped = reconstruct(choice.twin, choice.plan, choice.weights, used, display, journal, choice.layers)
    elif said:
        said += "; nothing was solved anew"
    small, notes = _small(choice, used, inplace=held is None)
    if held is not None:
        for name, tensor in tensors_of(choice.weights, choice.plan).items():
            tensor.copy_(before[name])
        plain, of_plain = _small(choice, used, inplace=True)
        apart, without = held.lost(small), held.lost(plain)
        taken = "the former are" if apart < without else "the latter are"
        if not apart < without:  # nor where one of them is no number
            small, notes, solved = plain, of_plain, ()
        said += (
            f"; on {held.samples} samples held back outputs are {apart:.3g} of their size apart with weights solved "
            f"anew, {without:.3g} without: {taken} taken"
        )
    if said:
        _log.warning("%s", said)
    return Built(choice, small, solved, skipped, choice.notes + ((said,) if said else ()) + notes)


def nearest(built: Sequence[Built], large: nn.Module, batches: Sequence[Batch]) -> Built:
    """Return the small model whose outputs on the data are nearest the large one's; it says what the others' are.

    Args:
        built: At least one.
        large: The large model.
        batches: Calibration data.
    """
    if len(built) == 1:
        return built[0]
    held = judged(large, batches)
    apart = [held.lost(one.model) for one in built]
    best = min(range(len(built)), key=lambda number: apart[number])
    ways = [f"without {', '.join(one.choice.layers)}" if one.choice.layers else "with all layers" for one in built]
    each = ", ".join(f"by {lost:.3g} of their size {way}" for lost, way in zip(apart, ways, strict=True))
    note = f"on {held.samples} samples of the data outputs are apart {each}: the model {ways[best]} is taken"
    _log.info("%s", note)
    return replace(built[best], notes=(*built[best].notes, note))


def _small(choice: Choice, batches: Sequence[Batch], *, inplace: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """Cut the twin of a choice; return it with what is to be said of its batch norms."""
    small = structure.cut(choice.twin, choice.plan, inplace=inplace)
    return small, norms_said(small, batches, refit_norms(small, batches) if count(batches) > 1 else 0)
