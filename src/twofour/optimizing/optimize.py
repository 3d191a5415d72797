"""optimize: prune, compile in the types allowed, judge, time beside dense runtimes, keep the fastest that holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twofour import calls, checker, criteria, measure, report
from twofour.calls import Example
from twofour.checkpoints import CONFIG
from twofour.compiler import advise
from twofour.compiler import compile as compile_model
from twofour.compiler.embeddings import kind_of_tables
from twofour.errors import LayerError, OptimizeError, TwofourError
from twofour.export import load, save
from twofour.files import named
from twofour.journal import WORK, Journal, digest, name_of
from twofour.layers import require_module, walk
from twofour.measure import Record
from twofour.optimizing.closer import Judging
from twofour.optimizing.folder import (
    MODEL,
    PAGE,
    PLAN,
    RECORD,
    USUAL,
    copied,
    kinds_of,
    of_the_moment,
    opened,
    said_of_error,
)
from twofour.optimizing.outcome import Candidate, Choice, Outcome, Tried, choose, verdict_of
from twofour.optimizing.quality import AGREE, TITLES, Evaluate, kind_of, said_of
from twofour.optimizing.samples import SEED, Samples, example_of, parted, sizes_of, tokens_of
from twofour.optimizing.timing import SECONDS, missing, require_known, require_smoothable, timed
from twofour.progress import Progress
from twofour.pruning import outcomes, prune
from twofour.quantization import quantize
from twofour.quantization.widths import Widths
from twofour.report import Score
from twofour.shrinking import Budget, report_of, shrink

SPARSE = "2:4"
TYPES = ("float32", "bfloat16", "int8")
"""Computing types that are tried where a loss is allowed; without a limit the first alone."""
FLOAT = "float32"
_IN_THE_FILE = ("graph", "machines")
"""Parts of a plan that the model's file holds; plan.json goes without them."""


def optimize(
    model: nn.Module,
    data: Any,
    out: str | Path,
    *,
    evaluate: Evaluate | None = None,
    within: float | None = None,
    pattern: str = SPARSE,
    criterion: str | None = criteria.AUTO,
    skip: str | Sequence[str] = (),
    samples: int | None = None,
    batch: int = 1,
    budget: Budget | None = None,
    widths: Sequence[str] = (),
    embeddings: str | None = None,
    smooth: bool = False,
    without: Sequence[str] = (),
    seconds: float = SECONDS,
    pooling: str = "mean",
    name: str = "model",
    loading: str = "",
    beside: Mapping[str, Path] | None = None,
    progress: bool = True,
) -> Outcome:
    """Make a dense model faster on this machine: prune it once, compile it, judge it, measure it, keep what is best.

    A part of the data is held back for judging; the rest calibrates the pruning and the ranges of int8. The model is
    compiled pruned and dense, in float32, and where `within` allows a loss in bfloat16 and int8 too; each is saved,
    loaded again, judged, and timed beside the dense runtimes that are installed, in the types that were tried. The
    fastest whose quality holds is kept: a dense one where nothing sparse holds, and the verdict says so.

    Stopped and called again with the same arguments, it goes on after the last step that was done.

    Args:
        model: The trained dense model, on the CPU; it stays as it is.
        data: Inputs, or pairs (input, target), as `twofour.prune` takes them; at least eight samples.
        out: Folder to write: the model, plan.json, results.json, report.html. New or empty, or left by the same run.
        evaluate: `evaluate(model)` -> one number, the higher the better. A dense model's number from -1 to 1 is a
            fraction: it and all others are multiplied by 100. Without it, answers are compared with the dense model's
            on the samples held back: top-1 agreement where the model answers with logits or the targets are classes,
            the cosine of embeddings for encoders of transformers, else 100 minus the relative error in per cent.
        within: Points of that quality that may be lost. None: float32 alone, and a model that answers worse is kept
            only where it takes 5 % less time than those that answer better and than the fastest dense runtime.
        pattern: What to prune to.
        criterion: As in `twofour.prune`; its best for one shot by default.
        skip: Globs of layers to leave dense.
        samples: Samples of the data that calibrate. Default: as many as `prune` takes by itself.
        batch: Samples of one call that is timed; they are the median of the data in size.
        budget: Shrink the model to this first (`twofour.shrink`).
        widths: Low bits to try too, such as "w4a8".
        embeddings: What tables of embeddings are kept in, as `twofour.compile` takes it.
        smooth: Smooth outliers before int8 rounds them, as there; it is tried where `within` allows a loss.
        without: Runtimes to leave out: "torch.compile", "ONNX Runtime", "OpenVINO".
        seconds: Time box of the comparison.
        pooling: How token embeddings become one where cosines are compared: "mean" or "cls".
        name: Of the model, for the report.
        loading: Python that loads the result, in which {file} stands for its path; made up where empty.
        beside: Files that are copied into the folder: path inside it -> where they are.
        progress: Show progress with the time left on standard error.

    Returns:
        What was found; `outcome.model` is the kept model as its file gives it.

    Raises:
        OptimizeError: An argument is impossible, the folder holds something else or another run, the function that
            judges fails, or no model was compiled.
        ExportError: A compiled model cannot be written; called again, the run goes on there.
        DataError: The data cannot be used, or are too few.
        TwofourError: The model cannot be pruned or shrunk as asked.
    """
    require_module(model, OptimizeError)
    require_known(without)
    _require(within, seconds, pooling, widths)
    require_smoothable(smooth, TYPES[:1] if within is None else TYPES, data=True)
    kind_of_tables(embeddings)
    chosen = criteria.resolve(criterion, data)
    given = parted(model, data, criteria.wanted(model, walk(model).weights, chosen) if samples is None else samples)
    example = example_of(given.held, batch)
    task = _Task(model, given, example, evaluate, within, pattern, criterion, skip, budget, tuple(widths))
    task = replace(task, without=tuple(without), seconds=seconds, pooling=pooling, name=name, batch=batch)
    task = replace(task, embeddings=embeddings, smooth=smooth)
    folder, others = named(out, OptimizeError), tuple(beside or ())
    with ExitStack() as stack:
        display = stack.enter_context(Progress(progress))
        journal = stack.enter_context(opened(folder, task.asked(), others, display))
        return replace(task, journal=journal).run(loading or _LOADING, beside or {})


