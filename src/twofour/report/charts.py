"""Charts as inline SVG: places across are per cent of the width, so that text keeps its size on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twofour.report.markup import Markup, joined, tag

ROW, BAR, TEXT = 46, 14, 15
"""Heights in pixels: of a row, of the bar in it, and where its text stands."""
LONGEST = 48
"""Letters of a name."""


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: What it is of.
        value: Its length, at least 0.
        label: The figure as text.
        ours: Whether it is drawn in the colour of ours.
        span: A range to draw over it, such as the quartiles.
    """

    name: str
    value: float
    label: str
    ours: bool = False
    span: tuple[float, float] | None = None


def bars(title: str, rows: Sequence[Bar]) -> Markup:
    """Return bars below each other, each with its name and its figure above it."""
    most = max((max(row.value, *(row.span or (0.0,))) for row in rows), default=0.0) or 1.0
    parts: list[Markup] = []
    for index, row in enumerate(rows):
        top = index * ROW
        parts.append(_name(row.name, top))
        parts.append(_text(row.label, "100%", top + TEXT, class_="figure", text_anchor="end"))
        place = {"y": top + 22, "height": BAR, "rx": 3}
        parts.append(tag("rect", x=0, width="100%", class_="track", **place))
        parts.append(
            tag("rect", x=0, width=_percent(row.value / most), class_="bar ours" if row.ours else "bar", **place)
        )
        if row.span is not None:
            low, high = row.span
            parts.append(_whisker(low / most, high / most, top + 22 + BAR / 2))
    return _svg(title, len(rows) * ROW, parts)


@dataclass(frozen=True)
class Dot:
    """One figure with its interval, which may be of no width; `ours` as of a `Bar`."""

    name: str
    value: float
    label: str
    ours: bool = False
    span: tuple[float, float] | None = None


def dots(title: str, rows: Sequence[Dot], floor: float | None = None) -> Markup:
    """Return figures as dots with their intervals, on one axis that spans them all; a mark at `floor`."""
    ends = [end for row in rows for end in (row.value, *(row.span or ()))] + ([] if floor is None else [floor])
    low, high = min(ends), max(ends)
    room = (high - low) * 0.08 or max(abs(high), 1.0) * 0.01
    low, high = low - room, high + room
    height = len(rows) * ROW

    def at(value: float) -> float:
        return (value - low) / (high - low)

    parts: list[Markup] = []
    for index, row in enumerate(rows):
        top = index * ROW
        middle = top + 29
        parts.append(_name(row.name, top))
        parts.append(_text(row.label, "100%", top + TEXT, class_="figure", text_anchor="end"))
        parts.append(tag("line", x1=0, x2="100%", y1=middle, y2=middle, class_="axis"))
        if floor is not None:
            x = _percent(at(floor))
            parts.append(tag("line", x1=x, x2=x, y1=middle - 9, y2=middle + 9, class_="floor"))
        if row.span is not None:
            parts.append(_whisker(at(row.span[0]), at(row.span[1]), middle))
        kind = "dot ours" if row.ours else "dot"
        parts.append(tag("circle", cx=_percent(at(row.value)), cy=middle, r=5, class_=kind))
    parts.append(_text(_short(low), "0", height + TEXT, class_="tick"))
    parts.append(_text(_short(high), "100%", height + TEXT, class_="tick", text_anchor="end"))
    return _svg(title, height + 22, parts)


def curves(title: str, lines: Mapping[str, Sequence[float]]) -> Markup:
    """Return lines over epochs 1, 2, ..., on one axis, with their names below."""
    values = [value for line in lines.values() for value in line]
    low, high, most = min(values), max(values), max(map(len, lines.values()))
    wide = high - low or max(abs(high), 1.0)
    drawn: list[Markup] = []
    for number, line in enumerate(lines.values()):
        points = [
            (100 * index / max(most - 1, 1), 100 - 100 * (value - low) / wide) for index, value in enumerate(line)
        ]
        if len(points) == 1:  # one epoch: a level line is seen where a point is not
            points.append((100.0, points[0][1]))
        path = " ".join(f"{x:.3f},{y:.3f}" for x, y in points)
        drawn.append(tag("polyline", points=path, class_=f"line line{number % 4}", vector_effect="non-scaling-stroke"))
    plot = tag(
        "svg", *drawn, x=0, y=22, width="100%", height=150, viewBox="0 0 100 100", preserveAspectRatio="none",
        overflow="visible",
    )  # fmt: skip
    parts = [
        _text(_short(high), "0", TEXT, class_="tick"),
        plot,
        tag("line", x1=0, x2="100%", y1=180, y2=180, class_="axis"),
        _text(f"{_short(low)}; epoch 1", "0", 196, class_="tick"),
        _text(f"epoch {most}", "100%", 196, class_="tick", text_anchor="end"),
    ]
    for number, (name, line) in enumerate(lines.items()):
        y = 204 + 20 * number
        parts.append(tag("line", x1=0, x2=18, y1=y + 10, y2=y + 10, class_=f"line line{number % 4}"))
        parts.append(_text(name, "26", y + TEXT, class_="name"))
        parts.append(_text(_short(line[-1]), "100%", y + TEXT, class_="figure", text_anchor="end"))
    return _svg(title, 210 + 20 * len(lines), parts)


def _svg(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    return tag("svg", *parts, role="img", aria_label=title, width="100%", height=round(height), class_="chart")


def _text(text: str, x: str, y: float, **attributes: object) -> Markup:
    return tag("text", text, x=x, y=round(y), **attributes)


def _name(name: str, top: float) -> Markup:
    """Return a name above its row: of a long one the middle goes, and what runs into the figure is not shown."""
    short = name if len(name) <= LONGEST else f"{name[: LONGEST // 3]}\u2026{name[-LONGEST * 2 // 3 :]}"
    text = tag("text", short, tag("title", name) if short != name else None, x=0, y=TEXT, class_="name")
    return tag("svg", text, x=0, y=round(top), width="72%", height=20, overflow="hidden")


def _whisker(low: float, high: float, y: float) -> Markup:
    left, right = _percent(low), _percent(high)
    ends = [tag("line", x1=x, x2=x, y1=y - 4, y2=y + 4, class_="span") for x in (left, right)]
    return joined([tag("line", x1=left, x2=right, y1=y, y2=y, class_="span"), *ends])


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.3f}%"


def _short(value: float) -> str:
    return f"{value:.4g}"
