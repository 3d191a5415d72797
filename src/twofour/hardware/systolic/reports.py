"""Reports: SCALE-Sim's files, its columns and its way of writing numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from twofour.errors import HardwareError
from twofour.files import replacing
from twofour.hardware.systolic.settings import Settings
from twofour.hardware.systolic.simulate import Simulated

Number = int | float | str

_COMPUTE = (
    "Total Cycles (incl. prefetch), Total Cycles, Stall Cycles, Overall Util %, Mapping Efficiency %, Compute Util %,"
)
_ACCESSES = "".join(
    f"{place} {kind} Start Cycle, {place} {kind} Stop Cycle, {place} {kind} {done}, "
    for place in ("SRAM", "DRAM")
    for kind, done in (("IFMAP", "Reads"), ("Filter", "Reads"), ("OFMAP", "Writes"))
).rstrip()
_SPARSE = (
    "Sparsity Representation, Original Filter Storage, New Storage (Filter+Metadata), Filter Metadata Storage, "
    "Avg FILTER Metadata SRAM BW, "
)


def texts(rows: Sequence[Simulated], settings: Settings) -> dict[str, str]:
    """Return the text of each report by its file name: compute, bandwidth, accesses, and sparse where it applies."""
    found = {
        "COMPUTE_REPORT.csv": _table(_COMPUTE, rows, _compute),
        "BANDWIDTH_REPORT.csv": _table(_bandwidth_head(settings), rows, _bandwidth),
        "DETAILED_ACCESS_REPORT.csv": _table(_ACCESSES, rows, _accesses),
    }
    if settings.representation is not None:
        name = settings.representation
        found["SPARSE_REPORT.csv"] = _table(_SPARSE, rows, lambda row: _sparse(row, name))
    return found


def write_reports(rows: Sequence[Simulated], settings: Settings, out: str | os.PathLike[str]) -> Path:
    """Write the reports into a folder named after the run and return it, as SCALE-Sim does.

    Raises:
        HardwareError: A file cannot be written.
    """
    folder = Path(out) / settings.name
    try:
        for name, text in texts(rows, settings).items():
            with replacing(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HardwareError(
            f"the reports cannot be written to {folder}",
            got=str(error),
            wanted="a folder that may be written to",
            remedy="choose another --out",
        ) from error
    return folder


def _table(head: str, rows: Sequence[Simulated], cells: Callable[[Simulated], list[Number]]) -> str:
    lines = [", ".join(map(str, (index, *cells(row)))) + "," for index, row in enumerate(rows)]
    return "\n".join([f"LayerID, {head}", *lines, ""])


def _compute(row: Simulated) -> list[Number]:
    return [row.span, row.cycles, row.stalls, row.overall, row.mapping, row.compute]


def _bandwidth_head(settings: Settings) -> str:
    metadata = "Avg FILTER Metadata SRAM BW, " if settings.representation is not None else ""
    beside = f"Avg IFMAP SRAM BW, Avg FILTER SRAM BW, {metadata}Avg OFMAP SRAM BW, "
    return beside + "Avg IFMAP DRAM BW, Avg FILTER DRAM BW, Avg OFMAP DRAM BW,"


def _bandwidth(row: Simulated) -> list[Number]:
    beside: list[Number] = [access.values / row.cycles for access in row.accesses]
    if row.storage is not None:
        beside.insert(2, row.storage.metadata / row.cycles)
    return [*beside, *(traffic.rate for traffic in row.traffic)]


def _accesses(row: Simulated) -> list[Number]:
    cells: list[Number] = []
    for found in (*row.accesses, *row.traffic):
        cells += [float(found.start), float(found.stop), found.values]
    return cells


def _sparse(row: Simulated, name: str) -> list[Number]:
    assert row.storage is not None
    found = row.storage
    return [name, found.original, found.compressed, found.metadata, found.metadata / row.cycles]
