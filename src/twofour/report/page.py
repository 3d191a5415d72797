"""A run as one HTML page that asks the network for nothing: its style, its script and its charts stand in it."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from twofour.errors import ReportError
from twofour.files import named, replacing, writing
from twofour.measure import Record
from twofour.report.charts import Bar, Dot, bars, curves, dots
from twofour.report.facts import described, facts_of, milliseconds, moment, size
from twofour.report.markup import Markup, joined, tag
from twofour.report.run import Layer, Quality, Run, Weight
from twofour.report.tables import Cell, number, table

MADE_BY = "<!-- twofour report -->"
"""The page's second line: a file that has it may be replaced."""

CHARTED = 6
"""Records up to which each gets a chart; more stand in one table."""
SENSITIVE = 12
"""Layers that lost most, which get a bar."""
_HERE = Path(__file__).parent


def write(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write a run's page to a file, which is replaced only where it is such a page, and only by a whole one.

    Raises:
        ReportError: The file is something else, or cannot be written.
    """
    target = named(path, ReportError)
    with writing(target, ReportError, "the report"):
        if target.exists() and (target.is_dir() or not _is_page(target)):
            raise ReportError(
                f"{target} exists already and is not overwritten",
                got="a folder" if target.is_dir() else "a file that is no report",
                wanted="a new file, or an earlier report",
                remedy="choose another --out",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_text(to_html(run), encoding="utf-8")
    return target


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(200)
    return not head or MADE_BY.encode() in head


def to_html(run: Run) -> str:
    """Return the page. Its policy lets nothing be loaded, and no script run but page.js."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src {_hashed(style)}; script-src {_hashed(script)}; img-src data:"
    sections = [(name, title, body) for name, title, make in SECTIONS if (body := make(run))]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run.title} - twofour"),
        tag("link", rel="icon", href="data:,"),
        Markup(f"<style>{style}</style>"),
    )
    links = [tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections]
    header = tag(
        "header",
        tag("p", "twofour report", f" · {moment(run.created)}" if run.created else "", class_="kicker"),
        tag("h1", run.title),
        tag("p", run.verdict, class_="verdict") if run.verdict else None,
        tag("nav", tag("ul", *links), aria_label="Sections") if len(links) > 1 else None,
    )
    main = tag("main", _tiles(run), *(_section(*section) for section in sections))
    footer = tag("footer", tag("p", "Written by twofour. This page loads nothing from the network."))
    body = tag("body", header, main, footer, Markup(f"<script>{script}</script>"))
    return f'<!doctype html>\n{MADE_BY}\n<html lang="en">\n{head}\n{body}\n</html>\n'


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _section(name: str, title: str, body: Markup) -> Markup:
    return tag("section", tag("h2", title, id=f"{name}-title"), body, id=name, aria_labelledby=f"{name}-title")


def _tiles(run: Run) -> Markup | None:
    tiles = [
        tag("div", tag("dt", label), tag("dd", figure, class_="value"), tag("dd", note, class_="soft"), class_="tile")
        for label, figure, note in run.figures
    ]
    return tag("dl", *tiles, class_="tiles") if tiles else None


def _quality(run: Run) -> Markup | None:
    return joined(_judged(quality) for quality in run.quality) if run.quality else None


def _judged(quality: Quality) -> Markup:
    def label(value: float, error: float | None) -> str:
        return f"{value:.2f}{'' if error is None else f' ± {error:.2f}'}{quality.unit and f' {quality.unit}'}"

    rows = [
        Dot(
            score.name,
            score.value,
            label(score.value, score.error),
            score.ours,
            None if score.error is None else (score.value - 1.96 * score.error, score.value + 1.96 * score.error),
        )
        for score in quality.scores
    ]
    spans = any(row.span for row in rows)
    said = [quality.said, "± is the standard error, the lines span 95 %." if spans else ""]
    said += ["The upright mark is the least that was allowed."] if quality.floor is not None else []
    cells = [
        (score.name, number(score.value, 3), number(score.error, 3), number(score.value - quality.scores[0].value, 3),
         score.note)
        for score in quality.scores
    ]  # fmt: skip
    against = f"against {quality.scores[0].name}"
    head = ("model", f"figure{quality.unit and f', {quality.unit}'}", "standard error", against, "note")
    return tag(
        "figure",
        tag("h3", quality.title),
        dots(quality.title, rows, quality.floor),
        tag("figcaption", " ".join(filter(None, said))),
        _numbers(table(head, cells)),
    )


