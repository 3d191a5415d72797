"""The folder of a run: what a whole run leaves there, beside its journal."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twofour import journal
from twofour.errors import OptimizeError, TwofourError, cut
from twofour.files import replacing
from twofour.journal import Journal
from twofour.progress import Progress
from twofour.report.read import PLAN
from twofour.report.read import RESULTS as RECORD

JOURNAL = "optimize.json"
MODEL, PAGE = "model.safetensors", "report.html"
RESULTS = (MODEL, PLAN, RECORD, PAGE)
"""What a whole run leaves, beside its journal."""

USUAL = {"judge dense": 5, "advise": 1, "prune": 45, "judge": 3, "time": 25, "finish": 1}
USUAL |= {"compile float32": 5, "compile bfloat16": 5, "compile int8": 6}
"""Seconds of each kind of step of MiniLM with 300 sentences and 512 pairs on one thread of a Zen 5: processor time of
a run, and the time box of the comparison. A busy machine takes a multiple of them, which its first steps show."""


def kinds_of(dtypes: Iterable[str]) -> list[str]:
    """Return the kinds of a run's steps in their order, for the types of the models that it compiles."""
    each = [kind for dtype in dtypes for kind in (f"compile {dtype}", "judge")]
    return ["judge dense", "advise", "prune", *each, "time", "finish"]


@contextmanager
def opened(folder: Path, asked: Mapping[str, Any], beside: Collection[str], display: Progress) -> Iterator[Journal]:
    """Give the journal of a run in a folder that is new or empty, or that the same run left, stopped or whole.

    Args:
        folder: The folder.
        asked: What the run is asked.
        beside: Names of further files that the run writes there.
        display: The progress to show.

    Raises:
        OptimizeError: As `journal.opened`.
    """
    names = (*RESULTS, *(Path(name).parts[0] for name in beside))
    with journal.opened(folder, JOURNAL, asked, OptimizeError, beside=names, display=display) as found:
        yield found


def of_the_moment(error: BaseException | None) -> bool:
    """Tell whether an error was caused by the disk or the memory, which may serve the next time."""
    return error is not None and (isinstance(error, OSError | MemoryError) or of_the_moment(error.__cause__))


def said_of_error(error: TwofourError) -> str:
    """Return what an error says, in a line."""
    return cut(f"{error.what}: {error.got}" if error.got else error.what, 300)


def copied(file: Path, target: Path) -> None:
    """Copy a file to another place, where a reader never sees half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        shutil.copyfile(file, temporary)
