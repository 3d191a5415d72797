"""What lies beside a checkpoint's weights: tokenizer, configuration and other files, which a sparse copy keeps."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from twofour.errors import SourceError
from twofour.files import is_temporary

FOREIGN = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.h5"),
    *("*.onnx", "*.onnx_data", "*.onnx.data", "*.msgpack", "*.gguf"),
)
"""Files beside a checkpoint that hold weights, which would stay dense: they are not copied."""

LONGEST = 120
"""Letters of a path that a message shows."""


def companions(source: Path) -> dict[str, Path]:
    """Return a folder's files but for those that hold weights: path inside the folder -> where the bytes lie.

    A link is followed inside the folder and, in a snapshot of the hub's cache, to the blobs beside it; what it points
    to elsewhere is not of this checkpoint, and would be given away with the copy.

    Raises:
        SourceError: A link leads out of the folder, nowhere or in a circle, or an entry is no plain file.
        OSError: A folder cannot be listed.
    """
    real = source.resolve()
    roots = [real, *([real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [])]
    found: dict[str, Path] = {}
    reached, left = {real}, [""]
    while left:
        inside = left.pop()
        for name in sorted(os.listdir(source / inside)):
            path = Path(inside, name)
            if is_temporary(name) or any(path.match(pattern) for pattern in FOREIGN):
                continue
            place = _place(source, path, roots)
            if not place.is_dir():
                found[path.as_posix()] = place
                continue
            if place in reached:
                raise _refused(source, path, "a link to a folder that is in the checkpoint already")
            reached.add(place)
            left.append(path.as_posix())
    return found


def copy_companions(found: Mapping[str, Path], folder: Path) -> None:
    """Copy what `companions` found into a folder, over what an interrupted run left there."""
    for name, place in found.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # it may be read-only
        shutil.copy2(place, target)


def _place(source: Path, path: Path, roots: list[Path]) -> Path:
    """Return where the bytes of an entry lie."""
    try:
        place = (source / path).resolve(strict=True)
        mode = place.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: how older Pythons say that links go round
        raise _refused(
            source, path, "a link that leads nowhere or in a circle, or an entry without permission"
        ) from error
    if not any(place.is_relative_to(root) for root in roots):
        raise _refused(source, path, f"a link out of the folder, to {str(place)[:LONGEST]}")
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise _refused(source, path, "a pipe, a socket or a device")
    return place


def _refused(source: Path, path: Path, got: str) -> SourceError:
    return SourceError(
        f"{source} holds something that cannot be copied beside the sparse weights",
        got=f"`{str(path)[:LONGEST]}`: {got}",
        wanted="plain files and folders, and links inside the folder",
        remedy="remove it, or put a copy of what it points to in its place",
    )
