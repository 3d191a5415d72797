"""Text to criterion, once, at the border."""

from __future__ import annotations

import difflib

from twofour.criteria.base import Criterion
from twofour.criteria.magnitude import Magnitude
from twofour.errors import RecipeError

_BUILT: dict[str, Criterion] = {criterion.name: criterion for criterion in (Magnitude(),)}
_PLANNED = ("sparsegpt", "wanda", "ria", "taylor", "hessian", "activation", "movement", "random")


def parse(criterion: str | Criterion) -> Criterion:
    """Turn the name of a criterion into a `Criterion`; a `Criterion` is returned as it is.

    Example:
        >>> parse("magnitude").absolute
        True

    Raises:
        RecipeError: The name is no criterion, or one that is planned and not built yet.
    """
    if isinstance(criterion, Criterion):
        return criterion
    wanted = ", ".join(f'"{name}"' for name in _BUILT)
    if criterion in _BUILT:
        return _BUILT[criterion]
    if criterion in _PLANNED:
        raise RecipeError(
            f"the criterion {criterion!r} is planned, not built yet",
            wanted=wanted,
            remedy='use "magnitude" until a release lists the criterion in its changelog',
        )
    close = difflib.get_close_matches(str(criterion), (*_BUILT, *_PLANNED), n=1)
    raise RecipeError(
        "the text is not a criterion",
        got=repr(criterion),
        wanted=wanted,
        remedy=f'did you mean "{close[0]}"?' if close else None,
    )
