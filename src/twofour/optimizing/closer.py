"""Closer: what a mean hides. Which answers changed, how well confidence tells accuracy, which class lost most."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration import Batch
from twofour.errors import OptimizeError
from twofour.journal import Journal
from twofour.optimizing.outcome import DENSE
from twofour.optimizing.quality import AGREEMENT, Evaluate, Judge
from twofour.report import Score

_log = logging.getLogger("twofour.optimizing")

BINS = 15
"""Bins of confidence, as Guo et al. 2017, "On Calibration of Modern Neural Networks", take them."""

FEW = 10
"""Samples below which a class is not judged by itself."""

ROUNDING = torch.finfo(torch.bfloat16).eps
"""How far from 1 a sum of probabilities may be: each is rounded, in the coarsest type by half of this."""

LOW = 0.05
"""Share of the samples whose figures lie below the one that is shown."""


@dataclass(frozen=True)
class Closer:
    """Looks closer at models, by the dense model's answers on data held back, and by the classes where data hold them.

    Attributes:
        judge: What compares answers.
    """

    judge: Judge

    @classmethod
    def of(cls, model: nn.Module, held: Sequence[Batch], pooling: str) -> Closer | None:
        """Return one for a dense model, None where its answers cannot be compared sample by sample."""
        try:
            return cls(Judge.by_agreement(model, held, pooling))
        except OptimizeError:
            return None

    def look(self, model: nn.Module) -> dict[str, Any]:
        """Return figures of one model, JSON-ready.

        Of models that classify: samples, how many answers `changed`; where the data hold the classes, how many of them
        were `lost` (right before, wrong now) and `won`, and the calibration error `ece` from 0 to 1 (of the answers
        where the dense model's are probabilities, else of their softmax); and the class that lost most as `worst`: its
        number, its samples, shares right (without classes: that agree) `now` and `before`.
        Of others: samples, the figure `low` that a twentieth of them stays below, and the `least`.

        Raises:
            OptimizeError: The model does not run.
        """
        answers = [self.judge.answer(model, batch) for batch in self.judge.held]
        pairs = list(zip(answers, self.judge.want, strict=True))
        values = torch.cat([self.judge.values(*pair) for pair in pairs]).double().nan_to_num(nan=0.0)
        looked: dict[str, Any] = {"samples": len(values)}
        if self.judge.kind != AGREEMENT or any(found.shape != want.shape for found, want in pairs):
            return looked | {"low": float(values.quantile(LOW)), "least": float(values.min())}
        found, want = (torch.cat([pair[side].float().cpu() for pair in pairs]) for side in (0, 1))
        confidence = found if _probabilities(want) else found.softmax(-1)
        return looked | _classified(found, want, self._classes(), confidence.amax(-1))

    def _classes(self) -> Tensor | None:
        """Return the class of each sample that is compared, None where the data do not hold them."""
        found = [batch.target for batch in self.judge.held]
        sizes = [len(want) for want in self.judge.want]
        if not all(
            isinstance(target, Tensor) and not target.is_floating_point() and target.shape == (size,)
            for target, size in zip(found, sizes, strict=True)
        ):
            return None
        return torch.cat(found).cpu()


def _probabilities(answers: Tensor) -> bool:
    """Whether answers (samples, classes) are probabilities already: none is negative, and each row's sum is 1."""
    return bool((answers >= 0).all()) and bool(((answers.double().sum(-1) - 1).abs() <= ROUNDING).all())


def _classified(found: Tensor, want: Tensor, classes: Tensor | None, confidence: Tensor) -> dict[str, Any]:
    now, before = found.argmax(-1), want.argmax(-1)
    looked: dict[str, Any] = {"changed": int((now != before).sum())}
    right, was = now == before, torch.ones_like(now, dtype=torch.bool)
    if classes is not None:
        right, was = now == classes, before == classes
        looked |= {"lost": int((was & ~right).sum()), "won": int((right & ~was).sum())}
        looked["ece"] = calibration_error(confidence, right)
    return looked | {"worst": _worst(before if classes is None else classes, right, was)}


@dataclass(frozen=True)
class Judging:
    """Judges a run's models and looks closer at them, each once, as steps of its journal.

    Attributes:
        model: The dense one.
        held: Data that no other step sees.
        pooling: How token embeddings become one.
        evaluate: The user's function, None where agreement judges.
        journal: Of the run.
    """

    model: nn.Module
    held: Sequence[Batch]
    pooling: str
    evaluate: Evaluate | None
    journal: Journal

    @cached_property
    def judge(self) -> tuple[Judge, Score]:
        """What judges, and the dense model's score."""
        if self.evaluate is not None:
            return Judge.by_function(self.model, self.evaluate)
        return Judge.by_agreement(self.model, self.held, self.pooling), Score(DENSE, 100.0)

    def dense(self) -> Score:
        """Judge the dense model."""
        return self._step("the dense model", lambda: self.judge[1], lambda: self.model)

    def of(self, name: str, model: Callable[[], nn.Module]) -> Score:
        """Judge another one."""
        return self._step(name, lambda: self.judge[0].score(name, model()), model)

    def closer(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the measures beside the one that judges, of the dense model and of those named, which were judged."""
        steps = {DENSE: "the dense model", **{name: name for name in names}}
        looked = {name: self.journal.done[f"judge {step}"].get("closer") for name, step in steps.items()}
        return measures(looked, DENSE) if all(looked.values()) else []

    @cached_property
    def _closer(self) -> Closer | None:
        return Closer.of(self.model, self.held, self.pooling)

    def _looked(self, name: str, model: Callable[[], nn.Module]) -> dict[str, Any] | None:
        """Look closer at a model; one whose outputs cannot be compared is judged all the same, by a function."""
        try:
            return self._closer and self._closer.look(model())
        except OptimizeError as error:
            _log.warning("%s is not compared sample by sample with the dense model: %s", name, error.what)
            return None

    def _step(self, name: str, score: Callable[[], Score], model: Callable[[], nn.Module]) -> Score:
        def both() -> dict[str, Any]:
            return {"score": vars(score()), "closer": self._looked(name, model)}

        found = self.journal.step(f"judge {name}", both)
        return Score(**found.get("score", found))  # an earlier version's step held the score alone


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Return the mean distance of confidence and accuracy over bins of confidence, weighted by their samples.

    Args:
        confidence: (samples,) the probability of the answer, 0 to 1.
        right: Bool (samples,).
    """
    bins = (confidence.double() * BINS).ceil().clamp(1, BINS).long()
    apart = torch.zeros(BINS + 1, dtype=torch.float64, device="cpu")
    apart.index_add_(0, bins, confidence.double() - right.double())
    return float(apart.abs().sum() / len(confidence))


def _worst(classes: Tensor, right: Tensor, was: Tensor) -> dict[str, Any] | None:
    """Return the class of at least `FEW` samples that lost most, None where there are not two of them."""
    names, places, counts = classes.unique(return_inverse=True, return_counts=True)
    if int((counts >= FEW).sum()) < 2:
        return None
    now, before = (
        torch.zeros(len(names), dtype=torch.float64, device="cpu").index_add_(0, places, side.double()) / counts
        for side in (right, was)
    )
    index = int((before - now).masked_fill(counts < FEW, -2.0).argmax())
    shares = {"now": float(now[index]), "before": float(before[index])}
    return {"class": int(names[index]), "samples": int(counts[index]), **shares}


def measures(looked: Mapping[str, Mapping[str, Any]], dense: str) -> list[dict[str, Any]]:
    """Return what a report shows of the figures of models, as measures of its quality; those that some model lacks not.

    Args:
        looked: Name of a model -> what `Closer.look` found.
        dense: The control's name.
    """
    made = [_changed(looked, dense), _calibration(looked), _worst_classes(looked, dense), _low(looked)]
    return [measure for measure in made if measure is not None]


def _measure(title: str, said: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "said": said, "unit": "", "floor": None, "scores": scores}


def _score(name: str, dense: str, value: float, note: str, error: float | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "error": error, "note": note, "ours": name != dense}


def _changed(looked: Mapping[str, Mapping[str, Any]], dense: str) -> dict[str, Any] | None:
    if not all("changed" in one for one in looked.values()):
        return None
    scores = []
    for name, one in looked.items():
        share = one["changed"] / one["samples"]
        note = f"{one['changed']} of {one['samples']}"
        note += f": {one['lost']} were right and are wrong, {one['won']} the other way" if "lost" in one else ""
        error = 100 * (share * (1 - share) / one["samples"]) ** 0.5
        scores.append(_score(name, dense, 100 * share, note, error))
    said = "Samples whose first answer is another than the dense model's, of a hundred; fewer is better."
    return _measure("Answers that changed", said, scores)


def _calibration(looked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if not all("ece" in one for one in looked.values()):
        return None
    said = f"Mean distance of confidence and accuracy over {BINS} bins of confidence, in points; smaller is better. "
    said += "With few samples it is too large, for all models alike."
    first = next(iter(looked))
    scores = [_score(name, first, 100 * one["ece"], f"{one['samples']} samples") for name, one in looked.items()]
    return _measure("Calibration error", said, scores)


def _worst_classes(looked: Mapping[str, Mapping[str, Any]], dense: str) -> dict[str, Any] | None:
    others = {name: one["worst"] for name, one in looked.items() if name != dense and one.get("worst")}
    if len(others) != len(looked) - 1 or not others:
        return None
    right = "right" if all("ece" in one for one in looked.values()) else "that agree with the dense model"
    said = f"Of the classes with {FEW} samples or more the one that lost most, by its share {right}; the dense model's "
    said += "figure is that of the class that the first model lost most in."
    first = next(iter(others.values()))
    scores = [_score(dense, dense, 100 * first["before"], f"class {first['class']}")]
    for name, worst in others.items():
        share, count = worst["now"], worst["samples"]
        note = f"class {worst['class']}, {count} samples: dense {100 * worst['before']:.1f}"
        scores.append(_score(name, dense, 100 * share, note, 100 * (share * (1 - share) / count) ** 0.5))
    return _measure("The class that lost most", said, scores)


def _low(looked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if not all("low" in one for one in looked.values()):
        return None
    first = next(iter(looked))
    scores = [_score(name, first, one["low"], f"least {one['least']:.2f}") for name, one in looked.items()]
    said = "The same figure, sample by sample: a twentieth of the samples stays below what is shown."
    return _measure("The samples that lost most", said, scores)
