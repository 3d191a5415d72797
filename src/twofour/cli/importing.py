"""`twofour import`: another library's sparse checkpoint in, a folder that every tool reads out."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from twofour import checker, importing
from twofour.checker import Report
from twofour.checkpoints import CONFIG, WEIGHTS
from twofour.cli import check as check_command
from twofour.cli.console import JsonFile, progress, say, write
from twofour.cli.options import Folder
from twofour.errors import FormatError
from twofour.export.file import untie
from twofour.export.plain import write_plain
from twofour.files import read_json, replacing
from twofour.importing import Imported
from twofour.streaming import result_folder
from twofour.streaming.companions import companions, copy_companions

FOREIGN = ("quantization_config", "compression_config")
"""Entries of config.json that would have a library look for its own format again."""


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file or folder that another library wrote.")],
    out: Folder,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its format; default: told by the names of its tensors.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Write our packed form, for twofour.load, instead of plain weights.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the result of an earlier import or prune.")] = False,
    json: JsonFile = None,
) -> None:
    """Read another library's sparse checkpoint; write weights and report.json to DIR."""
    result_folder.require_free(out, force)
    path = Path(source).expanduser()
    result_folder.require_apart(out, path)
    with result_folder.folder(out, force) as target:
        with progress(f"importing {source}"):
            imported = importing.decode(path, format=format)
            if path.is_dir():
                _write_companions(path, target)
            report = _write(imported, target / WEIGHTS, packed)
        head = {"source": source, "out": str(out), "format": imported.format, "notes": list(imported.notes)}
        content = result_folder.write_report(target, {**head, **report.to_dict()})
    check_command.show(report)
    for note in imported.notes:
        say(note)
    low = f" and {len(imported.low_bits)} of low bits" if imported.low_bits else ""
    say(f"{imported.format}: {len(imported.sparse)} sparse weights{low} of {source} in {out}")
    write(json, content)
    if not report.ok:
        raise typer.Exit(check_command.BROKEN)


def _write(imported: Imported, path: Path, packed: bool) -> Report:
    """Write the weights and say of what was written whether it is what it is said to be."""
    axes, weights = {name: found.axis for name, found in imported.sparse.items()}, imported.weights()
    if packed:
        importing.write(imported, path)
    else:
        stored, aliases = untie(weights)  # safetensors takes no two names of one tensor
        copies = {alias: stored[name].clone() for alias, name in aliases.items()}
        write_plain(path, {**stored, **copies}, imported.patterns, axes)
    held = {name: weights[name].float() for name in (*imported.sparse, *imported.low_bits)}
    return checker.check_weights(held, expect=imported.patterns, axes=axes, widths=imported.widths)


def _write_companions(folder: Path, target: Path) -> None:
    """Copy what stands beside the weights, config.json without the foreign format."""
    copy_companions(companions(folder), target)
    if (target / CONFIG).is_file():
        try:
            config = dict(read_json(target / CONFIG))
        except (OSError, ValueError, TypeError) as error:
            raise FormatError(
                "the folder's config.json cannot be read", got=str(error), wanted="a JSON object"
            ) from error
        plain = {key: value for key, value in config.items() if key not in FOREIGN}
        with replacing(target / CONFIG) as temporary:  # the copy is read-only where the original is
            temporary.write_text(json_text.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
