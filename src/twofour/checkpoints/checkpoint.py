"""A checkpoint on disk: one safetensors file, or a Hugging Face folder with one file or an index of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from twofour.checkpoints.configuration import CONFIG
from twofour.checkpoints.entry import ENTRIES, Entry, as_memory, opened, read_header
from twofour.checkpoints.promise import Promise, read_promise
from twofour.checkpoints.settled import settled
from twofour.errors import FormatError, cut
from twofour.files import LARGEST_LIST, read_json, unreadable

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".chkp", ".tar")
"""Endings of files that torch.save writes."""

_REMEDIES = {
    ".onnx": "ONNX is an output format, which only `check` reads: name the model that the file was exported from",
    ".json": "name the folder that holds it: an index and a config.json are read with the weights beside them",
    ".toml": "a recipe says how to prune, and is no model: name the model, or its folder",
    **dict.fromkeys(
        PICKLED,
        "a pickled checkpoint can run code when loaded: write it with safetensors.torch.save_file, "
        "or `twofour import` it if its weights are sparse",
    ),
}
"""What to do with files that are no weights here, by their endings."""
LONGEST_NAME = 255
"""Bytes of a file's name: what file systems take, and the system's error is no answer to an index."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Named tensors in one file or several, known from the files' headers.

    Attributes:
        path: The file, or the folder.
        files: The safetensors files, in the order of their names.
        entries: The tensors by name, file by file in the order of their bytes.
        metadata: The free text in each file's header.
        config: The folder's config.json, which tells what the tensors are; None for a bare file.
    """

    path: Path
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    metadata: Mapping[Path, Mapping[str, str]]
    config: Path | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the headers of a .safetensors file or of a folder's, and check that they belong together.

        A folder holds model.safetensors or, where that is missing, model.safetensors.index.json and the files it names,
        as `from_pretrained` reads it. The path of an index stands for the files it names, whatever lies beside it.

        Raises:
            FormatError: Nothing is there, a file is truncated or malformed, or the index and the files disagree.
        """
        return settled(path, (WEIGHTS, INDEX), lambda: cls._found(Path(path)))

    @classmethod
    def open_all(
        cls, path: str | os.PathLike[str], *, mapped: bool = False
    ) -> tuple[Checkpoint, dict[Path, dict[str, Tensor]]]:
        """Open a file or folder and read all its tensors, of one save where another process saves it again meanwhile.

        Args:
            path: The file or folder.
            mapped: Whether large tensors may stand on the files' own pages.

        Raises:
            FormatError: As `open` and `read_all`, or it is saved again and again.
        """

        def read() -> tuple[Checkpoint, dict[Path, dict[str, Tensor]]]:
            found = cls._found(Path(path))
            return found, found.map_all() if mapped else found.read_all()

        return settled(path, (WEIGHTS, INDEX), read)

    @classmethod
    def _found(cls, path: Path) -> Checkpoint:
        try:
            return cls._placed(path)
        except OSError as error:  # a folder that may not be looked into, a path that is too long
            raise unreadable(path, error, ".safetensors") from error

    @classmethod
    def _placed(cls, path: Path) -> Checkpoint:
        indexed = path.name == INDEX and path.is_file()
        path = path.parent if indexed else path
        if not path.is_dir():
            return _opened(path, (path,), None)
        config = path / CONFIG if (path / CONFIG).is_file() else None
        if (path / WEIGHTS).is_file() and not indexed:
            return _opened(path, (path / WEIGHTS,), config)
        if not (path / INDEX).is_file():
            raise _no_weights(path)
        places = read_index(path / INDEX)
        files = tuple(path / name for name in sorted(set(places.values())))
        if missing := [file.name for file in files if not file.is_file()]:
            raise _disagree("file", path, f"{len(missing)} files that it names are not there, such as {missing[0]}")
        found = _opened(path, files, config)
        _require_agreement(path, places, found.entries)
        return found

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory; see `Entry.read`.

        Raises:
            FormatError: There is no such tensor, or it cannot be read.
        """
        if name not in self.entries:
            raise FormatError(
                "there is no such tensor",
                got=f"`{name}`",
                wanted=f"one of {len(self.entries)} names, such as {', '.join(list(self.entries)[:3])}",
            )
        return self.entries[name].read()

    def read_all(self) -> dict[Path, dict[str, Tensor]]:
        """Read all tensors into memory, each into its own, so that each goes when nothing needs it any more.

        Raises:
            FormatError: torch has no type for a tensor, or a file cannot be read or changes meanwhile.
        """
        return {path: self._tensors(path, mapped=False) for path in self.files}

    def map_all(self) -> dict[Path, dict[str, Tensor]]:
        """Return all tensors as `read_all` does, large ones on pages of their files that processes share.

        They keep their values whatever becomes of the files. A file that the system does not guard is read, and the log
        says why (`twofour.native.mapped`).

        Raises:
            FormatError: As `read_all`.
        """
        return {path: self._tensors(path, mapped=True) for path in self.files}

    def _tensors(self, path: Path, *, mapped: bool) -> dict[str, Tensor]:
        with opened(path) as file:
            entries = [entry for entry in self.entries.values() if entry.file == path]
            pages = as_memory(path, file, entries) if mapped else None
            return {entry.name: entry.read_from(file, pages) for entry in entries}

    @cached_property
    def promise(self) -> Promise:
        """What the metadata of all files promise of the tensors.

        Raises:
            FormatError: A promise is malformed.
        """
        said = self.promises.values()
        patterns = {name: text for one in said for name, text in one.patterns.items()}
        return Promise(patterns, {name: axis for one in said for name, axis in one.axes.items()})

    @cached_property
    def promises(self) -> dict[Path, Promise]:
        """What each file's metadata promises.

        Raises:
            FormatError: A promise is malformed.
        """
        return {file: read_promise(text, file) for file, text in self.metadata.items()}

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors take."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def largest(self) -> int:
        """How many bytes the largest tensor takes."""
        return max((entry.nbytes for entry in self.entries.values()), default=0)


def read_index(path: Path) -> dict[str, str]:
    """Read which file each tensor lies in.

    Raises:
        FormatError: The index cannot be read, is no such index, or names something other than a file beside it.
    """
    try:
        found = read_json(path, LARGEST_LIST)
    except (OSError, ValueError) as error:
        raise _malformed("json", path, f"{type(error).__name__}: {error}") from error
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not places:
        raise _malformed("map", path, "no `weight_map`, or an empty one")
    if len(places) > ENTRIES:
        raise _malformed("map", path, f"{len(places)} tensors, at most {ENTRIES} are read")
    for name, file in places.items():
        if not isinstance(file, str):
            raise _malformed("place", path, f"the file of `{cut(name, 80)}` is {cut(repr(file), 40)}")
        if not _may_lie_beside(file):
            raise _malformed(
                "place",
                path,
                f"`{cut(name, 80)}` lies in {cut(repr(file), 120)}, which is no .safetensors file beside it",
            )
    return places


def _may_lie_beside(file: str) -> bool:
    """Tell whether a text is the name of a .safetensors file, and of nothing in another folder."""
    short = len(file.encode("utf-8", "surrogatepass")) <= LONGEST_NAME
    return short and file.endswith(".safetensors") and Path(file).name == file and "\\" not in file and "\0" not in file


def _opened(path: Path, files: tuple[Path, ...], config: Path | None) -> Checkpoint:
    headers = {file: read_header(file) for file in files}
    entries: dict[str, Entry] = {}
    for header in headers.values():
        for entry in header.entries:
            first = entries.setdefault(entry.name, entry)
            if first is not entry:
                raise _disagree("twice", path, f"`{entry.name}` lies in {first.file.name} and in {entry.file.name}")
    return Checkpoint(path, files, entries, {file: header.metadata for file, header in headers.items()}, config)


def _require_agreement(path: Path, places: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for name, file in places.items():
        entry = entries.get(name)
        if entry is None:
            raise _disagree("tensor", path, f"it says that `{name}` lies in {file}, which does not hold it")
        if entry.file.name != file:
            raise _disagree("other", path, f"it says that `{name}` lies in {file}; it lies in {entry.file.name}")
    if foreign := [name for name in entries if name not in places]:
        entry = entries[foreign[0]]
        raise _disagree(
            "foreign",
            path,
            f"{len(foreign)} tensors of the files are not in it, such as `{entry.name}` of {entry.file.name}",
        )


def _malformed(part: str, path: Path, got: str) -> FormatError:
    return FormatError(
        "the index of a checkpoint is malformed",
        got=f"{path}: {got}",
        wanted='an object with "weight_map": tensor names and the files beside it that hold them',
        remedy="download it again, or save the model again with save_pretrained",
        code=f"index-{part}",
    )


def _disagree(part: str, path: Path, got: str) -> FormatError:
    return FormatError(
        f"the index and the files of {path} disagree",
        got=got,
        wanted="each tensor in exactly one file, the one that the index names",
        remedy="an incomplete download or files of two checkpoints in one folder are the usual causes: fetch it anew",
        code=f"index-{part}",
    )


def _no_weights(path: Path) -> FormatError:
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    return FormatError(
        f"{path} holds no weights that can be read",
        got=", ".join(others[:4]) or "no file of weights",
        wanted=f"{WEIGHTS}, or {INDEX} and the files it names",
        remedy="a pickled checkpoint can run code when loaded: load it where you trust it and save_pretrained",
        code="no-weights",
    )


def remedy_for(path: Path, accepted: str) -> str:
    """Say what to do with a file that is not of an accepted kind."""
    return _REMEDIES.get(path.suffix.lower(), f"name {accepted}")
