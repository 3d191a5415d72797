"""prune: a plan for a checkpoint on disk is carried out, file by file; stopped and started again, it goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twofour import __version__
from twofour.checkpoints import CONFIG, INDEX, WEIGHTS, describe
from twofour.errors import SourceError
from twofour.files import read_json, replacing
from twofour.streaming.checkpoint_plan import Plan, axes_by_name, patterns_by_name
from twofour.streaming.cluster import run_on_cluster
from twofour.streaming.companions import companions, copy_companions
from twofour.streaming.journal import Journal
from twofour.streaming.report import Report
from twofour.streaming.shard import Shard, Written, write_shard

NOTE = "twofour"
"""Key of the note in config.json."""

Progress = Callable[[int, int, str], None]
"""Told of the megabytes done, of all to do, and of the tensor at hand."""


def prune(
    plan: Plan,
    folder: Path,
    *,
    journal: Path | None = None,
    cluster: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Write a sparse copy of a checkpoint into a folder.

    The files keep their names, the tensors theirs and their order; what is not pruned is copied byte by byte. The
    promise stands in each file's metadata and, with the recipe, as a note in config.json; files that are no weights are
    copied. Whoever kills it can start it again: finished files that nothing changed since are kept, and the result is
    the same to the byte.

    Args:
        plan: From `plan_folder` or `plan_file`.
        folder: Where the files go; it must be new, empty, or left by an interrupted run.
        journal: Where to note what is finished; default: `folder`'s name with ".journal.json", beside it. It is left
            for the caller to remove once the folder is where it belongs.
        cluster: Address of a Ray cluster, see `run_on_cluster`; None works in this process.
        progress: Told of every part.

    Raises:
        FormatError: A file is not what the plan was made for.
        PatternError: A weight holds NaN or infinity.
        SourceError: A file cannot be written, an unfinished run was asked something else, another process writes the
            same result, something beside the weights cannot be copied, or the cluster fails.
    """
    notes = Journal(journal or folder.with_name(f"{folder.name}.journal.json"), folder, _asked(plan))
    try:
        beside = companions(plan.checkpoint.path) if plan.checkpoint.path.is_dir() else {}
        with notes.opened():
            shards = [_shard(plan, file, folder) for file in plan.checkpoint.files]
            resumed = len(notes.files)
            todo = [shard for shard in shards if shard.target.name not in notes.files]
            _require_room(folder, todo)
            for shard, written in _run(todo, cluster, progress):
                notes.add(shard.target.name, written)
            found = [outcome for shard in shards for outcome in notes.outcomes(shard.target.name)]
            _finish(plan, beside, notes, settled=all(outcome.kept == 1 for outcome in found))
    except OSError as error:
        raise SourceError(
            f"{folder} cannot be written",
            got=f"{type(error).__name__}: {error}",
            wanted="a folder that can be written to, with room for the checkpoint",
            remedy="make room and give the same command again: finished files are kept",
        ) from error
    return Report(tuple(found), plan.skipped, resumed, (*notes.files, *notes.claimed))


def _require_room(folder: Path, todo: Sequence[Shard]) -> None:
    need, free = sum(shard.nbytes for shard in todo), shutil.disk_usage(folder).free
    if need > free:
        raise SourceError(
            f"there is no room for {folder}",
            got=f"{free / 1e9:.2f} GB free",
            wanted=f"{need / 1e9:.2f} GB, the bytes of {len(todo)} files",
            remedy="make room, or choose a folder on another disk",
        )


def _run(todo: Sequence[Shard], cluster: str | None, progress: Progress) -> Iterator[tuple[Shard, Written]]:
    total, done = sum(shard.nbytes for shard in todo), 0

    def advance(count: int, name: str) -> None:
        nonlocal done
        done += count
        progress(done >> 20, total >> 20, name)

    if cluster is None:
        for shard in todo:
            yield shard, write_shard(shard, advance)
        return
    for shard, written in run_on_cluster(todo, cluster) if todo else ():
        advance(shard.nbytes, shard.target.name)
        yield shard, written


def _shard(plan: Plan, file: Path, folder: Path) -> Shard:
    checkpoint = plan.checkpoint
    entries = tuple(entry for entry in checkpoint.entries.values() if entry.file == file)
    weights = {weight.entry.name: weight for weight in plan.weights if weight.entry.file == file}
    sparse = tuple(weights.values())
    promise = describe(patterns_by_name(sparse), axes_by_name(sparse))
    name = WEIGHTS if checkpoint.path == file else file.name
    return Shard(file, folder / name, entries, weights, plan.criterion, {**checkpoint.metadata[file], **promise})


def _asked(plan: Plan) -> dict[str, Any]:
    """Return what tells one run from another: the same answers give the same bytes."""
    files = {}
    for file in plan.checkpoint.files:
        found = file.stat()
        files[str(file.resolve())] = [found.st_size, found.st_mtime_ns]
    return {
        "release": __version__,
        "source": files,
        "recipe": plan.recipe.to_toml(),
        "axes": dict(axes_by_name(plan.weights)),
    }


def _finish(plan: Plan, found: Mapping[str, Path], notes: Journal, *, settled: bool) -> None:
    """Copy what lies beside a folder's weights, write the index, and the note into config.json.

    Of weights that are all `settled` the note keeps the criterion that they were pruned by before.
    """
    checkpoint, folder = plan.checkpoint, notes.folder
    if not checkpoint.path.is_dir():
        return
    indexed = WEIGHTS not in [file.name for file in checkpoint.files]
    notes.claim([*found, *([INDEX] if indexed else [])])
    copy_companions(found, folder)
    if indexed:
        with replacing(folder / INDEX) as temporary:
            shutil.copyfile(checkpoint.path / INDEX, temporary)
    if checkpoint.config is not None:
        criterion = earlier_criterion(checkpoint.path) if settled else plan.recipe.criterion.name
        write_note(folder / CONFIG, patterns_by_name(plan.weights), criterion)


def earlier_criterion(folder: Path) -> str | None:
    """Return the criterion that the note in a folder's config.json names, None where it names none."""
    noted = read_json(folder / CONFIG).get(NOTE) if (folder / CONFIG).is_file() else None
    found = noted.get("criterion") if isinstance(noted, dict) else None
    return found if isinstance(found, str) else None


def write_note(config: Path, patterns: Mapping[str, str], criterion: str | None) -> None:
    """Tell in a config.json how many weights have which pattern, and by which criterion where it is known."""
    names = list(patterns.values())
    known = {"criterion": criterion} if criterion else {}
    said = {"patterns": {name: names.count(name) for name in names}, **known, "version": __version__}
    content = read_json(config)
    with replacing(config) as temporary:
        text = json.dumps({**content, NOTE: said}, indent=2, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")
