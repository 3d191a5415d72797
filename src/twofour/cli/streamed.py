"""`twofour prune` on files: streamed where the criterion looks at the weights alone, refused where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twofour import streaming
from twofour.checkpoints import Checkpoint
from twofour.cli.console import Advance, print_table, say
from twofour.cli.options import axis_of
from twofour.cli.source import Source
from twofour.errors import SourceError
from twofour.export.file import KEY
from twofour.export.metadata import read_description
from twofour.measure.machine import free_memory_bytes
from twofour.recipe import Recipe
from twofour.streaming import Plan, Report, result_folder

GIGABYTE = 1 << 30


def plan(source: Source, recipe: Recipe, axes: Sequence[str]) -> Plan:
    """Lay the recipe over the files of a source.

    Raises:
        TwofourError: The files cannot be read, are packed, or nothing in them can be pruned as asked.
    """
    assert source.path is not None, source
    checkpoint = Checkpoint.open(source.path)
    texts = [(file, text) for file, said in checkpoint.metadata.items() if (text := said.get(KEY)) is not None]
    if packed := [name for file, text in texts for name in read_description(file, text).packed]:
        raise SourceError(
            f"{source.text} is packed already",
            got=f"{len(packed)} packed weights",
            wanted="a plain safetensors file",
            remedy="`twofour check` says what it holds",
        )
    if source.kind == "file":
        return streaming.plan_file(checkpoint, recipe, [axis_of(text) for text in axes])
    return streaming.plan_folder(checkpoint, recipe)


def prune(plan: Plan, target: Path, journal: Path, cluster: str | None, advance: Advance) -> Report:
    """Carry a plan out and say where an earlier run was gone on with."""
    report = streaming.prune(plan, target, journal=journal, cluster=cluster, progress=advance)
    if report.resumed:
        say(f"went on where an earlier run stopped: {report.resumed} of {len(plan.checkpoint.files)} files were done")
    return report


def show(report: Report) -> None:
    """Print the report, whose last line is its verdict."""
    head = ("weight", "kind", "shape", "axis", "pattern", "zeros", "|w| kept")
    print_table("", head, report.rows(), right=(3, 5, 6))
    if report.skipped:
        say("")
        print_table("", ("skipped", "reason"), report.skipped)
    say(f"\nOK: {report.summary}")


def require_axes(source: Source, include: Sequence[str] | None, axes: Sequence[str] | None) -> None:
    """Refuse a bare file without the names of its weights or their axes, and axes for anything else.

    Raises:
        SourceError: One is missing, or too much.
    """
    if source.kind != "file":
        if axes:
            raise SourceError(
                "--axis is for a bare file of weights",
                got=f"--axis for {source.text}",
                wanted="no --axis: the model says along which axis each layer sums",
            )
        return
    if include and axes:
        return
    assert source.path is not None, source
    entries = [entry for entry in Checkpoint.open(source.path).entries.values() if len(entry.shape) >= 2]
    listed = ", ".join(f"`{entry.name}` {entry.shape}" for entry in entries[:4])
    raise SourceError(
        f"{source.text} does not say which of its tensors are layers, nor along which axis they sum",
        got=f"{len(entries)} tensors of two or more axes: {listed}{', ...' if len(entries) > 4 else ''}",
        wanted='--include GLOB and --axis AXIS, for example --include "encoder.*" --axis 1',
        remedy="an embedding looks like a Linear weight in a file, and Hugging Face's Conv1D like its transpose: name "
        "what may be pruned; axis 1 for a Linear or a convolution, 0 for Conv1D; or pass the model or its folder",
    )


def require_memory(source: Source) -> None:
    """Refuse a folder whose weights cannot be in memory at once, before loading it.

    A criterion that looks at data keeps the model, the values it had before, and a mask of a byte per value.

    Raises:
        SourceError: It does not fit.
    """
    free = free_memory_bytes()
    if source.kind != "folder" or source.path is None or free is None:
        return
    entries = Checkpoint.open(source.path).entries.values()
    values = sum(entry.nbytes // of.itemsize for entry in entries if (of := entry.torch_dtype) is not None)
    need = 2 * sum(entry.nbytes for entry in entries) + values
    if need > free:
        raise SourceError(
            f"{source.text} does not fit into memory, and a criterion that looks at data needs all of it",
            got=f"{need / GIGABYTE:.1f} GB for the weights, the old weights and the masks; {free / GIGABYTE:.1f} GB "
            "are free",
            wanted="a model that fits",
            remedy='the criteria "magnitude" and "random" without --data and --permute take one tensor at a time',
        )


def written(journal: Path) -> int | None:
    """Return when a journal was last written, in ns; None where there is none."""
    return journal.stat().st_mtime_ns if journal.exists() else None


def kept(out: Path) -> str:
    """Say what an interrupted run leaves."""
    return f"finished files are kept in {result_folder.unfinished(out)}; the same command goes on from there"
