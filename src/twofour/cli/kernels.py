"""`twofour kernels`: every kernel, available here or the reason it is not."""

from __future__ import annotations

from twofour import measure
from twofour.cli.screen import JsonFile, print_table, say, write
from twofour.kernels import rows


def kernels(json: JsonFile = None) -> None:
    """List every kernel: available here, or the reason it is not."""
    table = [(kernel, kernel.unavailable()) for kernel in rows()]
    head = ("kernel", "operation", "pattern", "dtype", "device", "needs", "here")
    print_table(
        "",
        head,
        [(k.name, k.operation, k.pattern, k.dtype, k.device, k.isa, reason or "available") for k, reason in table],
    )
    machine = measure.machine()
    count = sum(reason is None for _, reason in table)
    say(f"{count} of {len(table)} kernels can run here: {machine['cpu']}, {machine['threads']} threads")
    entries = [
        {
            "name": kernel.name,
            "operation": kernel.operation,
            "pattern": kernel.pattern,
            "dtype": kernel.dtype,
            "device": kernel.device,
            "isa": kernel.isa,
            "available": reason is None,
            "reason": reason,
        }
        for kernel, reason in table
    ]
    write(json, {"kernels": entries, "machine": machine})
