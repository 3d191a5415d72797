"""Records as tables: ratios per shape and token count with their geometric mean, and what won where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from cases import mask
from cases.columns import headed, milliseconds, show_missing
from cases.records import machine_line
from twofour.measure import Record, geometric_mean

# The token counts that one design of kernel serves: few (a decoder, a request) and many (an encoder, a batch).
RANGES = ((1, 8), (128, 512))
WIDE_SPREAD = 0.5


def show_linear(records: Sequence[Record], console: Console) -> None:
    """Print one table per thread count and cache state: best dense over best sparse, and the winners."""
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.threads, record.weights), []).append(record)
    for (threads, weights), group in groups.items():
        dtype = str(group[0].meta.get("dtype", "float32"))
        title = f"{dtype}, {threads} thread{'s'[: threads > 1]}, weights {weights}: best dense / best 2:4"
        _heading(title, console)
        console.print(_ratios(group))
        for least, most in RANGES:
            ratios = [best_ratio(record) for record in group if least <= int(str(record.meta["tokens"])) <= most]
            if ratios:
                mean = f"{geometric_mean(ratios):.2f}, worst cell {min(ratios):.2f}"
                console.print(f"{least}-{most} tokens: geometric mean {mean}", highlight=False)
    _heading("each cell", console)
    console.print(_details(records))
    _warn_if_busy(records, console)
    if any(record.cold for record in records):
        console.print(f"cold: up to {_cold(records)}", highlight=False)
    noise = sorted(record.noise or 0.0 for record in records)
    console.print(
        f"A/A noise of a cell (the fastest dense timed twice): median {noise[len(noise) // 2]:.1%}, "
        f"worst {noise[-1]:.1%}",
        highlight=False,
    )
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def show_lines(
    records: Sequence[Record], heads: Sequence[str], line: Callable[[Record], list[str]], console: Console
) -> None:
    """Print a line per cell under `heads`, of which the first two are words, then what was not built and why."""
    table = headed(heads, words=2)
    for record in records:
        table.add_row(*line(record))
    console.print(table)
    show_missing(records, lambda record: line(record)[0], console)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


MASK_COLUMNS = (
    ("mask/copy", mask.MASK, mask.COPY),
    ("compress/copy", mask.COMPRESS, mask.COPY),
    ("mask/clone", mask.MASK, mask.CLONE),
    ("compress/clone", mask.COMPRESS, mask.CLONE),
    ("topk/mask", mask.TOPK, mask.MASK),
)


def show_mask(records: Sequence[Record], console: Console) -> None:
    """Print the times of the mask, and of mask and pack in one pass, beside copying and torch.topk."""
    _heading("2:4 mask of float32 weights; compress: mask and pack in one pass", console)
    names = (mask.MASK, mask.COMPRESS, mask.COPY, mask.CLONE, mask.TOPK)
    head = ("shape", "threads", *(f"{name} ms" for name in names), *(column for column, _, _ in MASK_COLUMNS))
    table = headed((*head, "GB/s read"))
    for record in records:
        rows, columns = map(int, str(record.meta["shape"]).split("x"))
        table.add_row(
            str(record.meta["shape"]),
            str(record.threads),
            *(milliseconds(record, name, 3) for name in names),
            *(_times([record], ours, other) for _, ours, other in MASK_COLUMNS),
            f"{rows * columns * 4 / record.median(mask.MASK) / 1e9:.1f}",
        )
    console.print(table)
    _warn_if_busy(records, console)
    for threads in dict.fromkeys(record.threads for record in records):
        group = [record for record in records if record.threads == threads]
        means = ", ".join(f"{column} {_times(group, ours, other)}" for column, ours, other in MASK_COLUMNS)
        console.print(f"{threads} thread{'s'[: threads > 1]}, geometric means: {means}", highlight=False)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def _times(records: Sequence[Record], ours: str, other: str) -> str:
    """Say how many times longer `ours` takes, over the records that timed both; older ones lack compress."""
    ratios = [1 / record.ratio(ours, against=other) for record in records if {ours, other} <= record.timings.keys()]
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def sparse_names(record: Record) -> list[str]:
    """Return the names of the sparse candidates."""
    return [name for name in record.timings if name.startswith("nm_matmul")]


def best_ratio(record: Record) -> float:
    """Return best dense over best sparse."""
    return record.ratio(record.fastest(sparse_names(record)))


def _warn_if_busy(records: Sequence[Record], console: Console) -> None:
    wide = [r for r in records if max(r.spread(name) for name in (*r.baseline, r.fastest())) > WIDE_SPREAD]
    if wide:
        load = max(record.load_average or 0.0 for record in wide)
        console.print(
            f"{len(wide)} of {len(records)} cells spread more than {WIDE_SPREAD:.0%} (load average up to {load:.1f}): "
            "the machine was busy, measure them again before quoting them",
            highlight=False,
            soft_wrap=True,
        )


def _heading(text: str, console: Console) -> None:
    # A table's own title is wrapped to the table's width.
    console.print(f"\n{text}", highlight=False, soft_wrap=True, style="bold")


def _ratios(records: Sequence[Record]) -> Table:
    shapes = list(dict.fromkeys(str(record.meta["shape"]) for record in records))
    plain_name = records[0].baseline[0]
    table = headed(("tokens", *shapes, "geomean", f"to {plain_name}"))
    for tokens in sorted({int(str(record.meta["tokens"])) for record in records}):
        row = {str(record.meta["shape"]): record for record in records if record.meta["tokens"] == tokens}
        ratios = {shape: best_ratio(record) for shape, record in row.items()}
        plain = [
            r.ratio(r.fastest(sparse_names(r)), against=plain_name) for r in row.values() if plain_name in r.timings
        ]
        table.add_row(
            str(tokens),
            *(f"{ratios[shape]:.2f}" if shape in ratios else "-" for shape in shapes),
            f"{geometric_mean(ratios.values()):.2f}",
            f"{geometric_mean(plain):.2f}" if plain else "-",
        )
    return table


def _details(records: Sequence[Record]) -> Table:
    table = Table(box=None, pad_edge=False)
    head = (
        "shape",
        "weights",
        "threads",
        "tokens",
        "dense ms",
        "by",
        "2:4 ms",
        "by",
        "ratio",
        "spread",
        "A/A",
        "GFLOP/s",
    )
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index in (0, 1, 5, 7) else "right")
    for record in records:
        dense, ours = record.fastest(record.baseline), record.fastest(sparse_names(record))
        rows, columns = map(int, str(record.meta["shape"]).split("x"))
        work = 2 * rows * columns * int(str(record.meta["tokens"]))
        table.add_row(
            str(record.meta["shape"]),
            record.weights,
            str(record.threads),
            str(record.meta["tokens"]),
            f"{record.median(dense) * 1e3:.4f}",
            dense,
            f"{record.median(ours) * 1e3:.4f}",
            ours,
            f"{record.ratio(ours):.2f}",
            f"{max(record.spread(dense), record.spread(ours)):.0%}",
            f"{record.noise or 0:.0%}",
            f"{work / record.median(ours) / 1e9:.0f}",
        )
    return table


def _cold(records: Sequence[Record]) -> str:
    largest = max((record.cold for record in records if record.cold), key=lambda cold: int(str(cold["bytes_total"])))
    llc = largest["llc_bytes"]
    says = {True: "larger than", False: "SMALLER than", None: "beside an unknown"}[largest["exceeds_llc"]]  # pyright: ignore
    return (
        f"{int(str(largest['bytes_total'])) / 1e6:.0f} MB of dense weight copies, {says} the last-level cache "
        f"({f'{int(str(llc)) / 1e6:.0f} MB' if llc else '?'} reported)"
    )
