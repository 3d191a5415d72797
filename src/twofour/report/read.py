"""RUN: what a command left, a folder or a file of JSON, as a `Run`; its values are anybody's and are checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twofour import measure
from twofour.errors import MeasureError, ReportError
from twofour.files import LARGEST_LIST, json_or_none, named, read_json
from twofour.measure import Record
from twofour.measure.record import FORMAT
from twofour.report.facts import milliseconds, size
from twofour.report.run import Curve, Layer, Quality, Run, Score, Weight

RESULTS, PLAN, SUMMARY, TRAINING, RECORDS = "results.json", "plan.json", "summary.json", "training.json", "records.json"
"""Files of a folder: of `optimize`, the plan of both, of `demo`, what `finetune` returned, records."""
PRUNED = "report.json"
"""Of `prune`: what it left of each weight."""
FORMS = (
    f"a folder of `twofour optimize` ({RESULTS}), of `twofour demo` ({SUMMARY}), of `twofour prune` ({PRUNED}) or with "
    f"the records of benchmarks; or such a file, what `--json` of `twofour check` wrote, or `finetune(...).to_dict()` "
    f"as JSON ({TRAINING})"
)
MOST_FILES, MOST_NOTES = 200, 40
"""Files of records that are read of one folder, and weights that stay dense of which a page says why."""


def read(path: str | os.PathLike[str]) -> Run:
    """Read a run.

    Args:
        path: A folder or a file, as `FORMS` says.

    Raises:
        ReportError: There is nothing of these forms, or it is malformed.
    """
    place = named(path, ReportError)
    try:
        if not place.exists():
            raise _nothing(place, "no such file or folder")
        return _folder(place) if place.is_dir() else _file(place, place.parent)
    except OSError as error:
        raise _nothing(place, str(error)) from error


def _folder(place: Path) -> Run:
    for name in (RESULTS, SUMMARY, TRAINING, RECORDS, PRUNED):
        if (place / name).is_file():
            return _file(place / name, place)
    files = sorted(place.glob("*.json"))[:MOST_FILES]
    records = [record for file in files for record in _records_of(file)]
    if not records:
        inside = ", ".join(sorted(entry.name for entry in place.iterdir())[:8]) or "nothing"
        raise _nothing(place, f"a folder with {inside}")
    return _of_records(place.name, records)


def _file(place: Path, folder: Path) -> Run:
    try:
        content = read_json(place, LARGEST_LIST)
    except ValueError as error:
        raise _nothing(place, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, Mapping):
        raise _nothing(place, f"JSON: a {type(content).__name__}")
    layers = json_or_none(folder / PLAN, LARGEST_LIST)
    try:
        if content.get("format") == FORMAT:
            records = measure.load(place)
            if records[0].meta.get("case") == "optimize":
                return _of_optimize(records, layers)
            return _of_records(place.stem, records)
        if {"accuracy", "latency", "training"} <= set(content):
            return _of_demo(content, layers)
        if {"sparse", "control", "seed"} <= set(content):
            return Run(f"Training: {place.stem}", curves=_curves(content), quality=_trained(content))
        if {"ok", "summary", "layers"} <= set(content):
            return _of_weights(content)
    except MeasureError as error:
        raise _malformed(place, str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise _malformed(place, f"{type(error).__name__}: {error}") from error
    raise _nothing(place, f"JSON with {', '.join(map(str, list(content)[:8])) or 'nothing in it'}")


def _records_of(file: Path) -> list[Record]:
    """Return the records of a file, none of one that holds other things."""
    try:
        return measure.load(file)
    except MeasureError:
        return []


def _of_records(name: str, records: list[Record]) -> Run:
    first = records[0]
    ratios = [record.ratio(best) for record in records if (best := _fastest_of_ours(record)) and record.baseline]
    figures = [("comparisons", str(len(records)), "medians of interleaved runs")]
    if ratios:
        mean = measure.geometric_mean(ratios)
        figures.append(("geometric mean", f"{mean:.2f}x", "ours against the fastest of the others"))
        figures.append(("least and most", f"{min(ratios):.2f}x - {max(ratios):.2f}x", "of the single comparisons"))
    notes = tuple(dict.fromkeys(record.note for record in records if record.note))
    return Run(
        f"Benchmark: {name}",
        figures=tuple(figures),
        records=tuple(records),
        notes=notes,
        machine=first.machine,
        created=first.created,
    )


def _fastest_of_ours(record: Record) -> str | None:
    ours = [name for name in record.timings if name not in record.baseline]
    return record.fastest(ours) if ours else None


def _of_optimize(records: list[Record], plan: object) -> Run:
    meta = records[0].meta
    losses = {str(name): _real(value) for name, value in _mapping(meta.get("losses", {})).items()}
    return Run(
        title=f"Optimised: {meta['model']}",
        verdict=str(meta.get("verdict", "")),
        figures=tuple((str(a), str(b), str(c)) for a, b, c in _list(meta.get("figures", []))),
        quality=tuple(map(_quality, _list(meta.get("quality", [])))),
        records=tuple(records),
        sizes=_sizes(meta.get("sizes", {})),
        candidates=tuple((str(name), str(said)) for name, said in _mapping(meta.get("candidates", {})).items()),
        layers=_layers(plan, losses),
        weights=_weights(meta.get("weights", [])),
        loading=str(meta.get("loading", "")),
        notes=tuple(map(str, _list(meta.get("notes", [])))),
        machine=records[0].machine,
        created=records[0].created,
    )


def _of_demo(content: Mapping[str, Any], plan: object) -> Run:
    records = tuple(map(Record.from_dict, _mapping(content["latency"]).values()))
    apart = _mapping(content["sparse_minus_control"])
    difference = f"{100 * _real(apart['value']):+.2f} ± {100 * _real(apart['standard_error']):.2f} points"
    said = f"{content['test_images']} held-out images; 2:4 minus its control, image by image: {difference}."
    ratio, fastest = max(((record.ratio("ours"), record) for record in records), key=lambda pair: pair[0])
    sizes, accuracy = _sizes(content["bytes"]), _real(_mapping(content["accuracy"])["sparse"])
    figures = (
        ("times as fast", f"{ratio:.2f}x", f"against the best dense, {_batch(fastest)}"),
        ("accuracy", f"{100 * accuracy:.2f} %", f"{difference} against the control"),
        ("checkpoint", size(sizes["packed"]), f"dense: {size(sizes['dense'])}"),
    )
    verdict = (
        f"2:4 answers {milliseconds(fastest.median('ours'))} ms a call at {_batch(fastest)}, {ratio:.2f} times as "
    )
    verdict += f"fast as the best dense kernels; accuracy {difference} against the dense model trained as long."
    if content.get("quick"):
        verdict += " The network was too small to judge by (quick)."
    return Run(
        title=f"Demo on {content['data']}",
        verdict=verdict,
        figures=figures,
        quality=(Quality("Accuracy on held-out images", _accuracies(content), "%", said),),
        records=records,
        sizes=sizes,
        layers=_layers(plan, {}),
        weights=_weights(content.get("weights", [])),
        curves=_curves(_mapping(content["training"])),
        notes=(f"Seed {content['seed']}; {_real(content['seconds']):.0f} s in all.",),
        machine=records[0].machine,
        created=records[0].created,
    )


def _accuracies(content: Mapping[str, Any]) -> tuple[Score, ...]:
    """Return the accuracies of the demo's models in per cent, the control first."""
    accuracy, errors = _mapping(content["accuracy"]), _mapping(content.get("accuracy_standard_error", {}))
    names = {"control": "dense, trained again", "dense": "dense", "one-shot": "2:4 one-shot"}
    names["sparse"] = "2:4, trained again"
    return tuple(
        Score(
            title,
            100 * _real(accuracy[name]),
            100 * _real(errors[name]) if name in errors else None,
            ours=name in ("one-shot", "sparse"),
        )
        for name, title in names.items()
        if name in accuracy
    )


