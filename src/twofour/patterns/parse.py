"""Text to pattern, once, at the border: inside the package only `Pattern` objects travel."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from twofour.errors import PatternError
from twofour.patterns.base import Pattern
from twofour.patterns.block import Block
from twofour.patterns.hybrid import Hybrid
from twofour.patterns.nm import NM
from twofour.patterns.pairs import PairedNM
from twofour.patterns.transposable import Transposable
from twofour.patterns.vnm import VNM

_FORMS = (
    '"N:M" (2:4, 1:2, 4:8, ...), "2:4+25%", "2:4-transposable", "4:8-pairs", "V:N:M" (64:2:8, ...) or "block:RxC@S"'
)
_BLOCK = re.compile(r"block:([0-9]{1,4})x([0-9]{1,4})@([01]?\.[0-9]{1,20}|[01])(?:/([0-9]{1,2}))?")
_HYBRID = re.compile(r"([0-9]{1,4}):([0-9]{1,4})\+([0-9]{1,3}(?:\.[0-9]{1,20})?)%")
_KINDS: dict[str, Callable[..., Pattern]] = {
    r"([0-9]{1,4}):([0-9]{1,4})": NM,
    r"([0-9]{1,4}):([0-9]{1,4})-pairs": PairedNM,
    r"([0-9]{1,4}):([0-9]{1,4})-transposable": Transposable,
    r"([0-9]{1,5}):([0-9]{1,4}):([0-9]{1,4})": VNM,
}
"""Form of a pattern's text -> what makes the pattern of the numbers in its brackets."""


def parse(pattern: str | Pattern) -> Pattern:
    """Turn the text of a pattern into a `Pattern`, white space around it and its "+" left out; a `Pattern` is returned.

    Example:
        >>> parse("2:4").density
        0.5

    Raises:
        PatternError: The text is no pattern, or one that is planned and not built yet.
    """
    match pattern:
        case Pattern():
            return pattern
        case str():
            return _parse(re.sub(r"\s*\+\s*", "+", pattern.strip()))
        case _:
            raise PatternError(
                "a pattern must be text or a Pattern",
                got=f"{type(pattern).__name__}: {pattern!r:.80}",
                wanted=_FORMS,
                remedy='"2:4", or a mapping from layer globs to patterns where a function takes one',
            )


def add(form: str, kind: Callable[..., Pattern]) -> None:
    """Let `parse` read the patterns of another package; the forms of this one come first.

    Args:
        form: Regular expression of the whole text, with brackets around its whole numbers: r"([0-9]+):8-mine".
        kind: Makes the pattern of these numbers. Its `name` must be such a text.
    """
    _KINDS.setdefault(form, kind)
    _parse.cache_clear()


@cache
def _parse(text: str) -> Pattern:
    for form, kind in _KINDS.items():
        if match := re.fullmatch(form, text):
            return kind(*map(int, match.groups()))
    if match := _BLOCK.fullmatch(text):
        return Block.of_text(*match.groups())
    if match := _HYBRID.fullmatch(text):
        return Hybrid(int(match[1]), int(match[2]), float(match[3]))
    if text.startswith("block"):
        raise PatternError(
            "the text is not a block pattern",
            got=repr(text),
            wanted='"block:RxC@S": blocks of R outputs by C inputs, S the share of them that is zero',
            remedy='"block:16x16@0.9": nine tenths of the 16 x 16 blocks are zero',
        )
    remedy = '"2:4" is what Sparse Tensor Cores and the CPU kernels run'
    if re.fullmatch(r"channels?(:.*)?", text):
        remedy = "whole channels change the shapes of weights, which no pattern does: twofour.structure will cut them"
    elif _HYBRID.fullmatch(near := re.sub(r"\s", "", text).removesuffix("%") + "%"):
        remedy = f'did you mean "{near}"?'
    raise PatternError("the text is not a sparsity pattern", got=repr(text), wanted=_FORMS, remedy=remedy)
