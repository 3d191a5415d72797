"""The control, pruned after its training: one more candidate for the state that stands in a sparse model.

It has had no step since, but all steps before were those of a dense model, and no more of them than the control had.
Where what pruning takes is little against what training under a mask leaves undone, it is the better one; the judge of
the sparse run's states tells. Pruning draws its random numbers from the seed, so that a run that was killed meanwhile
prunes once more, to the same bits unless reconstruction has fewer steps for want of time: their number goes by the
clock then, and a warning says so.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from twofour import masks, pruning
from twofour.errors import explained
from twofour.layers import walk
from twofour.training import loop
from twofour.training.controls import Beside
from twofour.training.judge import Judge
from twofour.training.result import PrunedLast, Run, shown
from twofour.training.trainee import Snapshot, left_out
from twofour.training.warm_start import Start

log = logging.getLogger("twofour.training")


def compared(
    model: nn.Module, run: Run, beside: Beside, start: Start | None, said: Sequence[str], *, progress: bool
) -> tuple[Run, tuple[str, ...]]:
    """Prune the trained control as the model was at its `start`, and let its state stand in the model if it is better.

    Nothing is done where the control is not finetune's own copy, or the last state stands and nothing is judged. The
    control is spent: it is pruned in place. Where it cannot be, a warning says so and the model stays as it is.

    Args:
        model: As its `run` ended, in the best of its states.
        run: The sparse run.
        beside: The trained control.
        start: What pruned the model, and the training by the loss that judges.
        said: What was told of the pruning of the model, which is not told once more.
        progress: Show how far pruning is.

    Returns:
        The run, which tells of the control's state where that stands, and what is to be told of it.
    """
    control = beside.control
    if start is None or control is None or not beside.own or (judge := start.plan.judge) is None:
        return run, ()
    log.info("the trained control is pruned as the model was; the better one of the two stands")
    with _noting_the_end(run):
        try:
            done = start.of_copy(control).prune(progress, None)
            evaluation = loop.evaluate(control, start.plan, -1)
            theirs, mine = judge.score(control, evaluation), judge.score_of(run.judged, run.evaluation)
            if theirs < mine:
                _give(control, model)
        except Exception as error:  # all is trained: what the model has is not lost for it
            note = f"the control, pruned after its training, takes no part: {explained(error)}"
            return run, (_told(note, aloud=True),)
    found = PrunedLast(theirs if judge.keep == "loss" else None, evaluation)
    losses = _compared(judge, run, found)
    if not theirs < mine:
        return run, (_told(f"the best state of the sparse run stands: {losses}"),)
    known = {part for note in said for part in note.split("; ")}
    differs = [part for part in done.split("; ") if part not in known]
    note = _told("; ".join([f"the control, pruned after its training, stands: {losses}", *differs]))
    return dataclasses.replace(run, instead=found), (note,)


def _compared(judge: Judge, run: Run, found: PrunedLast) -> str:
    """Return what was judged of the control and of the best state of the run."""
    when = f"after epoch {run.kept}" if run.kept else "before the first step"
    if judge.keep == "loss":
        return f"loss on what judges {run.judged:.4g} {when} of the sparse run, {found.held:.4g} of the pruned control"
    mine, theirs = shown(run.evaluation), shown(found.evaluation)
    return f"evaluation {mine} {when} of the sparse run, {theirs} of the pruned control"


def _told(note: str, *, aloud: bool = False) -> str:
    log.log(logging.WARNING if aloud else logging.INFO, "%s", note)
    return note


@contextmanager
def _noting_the_end(run: Run) -> Iterator[None]:
    """Say of what ends the last pruning early where the model stands."""
    try:
        yield
    except BaseException as error:
        when = f"after epoch {run.kept} of {len(run.history)}" if run.kept else "before the first step"
        error.add_note(
            f"All was trained and the control was being pruned as a last candidate; the sparse model has its state "
            f"{when}, the best of its run."
        )
        raise


def _give(control: nn.Module, model: nn.Module) -> None:
    """Give a model all that its pruned copy has: values, buffers, masks, and what `prune` told of them.

    Their channels may stand in other orders, so nothing of the model's own is left. What ends it early puts the model
    back.
    """
    kept, attached = Snapshot.of(model), masks.of(model)
    try:
        _lay(model, Snapshot(control.state_dict(), left_out(control)), masks.of(control))
        pruning.hand_on(control, model)
    except BaseException:
        _lay(model, kept, attached)
        raise


def _lay(model: nn.Module, state: Snapshot, attached: dict[str, masks.Mask]) -> None:
    """Give a model a state, then its masks: under others the values would be taken for new zeros of those."""
    masks.detach(model)
    state.give_to(model)
    weights = walk(model, eligibility="any", tied="*").by_name
    masks.attach_all([(weights[name], mask.keep, mask.pattern) for name, mask in attached.items()])