def _batch(record: Record) -> str:
    return f"batch {record.meta.get('batch', '?')}"


def _quality(given: Any) -> Quality:
    scores = tuple(
        Score(
            name=str(score["name"]),
            value=_real(score["value"]),
            error=_perhaps(score.get("error"), _real),
            note=str(score.get("note", "")),
            ours=bool(score.get("ours")),
        )
        for score in _list(given["scores"])
    )
    if not scores:
        raise ValueError("a measure of quality without scores")
    floor = _perhaps(given.get("floor"), _real)
    return Quality(str(given["title"]), scores, str(given.get("unit", "")), str(given.get("said", "")), floor)


def _trained(content: Mapping[str, Any]) -> tuple[Quality, ...]:
    """Return the final evaluations beside those before, where they are single numbers."""
    runs = [(name, _mapping(content[name])) for name in ("control", "sparse") if content.get(name)]
    found = [
        (f"{name}, {when}", value, name == "sparse")
        for name, run in runs
        for when, value in (("before", run.get("before")), ("after", _after(run)))
    ]
    if runs and (last := runs[-1][1].get("instead")) is not None:
        found.append(("pruned control, which stands", _mapping(last).get("evaluation"), True))
    scores = [Score(name, _real(value), ours=ours) for name, value, ours in found if isinstance(value, int | float)]
    said = "One run each; the control is the dense model that was trained as long."
    return (Quality("Evaluation", tuple(scores), "", said),) if scores else ()


