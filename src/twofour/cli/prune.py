"""`twofour prune`: a dense model or file of weights in, a folder with sparse weights out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from twofour import legality, pruning
from twofour.cli import check as check_command
from twofour.cli import output
from twofour.cli import source as sources
from twofour.cli.screen import JsonFile, progress, say, write
from twofour.criteria import SAMPLES, Scored
from twofour.errors import SourceError, TwofourError
from twofour.layers import Reduction, matches, walk
from twofour.legality import Report
from twofour.recipe import Recipe

AXIS = Reduction()
"""A file does not say which kind of layer a tensor belongs to: taken as a Linear's or a convolution's."""


def prune(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The dense model or weights.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")],
    pattern: Annotated[str, typer.Option(metavar="PATTERN", help="2:4 or another N:M.")] = "2:4",
    criterion: Annotated[str, typer.Option(help="Which values of a group stay; see docs/criteria.md.")] = "magnitude",
    data: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Returns calibration data, for criteria that need it.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples of the calibration data that are used.")] = SAMPLES,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Prune these layers only; needed for a file.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Leave these layers dense.")] = None,
    eligibility: Annotated[
        str, typer.Option(help='"asp": size(0) % 8 == 0 and size(1) % 16 == 0; "any": what the pattern divides.')
    ] = "asp",
    force: Annotated[bool, typer.Option("--force", help="Replace the result of an earlier prune.")] = False,
    json: JsonFile = None,
) -> None:
    """Make a model sparse once, without training; write weights, recipe.toml and report.json to DIR."""
    output.require_free(out, force)
    found = sources.resolve(source)
    output.require_apart(out, found)
    rules: Any = {glob: pattern for glob in include} if include else pattern
    recipe = Recipe.parse(rules, criterion=criterion, skip=skip or (), eligibility=eligibility)
    if found.kind == "file" and not include:
        raise _needs_include(found)
    calibration = _calibration(found, recipe, data)
    with output.folder(out, force) as target:
        # Calibration has a bar of its own.
        with progress(f"pruning {source}") if data is None else nullcontext():
            if found.kind == "file":
                report = _prune_file(found, recipe, target)
            else:
                report = _prune_model(found, recipe, target, data=calibration, samples=samples)
        recipe.save(target / output.RECIPE)
        content = output.write_report(target, {"source": source, "out": str(out), **report.to_dict()})
    check_command.show(report)
    say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    write(json, content)


def _calibration(source: sources.Source, recipe: Recipe, data: str | None) -> Any:
    need = recipe.criterion.need
    if need in ("gradients", "training"):
        raise SourceError(
            f'the criterion "{recipe.criterion.kind}" follows a loss, which the command line cannot take',
            wanted="a criterion without a loss",
            remedy="call twofour.prune(model, ..., data=..., loss=...) in Python",
        )
    if source.kind == "file" and (need is not None or data is not None):
        raise SourceError(
            "calibration needs a model to run",
            got=f"a file of weights and the criterion {recipe.criterion.name}",
            wanted='"magnitude" or "random" and no --data, or a SOURCE that is a model',
        )
    return None if data is None else sources.returned(data, "package.module:function that returns calibration data")


def _prune_model(source: sources.Source, recipe: Recipe, target: Path, **options: Any) -> Report:
    model = source.model()
    pruning.prune(model, recipe, **options)
    output.write_model(model, source, target)
    return legality.check(model)


def _prune_file(source: sources.Source, recipe: Recipe, target: Path) -> Report:
    assert source.path is not None, source
    weights = _plain(source)
    promise: dict[str, str] = {}
    skipped: list[tuple[str, str]] = []
    for name, weight in weights.items():
        reason = _reason(name, weight, recipe)
        if reason is None:
            weights[name] = _sparse(name, weight, recipe)
            promise[name] = _rule(name, recipe).name
        elif weight.ndim >= 2:
            skipped.append((name, reason))
    if not promise:
        raise SourceError(
            f"no weight in {source.text} can be pruned as asked",
            got="; ".join(f"`{name}`: {reason}" for name, reason in skipped[:5]) or "no tensor of two or more axes",
            wanted="an --include that matches Linear or convolution weights",
            remedy="`twofour check FILE` lists the weights; --eligibility any lifts the rule of 8 x 16 multiples",
        )
    output.write_weights(weights, promise, target / output.WEIGHTS, sources.read_metadata(source.path))
    report = legality.check_weights({name: weights[name] for name in promise}, expect=promise)
    return Report(report.layers, tuple(skipped))


def _sparse(name: str, weight: Tensor, recipe: Recipe) -> Tensor:
    criterion = recipe.criterion
    assert isinstance(criterion, Scored), "others need data"
    try:
        scores = AXIS.last(criterion.score(weight, None, name))
        keep = _rule(name, recipe).project(scores, absolute=criterion.absolute)
    except TwofourError as error:
        raise error.for_layer(name) from None
    return torch.where(AXIS.restore(keep), weight, torch.zeros((), dtype=weight.dtype)).contiguous()


def _rule(name: str, recipe: Recipe) -> Any:
    return next((rule for glob, rule in recipe.rules if _matches(glob, name)), None)


def _matches(glob: str, name: str) -> bool:
    # Both "fc1" and "fc1.weight" name the weight of layer fc1.
    return matches(glob, name) or matches(glob, name.removesuffix(".weight"))


def _reason(name: str, weight: Tensor, recipe: Recipe) -> str | None:
    pattern = _rule(name, recipe)
    if pattern is None:
        return "no --include matches it"
    if any(_matches(glob, name) for glob in recipe.skip):
        return "left out by --skip"
    if weight.ndim not in legality.KINDS or not weight.numel():
        return f"shape {tuple(weight.shape)} is no Linear or convolution weight"
    refused = walk(_layer(weight), eligibility=recipe.eligibility).skipped
    if refused:
        return refused[0].reason
    if weight.shape[1] % pattern.group:
        return f"its reduction axis {weight.shape[1]} is not a multiple of {pattern.group}"
    return None


def _layer(weight: Tensor) -> nn.Module:
    """Put a file's tensor into the layer that it must come from, so that the rule for layers decides."""
    out, reduction, *kernel = weight.shape
    make = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
    layer = make(reduction, out, *([tuple(kernel)] if kernel else []), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _needs_include(source: sources.Source) -> SourceError:
    names = [name for name, weight in _plain(source).items() if weight.ndim >= 2]
    return SourceError(
        f"{source.text} does not say which of its tensors are layers",
        got=f"{len(names)} tensors of two or more axes: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
        wanted='--include GLOB, for example --include "encoder.*"',
        remedy="an embedding looks like a Linear weight in a file: name what may be pruned, or pass the model",
    )


def _plain(source: sources.Source) -> dict[str, Tensor]:
    weights = source.weights()
    if weights.packed:
        raise SourceError(
            f"{source.text} is packed already",
            got=f"{len(weights.packed)} packed weights",
            wanted="a plain safetensors file",
            remedy="`twofour check` says what it holds",
        )
    return weights.tensors
