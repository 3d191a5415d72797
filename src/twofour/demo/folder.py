"""The folder of a demo's results: new, or left by the same command when it was stopped."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twofour import measure
from twofour.errors import DataError, cut
from twofour.files import is_temporary, json_or_none, locked, remove_left

RESULTS = (
    "model.safetensors",
    "records.json",
    "recipe.toml",
    "plan.json",
    "summary.json",
    "summary.txt",
    "report.html",
)
UNFINISHED = "unfinished.json"
"""Says what the run was asked, from its start to its end."""


@contextmanager
def run_folder(out: str | Path | None, asked: Mapping[str, Any]) -> Iterator[Path]:
    """Give the folder that the run writes into; a run that was stopped starts again in its own.

    Args:
        out: New or empty folder, or one that the same run left unfinished; runs/demo-<data>-<time> when None.
        asked: The run's arguments, JSON-ready, with its "data".

    Raises:
        DataError: The folder holds something else or another run's files, another process writes there, or it cannot
            be made.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(out) if out is not None else Path("runs") / f"demo-{asked['data']}-{stamp}"
    with locked(folder, DataError, remedy="pass another out, or wait for the other run"):
        _require_own(folder, asked)
        measure.write_json(folder / UNFINISHED, asked)
        remove_left(folder, lambda name: name in RESULTS)
        yield folder
        (folder / UNFINISHED).unlink(missing_ok=True)


def _require_own(folder: Path, asked: Mapping[str, Any]) -> None:
    found = {path.name for path in folder.iterdir() if not is_temporary(path.name)}
    if UNFINISHED not in found:
        if found:
            raise DataError(
                f"the folder {folder} is not empty, and earlier results are never overwritten",
                wanted="a new or an empty folder",
                remedy="pass another out, or none for runs/demo-<data>-<time>",
            )
        return
    if (stored := json_or_none(folder / UNFINISHED)) != asked:
        raise DataError(
            f"the folder {folder} holds another run of the demo, which was stopped",
            got=f"{UNFINISHED}: {cut(json.dumps(stored), 200)}",
            wanted=f"the same run: {json.dumps(asked)}",
            remedy="give the command that was stopped, or pass another out",
        )
