"""The folder of a result, of `twofour prune` and its like: it appears whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from twofour import measure
from twofour.errors import SourceError
from twofour.files import (
    LARGEST_LIST,
    locked,
    making,
    names_in,
    read_bytes,
    read_json,
    remove_known,
    remove_left,
)
from twofour.streaming.journal import Journal

_log = logging.getLogger("twofour.streaming")

RECIPE = "recipe.toml"
REPORT = "report.json"

MOVED = "moved.json"
"""In the hidden folder of a move: whose result was moved there, and the checksum of the report that takes its place."""
EARLIER, GONE = "earlier", "gone"
"""In the same folder: the result that was moved aside, and its name from the moment on at which it may be removed."""


def require_free(out: Path, force: bool) -> None:
    """Refuse an output folder that holds something, before any long work.

    Raises:
        SourceError: It exists and is not empty; with `force`, it is not exactly what `twofour` wrote.
    """
    with _writing(out):
        _require_own(out)
        if journal_of(out).exists() and not unfinished(out).exists():
            with _alone(out):  # a run that was killed at its very end
                _forget_journal(out)
        _require_free(out, force)


def _require_own(out: Path) -> None:
    """Refuse a folder that holds what no run may replace: the current folder, and those around it up to the root."""
    here, place = Path.cwd(), out.resolve()
    if place == here or place in here.parents:
        raise SourceError(
            f"{out} cannot become the result's folder",
            got="the current folder" if place == here else "a folder around the current one",
            wanted="a folder that can be replaced as a whole",
            remedy="name a new folder inside it, for example --out pruned",
        )


def _require_free(out: Path, force: bool) -> None:
    _require_own(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise SourceError(
            f"{out} exists already and is not overwritten",
            got=f"a folder of {len(list(out.iterdir()))} entries" if out.is_dir() else "a file",
            wanted="a new or empty folder",
            remedy="choose another --out, or pass --force to replace an earlier result",
        )
    if reason := _foreign(out):
        raise SourceError(
            f"{out} is not just the result of an earlier run of `twofour` and is not replaced",
            got=reason,
            wanted="a folder with nothing but what `twofour` wrote, or a new one",
            remedy="choose another --out, or move what is yours elsewhere",
        )


def require_apart(out: Path, source: Path | None) -> None:
    """Refuse an output folder that is the source, lies inside it or holds it.

    Raises:
        SourceError: It does.
    """
    if source is None:
        return
    with _writing(out):
        place, origin = out.resolve(), source.resolve()
    relation = (
        "the source itself" if place == origin
        else "a folder inside the source" if origin in place.parents
        else "a folder that holds the source" if place in origin.parents
        else None
    )  # fmt: skip
    if relation:
        raise SourceError(
            f"{out} cannot become the result's folder",
            got=f"{relation}, {source}",
            wanted="a folder apart from the source",
            remedy="choose another --out",
        )


@contextmanager
def folder(out: Path, force: bool) -> Iterator[Path]:
    """Give a temporary folder beside `out`; it becomes `out` when the block ends without an error.

    Raises:
        SourceError: As `require_free`, the place cannot be written to, or another process writes the same result.
    """
    with _place(out, force) as place, making(place, lambda made: _put(made, place, force)) as made:
        yield made


@contextmanager
def resumed(out: Path, force: bool, journal: Path) -> Iterator[Path]:
    """Give the folder in which an interrupted run goes on; it becomes `out` when the block ends without an error.

    What the block leaves there stays when it fails, for the next run; the journal is removed last.

    Raises:
        SourceError: As `require_free`, the place cannot be written to, or another process writes the same result.
    """
    with _place(out, force) as place:
        made = unfinished(place)
        yield made
        Journal.end(journal, _checksum(made))
        _put(made, place, force)
        journal.unlink(missing_ok=True)


@contextmanager
def _place(out: Path, force: bool) -> Iterator[Path]:
    """Keep the place of a result from other runs, killed ones cleared up after; it is free, and its path absolute."""
    require_free(out, force)
    out = out.absolute()  # the model's own code may change the current folder
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            _recover(out)
            _require_free(out, force)
            yield out


def unfinished(out: Path) -> Path:
    """Return the folder beside `out` in which a run that can be interrupted works."""
    return out.absolute().with_name(f"{out.name}.unfinished")


def journal_of(out: Path) -> Path:
    """Return where the journal of a result lies: beside it."""
    return out.absolute().with_name(f"{out.name}.journal.json")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep other processes from making the same result."""
    remedy = "choose another --out, or wait for the other run"
    with ExitStack() as locks:
        locks.enter_context(locked(unfinished(out), SourceError, remedy=remedy, passing=True))
        if out.is_dir():  # it may be the folder that another run filled, which stays locked until that run ends
            locks.enter_context(locked(out, SourceError, remedy=remedy))
        yield


