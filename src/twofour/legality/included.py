"""Which weights of a file the caller wants to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twofour.errors import LayerError
from twofour.layers import matches

LEFT_OUT = "not named by include"


class Included:
    """The names that `include` names; all of them where it is empty.

    Raises:
        LayerError: A glob names none.
    """

    def __init__(self, path: Path, names: Sequence[str], include: Sequence[str]) -> None:
        self._globs = include
        for glob in include:
            if not any(matches(glob, name) for name in names):
                raise LayerError(
                    "a glob in `include` names no weight",
                    got=repr(glob),
                    wanted=f"a name in {path}, or a glob of such names",
                    remedy=f"names there: {', '.join(names[:5])}",
                )

    def __contains__(self, name: str) -> bool:
        return not self._globs or any(matches(glob, name) for glob in self._globs)
