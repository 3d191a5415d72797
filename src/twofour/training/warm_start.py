"""A dense model becomes the start of a sparse training: pruned by what its training data allow, its copy a teacher.

The data are batches of the training itself, from the first epoch on. What it was pruned to is kept beside the
checkpoints of the run, so that an interrupted run goes on from the same bits without pruning once more.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from twofour import calls, criteria, masks, pruning
from twofour.calibration import Batch
from twofour.errors import FormatError, TrainingError, TwofourError, cut, explained
from twofour.layers import describe_attached
from twofour.recipe import Recipe
from twofour.training import checkpoint, judge, listed, randomness
from twofour.training.batches import Loader, epoch_batches, length
from twofour.training.controls import Beside, Wish
from twofour.training.plan import Plan
from twofour.training.result import CONTROL, DENSE

log = logging.getLogger("twofour.training")

FILE = "start.pt"
_OURS = ("model", "pattern", "simplify", "progress")
_TEACHERS = {
    DENSE: "the dense model, which teaches where it is clearly better",
    CONTROL: "the control, which is trained first as long and then teaches",
}
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


class Calibration:
    """The inputs and targets of a loader's first epoch as calibration data; it counts the batches that are taken.

    Those come `behind` so many; of a list of batches they are pieces of those that stand at no place in `but`.
    """

    def __init__(self, loader: Loader, seed: int, behind: int = 0, but: Collection[int] = ()) -> None:
        self.loader, self.seed, self.behind, self.but, self.taken = loader, seed, behind, but, 0

    def __iter__(self) -> Iterator[Batch]:
        self.taken, places = 0, set[int]()
        if listed.is_list(self.loader):
            for place, batch in listed.calibrating(self.loader, self.seed, self.but):
                places.add(place)
                batch = replace(batch, number=place + 1)
                self.taken = len(places)
                yield batch
            return
        for inputs, target in epoch_batches(self.loader, self.seed, 0, self.behind):
            self.taken += 1
            yield Batch(inputs, target, self.behind + self.taken)

    @property
    def told(self) -> str:
        """Which batches were taken."""
        batches = f"{self.taken} batch{'es' * (self.taken != 1)}"
        if listed.is_list(self.loader):
            apart = f", none of the {len(self.but)} that judge" if self.but else ""
            return f"{batches} spread over the list{apart}"
        first = (
            f"behind the first {self.behind}, which judge" if self.behind else f"the first one{'s' * (self.taken != 1)}"
        )
        return f"{batches} of the loader, {first}"

    @classmethod
    def of(cls, plan: Plan) -> Calibration:
        """Return the data of a plan's loader but those that judge, where at least as many are left.

        What is solved on the data that judge would win there, and against states that have had steps behind.
        """
        judging = None if plan.judge is None else plan.judge.held
        if judging is not None and judging.places:
            return cls(plan.loader, plan.seed, but=frozenset(judging.places))
        behind = 0 if judging is None or judging.apart else len(judging.batches)
        enough = (length(plan.loader) or 0) >= 2 * behind
        return cls(plan.loader, plan.seed, behind if enough else 0)


def options(model: nn.Module, pattern: Any, given: Any, *, scheme: bool, folder: Path | None) -> dict[str, Any] | None:
    """Return the arguments of `twofour.prune` that a caller chose; None where the model is not pruned here.

    It is if it has neither masks nor low bits, which are trained without masks too, and no scheme prunes it instead.

    Raises:
        TrainingError: `prune` has no such arguments, or data that can be walked only once, the model is not pruned here
            and there are some, or the folder is of a run that began with a dense model.
    """
    dense = not scheme and not masks.of(model) and not describe_attached(model)
    if not dense:
        require_fresh(folder)
    if not dense and (pattern is not None or given is not None):
        raise TrainingError(
            "the model is not pruned here, so `pattern` and `prune` say nothing",
            got="a scheme, which prunes meanwhile" if scheme else "a model with masks or low bits",
            wanted="a dense model, without scheme=",
            remedy="leave them out; twofour.masks.detach(model) and the dense weights begin anew",
        )
    if given is not None and not isinstance(given, Mapping):
        raise TrainingError(
            "`prune` cannot be used",
            got=type(given).__name__,
            wanted="a mapping of arguments of twofour.prune",
            remedy='prune={"skip": ["head"]}',
        )
    taken = [name for name in inspect.signature(pruning.prune).parameters if name not in _OURS]
    if wrong := [name for name in given or {} if name not in taken]:
        raise TrainingError(
            "`prune` has an argument that cannot be given here",
            got=repr(wrong[0]),
            wanted=", ".join(taken),
            remedy="pattern= is an argument of its own; to simplify, call twofour.simplify first",
        )
    if isinstance(walked := (given or {}).get("data"), Iterator):
        raise TrainingError(
            "the data of `prune` can be walked only once",
            got=f"an iterator ({type(walked).__name__})",
            wanted="something to iterate over anew: the channels in their order, and the control, are pruned by it too",
            remedy='prune={"data": list(data)}, a DataLoader, or nothing: batches of the loader then',
        )
    return {"pattern": "2:4" if pattern is None else pattern, **(given or {})} if dense else None


def cost(model: nn.Module, beside: Beside, wish: Wish) -> tuple[str, ...]:
    """Return what a training will cost beside the model, and what it is not compared with; log it."""
    plan = beside.plan
    parameters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    parts = [("gradients", parameters), ("the teacher", state * (plan.taught == DENSE))]
    parts += [("the control", state * beside.own), ("the best state", state * (plan.judge is not None))]
    held = None if plan.judge is None else plan.judge.held
    parts += [("the data that judge", 0 if held is None else held.nbytes)]
    said = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts if size)
    steps = length(plan.loader)
    teacher = _TEACHERS.get(plan.taught or "", plan.taught)
    if beside.own and plan.judge is not None:
        teacher = "the control, which is trained first as long, then teaches and is pruned last: the better one stands"
    taught = "" if plan.taught is None else f", each with a forward pass of {teacher}"
    size = f"{steps} steps" if steps else "a loader without a length"
    own = "; control=None saves that" * beside.own
    own = own or ", of the control as many before" * (beside.control is not None and plan.taught != CONTROL)
    amount = f"{plan.epochs} epoch{'s' * (plan.epochs != 1)} of {size}{taught}{own}"
    notes = (amount, f"memory in MiB: {said}, and what the optimiser keeps{', twice the gradients' * (not wish.known)}")
    if beside.control is None and wish.left and not beside.notes and not describe_attached(model):  # low bits have none
        notes += ("no comparison: control=copy.deepcopy(model), copied before it is pruned, brings one",)
    for note in notes:
        log.info("%s", note)
    return notes


@dataclass(frozen=True)
class Start:
    """A dense model that is to be pruned here, in which all that could be wrong has been looked for.

    What it is pruned to, by `options`, is kept in `file`, beside what must be the same for a `run` to go on; `stored`
    is what it holds of one that was interrupted.
    """

    model: nn.Module
    plan: Plan
    options: Mapping[str, Any]
    file: Path | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, Any] | None = None

    @classmethod
    def checked(cls, model: nn.Module, plan: Plan, options: Mapping[str, Any], folder: Path | None) -> Start:
        """Look at a dense model, its training and the folder of its checkpoints; nothing is changed.

        Raises:
            TrainingError: The model is wrapped, its training cannot begin, or the folder is of another run.
            FormatError: What the folder holds cannot be read.
        """
        require_bare(model)
        _require_trainable(model, plan)
        if folder is None:
            return cls(model, plan, options)
        file, run = folder / FILE, _fingerprint(model, plan, options)
        stored = checkpoint.read(file, checkpoint.START)
        if stored is None:
            _require_unused(folder)
        else:
            _require_same(file, stored["run"], run)
        return cls(model, plan, options, file, run, stored)

    def of_copy(self, copy: nn.Module) -> Start:
        """Return the start of a copy of the model, to be pruned alike; nothing is kept of it."""
        return replace(self, model=copy, file=None, stored=None)

    def prune(self, progress: bool, teacher: str | None) -> str:
        """Prune the model, or take up what an interrupted run pruned it to; return what was done. Keep who teaches."""
        if self.stored is not None and self.file is not None:
            _restore(self.model, self.stored, self.file)
            log.info(
                "the masks and values of the interrupted run are taken up from `%s`; what `prune` reported layer by "
                "layer is not kept there",
                self.file,
            )
            return "; ".join(map(str, self.stored["notes"]))
        note = _pruned(self.model, self.plan, self.options, progress)
        log.info("%s", note)
        if self.file is not None:
            state = {"model": self.model.state_dict(), "masks": masks.state_dict(self.model), "notes": [note]}
            checkpoint.write(self.file, {"run": dict(self.run), "teacher": teacher or checkpoint.NOBODY, **state})
        return note


def require_bare(model: nn.Module) -> None:
    """Refuse a dense model inside a wrapper for several devices or processes, each of which would prune for itself.

    Raises:
        TrainingError: It is wrapped.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            place = f"model.{name}" if name else "model"
            raise TrainingError(
                "a model that is wrapped for several devices cannot be pruned here",
                got=f"{place}, a {type(module).__name__}",
                wanted="the module inside",
                remedy=f"finetune(model.module, ...), or twofour.prune({place}.module, ...) first and wrap it then",
            )


