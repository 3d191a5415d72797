"""Does a file belong to a model: every tensor in its place, of its shape, packed along its reduction axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from twofour.errors import FormatError, TwofourError, cut
from twofour.export.file import Contents
from twofour.layers import reduction_axes
from twofour.patterns import parse
from twofour.quantization.carried import STEPS


def with_ties(model: nn.Module, contents: Contents) -> Contents:
    """Add an alias for each tensor of the model that the file lacks and that the model ties to one it has.

    Checkpoints of Hugging Face hold a tied head under the embedding's name alone.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    have = contents.plain.keys() | contents.packed.keys() | contents.aliases.keys()
    stored = {id(state[name]): contents.aliases.get(name, name) for name in have if name in state}
    ties = {name: stored[id(value)] for name, value in state.items() if name not in have and id(value) in stored}
    return replace(contents, aliases={**contents.aliases, **ties}) if ties else contents


def require_fit(path: Any, model: nn.Module, contents: Contents) -> None:
    """Refuse contents that are not those of a model of this architecture.

    Raises:
        FormatError: A tensor is missing, foreign, of another shape, packed along another axis, or the settings name
            patterns of tensors, or input ranges of layers, that are not there.
    """
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    have = {name: tuple(tensor.shape) for name, tensor in contents.plain.items()}
    have |= {name: weight.header.shape for name, weight in contents.packed.items()}
    have |= {alias: have[name] for alias, name in contents.aliases.items() if name in have}
    if missing := sorted(want.keys() - have.keys()):
        got = f"{len(missing)} tensors of the model are not in the file, such as `{missing[0]}`"
        step = all(name.rpartition(".")[2] in STEPS for name in missing)
        raise misfit("model-missing", path, got, **(BEFORE_LOW_BITS if step else {}))
    if foreign := sorted(have.keys() - want.keys()):
        got = f"{len(foreign)} tensors of the file are not in the model, such as `{foreign[0]}`"
        raise misfit("model-foreign", path, got)
    for name, shape in want.items():
        if have[name] != shape:
            raise misfit("model-shape", path, f"`{name}` is {have[name]} in the file and {shape} in the model")
    _require_kinds(path, model, contents)
    axes = reduction_axes(model)
    for name, weight in contents.packed.items():
        axis = axes[name].axis if name in axes else 1
        if weight.header.axis != axis or len(weight.header.shape) < 2:
            got = f"`{name}` is packed along axis {weight.header.axis}; the reduction axis is {axis}"
            raise misfit("model-axis", path, got)
    _require_patterns(path, contents)
    require_layers(path, contents.settings, have, ("ranges",))  # without its range a layer answers otherwise


LAYERS = ("low_bits", "ranges", "answers", "counts", "images", "steps", "kept_dense")
"""Keys of the settings whose values name layers."""


def require_layers(
    path: Any, settings: Mapping[str, Any], names: Iterable[str], keys: Collection[str] = LAYERS
) -> None:
    """Refuse settings that name a layer of which the file holds nothing.

    Args:
        path: For messages.
        settings: Of the file.
        names: Every name that it stores a tensor under, aliases too.
        keys: Which settings are looked at.

    Raises:
        FormatError: One does.
    """
    layers = {name.rpartition(".")[0] for name in names}
    for key in keys:
        said = settings.get(key)
        named = [layer for layer in said if isinstance(layer, str)] if isinstance(said, dict | list) else []
        if gone := sorted(layer for layer in named if layer not in layers):
            got = f"`{key}` in its settings says something of `{cut(gone[0], 80)}`, of which the file holds nothing"
            raise misfit("settings-names", path, got)


def _require_kinds(path: Any, model: nn.Module, contents: Contents) -> None:
    """Refuse real numbers where the model has whole ones, and the other way round."""
    for name, tensor in model.state_dict().items():
        stored = contents.plain.get(contents.aliases.get(name, name))
        if isinstance(tensor, Tensor) and stored is not None:
            kinds = [(one.is_floating_point(), one.is_complex()) for one in (stored, tensor)]
            if kinds[0] != kinds[1]:
                got = f"`{name}` is {stored.dtype} in the file and {tensor.dtype} in the model"
                raise misfit("model-dtype", path, got)


def _require_patterns(path: Any, contents: Contents) -> None:
    patterns = contents.settings.get("patterns", {})
    known = contents.plain.keys() | contents.packed.keys()
    if not isinstance(patterns, dict) or any(name not in known for name in patterns):
        raise misfit("settings-names", path, "the patterns in its settings do not name its tensors")
    for text in patterns.values():
        try:
            parse(text)
        except TwofourError as error:
            got = f"the pattern {cut(repr(text), 40)} in its settings is not known"
            raise misfit("settings-pattern", path, got) from error


WANTED = "a file saved from a model of the same architecture"

BEFORE_LOW_BITS = {
    "wanted": "a file of a model that computes in these low bits, or one of floats and a model that does not yet",
    "remedy": "load the file into the model before `twofour.quantize`, and quantise it then",
}
"""What is said of a file of floats and a model of low bits."""


def misfit(
    code: str,
    path: Any,
    got: str,
    what: str = "the file",
    wanted: str = WANTED,
    remedy: str = "build the model as it was built when it was saved",
) -> FormatError:
    """Build the error for a file, or a part of it, that is not of the model it is to fill."""
    return FormatError(f"{what} does not fit the model", got=f"{path}: {got}", wanted=wanted, remedy=remedy, code=code)
