"""The GPU benchmarks: `python benchmarks/gpu.py OUT` writes one JSON record a case into the folder OUT.

A case that OUT has is not measured again, nor one that failed (NAME.failed.txt says why; remove it to try again). After
--seconds no further one begins: run it again until it says that all are there. Without a GPU it says so and ends with
exit code 0. docs/gpu.md says what is measured.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cases import gpu_products, gpu_rates, gpu_steps
from cases.gpu_products import GpuCase
from twofour.errors import TwofourError
from twofour.measure import Record, load
from twofour.native import gpu

PARTS = {
    "rates": gpu_rates.rates,
    "small": gpu_products.small,
    "compress": gpu_steps.compress,
    "blocks": gpu_steps.blocks,
    "bits": gpu_products.bits,
    "grid": gpu_products.grid,
}

console = Console(stderr=True)


def main(
    out: Annotated[Path, typer.Argument(help="Folder of the records; also of the cache, unless TWOFOUR_CACHE is set.")],
    part: Annotated[str, typer.Option(help=f"{', '.join(PARTS)}, or several, comma separated.")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="Begin no further case after this many.")] = 400.0,
    only: Annotated[str, typer.Option(help="Text that the names of cases must contain.")] = "",
) -> None:
    """Measure what is missing in OUT, and print what is there."""
    if reason := gpu.unavailable():
        typer.echo(f"the GPU benchmarks are not run: this machine {reason}")
        return
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TWOFOUR_CACHE", str(out / "cache"))
    cases = [case for name in part.split(",") for case in PARTS[name]() if only in case.name]
    begin, missing, failed = time.monotonic(), 0, 0
    for case in cases:
        path = out / f"{case.name}.json"
        broken = path.with_suffix(".failed.txt")
        if not path.exists():
            if broken.exists():
                failed += 1
                continue
            if time.monotonic() - begin > seconds:
                missing += 1
                continue
            broken.write_text("begun and not ended")  # an illegal instruction ends the process: not to be met again
            if (record := measured(case, broken)) is None:
                failed += 1
                continue
            record.save(path)
            broken.unlink()
        show(case.name, load(path)[0])
    typer.echo(f"{len(cases) - missing - failed} of {len(cases)} cases in {out}, {failed} failed, {missing} to come")


def measured(case: GpuCase, broken: Path) -> Record | None:
    """Return the record of a case, or None where it failed, and why in `broken`: one must not end the suite."""
    try:
        with torch.no_grad():
            return case.run()
    except (TwofourError, RuntimeError) as error:
        broken.write_text(f"{type(error).__name__}: {error}")
        console.print(f"[red]{case.name}: {type(error).__name__}: {str(error).splitlines()[0]}[/red]")
        return None
    finally:
        torch.cuda.empty_cache()


def show(name: str, record: Record) -> None:
    """Print one line: the best baseline, the best of the others, and their ratio."""
    others = [candidate for candidate in record.timings if candidate not in record.baseline]
    if not others or not record.baseline:
        typer.echo(f"{name}: " + ", ".join(f"{n} {1e6 * t.median:.1f} us" for n, t in record.timings.items()))
        return
    best, dense = record.fastest(others), record.fastest(record.baseline)
    joules = record.meta.get("joules")
    energy = f", energy {joules[dense] / joules[best]:.2f}" if isinstance(joules, dict) and joules.get(best) else ""
    noise = "" if record.noise is None else f", A/A {record.noise:.1%}"
    typer.echo(
        f"{name}: {dense} {1e6 * record.median(dense):.1f} us, {best} {1e6 * record.median(best):.1f} us, "
        f"ratio {record.ratio(best):.2f}{energy}{noise}"
    )


if __name__ == "__main__":
    typer.run(main)