def require_fresh(folder: Path | None) -> None:
    """Refuse a pruned model where the folder is of a run that began with a dense one.

    Raises:
        TrainingError: It is.
    """
    if folder is not None and (folder / FILE).exists():
        raise TrainingError(
            f"the checkpoints in `{folder}` are of a run that began with a dense model",
            got="a model that is pruned already",
            wanted="the dense model, as the run was given it",
            remedy="load the dense model again and call finetune with it: what it was pruned to is in the folder",
        )


def _require_unused(folder: Path) -> None:
    """Refuse a dense model where the folder is of a run that began with a pruned one, before it is written into.

    Raises:
        TrainingError: It is.
    """
    if found := [name for name in ("sparse.pt", "control.pt") if (folder / name).exists()]:
        raise TrainingError(
            f"the checkpoints in `{folder}` are of a run that did not begin with this dense model; they are left as "
            "they are",
            got=f"{found[0]} without {FILE}, which a run writes that prunes a dense model",
            wanted="an empty folder, or that of this run",
            remedy="pass another `checkpoint` folder, or to go on with that run the model as it was given it",
        )


def _require_trainable(model: nn.Module, plan: Plan) -> None:
    """Refuse what would only fail after pruning: all frozen, a loss, an optimiser or a schedule that is none.

    Raises:
        TrainingError: It would.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(
            "the model has nothing to train",
            got="a model whose parameters are all frozen",
            wanted="parameters that require gradients",
            remedy="model.requires_grad_(True), or of a part of it; twofour.prune alone prunes frozen weights",
        )
    if plan.judge is None or plan.judge.held is None:
        judge.held_loss(model, plan.loss, judge.Held((judge.first_batch(plan.loader, plan.seed),), 1, apart=False))
    plan.start(model, {})


def _pruned(model: nn.Module, plan: Plan, options: Mapping[str, Any], progress: bool) -> str:
    """Prune, in a better order of the channels where there is one; return what was done."""
    data = Calibration.of(plan)
    given: dict[str, Any] = {"data": data, "progress": progress, **options}
    reason = ", which loses no more"
    with calls.keeping_modes(model), randomness.undisturbed(plan.loader):
        randomness.seed_everything(randomness.derive(plan.seed, 0, "pruning"))
        failed = None
        try:
            pruning.prune(model, **{"permute": True, **given})
        except (TwofourError, MemoryError) as error:  # what is not about the order is raised again below
            failed = error
        if failed is not None:
            pruning.prune(model, **given)
            log.warning("the channels stay in their order, since they could not be permuted: %s", cut(str(failed), 300))
            reason = f": {explained(failed)}"
    outcomes = pruning.outcomes(model)
    patterns = ", ".join(dict.fromkeys(outcome.pattern for outcome in outcomes))
    by = ", ".join(dict.fromkeys(outcome.criterion for outcome in outcomes))
    parts = [f"pruned {len(outcomes)} weights to {patterns} by {by}"]
    if frozen := [name for name, mask in masks.of(model).items() if not mask.parameter.requires_grad]:
        parts.append(f"{len(frozen)} of them frozen, so not trained again: {', '.join(frozen[:3])}")
    if given["data"] is data:
        reads = criteria.resolve(options.get("criterion"), data).need is not None
        did = "calibrated" if reads or isinstance(options["pattern"], Recipe) else "what it loses measured"
        parts.append(f"{did} on {data.told}")
        parts += filter(None, [criteria.few_data(outcomes)])
    if (order := pruning.permutation_report(model)) is not None:
        parts.append("channels permuted" if order.kept else f"channels in their order{reason}")
    elif "permute" not in options:
        parts.append(f"channels in their order{reason}")
    if (solved := pruning.reconstruction_report(model)) is not None and solved.kept:
        parts.append("kept values solved together")
    return "; ".join(parts)


def _fingerprint(model: nn.Module, plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a run to go on; of options that are no plain values their kind."""
    plain = {name: repr(value) if _is_plain(value) else type(value).__name__ for name, value in options.items()}
    plain["pattern"] = str(options["pattern"])
    return {"seed": plan.seed, "prune": plain, "dense model": judge.digest(model.state_dict())}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _require_same(file: Path, stored: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for key in dict.fromkeys((*mine, *stored)):
        if stored.get(key) != mine.get(key):
            raise TrainingError(
                f"`{file}` is of another run; it is left as it is",
                got=f"{key}: {cut(str(stored.get(key)), 80)}",
                wanted=f"{key}: {cut(str(mine.get(key)), 80)}",
                remedy="pass the same dense model and arguments as the interrupted run, or another checkpoint folder",
            )


def _restore(model: nn.Module, stored: Mapping[str, Any], file: Path) -> None:
    """Attach the stored masks and load the stored values, or leave the model as it is.

    Raises:
        FormatError: They do not fit the model.
    """
    mine, theirs = model.state_dict(), stored["model"]
    wrong = [key for key in dict.fromkeys((*mine, *theirs)) if _kind(mine, key) != _kind(theirs, key)]
    try:
        if wrong:
            raise ValueError(f"`{wrong[0]}` is {_kind(theirs, wrong[0])}, of the model {_kind(mine, wrong[0])}")
        masks.load_state_dict(model, stored["masks"])
        model.load_state_dict(theirs)
    except Exception as error:  # each part says in its own way that it cannot be what it is said to be
        raise FormatError(
            f"`{file}` cannot be taken up; it is left as it is",
            got=f"{type(error).__name__}: {cut(str(error), 200)}",
            wanted="what this model was pruned to, as it was written",
            remedy="move the folder away to start the run anew",
        ) from error


def _kind(state: Mapping[str, Any], key: str) -> Any:
    if key not in state:
        return "absent"
    value = state[key]
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)
