"""`twofour simulate`: SCALE-Sim's files in, SCALE-Sim's reports out, for a systolic array of any size."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.console import JsonFile, print_table, progress, say, write
from twofour.errors import HardwareError
from twofour.hardware import systolic
from twofour.hardware.systolic import Simulated


def simulate(
    config: Annotated[Path, typer.Argument(metavar="CFG", help="A SCALE-Sim configuration.")],
    topology: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="A SCALE-Sim list of layers (.csv).")],
    out: Annotated[Path, typer.Option("--out", "-p", metavar="DIR", help="Reports go to DIR/run_name.")] = Path(
        "results"
    ),
    form: Annotated[
        str | None, typer.Option("--input", "-i", metavar="conv|gemm", help="Form of the list; told from its rows.")
    ] = None,
    step: Annotated[
        bool, typer.Option(help="Also step every layer cycle by cycle on whole numbers and compare its product.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Simulate layers on a systolic array: cycles, use, memory traffic, in the reports of SCALE-Sim 3.0.0."""
    settings = systolic.read_settings(config)
    layers = systolic.read_topology(topology, form)
    rows: list[Simulated] = []
    cycles: list[int] = []
    with progress(f"simulating {len(layers)} layers"):
        for row in systolic.simulated(layers, settings):
            rows.append(row)
            if step:
                cycles.append(_stepped(row, settings))
    folder = systolic.write_reports(rows, settings, out)
    head = ("layer", "M x N x K", "cycles", "stalls", "mapped", "use")
    array = settings.array
    title = f"{settings.name}: {array.rows} x {array.columns} units, {array.dataflow}"
    print_table(title, head, [_cells(row, settings) for row in rows], right=range(1, 6))
    say(
        f"{sum(row.cycles for row in rows)} cycles in all, {sum(row.stalls for row in rows)} of them waiting for memory"
    )
    if ignored := _ignored(layers, settings):
        say(ignored)
    if step:
        counted = "SCALE-Sim's figure for a layer, above, is the number of its last cycle, counted from 0"
        say(f"stepped: every product exact, {sum(cycles)} cycles without stalls, as the closed form; {counted}")
    say(f"reports in {folder}")
    write(json, {"array": asdict(array), "reports": str(folder), "layers": [_row(row) for row in rows]})


def _stepped(row: Simulated, settings: systolic.Settings) -> int:
    found = systolic.step_layer(row.layer, settings)
    if not found.exact or found.cycles != row.cycles - row.stalls + 1:
        raise HardwareError(
            f"stepping `{row.layer.name}` disagrees with the closed form: a fault of twofour",
            got=f"{found.cycles} cycles, product {'exact' if found.exact else 'wrong'}",
            wanted=f"{row.cycles - row.stalls + 1} cycles and the product",
            remedy="report the configuration and the row",
        )
    return found.cycles


def _counts(settings: systolic.Settings) -> bool:
    """Whether the N:M of a row shortens its reduction."""
    return settings.representation is not None and settings.block is None


def _ignored(layers: tuple[systolic.Layer, ...], settings: systolic.Settings) -> str:
    """Say why rows with N:M were not simulated with it, "" where none was."""
    if _counts(settings) or all(layer.group == 1 for layer in layers):
        return ""
    if settings.representation is None:
        return "N:M ignored: SparsitySupport is not true in CFG"
    return "N:M of the rows ignored: with OptimizedMapping each filter draws its own"


def _cells(row: Simulated, settings: systolic.Settings) -> tuple[str, ...]:
    layer = row.layer
    sparse = f" ({layer.kept}:{layer.group})" if layer.group > 1 and _counts(settings) else ""
    size = f"{layer.m} x {layer.n} x {layer.k}{sparse}"
    return (layer.name, size, str(row.cycles), str(row.stalls), f"{row.mapping:.1f} %", f"{row.compute:.1f} %")


def _row(row: Simulated) -> dict[str, object]:
    sizes = {"layer": row.layer.name, "m": row.layer.m, "n": row.layer.n, "k": row.layer.k}
    shares = {"overall": row.overall, "mapping": row.mapping, "compute": row.compute}
    traffic = dict(zip(("inputs", "weights", "outputs"), (each.values for each in row.traffic), strict=True))
    return {**sizes, "cycles": row.cycles, "stalls": row.stalls, "whole": row.span, **shares, "traffic": traffic}
