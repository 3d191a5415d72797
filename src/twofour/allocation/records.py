"""The records of a sensitivity run: per layer, what each candidate pattern keeps, loses and costs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from twofour.errors import FormatError, RecipeError, one_of
from twofour.files import read_json
from twofour.measure import write_json

FORMAT = 1

Loss = Literal["task", "error"]
"""What is summed over the layers: the change of the task's loss, or the squared relative error of their outputs."""


@dataclass(frozen=True)
class Candidate:
    """One layer with one pattern, all other layers dense.

    Attributes:
        pattern: The pattern's text, or "dense".
        kept: Values that stay.
        error: ||X (W - W')^T|| / ||X W^T|| over the calibration inputs X of the dense model; of a layer of several
            weights the root of the sum of squares.
        change: How much worse the task is: the loss minus the dense model's, or the dense model's score minus that of
            `evaluate`; negative where it is better, None where neither was given. Of a layer of several weights the sum
            over them, each pruned alone.
        sparse: Whether every group of four holds at most two values, so that the 2:4 kernels can run it.
        ms: Measured time of the layer: of the faster of the dense and the 2:4 kernel if `sparse`, else of the dense
            one; None where it was not measured.
    """

    pattern: str
    kept: int
    error: float = 0.0
    change: float | None = None
    sparse: bool = False
    ms: float | None = None

    def loss(self, kind: Loss) -> float:
        """Return what the candidate adds to the total: `change`, or `error` squared."""
        if kind == "error":
            return self.error**2
        assert self.change is not None, "the caller looked"
        return self.change


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer and its candidates.

    Attributes:
        layer: Name of the layer.
        layers: The names of all layers that share its weight, `layer` first.
        values: Values of its weights.
        candidates: One for each pattern that fits it, in the order asked for.
    """

    layer: str
    layers: tuple[str, ...]
    values: int
    candidates: tuple[Candidate, ...]

    def find(self, pattern: str) -> Candidate | None:
        """Return the candidate of a pattern, or None where the pattern does not fit."""
        return next((candidate for candidate in self.candidates if candidate.pattern == pattern), None)


@dataclass(frozen=True)
class Sensitivities:
    """What every layer loses with every candidate pattern.

    Attributes:
        layers: In the model's order.
        patterns: The candidates asked for.
        criterion: The criterion's text.
        eligibility: "asp" or "any".
        baseline: The dense model's loss, or what `evaluate` answered for it; None where neither was given.
        skipped: Name and reason of each weight that has no candidates.
        timing: What the times were measured with, "" where they were not.
    """

    layers: tuple[LayerSensitivity, ...]
    patterns: tuple[str, ...]
    criterion: str
    eligibility: str
    baseline: float | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    timing: str = ""

    @property
    def values(self) -> int:
        """Values of all layers."""
        return sum(layer.values for layer in self.layers)

    @property
    def measured(self) -> Loss:
        """The better of the two losses that were measured: "task" where there is one."""
        return "task" if self.baseline is not None else "error"

    def only(self, *patterns: str) -> Sensitivities:
        """Return the same records with these candidates alone; layers that none of them fits are left out.

        Raises:
            RecipeError: One was not measured, or no layer is left.
        """
        if missing := [name for name in patterns if name not in self.patterns]:
            raise self.without(missing[0])
        kept = [tuple(entry for entry in layer.candidates if entry.pattern in patterns) for layer in self.layers]
        layers = tuple(replace(layer, candidates=some) for layer, some in zip(self.layers, kept, strict=True) if some)
        if not layers:
            raise RecipeError(
                "no layer is left",
                got=", ".join(patterns) or "no patterns",
                wanted=f"candidates that fit a layer, of {', '.join(self.patterns)}",
                remedy="name more patterns: .layers lists what was measured for each layer",
            )
        return replace(self, layers=layers, patterns=tuple(name for name in self.patterns if name in patterns))

    def without(self, pattern: str) -> RecipeError:
        """Build the error for a pattern that was not measured, or not for every layer."""
        return RecipeError(
            f"the pattern {pattern!r} is not among the candidates",
            got=", ".join(self.patterns),
            wanted="patterns that the sensitivities were measured with",
            remedy=f"measure again with sensitivity(..., patterns=(..., {pattern!r})), or take some of those",
        )

    def require(self, loss: Loss | None) -> Loss:
        """Return the loss to be summed: the one given, or the best that was measured.

        Raises:
            RecipeError: It is unknown, or was not measured.
        """
        remedy = "leave it out to take the task's loss where it was measured, else the errors"
        one_of("the loss to be summed is unknown", loss, (None, "task", "error"), RecipeError, remedy)
        if loss == "task" and self.baseline is None:
            raise RecipeError(
                "the change of the task's loss was not measured",
                got='loss="task" of sensitivities without it',
                wanted="sensitivity(..., loss=...) or sensitivity(..., evaluate=...)",
                remedy='loss="error" sums the squared errors of the layers\' outputs',
            )
        return loss or self.measured

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the records as JSON; a reader never sees half of them.

        Raises:
            MeasureError: The file cannot be written.
        """
        return write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sensitivities:
        """Read what `save` wrote.

        Raises:
            FormatError: The file is missing, no JSON, or no such record.
        """
        try:
            return _from_table(read_json(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{os.fspath(path)} does not hold sensitivities",
                got=f"{type(error).__name__}: {error}",
                wanted=f"a JSON file of format {FORMAT}, as Sensitivities.save writes it",
                remedy="measure them again: twofour.allocation.sensitivity(model, data)",
            ) from error

    def __str__(self) -> str:
        kind = self.measured
        width = max(len(layer.layer) for layer in self.layers)
        what = "change of the task" if kind == "task" else "squared relative error of the output"
        lines = [f"{'layer'.ljust(width)}  {'values':>9}" + "".join(f"  {name:>10}" for name in self.patterns)]
        for layer in self.layers:
            cells = [layer.find(name) for name in self.patterns]
            texts = ["-" if cell is None else f"{cell.loss(kind):.4g}" for cell in cells]
            lines.append(f"{layer.layer.ljust(width)}  {layer.values:>9}" + "".join(f"  {text:>10}" for text in texts))
        lines.append(f"{what}, each layer pruned alone by {self.criterion}")
        if self.timing:
            lines += ["", f"{'layer'.ljust(width)}  {'':>9}" + "".join(f"  {name:>10}" for name in self.patterns)]
            for layer in self.layers:
                found = [layer.find(name) for name in self.patterns]
                texts = ["-" if one is None or one.ms is None else f"{one.ms:.4g}" for one in found]
                lines.append(f"{layer.layer.ljust(width)}  {'':>9}" + "".join(f"  {text:>10}" for text in texts))
            lines.append(f"milliseconds of a layer, measured with {self.timing}")
        return "\n".join(lines)


def _from_table(table: Mapping[str, Any]) -> Sensitivities:
    if table["format"] != FORMAT:
        raise ValueError(f"format {table['format']!r}")
    layers = tuple(_layer(entry) for entry in table["layers"])
    if not layers:
        raise ValueError("no layers")
    return Sensitivities(
        layers,
        tuple(map(str, table["patterns"])),
        str(table["criterion"]),
        str(table["eligibility"]),
        _number(table["baseline"]),
        tuple((str(name), str(reason)) for name, reason in table["skipped"]),
        str(table["timing"]),
    )


def _layer(entry: Mapping[str, Any]) -> LayerSensitivity:
    candidates = tuple(
        Candidate(
            str(found["pattern"]),
            int(found["kept"]),
            _real(found["error"]),
            _number(found["change"]),
            bool(found["sparse"]),
            _number(found["ms"]),
        )
        for found in entry["candidates"]
    )
    if not candidates:
        raise ValueError(f"layer {entry['layer']!r} has no candidates")
    return LayerSensitivity(str(entry["layer"]), tuple(map(str, entry["layers"])), int(entry["values"]), candidates)


def _number(value: Any) -> float | None:
    return None if value is None else _real(value)


def _real(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is no finite number")
    return number
