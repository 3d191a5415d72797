"""One model under training: all that changes from step to step, so that it can be saved and continued."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twofour import masks
from twofour.errors import FormatError, TrainingError, cut
from twofour.training import checkpoint, randomness
from twofour.training.plan import Plan
from twofour.training.result import Epoch, Evaluation
from twofour.training.schemes import Scheme
from twofour.training.stored import require_optimizer_state, require_schedule_state

log = logging.getLogger("twofour.training")


@contextmanager
def ending(scheme: Scheme | None) -> Iterator[None]:
    """Take a scheme off where what is done under it fails: nobody else holds it."""
    try:
        yield
    except BaseException:
        if scheme is not None and scheme.attached:
            scheme.remove()
        raise


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of a model's state dict and of the buffers that it leaves out."""

    state: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, old: Snapshot | None = None) -> Snapshot:
        """Copy a model's state, into the tensors of an `old` copy where they fit."""
        kept = ({}, {}) if old is None else (old.state, old.buffers)
        return cls(*map(_copied, (model.state_dict(), left_out(model)), kept))

    def give_to(self, model: nn.Module) -> None:
        """Give a model the state that was copied."""
        model.load_state_dict(self.state)
        for name, value in self.buffers.items():
            place, _, own = name.rpartition(".")
            module = model.get_submodule(place)
            now = getattr(module, own)
            if isinstance(now, Tensor) and now.shape == value.shape and _is_writable(now):
                with torch.no_grad():
                    now.copy_(value)
            else:
                setattr(module, own, value.clone())
        torch.clear_autocast_cache()


@dataclasses.dataclass(frozen=True)
class Best:
    """The best state of a run so far: that after an `epoch`, 0 for before the first step.

    A smaller `score` of the judge is better.
    """

    epoch: int
    score: float
    kept: Snapshot


def left_out(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not part of a model's state dict, by name."""
    named = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers(remove_duplicate=False) if name not in named}


