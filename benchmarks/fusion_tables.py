"""Records of the cases `fusion` and `algebra` as Markdown for docs/benchmarks.md; of ratios lower is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cases import algebra, fusion
from cases.models import DENSE, EAGER, INDUCTOR, OPENVINO, ORT, SPARSE
from twofour.measure import Record, geometric_mean

PEERS = (EAGER, INDUCTOR, ORT, OPENVINO)
RATIOS = ("dense / best", "close / best", "2:4 / best", "2:4 close / best")


def of_fusion(records: Sequence[Record]) -> str:
    """Return milliseconds of every runtime, ours over the best peer, and our kernels over the fewer of theirs."""
    columns = (*PEERS, DENSE, fusion.CLOSE, SPARSE, fusion.SPARSE_CLOSE)
    head = ["eight models, float32, one thread", *(f"{name}, ms" for name in columns), *RATIOS, "kernels", "bytes"]
    found = [fusion.figures(record) for record in records]
    lines = [[str(r.meta["model"]), *_ms(r, columns), *_ratios(f)] for r, f in zip(records, found, strict=True)]
    means = {name: [value for f in found if (value := f[name])] for name in (*RATIOS, "kernels", "bytes")}
    mean = [f"**{geometric_mean(values):.2f}**" if values else "-" for values in means.values()]
    return markdown([head, *lines, ["geometric mean", *[""] * len(columns), *mean]])


def of_algebra(records: Sequence[Record]) -> str:
    """Return milliseconds of every runtime, and each peer's over ours: how many times as fast ours is."""
    head = ["blocks that algebra shortens", *(f"{name}, ms" for name in (*PEERS, algebra.EXACT, algebra.CLOSE))]
    head += [f"{name} / exact" for name in PEERS[1:]]
    times = {name: [_over(record, name) for record in records] for name in PEERS[1:]}
    lines = [
        [str(r.meta["model"]), *_ms(r, (*PEERS, algebra.EXACT, algebra.CLOSE))]
        + [f"{times[name][at]:.2f}" if times[name][at] else "-" for name in PEERS[1:]]
        for at, r in enumerate(records)
    ]
    mean = [f"**{geometric_mean([v for v in times[name] if v]):.2f}**" for name in PEERS[1:]]
    return markdown([head, *lines, ["geometric mean", *[""] * 6, *mean]])


def _over(record: Record, name: str) -> float | None:
    both = name in record.timings and algebra.EXACT in record.timings
    return record.median(name) / record.median(algebra.EXACT) if both else None


def _ms(record: Record, names: Sequence[str]) -> list[str]:
    return [f"{record.median(name) * 1e3:.2f}" if name in record.timings else "-" for name in names]


def _ratios(found: Mapping[str, float | None]) -> list[str]:
    return [f"{value:.2f}" if (value := found[name]) else "-" for name in (*RATIOS, "kernels", "bytes")]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table; the first line is its head."""
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in rows)
