"""`twofour prune`: a dense model or file of weights in, a folder with sparse weights out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from twofour import legality, permutation, pruning
from twofour.cli import check as check_command
from twofour.cli import data as calibration
from twofour.cli import huggingface, output
from twofour.cli import source as sources
from twofour.cli.screen import JsonFile, progress, say, write
from twofour.criteria import SAMPLES, Scored
from twofour.errors import SourceError, TwofourError
from twofour.layers import Reduction, matches, walk
from twofour.legality import Report
from twofour.recipe import Recipe

AXIS = Reduction()
"""A file does not say which kind of layer a tensor belongs to: taken as a Linear's or a convolution's."""


Globs = list[str] | None
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The dense model or weights.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist.")]
PatternText = Annotated[str, typer.Option(metavar="PATTERN", help="2:4 or another N:M.")]
CriterionText = Annotated[str, typer.Option(help="Which values of a group stay; see docs/criteria.md.")]
Data = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="Calibration data: module:function, .npz, .npy, .safetensors, .txt or .jsonl."),
]
Samples = Annotated[int, typer.Option(help="Samples of the calibration data that are used.", min=1)]
Length = Annotated[int, typer.Option(help="Tokens at most of a text of the calibration data.", min=1)]
Permute = Annotated[
    bool, typer.Option("--permute", help="Order the channels so that the pattern fits better; needs --data.")
]
Include = Annotated[Globs, typer.Option(metavar="GLOB", help="Prune these layers only; needed for a file.")]
Skip = Annotated[Globs, typer.Option(metavar="GLOB", help="Leave these layers dense.")]
Eligibility = Annotated[
    str, typer.Option(help='"asp": size(0) % 8 == 0 and size(1) % 16 == 0; "any": what the pattern divides.')
]
Force = Annotated[bool, typer.Option("--force", help="Replace the result of an earlier prune.")]


def prune(
    source: Source,
    out: Out,
    pattern: PatternText = "2:4",
    criterion: CriterionText = "magnitude",
    data: Data = None,
    samples: Samples = SAMPLES,
    length: Length = 512,
    permute: Permute = False,
    include: Include = None,
    skip: Skip = None,
    eligibility: Eligibility = "asp",
    force: Force = False,
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
    _require_usable(found, recipe, data, permute)
    given = None if data is None else calibration.read(data, found, samples, length)
    with output.folder(out, force) as target:
        # Calibration has a bar of its own.
        with progress(f"pruning {source}") if data is None else nullcontext():
            permuted: dict[str, Any] = {}
            if found.kind == "file":
                report = _prune_file(found, recipe, target)
            else:
                report, permuted = _prune_model(found, recipe, target, given, samples, permute)
        recipe.save(target / output.RECIPE)
        content = output.write_report(target, {"source": source, "out": str(out), **permuted, **report.to_dict()})
    if permuted:
        shares = permuted["permutation"]
        say(f"permuted: magnitude kept {shares['magnitude_before']:.2%} -> {shares['magnitude_after']:.2%}")
    check_command.show(report)
    say(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    write(json, content)


def _require_usable(source: sources.Source, recipe: Recipe, data: str | None, permute: bool) -> None:
    need = recipe.criterion.need
    if need in ("gradients", "training"):
        raise SourceError(
            f'the criterion "{recipe.criterion.kind}" follows a loss, which the command line cannot take',
            wanted="a criterion without a loss",
            remedy="call twofour.prune(model, ..., data=..., loss=...) in Python",
        )
    if source.kind == "file" and (need is not None or data is not None or permute):
        raise SourceError(
            "calibration and permutation need a model to run",
            got=f"a file of weights and the criterion {recipe.criterion.name}",
            wanted='"magnitude" or "random", no --data and no --permute, or a SOURCE that is a model',
        )
    if permute and data is None:
        raise SourceError(
            "--permute needs inputs: the model is traced on them and compared with itself",
            got="no --data",
            wanted=calibration.FORMS,
            remedy="--data FILE; two samples are enough unless the criterion wants more",
        )


def _prune_model(
    source: sources.Source, recipe: Recipe, target: Path, data: Any, samples: int, permute: bool
) -> tuple[Report, dict[str, Any]]:
    model = source.model()
    options: dict[str, Any] = {}
    if data is not None:
        options = {"data": calibration.fitted(data, model, samples), "samples": samples}
    if permute:
        options |= {"permute": True, "example": calibration.example(model, options["data"])}
    with huggingface.without_cache(model):
        pruning.prune(model, recipe, **options)
    output.write_model(model, source, target)
    return legality.check(model), _permutation(pruning.permutation_report(model))


def _permutation(found: permutation.Report | None) -> dict[str, Any]:
    if found is None:
        return {}
    names = ("magnitude_before", "magnitude_after", "scores_before", "scores_after", "error", "unused")
    groups = [str(gain) for gain in found.groups]
    return {"permutation": {**{name: getattr(found, name) for name in names}, "groups": groups}}


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
