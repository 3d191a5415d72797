"""What a recipe means for a checkpoint on disk: which tensors become sparse, along which axis, and why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from twofour.checkpoints import Checkpoint, Entry, structure
from twofour.criteria import Scored
from twofour.errors import LayerError, RecipeError
from twofour.layers import Reduction, dtype_reason, matches, remedy_for, walk
from twofour.patterns import Pattern
from twofour.recipe import Recipe

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_AXES = range(2, 6)
"""How many axes a weight can have: a Linear's 2 to a Conv3d's 5."""
_SHOWN = 5
"""Reasons that an error shows."""


@dataclass(frozen=True)
class Sparse:
    """One tensor that becomes sparse.

    Attributes:
        entry: Where it lies.
        weight: Name of the parameter in the model, by which random scores are drawn; without a model, of the tensor.
        kind: Kind of layer, as in `layers.KINDS`.
        pattern: The pattern.
        axis: Reduction axis.
    """

    entry: Entry
    weight: str
    kind: str
    pattern: Pattern
    axis: Reduction


@dataclass(frozen=True, eq=False)
class Plan:
    """A recipe laid over a checkpoint.

    Attributes:
        checkpoint: The dense weights.
        recipe: The recipe.
        weights: The tensors that become sparse.
        skipped: Names of the others of two or more axes, each with its reason.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    weights: tuple[Sparse, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def criterion(self) -> Scored:
        """The recipe's criterion, which ranks by the weight alone."""
        assert isinstance(self.recipe.criterion, Scored), self.recipe
        return self.recipe.criterion


def plan_folder(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Lay a recipe over a Hugging Face folder; layers, ties and axes are those of the model in its config.json.

    Raises:
        RecipeError: The criterion needs data, or a glob matches no layer.
        LayerError: Nothing can be pruned, or a rule asks for a layer that cannot be.
        SourceError: transformers is not installed or does not know the model.
        FormatError: config.json and the weights disagree.
    """
    _require_scored(recipe)
    found = structure(checkpoint)
    assignment = recipe.assign(found.model, empty=True)
    weights: list[Sparse] = []
    skipped = [(name, reason) for name, reason in found.unknown.items() if len(checkpoint.entries[name].shape) > 1]
    for weight, pattern in assignment.weights:
        stored = found.stored(weight)
        if not stored:
            skipped.append((weight.name, "it is not in the files: a head that starts at random values"))
        for name in stored:
            entry = checkpoint.entries[name]
            if reason := dtype_reason(entry.torch_dtype or entry.dtype):
                skipped.append((name, reason))
            else:
                weights.append(Sparse(entry, weight.name, weight.kind, pattern, weight.axis))
    for one in assignment.skipped:
        skipped += [(name, one.reason) for name in found.stored(one) or (one.name,)]
    return _plan(checkpoint, recipe, weights, skipped)


def plan_file(checkpoint: Checkpoint, recipe: Recipe, axes: Sequence[tuple[str, int]]) -> Plan:
    """Lay a recipe over a bare file, in which the rules name the weights and `axes` their reduction axes.

    Args:
        checkpoint: The file.
        recipe: Its rules match names of tensors, with or without a last ".weight".
        axes: Pairs of a glob and 0 or 1, the first that matches decides.

    Raises:
        RecipeError: The criterion needs data.
        LayerError: Nothing can be pruned, or the axis of a weight to prune is not known.
    """
    _require_scored(recipe)
    weights: list[Sparse] = []
    skipped: list[tuple[str, str]] = []
    for name, entry in checkpoint.entries.items():
        if len(entry.shape) < 2:
            continue
        made, reason = _named_weight(entry, recipe, axes)
        if made is None:
            skipped.append((name, reason))
        else:
            weights.append(made)
    return _plan(checkpoint, recipe, weights, skipped)


def _plan(
    checkpoint: Checkpoint, recipe: Recipe, weights: Sequence[Sparse], skipped: Sequence[tuple[str, str]]
) -> Plan:
    order = {name: position for position, name in enumerate(checkpoint.entries)}
    if not weights:
        raise LayerError(
            f"no weight in {checkpoint.path} can be pruned as asked",
            got=f"{len(skipped)} weights, each with a reason against it"
            if skipped
            else "no tensor of two or more axes",
            reasons=_reasons(skipped),
            wanted="rules that match at least one weight of a Linear or a convolution",
            remedy=remedy_for(reason for _, reason in skipped),
        )
    weights = sorted(weights, key=lambda weight: order[weight.entry.name])
    return Plan(checkpoint, recipe, tuple(weights), tuple(skipped))


def _reasons(skipped: Sequence[tuple[str, str]]) -> list[str]:
    """Return one line per reason, with the first weight that it holds for."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped:
        names.setdefault(reason, []).append(name)
    return [
        f"`{found[0]}`{f' and {len(found) - 1} more' if found[1:] else ''}: {reason}" for reason, found in names.items()
    ][:_SHOWN]


def _require_scored(recipe: Recipe) -> None:
    if not isinstance(recipe.criterion, Scored) or recipe.criterion.need is not None:
        raise RecipeError(
            f'the criterion "{recipe.criterion.kind}" cannot work on files',
            got="a criterion that looks at more than the weight",
            wanted='"magnitude" or "random"',
            remedy="load the model and call twofour.prune(model, ..., data=...)",
        )
    if recipe.criterion.over != "weight":
        raise RecipeError(
            "files are pruned weight by weight, so that nothing can be ranked over several",
            got=f"criterion {recipe.criterion.name}",
            wanted="over=weight, or a loaded model",
            remedy="twofour.prune(model, ...) ranks over several; or give layers shares of their own by rules",
        )


def _named_weight(entry: Entry, recipe: Recipe, axes: Sequence[tuple[str, int]]) -> tuple[Sparse | None, str]:
    """Return what the tensor becomes, or None and the reason why it stays dense."""
    pattern = next((rule for glob, rule in recipe.rules if _names(glob, entry.name)), None)
    if pattern is None:
        return None, "no rule names it"
    if any(_names(glob, entry.name) for glob in recipe.skip):
        return None, "left out by a rule"
    if len(entry.shape) not in _AXES or not entry.nbytes:
        return None, f"shape {entry.shape} is no Linear or convolution weight"
    if reason := dtype_reason(entry.torch_dtype or entry.dtype):
        return None, reason
    axis = next((axis for glob, axis in axes if fnmatchcase(entry.name, glob) or _names(glob, entry.name)), None)
    if axis is None:
        raise LayerError(
            f"a file does not say along which axis the product with `{entry.name}` sums",
            got=f"shape {entry.shape} and no axis for it",
            wanted="1 for a Linear (out, in) or a convolution (out, in, ...), 0 for Hugging Face's Conv1D (in, out) or "
            "a transposed convolution (in, out, ...)",
            remedy='--axis 1, or --axis "GLOB=1" for some; the Hugging Face folder with its config.json needs no axis',
        )
    found = walk(_layer(entry, axis), eligibility=recipe.eligibility, empty=True)
    if found.skipped:
        return None, found.skipped[0].reason
    (weight,) = found.weights
    if weight.reduction % pattern.group:
        return None, f"its reduction axis {weight.reduction} is not a multiple of {pattern.group}"
    kind = "hf_conv1d" if weight.kind == "linear" and axis == 0 else weight.kind
    return Sparse(entry, entry.name, kind, pattern, Reduction(axis)), ""


def _names(glob: str, name: str) -> bool:
    # Both "fc1" and "fc1.weight" name the weight of layer fc1.
    return matches(glob, name) or matches(glob, name.removesuffix(".weight"))


def _layer(entry: Entry, axis: int) -> nn.Module:
    """Make the layer that a tensor must come from, without values, so that the rule for layers decides."""
    kernel = entry.shape[2:]
    options = {"bias": False, "device": "meta", "dtype": entry.torch_dtype}
    if not kernel:  # Hugging Face's Conv1D is a Linear whose weight is stored transposed
        return nn.Linear(entry.shape[axis], entry.shape[1 - axis], **options)
    make: Any = (_CONVOLUTIONS if axis else _TRANSPOSED)[len(kernel) - 1]
    return make(entry.shape[axis], entry.shape[1 - axis], kernel, **options)


def axes_by_name(weights: Sequence[Sparse]) -> Mapping[str, int]:
    """Return the reduction axes by tensor name."""
    return {weight.entry.name: weight.axis.axis for weight in weights}


def patterns_by_name(weights: Sequence[Sparse]) -> Mapping[str, str]:
    """Return the patterns' texts by tensor name."""
    return {weight.entry.name: weight.pattern.name for weight in weights}
