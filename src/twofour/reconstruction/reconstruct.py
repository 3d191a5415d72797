"""Reconstruction: the values that were kept are solved together, so that blocks answer as the dense ones did.

A criterion solves each weight by itself. Here the kept values of a block, the biases beside them and its norms follow
the gradient of the squared distance between what the block answers, given what the pruned blocks before it answered,
and what the dense block answers, given what the dense ones did: so that later blocks mend what earlier ones lost. Then
those of the whole model follow the distance of its answers. Samples held back say when to end, soon where nothing is
won. It needs inputs alone, no targets; the hidden states of the data twice, or the dense model's answers where those
are small; copies of the pruned weights, two in their own dtype; and Adam's state of one block, of the whole model where
that is affordable.

After Li et al. 2021, "BRECQ" (arXiv 2102.05426), who reconstruct rounded blocks, and Guo et al. 2024, "EBFT" (arXiv
2402.12419), who train the kept values of pruned ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from twofour import calls
from twofour.calibration import Batch, Held, hold_back, pieces
from twofour.calibration.gradients import trainable
from twofour.calibration.held import EVERY
from twofour.calibration.passes import calibrating
from twofour.criteria import Solved
from twofour.errors import DataError, RecipeError, TwofourError, cut
from twofour.layers import PrunableWeight
from twofour.progress import Progress
from twofour.reconstruction.distances import compared
from twofour.reconstruction.solving import Run, Value

_log = logging.getLogger("twofour.reconstruction")

SAMPLES = 16
"""Samples of a step at most, where batches can be parted."""
_FLAT = ("weight", "bias")
_SHORT = (
    "for want of time %d parts of the model were reconstructed in fewer steps, or not at all (%s), so that another run "
    "may come to other values; shorter sequences or smaller images in `data`, or more threads, make a step shorter; "
    "reconstruct=False leaves it out"
)


@dataclass(frozen=True)
class Report:
    """What reconstruction won.

    Attributes:
        before: How far the answers of the pruned model were from the dense one's on samples that it did not see,
            relative to their size.
        after: The same afterwards.
        kept: Whether it stands: not where `after` is no smaller.
        samples: How many samples judged.
        seconds: What it took.
        short: What had fewer steps for want of time, or none; other runs may make more or fewer.
    """

    before: float
    after: float
    kept: bool
    samples: int
    seconds: float
    short: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = "kept" if self.kept else "no smaller, so the values of the criterion stand"
        return (
            f"reconstructed: answers to {self.samples} samples held back are {self.after:.4f} of their size from the "
            f"dense ones, {self.before:.4f} before; {done} ({self.seconds:.0f} s)"
        )


Reconstruct = Callable[[Solved], Report | None]
"""What solves weights together that a criterion has solved one by one; None: it could not, and nothing has changed."""


def prepared(
    model: nn.Module, batches: Sequence[Batch] | None, *, asked: bool | None, progress: bool
) -> Reconstruct | None:
    """Return what reconstructs a model by its solved weights later; the dense model answers the data held back now.

    Args:
        model: The dense model.
        batches: What `calibration.take` returned.
        progress: Show how far it is on standard error.
        asked: True: what stands against it is an error. None: it is logged, and there is no reconstruction. False:
            there is none.

    Raises:
        RecipeError: There are no data.
        DataError: No sample can be held back, the model answers with no tensor of one axis or more, or does not run.
    """
    require_asked(asked)
    if asked is False:
        return None
    try:
        used, held = _held(model, batches)
    except TwofourError as error:
        if asked:
            raise
        _log.info("not reconstructed: %s", cut(str(error), 300))
        return None

    def run(solved: Solved) -> Report | None:
        pruned = [(choice.weight, choice.keep) for choice in solved.choices]
        try:
            with Progress(progress) as display:
                return reconstruct(model, pruned, solved.before, used, held, solved.write, display=display)
        except Exception as error:
            if asked:
                raise
            _log.warning("not reconstructed, the values of the criterion stand: %s", cut(str(error), 300))
            return None

    return run


def require_asked(asked: object) -> None:
    """Refuse what `reconstruct` cannot be.

    Raises:
        RecipeError: It is neither True, False nor None.
    """
    if asked is not None and not isinstance(asked, bool):
        raise RecipeError(
            "`reconstruct` is neither True nor False",
            got=repr(asked),
            wanted="True, False, or None: where there are data and nobody names a criterion",
            remedy="leave it out",
        )


def require_dense(asked: bool | None, settled: int) -> None:
    """Refuse to reconstruct a model of which all weights, `settled` of them, were pruned before.

    Raises:
        RecipeError: Reconstruction is asked for.
    """
    if asked:
        raise RecipeError(
            "there is nothing to reconstruct by: kept values follow the dense model's answers, and it is gone",
            got=f"reconstruct=True for a model whose weights ({settled}) obey their patterns already",
            wanted="a dense model",
            remedy="leave `reconstruct` out; to start anew call twofour.masks.detach(model) and load the dense weights",
        )


def _held(model: nn.Module, batches: Sequence[Batch] | None) -> tuple[list[Batch], Held]:
    remedy = "reconstruct=False leaves the values as the criterion has them"
    if batches is None:
        raise RecipeError(
            "there is nothing to reconstruct by",
            got="reconstruct=True without data",
            wanted="data: inputs as the model takes them",
            remedy="data=loader; targets are not needed",
        )
    least, whole = min(batch.samples for batch in batches), next((b.whole for b in batches if b.whole), "")
    if len(batches) < EVERY and (whole or least < EVERY):
        raise DataError(
            "no sample can be held back to judge a reconstruction",
            got=f"{len(batches)} batches, {f'not to be cut: {whole}' if whole else f'of {least} samples the smallest'}",
            wanted=f"{EVERY} batches, or {EVERY} samples in each",
            remedy=f"give more samples: {EVERY - len(batches)} more batches, or {EVERY} samples or more in each",
        )
    with _explained():
        used, held = hold_back(model, batches)
    if not any(compared(leaf) for answer in held.answers for leaf in answer):
        raise DataError(
            "the answers of the model cannot be compared, so that it cannot be reconstructed",
            got="no tensor of real numbers with an axis",
            wanted="a model that answers with tensors, not with its loss",
            remedy=remedy,
        )
    return used, held


def reconstruct(
    model: nn.Module,
    pruned: Sequence[tuple[PrunableWeight, Tensor]],
    dense: Mapping[nn.Parameter, Tensor],
    batches: Sequence[Batch],
    held: Held,
    write: Callable[[nn.Parameter, Tensor], None],
    *,
    display: Progress | None = None,
) -> Report:
    """Solve the kept values of pruned weights together, with the biases beside them and the norms.

    Tokens that an attention mask hides count neither in what is followed nor in what judges. Parameters that do not
    require gradients stay, and so do layers that are not pruned.

    Args:
        model: Its pruned weights are zero outside of their masks. It runs in evaluation mode; its modes come back.
        pruned: Each weight with its mask, bool of the weight's shape.
        dense: What these parameters held before.
        batches: What `calibration.take` returned: inputs to follow.
        held: Other inputs, with the dense model's answers, that judge.
        write: Gives a parameter new values; called at the end, once each.
        display: Shows progress.

    Raises:
        DataError: The model cannot be run or differentiated on the data.
    """
    begin = time.perf_counter()
    display = display or Progress(shown=False)
    values = _values(model, pruned)
    with calibrating(model), trainable(model, []), _explained():
        run = Run(model, dict(dense), values, _parted(batches), held, display)
        before = run.judge()
        run.solve([weight for weight, _ in pruned])
    for parameter, best in run.best.items():
        write(parameter, best)
    took = time.perf_counter() - begin
    report = Report(before, run.least, run.least < before, held.samples, took, tuple(run.short))
    _log.info("%s", report)
    if run.short:
        _log.warning(_SHORT, len(run.short), cut("; ".join(run.short), 300))
    return report


def _values(model: nn.Module, pruned: Sequence[tuple[PrunableWeight, Tensor]]) -> dict[nn.Parameter, Value]:
    """Return the pruned weights, the biases of their layers, and the norms.

    Norms of any library are modules that have no parameters but vectors called `weight` or `bias`.
    """
    values = {weight.parameter: Value(weight.parameter.detach().clone(), keep) for weight, keep in pruned}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        flat = {name: p for name, p in own.items() if name in _FLAT and p.ndim == 1 and p.is_floating_point()}
        if len(flat) == len(own) or any(parameter in values for parameter in own.values()):
            values |= {p: Value(p.detach().clone()) for p in flat.values() if p.requires_grad and p not in values}
    return values


def _parted(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches in pieces of a step's size, where they can be cut, of tensors without a history."""
    small = [piece for batch in batches for piece in pieces(batch, SAMPLES)]
    return [Batch(tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, b.inputs)) for b in small]


def _explained() -> AbstractContextManager[None]:
    return calls.explaining(
        DataError,
        "the calibration data while it is reconstructed",
        wanted="a forward pass that can be differentiated, and memory for it",
        remedy="reconstruct=False leaves the values as the criterion has them",
    )