_LOADING = 'import twofour\nfast = twofour.load("{file}", model)'


def _require(within: float | None, seconds: float, pooling: str, widths: Sequence[str]) -> None:
    if within is not None and not within >= 0:
        raise OptimizeError("the loss allowed is impossible", got=f"within={within!r}", wanted="points, at least 0")
    if not seconds > 0:
        raise OptimizeError("the time box is impossible", got=f"seconds={seconds!r}", wanted="seconds above 0")
    if pooling not in ("mean", "cls"):
        raise OptimizeError("the pooling is not known", got=repr(pooling), wanted='"mean" or "cls"')
    for text in widths:
        Widths.parse(text)


@dataclass(frozen=True)
class _Task:
    """One run: `optimize`'s arguments, and its steps."""

    model: nn.Module
    data: Samples
    example: Any
    evaluate: Evaluate | None
    within: float | None
    pattern: str
    criterion: str | None
    skip: str | Sequence[str]
    budget: Budget | None
    widths: tuple[str, ...]
    embeddings: str | None = None
    smooth: bool = False
    without: tuple[str, ...] = ()
    seconds: float = SECONDS
    pooling: str = "mean"
    name: str = "model"
    batch: int = 1
    journal: Journal = field(default_factory=Journal)

    def asked(self) -> dict[str, Any]:
        """Return what makes the run this one, JSON-ready: another model, other data or versions are another run."""
        given = [[[batch.inputs, batch.target] for batch in part] for part in (self.data.used, self.data.held)]
        return {
            **{"model": self.name, "weights": digest(self.model), "data": digest(given), "samples": self.data.count},
            **{"evaluate": name_of(self.evaluate), "within": self.within, "pattern": self.pattern},
            **{"criterion": self.criterion, "skip": [self.skip] if isinstance(self.skip, str) else list(self.skip)},
            **{"batch": self.batch, "budget": repr(self.budget), "widths": list(self.widths)},
            **({"embeddings": self.embeddings, "smooth": self.smooth} if self.embeddings or self.smooth else {}),
            **{"without": list(self.without), "seconds": self.seconds, "pooling": self.pooling},
            **{"threads": torch.get_num_threads(), "machine": measure.processor(), "versions": measure.software()},
        }

    def run(self, loading: str, beside: Mapping[str, Path]) -> Outcome:
        """Make every step that is not done."""
        names = [one.name(self.pattern) for one in self._candidates]
        self.journal.begin(f"optimizing {self.name}", kinds_of(one.dtype for one in self._candidates), USUAL)
        dense = self._judging.dense()
        advice = self.journal.step(f"measure per layer what {self.pattern} brings", self._advised)
        pruned = self.journal.step(f"prune to {self.pattern}", self._prune)
        unpruned = pruned.get("refused", "")
        found = {name: self._try(one, name, unpruned) for one, name in zip(self._candidates, names, strict=True)}
        if all(one.refused for one in found.values()):
            raise OptimizeError(
                "the model was compiled in no form",
                reasons=[f"{name}: {one.refused}" for name, one in found.items()],
                wanted="a model with layers that compile takes",
            )
        compiled = [name for name, one in found.items() if not one.refused]
        record = Record.from_dict(self.journal.step("time the models and the runtimes", partial(self._timed, compiled)))
        tried = [one if one.refused else replace(one, seconds=record.median(name)) for name, one in found.items()]
        least = None if self.within is None else dense.value - self.within
        choice = choose(tried, least)
        return self._finished(record, tried, choice, dense, (advice, pruned), loading, beside)

    @property
    def _candidates(self) -> list[Candidate]:
        """The models to compile, the likeliest to be kept first."""
        types = TYPES[:1] if self.within is None else TYPES
        found = [Candidate(sparse, dtype) for dtype in types for sparse in (True, False)]
        return found + [Candidate(True, FLOAT, text) for text in self.widths]

    @cached_property
    def _judging(self) -> Judging:
        return Judging(self.model, self.data.held, self.pooling, self.evaluate, self.journal)

    @cached_property
    def _loaded(self) -> dict[str, nn.Module]:
        return {}

    def _advised(self) -> dict[str, Any]:
        try:
            found = advise(self.model, tokens=(tokens_of(Example.of(self.example).leaves),), patterns=(self.pattern,))
        except TwofourError as error:
            return {"refused": error.what}
        return {"summary": found.summary(found.tokens[0]), "ratios": {row.layer: row.ratio for row in found.rows}}

    def _prune(self) -> dict[str, Any]:
        """Prune a copy, smaller first where that is asked for, and keep it for the steps to come."""
        made, told = copy.deepcopy(self.model), []
        if self.budget is not None:
            assert self.journal.folder is not None
            options: dict[str, Any] = {"checkpoint": self.journal.folder / WORK / "shrunk", "progress": False}
            with calls.without_cache(made):
                made = shrink(made, self.example, self.budget, data=self.data.calibration, **options)
            found = report_of(made)
            told.append(f"Shrunk first: {str(found).partition(chr(10))[0]}.")
        options = {"criterion": self.criterion, "skip": self.skip, "progress": False}
        try:
            with calls.without_cache(made):
                made = prune(made, self.pattern, data=self.data.calibration, samples=self.data.count, **options)
        except LayerError as error:  # nothing in it can be pruned: it may still run faster dense
            return {"refused": said_of_error(error), "losses": {}, "weights": [], "told": told}
        file = self.journal.work("pruned")
        save(made, file)
        losses = {one.name.removesuffix(".weight"): one.error for one in outcomes(made) if one.error is not None}
        checked = checker.check(made)
        weights = [
            {"name": w.name, "promised": w.promised, "zeros": w.zeros, "legal": w.legal, "verdict": w.verdict}
            for w in checked.layers
        ]
        criterion = next((one.criterion for one in outcomes(made)), "")
        return {"losses": losses, "weights": weights, "criterion": criterion, "told": told}

    def _pruned(self) -> nn.Module:
        return load(self.journal.work("pruned"), copy.deepcopy(self.model), masked=True).eval()

    def _try(self, one: Candidate, name: str, unpruned: str) -> Tried:
        """Compile a model, judge it; both once. `unpruned`: why there is no pruned one, "" where there is."""
        made = self.journal.step(f"compile {name}", partial(self._compile, one, name, unpruned))
        if "refused" in made:
            self.journal.passed()
            return Tried(name, False, refused=made["refused"])
        score = self._judging.of(name, lambda: self._load(name))
        return Tried(name, bool(made["sparse"]), score, None, made["bytes"])

    def _compile(self, one: Candidate, name: str, unpruned: str) -> dict[str, Any]:
        if one.sparse and unpruned:
            return {"refused": unpruned}
        try:
            base = self._pruned() if one.sparse else self.model
            if one.widths:
                weights, _, inputs = one.widths.partition("a")
                base = quantize(base, weights, f"a{inputs}", data=self.data.calibration, skip=self.skip)
            ranged = {"data": self.data.calibration, "smooth": self.smooth} if one.dtype == "int8" else {}
            options = {"embeddings": self.embeddings, "tokens": sizes_of(self.data.held, self.batch), **ranged}
            fast: Any = compile_model(base, self.example, one.dtype, **options)
            save(fast, file := self.journal.work(name))
        except TwofourError as error:
            if of_the_moment(error):
                raise  # the journal keeps what holds for good: called again, the run tries it once more
            return {"refused": said_of_error(error)}
        plan = fast.plan
        sparse = one.sparse and any(layer.sparse for layer in plan.layers)
        told = {key: value for key, value in plan.to_dict().items() if key not in _IN_THE_FILE}
        return {"plan": told, "bytes": file.stat().st_size, "sparse": sparse}

    def _load(self, name: str) -> nn.Module:
        """Return a compiled model as its file gives it: what is judged and timed is what the user will load."""
        if name not in self._loaded:
            self._loaded[name] = load(self.journal.work(name), self.model)
        return self._loaded[name]

    def _timed(self, names: Sequence[str]) -> dict[str, Any]:
        types = TYPES[:1] if self.within is None else TYPES
        ours = {name: self._load(name) for name in names}
        tell = self.journal.display.say
        meta = {"case": "optimize", "model": self.name, "batch": self.batch}
        meta |= {"tokens": tokens_of(Example.of(self.example).leaves)}
        options = {"without": self.without, "seconds": self.seconds, "meta": meta, "tell": tell}
        return timed(ours, self.model, self.example, types, **options).to_dict()

    def _finished(
        self,
        record: Record,
        tried: Sequence[Tried],
        choice: Choice,
        dense: Score,
        steps: tuple[dict[str, Any], dict[str, Any]],
        loading: str,
        beside: Mapping[str, Path],
    ) -> Outcome:
        """Write what is kept and what was found; return it with the model."""
        folder = self.journal.folder
        assert folder is not None
        kept = next(one for one in tried if one.name == choice.kept)
        if "finished" not in self.journal.done:
            copied(self.journal.work(kept.name), folder / MODEL)
        for name, place in beside.items():
            copied(place, folder / name)
        config: Any = getattr(self.model, "config", None)
        if CONFIG in beside and hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)  # with the dtype: a model made of it is the one that the file's graph is of
        reasons = {**choice.reasons, **{name: f"not timed: {why}" for name, why in missing(record).items()}}
        code = loading.replace("{file}", str(folder / MODEL))
        scores = [one.score for one in tried if one.score is not None]
        verdict, figures = verdict_of(
            record, kept, dense, choice.held, self.within, Candidate(False, FLOAT).name(self.pattern)
        )
        meta = {"verdict": verdict, "figures": figures, "candidates": reasons, "loading": code, "kept": kept.name}
        meta |= self._meta(dense, scores, choice, kept, *steps)
        record = replace(record, meta={**record.meta, **measure.without_nan(meta)})
        measure.write_json(folder / PLAN, self.journal.done[f"compile {kept.name}"]["plan"])
        measure.save([record], folder / RECORD)
        report.write(report.read(folder), folder / PAGE)
        self.journal.step("finished", lambda: True)
        self.journal.clear()
        fast = load(folder / MODEL, self.model)
        by_name = {score.name: score for score in (dense, *scores)}
        return Outcome(folder, kept.name, kept.sparse, choice.held, record, by_name, reasons, code, verdict, fast)

    def _meta(
        self,
        dense: Score,
        scores: Sequence[Score],
        choice: Choice,
        kept: Tried,
        advice: Mapping[str, Any],
        pruned: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what the record holds for the report, beside times and verdict."""
        title, said = self._title
        floor = None if self.within is None else dense.value - self.within
        noted = [dict(vars(score), note=choice.reasons[score.name].partition(";")[0]) for score in scores]
        judged = {"title": title, "said": said, "unit": "", "floor": floor, "scores": [vars(dense), *noted]}
        sizes = {"dense weights": sum(p.nbytes for p in self.model.parameters()), f"kept: {kept.name}": kept.nbytes}
        masked = any(one.sparse and one.name(self.pattern) == kept.name for one in self._candidates)
        weights = pruned["weights"] if masked else []  # a dense model has no masks to show
        return {
            **{
                "quality": [judged, *self._judging.closer([score.name for score in scores])],
                "sizes": sizes,
                "losses": pruned["losses"],
                "weights": weights,
            },
            **{"notes": self._notes(advice, pruned), "advice": advice},
        }

    @property
    def _title(self) -> tuple[str, str]:
        if self.evaluate is not None:  # which a finished run need not ask again
            return TITLES[kind_of(self.evaluate)], said_of(self.evaluate)
        return TITLES[self._judging.judge[0].kind], f"{AGREE} {self.data.said[0].upper()}{self.data.said[1:]}."

    def _notes(self, advice: Mapping[str, Any], pruned: Mapping[str, Any]) -> list[str]:
        notes = [f"Pruned to {self.pattern} by {pruned['criterion']}, once, nothing was trained; seed {SEED}."]
        if "refused" in pruned:
            notes = [f"Not pruned: {pruned['refused']}."]
        if self.within is not None:
            notes.append("The int8 of other runtimes is made by their own tools on the example and is not judged.")
        notes += [str(told) for told in pruned["told"]]
        notes.append(f"Per layer: {advice.get('summary') or advice.get('refused')}.")
        sample = f"{self.batch} sample{'s' * (self.batch > 1)} of the data held back, of the median size"
        return [*notes, f"One call is {sample}: {tokens_of(Example.of(self.example).leaves)} tokens or samples."]
