"""How far a compilation is, told to whoever asked, or shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from twofour.compiler.choose import Progress
from twofour.progress import Progress as Shown

WHOLE = "the whole model"
"""Name of the last step, after the layers."""


class Stages:
    """The stages of one compilation: measure each layer, then capture and time the whole model.

    Args:
        shown: A bar, or lines in a log.
        told: Called in its place.
    """

    def __init__(self, shown: Shown, told: Progress | None) -> None:
        self._shown, self._told = shown, told
        shown.begin("measuring the kernels of each layer")
        self._total = 0

    def layer(self, done: int, total: int, name: str) -> None:
        """Begin the next layer."""
        self._total = total
        if self._told is not None:
            self._told(done, total, name)
        self._shown.move(done, total, name or "the model")

    def whole(self) -> None:
        """Begin with the whole model."""
        if self._told is not None and self._total:
            self._told(self._total, self._total, WHOLE)
        self._shown.move(self._total, self._total)
        self._shown.begin("capturing and timing the whole model")


@contextmanager
def stages(progress: Progress | bool | None) -> Iterator[Stages]:
    """Follow a compilation inside.

    Args:
        progress: As in `compile`.
    """
    told = progress if callable(progress) else None
    with Shown(told is None and progress is not False) as shown:
        yield Stages(shown, told)
