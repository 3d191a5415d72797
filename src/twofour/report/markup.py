"""HTML built from elements: whatever is not an element is text, and text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that are not shown, turn the text around them, or have no bytes in UTF-8; tab and newline are not."""
_EMPTY = {"meta", "link", "br", "hr"}


class Markup(str):
    """HTML already: it is not escaped again."""


def escaped(value: object) -> Markup:
    """Return a value as HTML: markup as it is, other things as their text; what a reader would not see is spelt."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Of the element.
        children: Markup or text; None is left out.
        attributes: A trailing underscore goes and others become hyphens: class_, stroke_width. None and False leave an
            attribute out, True gives it no value.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """Return parts, one after the other; None is left out."""
    return Markup("".join(escaped(part) for part in parts if part is not None))