def _recover(out: Path) -> None:
    """Clear up after runs that were killed: bring back what one of them moved aside, or remove what it replaced."""
    _forget_journal(out)
    named = re.compile(re.escape(_hidden(out)) + r"[a-z0-9_]{8}\.old")
    for aside in [path for path in out.parent.iterdir() if named.fullmatch(path.name) and not path.is_symlink()]:
        remove_left(aside, MOVED.__eq__)
        if _replacement(aside, out) is not None:
            _settle(aside, out)
        else:
            with suppress(OSError):  # one that was killed before it moved anything, or a folder of the user's
                aside.rmdir()


def _forget_journal(out: Path) -> None:
    """Remove the journal of a run whose whole result `out` is."""
    if _is_result(out, Journal.ended(journal_of(out))):
        journal_of(out).unlink(missing_ok=True)


def _put(made: Path, out: Path, force: bool) -> None:
    """Let a folder take the place of `out`; an earlier result is moved aside first and removed last.

    Whatever goes wrong in between, it comes back: here, or where the process was killed, with the next run, which knows
    it by the note beside it.
    """
    _require_free(out, force)  # the user may have put something there since the run began
    aside: Path | None = None
    try:
        if out.exists() and any(out.iterdir()):
            aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=_hidden(out), suffix=".old"))
            measure.write_json(aside / MOVED, {"out": out.name, "report": _checksum(made)})
            out.rename(aside / EARLIER)
        made.rename(out)  # takes the place of an empty folder
    finally:
        if aside is not None:
            _settle(aside, out)


def _hidden(out: Path) -> str:
    """Return how the names begin under which earlier results lie while new ones take their place."""
    return f".{out.name[:100]}.twofour-"


def _replacement(aside: Path, out: Path) -> str | None:
    """Return the checksum of the report that replaces the result moved aside; None where no run of `out` moved it."""
    try:
        note = read_json(aside / MOVED)
        return str(note["report"]) if note["out"] == out.name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _settle(aside: Path, out: Path) -> None:
    """End a move: the earlier result comes back where there is none, and goes where the new one is whole."""
    earlier, gone = aside / EARLIER, aside / GONE
    if earlier.is_dir():
        if not out.exists():
            _bring_back(earlier, out)
        elif _is_result(out, _replacement(aside, out)):
            earlier.rename(gone)  # from here on it is not whole, and does not come back
        else:
            _log.warning("%s stays, an earlier result: %s is not what was to replace it", earlier, out)
    if gone.is_dir():
        _remove_result(gone)
    if not earlier.exists() and not gone.exists():
        (aside / MOVED).unlink(missing_ok=True)
        with suppress(OSError):
            aside.rmdir()


def _checksum(folder: Path) -> str:
    return hashlib.sha256(read_bytes(folder / REPORT, LARGEST_LIST)).hexdigest()


def _is_result(out: Path, checksum: str | None) -> bool:
    """Whether a folder has the report of this checksum, and every file that the report names."""
    try:
        return (
            checksum is not None and _checksum(out) == checksum and all((out / name).is_file() for name in _files(out))
        )
    except (OSError, ValueError):
        return False


def _files(result: Path) -> set[str]:
    return set(read_json(result / REPORT, LARGEST_LIST)["files"])


def _remove_result(old: Path) -> None:
    """Remove the files that an earlier result's report names; others stay, and a warning says so."""
    names = _files(old) if (old / REPORT).exists() else set[str]()
    for name in (names - {REPORT}, {REPORT}):  # the report last: with it a killed removal goes on
        remove_known(old, name)
    if old.exists():
        _log.warning("%s stays: there are files in it that `twofour` did not write", old)


def write_report(target: Path, content: Mapping[str, Any], files: Iterable[str] | None = None) -> dict[str, Any]:
    """Write report.json last, with the names of all files of the result, and return what it holds.

    Args:
        target: The folder.
        content: What to report.
        files: What was written beside recipe and report; None: all that is there, in a folder of this run alone.
    """
    found = names_in(target) if files is None else {*files, RECIPE}
    whole = measure.without_nan({**content, "files": sorted({*found, REPORT})})
    measure.write_json(target / REPORT, whole)
    return whole


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Say of which output folder the operating system complains."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{out} cannot be written",
            got=f"{type(error).__name__}: {error}",
            wanted="the path of a new folder, in a folder that can be written to",
            remedy="choose another --out",
        ) from error


def _foreign(out: Path) -> str | None:
    """Say what shows that `out` is not exactly what `twofour` wrote, or None."""
    if not out.is_dir():
        return "a file"
    try:
        report = read_json(out / REPORT, LARGEST_LIST)
    except FileNotFoundError:
        return f"no {REPORT} in it"
    except (OSError, ValueError):
        report = None
    if not isinstance(report, dict) or not isinstance(report.get("files"), list) or "source" not in report:
        return f"a {REPORT} that `twofour` did not write"
    known = {str(name) for name in report["files"]}
    known |= {parent.as_posix() for name in known for parent in Path(name).parents}
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    unknown = [name for name in found if name not in known]
    return f"`{unknown[0]}`, which `twofour` did not write ({len(unknown)} such entries)" if unknown else None


def _bring_back(earlier: Path, out: Path) -> None:
    try:
        earlier.rename(out)
    except OSError as error:
        raise SourceError(
            f"the earlier result could not be moved back to {out}", got=str(error), remedy=f"it is whole in {earlier}"
        ) from error