def _times(run: Run) -> Markup | None:
    if not run.records:
        return None
    if len(run.records) > CHARTED:
        return _all_times(run.records)
    return tag("div", *map(_timed, run.records), class_="charts")


def _timed(record: Record) -> Markup:
    names = sorted(record.timings, key=record.median)
    best = record.fastest(record.baseline) if record.baseline else names[0]
    rows = [
        Bar(
            name,
            record.median(name),
            f"{milliseconds(record.median(name))} ms",
            bool(record.baseline) and name not in record.baseline,
            (record.timing(name).lower, record.timing(name).upper),
        )
        for name in names
    ]
    cells = [
        (name, number(1e3 * record.median(name), 4), number(record.median(best) / record.median(name), 2),
         number(100 * record.spread(name), 1), number(record.timing(name).samples, 0))
        for name in names
    ]  # fmt: skip
    head = ("model", "ms", f"times as fast as {best}", "spread, %", "samples")
    title = described(record)
    return tag(
        "figure",
        tag("h3", title),
        bars(f"Milliseconds: {title}", rows),
        tag("figcaption", _conditions(record)),
        _numbers(table(head, cells)),
    )


def _conditions(record: Record) -> str:
    said = f"Shorter is faster. Medians of interleaved runs, lines: quartiles; {record.threads} thread"
    said += f"{'s' * (record.threads > 1)}, {record.clock} time"
    noise = "" if record.noise is None else f"; the fastest of the others against itself: {record.noise:.1%}"
    return f"{said}{noise}."


def _all_times(records: Sequence[Record]) -> Markup:
    rows = []
    for record in records:
        theirs = record.fastest(record.baseline) if record.baseline else ""
        ours = [name for name in record.timings if name not in record.baseline]
        best = record.fastest(ours) if ours else record.fastest()
        ratio = record.ratio(best) if record.baseline else None
        rows.append(
            (described(record), Cell(theirs or "-", "text"), number(1e3 * record.median(theirs), 4) if theirs else "",
             Cell(best, "text"), number(1e3 * record.median(best), 4), number(ratio, 2))
        )  # fmt: skip
    head = ("case", "fastest of the others", "ms", "fastest of ours", "ms", "times as fast")
    return tag(
        "div", tag("p", f"{len(records)} comparisons, medians of interleaved runs.", class_="soft"), table(head, rows)
    )


def _sizes(run: Run) -> Markup | None:
    if not run.sizes:
        return None
    most = max(run.sizes.values())
    rows = [Bar(name, nbytes, size(nbytes), index > 0) for index, (name, nbytes) in enumerate(run.sizes.items())]
    return tag("div", bars("Bytes", rows)) if most else None


def _tried(run: Run) -> Markup | None:
    if not run.candidates:
        return None
    return table(("model", "what became of it"), [(name, Cell(said, "text")) for name, said in run.candidates])


def _layers(run: Run) -> Markup | None:
    if not run.layers:
        return tag("div", tag("pre", run.plan), class_="scroll") if run.plan else None
    whole = [layer for layer in run.layers if not layer.parts]
    sparse = sum(layer.sparse for layer in whole)
    lost = sorted((layer for layer in run.layers if layer.loss is not None), key=lambda layer: -(layer.loss or 0.0))
    return joined(
        [
            tag("p", f"{sparse} of {len(whole)} layers run sparse."),
            _layer_table(run.layers),
            _sensitivity(lost) if lost else None,
        ]
    )


