"""What `twofour prune` leaves behind: a folder that appears whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from twofour import export, layers, masks
from twofour.cli import huggingface
from twofour.cli.source import PROMISE, Source, read_metadata
from twofour.errors import SourceError

RECIPE = "recipe.toml"
WEIGHTS = "model.safetensors"


def require_free(out: Path, force: bool) -> None:
    """Refuse an output folder that holds something, before any long work.

    Raises:
        SourceError: It exists and is not empty; with `force`, it was not written by `twofour prune`.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise SourceError(
            f"{out} exists already and is not overwritten.",
            got="a file" if out.is_file() else f"a folder of {len(list(out.iterdir()))} entries",
            wanted="a new or empty folder",
            remedy="choose another --out, or pass --force to replace an earlier result",
        )
    if not (out / RECIPE).is_file():
        raise SourceError(
            f"{out} is not the result of an earlier `twofour prune` and is not replaced.",
            got=f"no {RECIPE} in it",
            wanted="a folder that `twofour prune` wrote, or a new one",
            remedy="choose another --out",
        )


@contextmanager
def folder(out: Path, force: bool) -> Iterator[Path]:
    """Give a temporary folder beside `out`; it becomes `out` when the block ends without an error.

    Raises:
        SourceError: As `require_free`, or the place cannot be written to.
    """
    require_free(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise SourceError(f"{out} cannot be written.", got=str(error)) from error
    try:
        made = temporary / "new"
        made.mkdir()
        yield made
        if out.exists():
            out.rename(temporary / "old")
        made.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_model(model: nn.Module, source: Source, target: Path) -> None:
    """Write a masked model's plain weights (zeros included), with the promise in the file's metadata."""
    if source.kind == "folder":
        assert source.path is not None, source
        path = huggingface.save(model, source.path, target)
    else:
        path = target / WEIGHTS
        save_model(model, str(path))
    weights = export.read(path).plain
    attached, promise = masks.of(model), dict[str, str]()
    for weight in layers.walk(model, eligibility="any").weights:
        names = (weight.name, *weight.aliases)
        mask = next((attached[name] for name in names if name in attached), None)
        if mask is not None:  # a tied weight is in the file under one of its names
            promise[next((name for name in names if name in weights), weight.name)] = mask.pattern.name
    write_weights(weights, promise, path, read_metadata(path))


def write_weights(
    weights: Mapping[str, Tensor], promise: Mapping[str, str], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write named weights as safetensors, with the promise in the metadata."""
    save_file(dict(weights), path, metadata={**metadata, PROMISE: json.dumps(dict(promise))})
    path.chmod(0o644)
