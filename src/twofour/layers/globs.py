"""Globs of layer names, and options that are checked at the border."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from twofour.errors import LayerError, TwofourError, cut, one_of
from twofour.layers.modules import named_modules, parameters_of, table

ELIGIBILITIES = ("asp", "any")


def matches(glob: str, layer: str) -> bool:
    """Whether a glob names the layer or a module around it; `*` crosses dots, so "encoder.*.fc1" fits any depth."""
    parts = layer.split(".")
    return any(fnmatchcase(".".join(parts[:end]), glob) for end in range(len(parts), 0, -1))


def nearest(glob: str, names: Iterable[str]) -> str:
    """Say which of `names` look most like `glob`, for the last line of an error."""
    names = list(dict.fromkeys(name for name in names if name))
    found = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
    return "nearest names: " + ", ".join(f"`{name}`" for name in found) if found else "the model has no named layers"


def parse_globs(given: object, option: str = "skip", kind: type[TwofourError] = LayerError) -> tuple[str, ...]:
    """Return the globs that a caller gave as one text or as several.

    Args:
        given: Text, or an iterable of texts.
        option: Name of the argument, for messages.
        kind: Error to raise.

    Raises:
        TwofourError: Of `kind`: it is neither.
    """
    if isinstance(given, str):
        return (given,)
    globs: tuple[Any, ...] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, bytes | bytearray):
        globs = tuple(cast(Iterable[Any], given))
    if wrong := [glob for glob in globs if not isinstance(glob, str)]:
        raise kind(
            f"`{option}` names no layers",
            got=f"{cut(repr(wrong[0]), 80)}, of type {type(wrong[0]).__name__}",
            wanted='a layer name or glob such as "encoder.*.fc1", or a sequence of them',
            remedy=f"leave `{option}` out to name none",
        )
    return globs


def require_module(model: object, kind: type[TwofourError] = LayerError) -> None:
    """Raise an error of `kind` unless `model` is a module: not a class, a state dict or None."""
    if not isinstance(model, nn.Module):
        raise kind(
            "there is no model",
            got=f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__,
            wanted="a torch.nn.Module",
            remedy="build the model first, and pass it",
        )


def require_unwrapped(model: object, kind: type[TwofourError] = LayerError) -> None:
    """Raise an error of `kind` unless `model` is a module of which torch.compile has wrapped no part.

    torch.compile's wrapper shares the weights, but names all of them anew and runs code that was compiled for the
    module as it was.
    """
    require_module(model, kind)
    assert isinstance(model, nn.Module)
    for name, part in named_modules(model):
        if type(part).__name__ == "OptimizedModule" and "_orig_mod" in table(part, "_modules"):
            place = f"model.{name}" if name else "model"
            raise kind(
                "torch.compile has wrapped the model" if not name else "torch.compile has wrapped a part of the model",
                got=f"{place}, an OptimizedModule",
                wanted="the module itself, whose weights the wrapper shares",
                remedy=f"pass {place}._orig_mod" if not name else f"put its module back: {place} = {place}._orig_mod",
            )


def require_eligibility(eligibility: object, kind: type[TwofourError] = LayerError) -> None:
    """Raise an error of `kind` unless `eligibility` is one of `ELIGIBILITIES`."""
    one_of("the eligibility rule is unknown", eligibility, ELIGIBILITIES, kind, "leave it out for ASP's rule")


def require_matches(model: nn.Module, globs: Iterable[str], source: str, kind: type[TwofourError] = LayerError) -> None:
    """Raise an error of `kind` unless each glob names a layer of `model`; `source` says where the globs stand.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    names = [name for name, _ in named_modules(model, again=True)]
    for glob in globs:
        named = names if glob or parameters_of(model) else ()  # "" is the model itself, a layer where it has weights
        if not any(fnmatchcase(name, glob) for name in named):
            raise kind(
                f"{source} matches no layer",
                got=repr(glob),
                wanted="the name of a layer, or a glob of such names",
                remedy=nearest(glob, names),
            )