def _layer_table(layers: Sequence[Layer]) -> Markup:
    head = ("layer", "kind", "shape", "runs", "dense ms", "sparse ms", "times as fast", "error", "why", "kernel")
    rows = [
        (
            Cell(layer.name or "(model)", "name"),
            layer.kind,
            Cell("x".join(map(str, layer.shape)), "", str(_product(layer.shape))),
            "sparse" if layer.sparse else "dense",
            number(layer.dense_ms, 4),
            number(layer.sparse_ms, 4),
            number(layer.dense_ms / layer.sparse_ms if layer.dense_ms and layer.sparse_ms else None, 2),
            number(layer.loss, 3),
            Cell(layer.reason, "text"),
            Cell(layer.kernel, "name"),
        )
        for layer in layers
    ]
    return table(head, rows, marked=[layer.sparse for layer in layers])


def _product(shape: Sequence[int]) -> int:
    values = 1
    for length in shape:
        values *= length
    return values


def _sensitivity(lost: Sequence[Layer]) -> Markup:
    shown = lost[:SENSITIVE]
    rows = [Bar(layer.name, layer.loss or 0.0, f"{layer.loss:.3f}", True) for layer in shown]
    title = "Sensitivity: what pruning changed of each layer's output"
    more = f" The {len(shown)} most sensitive of {len(lost)}." if len(lost) > len(shown) else ""
    return tag(
        "figure",
        tag("h3", title),
        bars(title, rows),
        tag("figcaption", f"Norm of the change over the norm of the output, on the calibration data.{more}"),
    )


def _masks(run: Run) -> Markup | None:
    if not run.weights:
        return None
    sparse = [weight for weight in run.weights if weight.pattern]
    kept = sum(weight.kept for weight in sparse)
    said = f"{kept} of {len(sparse)} masks are kept in every group; {len(run.weights) - len(sparse)} weights are dense."
    return joined([tag("p", said), _numbers(_mask_table(run.weights), "All weights")])


def _mask_table(weights: Sequence[Weight]) -> Markup:
    rows = [
        (Cell(weight.name, "name"), weight.pattern or "-", number(100 * weight.zeros, 1), Cell(weight.verdict, "text"))
        for weight in weights
    ]
    return table(("weight", "promised", "zeros, %", "verdict"), rows, marked=[bool(w.pattern) for w in weights])


def _training(run: Run) -> Markup | None:
    if not run.curves:
        return None
    drawn = [tag("figure", tag("h3", curve.title), curves(curve.title, curve.lines)) for curve in run.curves]
    return tag("div", *drawn, class_="charts")


def _loading(run: Run) -> Markup | None:
    return tag("pre", run.loading, tabindex=0) if run.loading else None


def _rests(run: Run) -> Markup | None:
    facts = facts_of(run.machine)
    if not facts and not run.notes:
        return None
    listed = joined(joined([tag("dt", name), tag("dd", value)]) for name, value in facts)
    return joined([*(tag("p", note) for note in run.notes), tag("dl", listed, class_="facts") if facts else None])


def _numbers(inside: Markup, said: str = "Numbers") -> Markup:
    return tag("details", tag("summary", said), inside)


SECTIONS: tuple[tuple[str, str, Callable[[Run], Markup | None]], ...] = (
    ("quality", "Quality", _quality),
    ("time", "Time", _times),
    ("size", "Size", _sizes),
    ("tried", "What was tried", _tried),
    ("layers", "Layers", _layers),
    ("masks", "Masks", _masks),
    ("training", "Training", _training),
    ("load", "Load it", _loading),
    ("machine", "Machine", _rests),
)
"""Parts of the page in their order: its anchor, its heading, and what makes it of a run; None leaves it out."""
