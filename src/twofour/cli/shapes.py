"""SHAPE: text on the command line to the shape of one sample."""

from __future__ import annotations

import typer


def parsed(given: str | None) -> tuple[int, ...] | None:
    """Return the sizes in a text such as 3x224x224.

    Raises:
        typer.BadParameter: It is none.
    """
    if given is None:
        return None
    try:
        shape = tuple(int(part) for part in given.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise typer.BadParameter(f"{given!r} is no shape such as 3x224x224", param_hint="--input")
    return shape
