"""Errors in the words of the command line: an argument of Python is an option here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from twofour.errors import TwofourError


@contextmanager
def spoken(remedies: Mapping[str, str]) -> Iterator[None]:
    """Give an error that passes through the remedy whose key stands in its own."""
    try:
        yield
    except TwofourError as error:
        said = error.remedy or ""
        error.remedy = next((remedy for key, remedy in remedies.items() if key in said), error.remedy)
        raise
