"""`twofour prune`: a dense model or file of weights in, a folder with sparse weights out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from twofour import calls, checker, pruning
from twofour.calibration.batches import read
from twofour.checker import Report
from twofour.cli import check as check_command
from twofour.cli import data as calibration
from twofour.cli import source as sources
from twofour.cli import streamed
from twofour.cli.console import JsonFile, progress, remedies_of_options, say, warn, write
from twofour.cli.options import Folder, Globs, Skip
from twofour.criteria import AUTO, LEFT, SAMPLES, few_data, resolve, wanted
from twofour.errors import SourceError
from twofour.export.huggingface import write_pruned
from twofour.recipe import DENSE, Recipe
from twofour.streaming import result_folder
from twofour.streaming.companions import companions
from twofour.structure import permutation

REMEDIES = {'eligibility="any"': "--eligibility any lifts ASP's rule of 8 x 16 multiples"}

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The dense model or weights.")]
PatternText = Annotated[str, typer.Option(metavar="PATTERN", help="2:4, another N:M, 2:4+25%, block:16x16@0.9 ...")]
CriterionText = Annotated[
    str,
    typer.Option(help="Which values of a group stay; see docs/criteria.md. auto: admm with --data, else magnitude."),
]
Data = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="Calibration data: module:function, .npz, .npy, .safetensors, .txt or .jsonl."),
]
Samples = Annotated[
    int | None,
    typer.Option(
        help="Samples of the calibration data that are used.", min=1, show_default=f"{SAMPLES}, and more of short ones"
    ),
]
Length = Annotated[int, typer.Option(help="Tokens at most of a text of the calibration data.", min=1)]
Permute = Annotated[
    bool, typer.Option("--permute", help="Order the channels so that the pattern fits better; needs --data.")
]
Reconstruct = Annotated[
    bool | None,
    typer.Option(
        "--reconstruct/--no-reconstruct",
        help="Solve the kept values together afterwards; kept where samples held back come nearer to the dense model.",
        show_default="with --data and --criterion auto",
    ),
]
Include = Annotated[Globs, typer.Option(metavar="GLOB", help="Prune these layers only; needed for a file.")]
Axis = Annotated[
    Globs,
    typer.Option(metavar="AXIS", help='Reduction axis of a file\'s weights: 1, 0 or "GLOB=0"; needed for a file.'),
]
Eligibility = Annotated[
    str, typer.Option(help='"asp": size(0) % 8 == 0 and size(1) % 16 == 0; "any": what the pattern divides.')
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help='Spread the files over a Ray cluster: auto, "local", HOST:PORT.'),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the result of an earlier prune.")]


def prune(
    source: Source,
    out: Folder,
    pattern: PatternText = "2:4",
    criterion: CriterionText = AUTO,
    data: Data = None,
    samples: Samples = None,
    length: Length = 512,
    permute: Permute = False,
    reconstruct: Reconstruct = None,
    include: Include = None,
    axis: Axis = None,
    skip: Skip = None,
    eligibility: Eligibility = "asp",
    ray: Ray = None,
    force: Force = False,
    json: JsonFile = None,
) -> None:
    """Make a model sparse once, without training; write weights, recipe.toml and report.json to DIR.

    Files are pruned part by part where the criterion needs no data, and a run that was stopped goes on.
    """
    result_folder.require_free(out, force)
    found = sources.resolve(source)
    result_folder.require_apart(out, found.path)
    if found.kind == "folder" and found.path is not None:
        companions(found.path)  # refuses what cannot be copied before any long work
    rules: Any = {glob: pattern for glob in include} if include else pattern
    recipe = Recipe.parse(rules, criterion=resolve(criterion, data), skip=skip or (), eligibility=eligibility)
    streamed.require_axes(found, include, axis)
    _require_usable(found, recipe, data, permute, bool(reconstruct))
    with remedies_of_options(REMEDIES):
        if found.kind != "function" and recipe.criterion.need is None and data is None and not permute:
            content = _prune_files(found, recipe, out, axis or (), ray, force)
        else:
            _require_one_machine(ray)
            given = None if data is None else calibration.read(data, found, samples or calibration.MOST_TEXTS, length)
            how = {"permute": permute, "reconstruct": reconstruct, "unnamed": criterion == AUTO and data is not None}
            content = _prune_loaded(found, recipe, out, given, samples, how, force)
    if _say_settled(content) < len(content["layers"]) and criterion == AUTO and data is None:
        say(pruning.WITHOUT_DATA.replace("data=", "--data").replace('criterion="magnitude"', "--criterion magnitude"))
    say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    write(json, content)


def _prune_files(
    source: sources.Source, recipe: Recipe, out: Path, axes: Sequence[str], ray: str | None, force: bool
) -> dict[str, Any]:
    plan, journal = streamed.plan(source, recipe, axes), result_folder.journal_of(out)
    earlier = streamed.written(journal)
    try:
        with result_folder.resumed(out, force, journal) as target:
            with progress(f"pruning {source.text} (MB)") as advance:
                report = streamed.prune(plan, target, journal, ray, advance)
            recipe.save(target / result_folder.RECIPE)
            content = result_folder.write_report(
                target,
                {"source": source.text, "out": str(out), **report.to_dict(), **_settled(report.settled)},
                report.files,
            )
    except BaseException:
        if streamed.written(journal) not in (None, earlier):  # a journal that was refused is as it was
            warn(streamed.kept(out))
        raise
    streamed.show(report)
    return content


def _prune_loaded(
    source: sources.Source, recipe: Recipe, out: Path, data: Any, samples: int | None, how: dict[str, Any], force: bool
) -> dict[str, Any]:
    streamed.require_memory(source)
    with result_folder.folder(out, force) as target:
        # Calibration has a bar of its own.
        with progress(f"pruning {source.text}") if data is None else nullcontext():
            report, changed, told = _prune_model(source, recipe, target, data, samples, **how)
        recipe.save(target / result_folder.RECIPE)
        content = result_folder.write_report(
            target, {"source": source.text, "out": str(out), **changed, **report.to_dict()}
        )
    for sentence in told:
        say(sentence)
    if shares := changed.get("permutation"):
        before, after = shares["magnitude_before"], shares["magnitude_after"]
        say(f"permuted: magnitude kept {before:.2%} -> {after:.2%}{'' if shares['kept'] else ', put back'}")
        if shares["judged"] is not None:
            old, new = shares["judged"]
            say(f"on data held back the pruned model lost {old:.4f} in the old order and {new:.4f} in the new one")
    check_command.show(report)
    return content


def _require_one_machine(ray: str | None) -> None:
    if ray is not None:
        raise SourceError(
            "only files are spread over machines, by criteria that need no data",
            got=f"--ray {ray}",
            wanted='a folder or a file of weights and the criterion "magnitude" or "random", without --data',
            remedy="leave --ray out",
        )


def _require_usable(source: sources.Source, recipe: Recipe, data: str | None, permute: bool, reconstruct: bool) -> None:
    need = recipe.criterion.need
    if need in ("gradients", "training"):
        raise SourceError(
            f'the criterion "{recipe.criterion.kind}" follows a loss, which the command line cannot take',
            wanted="a criterion without a loss",
            remedy="call twofour.prune(model, ..., data=..., loss=...) in Python",
        )
    if source.kind == "file" and (need is not None or data is not None or permute or reconstruct):
        raise SourceError(
            "calibration, permutation and reconstruction need a model to run",
            got=f"a file of weights and the criterion {recipe.criterion.name}",
            wanted='"magnitude" or "random", no --data, --permute or --reconstruct, or a SOURCE that is a model',
        )
    if reconstruct and data is None:
        raise SourceError(
            "--reconstruct needs inputs: the kept values follow what the dense model answers to them",
            got="no --data",
            wanted=calibration.FORMS,
            remedy="--data FILE; a few hundred samples without targets",
        )
    if permute and data is None:
        raise SourceError(
            "--permute needs inputs: the model is traced on them and compared with itself",
            got="no --data",
            wanted=calibration.FORMS,
            remedy="--data FILE; two samples are enough unless the criterion wants more",
        )


def _prune_model(
    source: sources.Source,
    recipe: Recipe,
    target: Path,
    data: Any,
    samples: int | None,
    *,
    permute: bool,
    reconstruct: bool | None,
    unnamed: bool,
) -> tuple[Report, dict[str, Any], list[str]]:
    model = source.model()
    options: dict[str, Any] = {}
    told: list[str] = []
    if data is not None:
        weights = [weight for weight, _ in recipe.assign(model).weights]
        cheap = unnamed if reconstruct is None else reconstruct
        count = samples or wanted(model, weights, recipe.criterion, cheap=cheap)
        taken = calibration.fitted(data, model, count, tell=told.append)
        options = {"data": taken, "samples": sum(read(model, item).samples for item in taken)}
        told.insert(0, f"criterion: {recipe.criterion.name}, calibrated on {options['samples']} samples")
    if permute:
        options |= {"permute": True, "example": calibration.example(model, options["data"])}
    with calls.without_cache(model):
        pruning.prune(model, **_what(recipe, unnamed), reconstruct=reconstruct, **options)
    settled = [outcome.name for outcome in pruning.outcomes(model) if outcome.criterion == LEFT]
    named = None if len(settled) == len(pruning.outcomes(model)) else recipe.criterion.name
    write_pruned(model, target, source.path if source.kind == "folder" else None, named)
    won = pruning.reconstruction_report(model)
    told += filter(None, (few_data(pruning.outcomes(model)), won and str(won)))
    changed = (
        _settled(settled)
        | _permutation(pruning.permutation_report(model))
        | ({"reconstruction": asdict(won)} if won else {})
    )
    return checker.check(model), changed, told


def _settled(names: Sequence[str]) -> dict[str, Any]:
    """Return what the report says of weights whose values are left as they were."""
    return {"settled": list(names)} if names else {}


def _say_settled(content: dict[str, Any]) -> int:
    """Say which weights of a report are left as they were; return how many."""
    if names := content.get("settled", []):
        others = f" and {len(names) - 1} more" if names[1:] else ""
        say(
            f"`{names[0]}`{others}: pruned already, its zeros stay and the criterion has nothing to choose; "
            "values are left as they are; to start anew prune the dense weights"
        )
    return len(names)


def _what(recipe: Recipe, unnamed: bool) -> dict[str, Any]:
    """Return what `prune` is asked for: of a recipe whose criterion nobody named its rules, so `prune` names it."""
    if not unnamed:
        return {"pattern": recipe}
    rules = {glob: DENSE if pattern is None else pattern for glob, pattern in recipe.rules}
    return {"pattern": rules, "skip": recipe.skip, "eligibility": recipe.eligibility}


def _permutation(found: permutation.Report | None) -> dict[str, Any]:
    if found is None:
        return {}
    names = (
        "magnitude_before",
        "magnitude_after",
        "scores_before",
        "scores_after",
        "error",
        "judged",
        "kept",
        "unused",
    )
    groups = [str(gain) for gain in found.groups]
    return {"permutation": {**{name: getattr(found, name) for name in names}, "groups": groups}}