def _after(run: Mapping[str, Any]) -> Any:
    """Return the evaluation of the best state of a run."""
    history = _list(run["history"])
    kept = len(history) if run.get("kept") is None else run["kept"]
    if type(kept) is not int or not 0 <= kept <= len(history):
        raise ValueError(f"the state after epoch {kept!r} of {len(history)}")
    return history[kept - 1].get("evaluation") if kept else run.get("before")


def _curves(content: Mapping[str, Any]) -> tuple[Curve, ...]:
    """Return loss, evaluation where it is one number, and learning rate, of the sparse run and its control."""
    histories = {name: _list(content[name]["history"]) for name in ("sparse", "control") if content.get(name)}
    found = []
    for key, title in (("loss", "Loss of training"), ("evaluation", "Evaluation"), ("lr", "Learning rate")):
        lines = {
            name: tuple(_real(epoch[key]) for epoch in history)
            for name, history in histories.items()
            if history and all(isinstance(epoch[key], int | float) for epoch in history)
        }
        if lines:
            found.append(Curve(title, lines))
    return tuple(found)


def _layers(plan: object, losses: Mapping[str, float]) -> tuple[Layer, ...]:
    if plan is None:
        return ()
    found = [
        Layer(
            name=str(row["name"]),
            kind=str(row["kind"]),
            shape=tuple(int(length) for length in _list(row["shape"])),
            kernel=str(row["kernel"]),
            sparse=bool(row["sparse"]),
            reason=str(row["reason"]),
            dense_ms=_perhaps(row.get("dense_ms"), _real),
            sparse_ms=_perhaps(row.get("sparse_ms"), _real),
            loss=losses.get(str(row["name"])),
            parts=tuple(map(str, _list(row.get("parts", ())))),
        )
        for row in _list(_mapping(plan)["layers"])
    ]
    holding = {part: layer for layer in found for part in layer.parts}  # a part runs as its product does
    return tuple(replace(layer, sparse=holding.get(layer.name, layer).sparse) for layer in found)


def _of_weights(content: Mapping[str, Any]) -> Run:
    """Return what `prune` left of each weight, or `check` found; of files pruned part by part, what share stayed."""
    weights = [_mapping(weight) for weight in _list(content["layers"])]
    if content.get("streamed"):
        weights = [{"legal": True, "verdict": f"{_real(w['kept']):.1%} of |w| kept", **w} for w in weights]
    skipped = [_mapping(entry) for entry in _list(content.get("skipped", []))]
    notes = [f"{entry['name']} stays dense: {entry['reason']}" for entry in skipped[:MOST_NOTES]]
    notes += [f"{len(skipped) - MOST_NOTES} more stay dense"] if len(skipped) > MOST_NOTES else []
    head = "" if content["ok"] else "A promise is broken: "
    made = "Pruned" if "files" in content else "Checked"
    return Run(
        f"{made}: {content.get('source', 'weights')}",
        verdict=f"{head}{content['summary']}.",
        weights=_weights(weights),
        notes=tuple(notes),
    )


def _weights(given: object) -> tuple[Weight, ...]:
    return tuple(
        Weight(str(w["name"]), str(w.get("promised") or ""), _real(w["zeros"]), bool(w["legal"]), str(w["verdict"]))
        for w in _list(given)
    )


def _sizes(given: object) -> dict[str, int]:
    return {str(name): int(_real(nbytes)) for name, nbytes in _mapping(given).items()}


def _perhaps(value: Any, read_one: Callable[[Any], float]) -> float | None:
    return None if value is None else read_one(value)


def _real(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} where a finite number belongs")
    return number


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} where an object belongs")
    return value


def _list(value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} where a list belongs")
    return list(value)


def _nothing(place: Path, got: str) -> ReportError:
    remedy = "name the folder that a command wrote, or write finetune's result with measure.write_json"
    return ReportError(f"{place} is no run that a report can be made of", got=got, wanted=FORMS, remedy=remedy)


def _malformed(place: Path, got: str) -> ReportError:
    return ReportError(
        f"{place} is malformed", got=got, wanted="the file as it was written", remedy="make the run again"
    )
