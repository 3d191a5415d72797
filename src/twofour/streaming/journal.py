"""The journal of a long run: what was asked, and which files are finished, so that a killed run can go on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from twofour.errors import SourceError
from twofour.files import LARGEST_LIST, json_or_none, locked, read_json, remove_left, replacing
from twofour.streaming.shard import Outcome, Written, checksum

logger = logging.getLogger("twofour.streaming")

FORMAT = 1


class Journal:
    """What a run has finished: a JSON file beside the folder that it fills, replaced as a whole after each file.

    Args:
        path: The journal.
        folder: The folder to fill.
        asked: What the run was asked to do; only a run that is asked the same goes on where another stopped.

    Attributes:
        claimed: The names of the files beside the weights.
    """

    def __init__(self, path: Path, folder: Path, asked: Mapping[str, Any]) -> None:
        self.path = path
        self.folder = folder
        self.asked = json.loads(json.dumps(asked))  # as it will be read back: lists for tuples
        self._done: dict[str, dict[str, Any]] = {}
        self.claimed: list[str] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Read what an earlier run finished and keep other processes out while the block runs.

        A run that finished no file leaves nothing; what is not ours in the folder stays, and the journal with it.

        Raises:
            SourceError: The journal belongs to another run, another process works on it, or files lie in the folder
                without a journal.
        """
        self._load(summed=False)  # refuses before anything is made
        with locked(self.folder, SourceError, remedy="choose another --out, or wait for the other run"):
            self._load(summed=True)  # another process may have gone on meanwhile
            self._write()
            remove_left(self.folder)
            try:
                yield
            finally:
                if not self._done and not any(self.folder.iterdir()):  # else something of the user's lies there
                    self.path.unlink(missing_ok=True)  # while the folder is locked: then both are the next run's
                    with suppress(OSError):
                        self.folder.rmdir()

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the finished files."""
        return tuple(self._done)

    def outcomes(self, file: str) -> tuple[Outcome, ...]:
        """Return what became of the weights of a finished file."""
        return _outcomes(self._done[file])

    def add(self, file: str, written: Written) -> None:
        """Note that a file is finished."""
        size, weights = (self.folder / file).stat().st_size, [vars(outcome) for outcome in written.outcomes]
        self._done[file] = {"bytes": size, "crc32": written.checksum, "weights": weights}
        self._write()

    @staticmethod
    def end(path: Path, checksum: str) -> None:
        """Note in a journal that the result is whole, and the checksum by which it is known where it belongs."""
        found = read_json(path, LARGEST_LIST)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({**found, "ended": checksum}))

    @staticmethod
    def ended(path: Path) -> str | None:
        """Return the checksum of the result of a run that ended; None where it did not, or the file is no journal."""
        found = json_or_none(path, LARGEST_LIST)
        whole = isinstance(found, dict) and {"format", "asked", "done", "ended"} <= found.keys()
        return str(found["ended"]) if whole else None

    def claim(self, files: Iterable[str]) -> None:
        """Note which other files are about to be written, so that none of the user's is taken for one of ours.

        Raises:
            SourceError: A file of such a name lies there, and no run has written it.
        """
        files = sorted(files)
        for file in files:
            if file not in self.claimed and os.path.lexists(self.folder / file):
                raise SourceError(
                    f"{self.folder / file} is in the way",
                    got="a file that this run and those before it did not write",
                    wanted="room for the file of that name beside the weights",
                    remedy="move it elsewhere and give the same command again: finished files are kept",
                )
        self.claimed = files
        self._write()

    def _load(self, *, summed: bool) -> None:
        if self.path.exists():
            self._read(summed)
        else:
            self._require_empty()

    def _write(self) -> None:
        content = {"format": FORMAT, "asked": self.asked, "done": self._done, "claimed": self.claimed}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(content))

    def _read(self, summed: bool) -> None:
        try:
            found = read_json(self.path, LARGEST_LIST)
            done = {file: noted for file, noted in found["done"].items() if self._is_whole(file, noted, summed)}
            for noted in done.values():
                _outcomes(noted)
            asked, claimed = found["asked"], [str(file) for file in found.get("claimed", ())]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unusable(self, f"{type(error).__name__}: {error}") from error
        if asked != self.asked or found.get("format") != FORMAT:
            keys = [key for key in self.asked if not isinstance(asked, dict) or asked.get(key) != self.asked[key]]
            raise _unusable(self, f"another {' and another '.join(keys) or 'format'}")
        self._done, self.claimed = done, claimed

    def _is_whole(self, file: str, noted: Mapping[str, Any], summed: bool) -> bool:
        """Whether a file's bytes are those that were written; journals of old had no checksums: such files are not."""
        path = self.folder / file
        if Path(file).name != file or not path.is_file() or path.stat().st_size != noted["bytes"]:
            return False
        same = "crc32" in noted and (not summed or checksum(path) == noted["crc32"])
        if not same and summed:
            why = "changed since it was written" if "crc32" in noted else "has no checksum in the journal"
            logger.warning("%s %s: it is written again", path, why)
        return same

    def _require_empty(self) -> None:
        if self.folder.exists() and any(self.folder.iterdir()):
            raise _unusable(
                self,
                f"files in {self.folder} and no journal beside it",
                remedy="move what is yours in it elsewhere, or choose another folder for the result",
            )


def _outcomes(noted: Mapping[str, Any]) -> tuple[Outcome, ...]:
    return tuple(Outcome(**{**found, "shape": tuple(found["shape"])}) for found in noted["weights"])


def _unusable(journal: Journal, got: str, remedy: str = "") -> SourceError:
    return SourceError(
        "an unfinished run with the same result cannot be gone on with",
        got=f"{journal.path}: {got}",
        wanted="the command that was stopped, on the same files and by the same release",
        remedy=remedy or f"give that command, or remove {journal.path.name} and {journal.folder.name} to start anew",
    )