def _copied(state: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state, in the tensors of an older copy where they fit, so that there are never two."""
    same = old.keys() == state.keys() and all(_fits(value, old[name]) for name, value in state.items())
    if not same:
        return copy.deepcopy(state)
    with torch.no_grad():
        for name, value in state.items():
            old[name] = old[name].copy_(value) if isinstance(value, Tensor) else copy.deepcopy(value)
    return old


def _fits(value: Any, old: Any) -> bool:
    if not isinstance(value, Tensor):
        return True
    kinds = [(type(t), t.shape, t.dtype, t.device, t.layout) for t in (value, old) if isinstance(t, Tensor)]
    return len(kinds) == 2 and kinds[0] == kinds[1] and _is_writable(old)


def _is_writable(tensor: Tensor) -> bool:
    """Whether each value has a place of its own, as those of an expanded tensor do not."""
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@dataclasses.dataclass
class Trainee:
    """The changing state of a run.

    `epoch` counts from 0, `step` counts the batches already trained on in this epoch, `taught` those of them in which a
    teacher taught, `random` is the model's random state to go on with in mid-epoch, `held` the loss on the data that
    judge before the first step.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    fingerprint: dict[str, Any]
    file: Path | None
    scheme: Scheme | None = None
    epoch: int = 0
    step: int = 0
    taught: int = 0
    loss_sum: float = 0.0
    lr: float = 0.0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    before: Evaluation | None = None
    begun: bool = False
    random: randomness.State | None = None
    best: Best | None = None
    held: float | None = None
    earlier: float = 0.0
    since: float = dataclasses.field(default_factory=time.perf_counter)

    @classmethod
    def start(cls, name: str, model: nn.Module, plan: Plan, file: Path | None) -> Trainee:
        """A run at its first step, or where `file` left it."""
        scheme = plan.attach(model)
        with ending(scheme):
            optimizer, schedule = plan.start(model, masks.of(model))
            fingerprint = {}
            if file is not None:
                attached = {} if scheme is None else {"scheme": repr(scheme)}
                fingerprint = checkpoint.plain({"name": name, **attached, **plan.fingerprint(optimizer, schedule)})
            trainee = cls(name, model, optimizer, schedule, fingerprint, file, scheme)
            state = checkpoint.read(file) if file is not None else None
            if state is not None:
                trainee.resume(state)
        return trainee

    @property
    def seconds(self) -> float:
        """Working time so far, earlier sessions included."""
        return self.earlier + time.perf_counter() - self.since

    def save(self) -> None:
        """Write the checkpoint, if there is to be one."""
        if self.file is None:
            return
        position = {name: getattr(self, name) for name in ("epoch", "step", "taught", "loss_sum", "lr")}
        state = {
            "run": self.fingerprint,
            "position": {**position, "seconds": self.seconds, "threads": torch.get_num_threads()},
            "history": self.history,
            "before": self.before,
            "model": self.model.state_dict(),
            "masks": masks.state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "random": randomness.to_plain(randomness.capture()),
        }
        if self.scheme is not None:
            state["scheme"] = self.scheme.state_dict()
        if self.best is not None:
            best = self.best
            kept = {"state": best.kept.state, "buffers": best.kept.buffers}
            state["best"] = {"epoch": best.epoch, "score": best.score, "held": self.held, **kept}
        checkpoint.write(self.file, state)

    def judged(self, plan: Plan, evaluation: Evaluation | None, epoch: int) -> float | None:
        """Keep the model's state if it is the best so far; return its loss on the data that judge, where that does."""
        if plan.judge is None:
            return None
        score = plan.judge.score(self.model, evaluation)
        if self.best is None or score <= self.best.score:
            kept, self.best = self.best, None  # while it is written into there is none
            self.best = Best(epoch, score, Snapshot.of(self.model, None if kept is None else kept.kept))
        return score if plan.judge.keep == "loss" else None

    def restore_best(self) -> None:
        """Give the model its best state, if it is not the one it has."""
        best = self.best
        if best is not None and best.epoch != len(self.history):
            best.kept.give_to(self.model)

    @contextmanager
    def best_stands(self, epochs: int) -> Iterator[None]:
        """Give the model its best state at the end, and where a run of so many epochs ends early too."""
        try:
            yield
        except BaseException as error:
            if (best := self.best) is not None:
                try:
                    best.kept.give_to(self.model)
                except Exception as failed:  # a device that is lost; what ended the run is what must be seen
                    error.add_note(f"The best state could not be given back to the model: {failed}")
                else:
                    when = f"after epoch {best.epoch} of {epochs}" if best.epoch else "before the first step"
                    error.add_note(f"The {self.name} model has its state {when}, the best so far.")
                    log.warning("%s run: ended early; the state %s stands, the best so far", self.name, when)
            elif not self.begun:
                error.add_note(f"The {self.name} model has had no step of training; what finetune pruned stays pruned.")
            raise
        self.restore_best()

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state; the model is written last, when all else has fitted.

        Raises:
            TrainingError: The checkpoint is of another run, model or set of masks.
            FormatError: Its parts do not fit together.
        """
        self._same_run(state)
        self._same_model(state)
        try:
            position, random = state["position"], randomness.from_plain(state["random"])
            if not 0 <= position["epoch"] <= self.fingerprint["epochs"] or len(state["history"]) != position["epoch"]:
                raise ValueError(f"epoch {position['epoch']} with {len(state['history'])} finished")
            if position["step"] < 0 or not math.isfinite(position["loss_sum"] + position["lr"] + position["seconds"]):
                raise ValueError(f"position {position}")
            for epoch in state["history"]:
                Epoch(**epoch)
            with randomness.undisturbed():
                randomness.restore(random)  # numpy and torch look at their states themselves
            require_optimizer_state(self.optimizer, state["optimizer"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.schedule is not None:
                require_schedule_state(self.schedule.state_dict(), state["schedule"])
                self.schedule.load_state_dict(state["schedule"])
            self.epoch, self.step, self.taught = (int(position.get(name, 0)) for name in ("epoch", "step", "taught"))
            self.loss_sum, self.lr = float(position["loss_sum"]), float(position["lr"])
            self.earlier, threads = float(position["seconds"]), position["threads"]
            self.history, self.before, self.begun = list(state["history"]), state["before"], True
            self._resume_parts(state)
            self._resume_model(state)
        except TrainingError:
            raise
        except Exception as error:  # each part says in its own way that it cannot be what it is said to be
            raise FormatError(
                f"checkpoint `{self.file}` cannot be continued; it is left as it is",
                got=f"{type(error).__name__}: {cut(str(error), 200)}",
                wanted="the state of this run, as it was written",
                remedy="move the file away to start the run anew",
            ) from error
        self.random = random if self.step else None
        if threads != torch.get_num_threads():
            log.warning(
                "%s run: begun with %d threads, continued with %d; the result may differ in the last bits",
                *(self.name, threads, torch.get_num_threads()),
            )
        log.info("%s run continues at epoch %d, step %d", self.name, self.epoch + 1, self.step + 1)

    def _resume_parts(self, state: dict[str, Any]) -> None:
        """Take up what not every run has: a scheme, and the best state."""
        self._resume_scheme(state)
        if (kept := state.get("best")) is None:
            return
        mine, theirs = state["model"], kept["state"]
        if not 0 <= kept["epoch"] <= len(state["history"]) or math.isnan(kept["score"]):
            raise ValueError(f"the best state is of epoch {kept['epoch']}, {kept['score']}")
        wrong = [key for key in mine if getattr(theirs.get(key), "shape", ()) != getattr(mine[key], "shape", ())]
        if mine.keys() != theirs.keys() or wrong:
            raise ValueError(f"the best state is of another model: {', '.join(wrong[:3])}")
        buffers = kept.get("buffers", {})
        if buffers.keys() - left_out(self.model).keys() or not all(isinstance(b, Tensor) for b in buffers.values()):
            raise ValueError("the best state has buffers of another model")
        self.best = Best(int(kept["epoch"]), float(kept["score"]), Snapshot(theirs, buffers))
        self.held = kept["held"]

    def _resume_model(self, state: dict[str, Any]) -> None:
        """Give the model its state, and the buffers that this leaves out where the best state, the same, has them."""
        self.model.load_state_dict(state["model"])
        if self.best is not None and self.best.epoch == self.epoch and not self.step:
            self.best.kept.give_to(self.model)

    def _resume_scheme(self, state: dict[str, Any]) -> None:
        try:
            if self.scheme is not None:
                self.scheme.load_state_dict(state["scheme"])
        except TrainingError as error:
            raise self._other_run("scheme", error.got, error.wanted) from error

    def _same_run(self, state: dict[str, Any]) -> None:
        stored, mine = state["run"], self.fingerprint
        for key in dict.fromkeys((*mine, *stored)):
            if not checkpoint.equal(stored.get(key), mine.get(key)):
                raise self._other_run(key, stored.get(key), mine.get(key))

    def _same_model(self, state: dict[str, Any]) -> None:
        stored, mine = state["model"], self.model.state_dict()
        for key in dict.fromkeys((*mine, *stored)):
            shapes = [tuple(getattr(d[key], "shape", ())) if key in d else "absent" for d in (stored, mine)]
            if shapes[0] != shapes[1]:
                raise self._other_run(f"state of the model, `{key}`", *shapes)
        if self.scheme is None and not checkpoint.equal(state["masks"], checkpoint.plain(masks.state_dict(self.model))):
            raise self._other_run("masks", "other masks", "the masks of this model")

    def _other_run(self, what: str, stored: object, mine: object) -> TrainingError:
        remedy = "pass the same arguments as the interrupted run"
        if what == "keep":  # what no argument says may differ by version, or by whether there is an optimiser
            stored, mine = stored or "last", mine or "last"
            remedy = f'pass keep="{stored}" to go on with that run'
        return TrainingError(
            f"checkpoint `{self.file}` is of another run; it is left as it is",
            got=f"{what}: {stored}",
            wanted=f"{what}: {mine}",
            remedy=f"{remedy}, or another checkpoint folder",
        )
