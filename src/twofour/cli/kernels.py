"""`twofour kernels`: every kernel, available here or the reason it is not, and the threads they run on."""

from __future__ import annotations

from dataclasses import asdict

from twofour import measure, native
from twofour.cli.console import JsonFile, print_table, say, write
from twofour.kernels.table import listing

_BACKENDS = {
    "openmp": "on torch's own OpenMP pool",
    "torch": "on torch's own pool",
    "own": "on a pool of their own, since torch's cannot serve",
}

AVAILABLE = {True: "available", False: "available, not measured"}
"""What is said of a kernel that can run here, by whether its speed was measured."""


def kernels(json: JsonFile = None) -> None:
    """List every kernel: available here, or the reason it is not; and how many threads they run on."""
    table = listing()
    head = ("kernel", "operation", "pattern", "dtype", "device", "needs", "here")
    print_table(
        "",
        head,
        [(k.name, k.operation, k.pattern, k.dtype, k.device, k.isa, k.reason or AVAILABLE[k.measured]) for k in table],
    )
    machine, threads, backend = measure.machine(), native.threads(), native.threads_backend()
    say(f"kernels run on {threads} thread{'s'[: threads > 1]}: {_BACKENDS[backend]}")
    count = sum(kernel.reason is None for kernel in table)
    say(f"{count} of {len(table)} kernels can run here: {machine['cpu']}, {native.isa_text()}")
    entries = [{**asdict(kernel), "available": kernel.reason is None} for kernel in table]
    write(json, {"kernels": entries, "threads": {"backend": backend, "count": threads}, "machine": machine})
