"""Text to criterion, once, at the border: "wanda", "sparsegpt:dampening=0.05,block=64"."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, cast

from twofour.criteria.activation import RIA, Wanda
from twofour.criteria.admm import ADMM
from twofour.criteria.base import Criterion
from twofour.criteria.learned import Learned
from twofour.criteria.magnitude import Magnitude
from twofour.criteria.random import Random
from twofour.criteria.sparsegpt import SparseGPT, SparseGPTMask
from twofour.criteria.taylor import Taylor
from twofour.errors import RecipeError

_BUILT: dict[str, Callable[..., Criterion]] = {
    kind().kind: kind for kind in (Magnitude, Random, Wanda, RIA, SparseGPT, SparseGPTMask, ADMM, Taylor, Learned)
}
NAMES = tuple(_BUILT)
"""The names of all criteria."""

AUTO = "auto"
"""Stands for the best criterion that the data allow; what prunes resolves it, a recipe names what was taken."""


def default(data: Any) -> Criterion:
    """Return the criterion that "auto" stands for.

    That is "admm" with data, and "magnitude" without. Of the criteria that solve layers one by one "admm" lost least in
    every task of docs/results.md, by the mean of the seeds; "learned", which trains by a loss, lost less in one (a
    perplexity of 7.98 for 8.67 on the stories), though not less than "admm" reconstructed (6.41), and more in two.
    """
    return Magnitude() if data is None else ADMM()


def resolve(criterion: str | Criterion | None, data: Any) -> Criterion:
    """Return the criterion of a caller's argument, `default` for "auto" and None.

    Raises:
        RecipeError: As `parse`.
    """
    return default(data) if criterion is None or criterion == AUTO else parse(criterion)


def parse(criterion: str | Criterion) -> Criterion:
    """Turn the text of a criterion, "name" or "name:option=value,...", into a `Criterion`, which passes as it is.

    Example:
        >>> parse("sparsegpt:dampening=0.05").dampening
        0.05

    Raises:
        RecipeError: The name is no criterion, or an option is unknown or has a value that cannot be used.
    """
    if isinstance(criterion, Criterion):
        return criterion
    name, _, options = (criterion if isinstance(criterion, str) else repr(criterion)).partition(":")
    if name not in _BUILT:
        close = difflib.get_close_matches(name, NAMES, n=1)
        raise RecipeError(
            "the text is not a criterion",
            got=repr(criterion) + (", which prune replaces by what the data allow" if name == AUTO else ""),
            wanted=", ".join(f'"{known}"' for known in (*NAMES, *(() if name == AUTO else (AUTO,)))),
            remedy=f'did you mean "{close[0]}"?' if close else "docs/criteria.md says what each keeps and needs",
        )
    kind = _BUILT[name]
    return kind(**dict(_option(kind, name, text) for text in options.split(",") if text))


def _option(kind: Any, name: str, text: str) -> tuple[str, Any]:
    known = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or key not in known:
        raise RecipeError(
            f"the criterion {name!r} has no such option",
            got=repr(text.strip()),
            wanted=", ".join(f"{option.name}={option.default}" for option in known.values()) or "no options",
            remedy="options stand after a colon, with commas between: " + '"sparsegpt:dampening=0.05,block=64"',
        )
    wanted = type(known[key].default)
    try:
        return key, wanted(value)
    except ValueError:
        raise RecipeError(
            f"the option `{key}` of the criterion {name!r} cannot be read",
            got=repr(value),
            wanted=f"{'a whole number' if wanted is int else 'a number' if wanted is float else 'text'}, {key}="
            f"{known[key].default}",
            remedy=f"leave the option out to take {known[key].default}",
        ) from None
