"""One base error and its kinds: each message says what was wrong, what was got, what was wanted and what to try."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self, TypeVar


class TwofourError(Exception):
    """Base of every error that twofour raises on purpose.

    Args:
        what: One sentence: what could not be done.
        got: What was found, with values.
        wanted: What would have been accepted.
        remedy: What the reader can try next.
        reasons: One line per candidate that was considered and refused.
        layer: Name of the layer or weight concerned; the border that knows it adds it with `for_layer`.
        code: Name of the way in which a file is malformed, a row of the table in docs/formats.md.
    """

    def __init__(
        self,
        what: str,
        *,
        got: str | None = None,
        wanted: str | None = None,
        remedy: str | None = None,
        reasons: Sequence[str] = (),
        layer: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.got = got
        self.wanted = wanted
        self.remedy = remedy
        self.reasons = tuple(reasons)
        self.layer = layer
        self.code = code

    def __str__(self) -> str:
        lines = [f"layer `{self.layer}`: {self.what}" if self.layer else self.what]
        lines += [f"  reason  {reason}" for reason in self.reasons]
        for label, text in (("got", self.got), ("wanted", self.wanted), ("try", self.remedy), ("code", self.code)):
            if text:
                lines.append(f"  {label:<7} {text}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        # What frameworks that wrap an error show of it: the whole message, not its first line.
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by calling cls(*args); keyword-only fields travel as state instead.
        return (type(self), (self.what,), self.__dict__.copy())

    def for_layer(self, name: str) -> Self:
        """Return the same error with the layer's name in front, unless one is named already."""
        self.layer = self.layer or name
        return self


Kind = TypeVar("Kind", bound=TwofourError)


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` letters for a message; one that is longer ends in "..."."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_of(what: str, given: object, allowed: Collection[object], kind: type[TwofourError], remedy: str = "") -> None:
    """Refuse a value that is none of those allowed.

    Args:
        what: The error's first line.
        given: The value.
        allowed: What it may be.
        kind: The error to raise.
        remedy: What to try.

    Raises:
        TwofourError: It is none of them; of the kind that was asked for.
    """
    if given not in allowed:
        known = [f'"{value}"' if isinstance(value, str) else str(value) for value in allowed if value is not None]
        wanted = " or ".join(known) if len(known) < 4 else f"one of {', '.join(map(str, allowed))}"
        raise kind(what, got=cut(repr(given), 80), wanted=wanted, remedy=remedy)


def integer_from(
    least: int, what: str, kind: type[TwofourError], remedy: str = "", most: int | None = None, **given: object
) -> None:
    """Refuse arguments, given by their names, that are no whole numbers from `least` to `most`.

    Raises:
        TwofourError: One is none, a bool included; of the kind that was asked for.
    """
    for name, value in given.items():
        if type(value) is not int or value < least or (most is not None and value > most):
            upto = f"at least {least}" if most is None else f"from {least} to {most}"
            raise kind(what, got=f"{name}={cut(repr(value), 80)}", wanted=f"a whole number, {upto}", remedy=remedy)


def explained(error: BaseException) -> str:
    """Return an error's kind and first line, and those of the error at the root of it where that is another.

    A library that imports its parts when they are used says that one is missing; why, its cause alone tells.
    """
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return _line(error) if root is error else f"{_line(error)} Because of {_line(root)}"


def absent(kind: type[Kind], what: str, error: ImportError, wanted: str, extra: str) -> Kind:
    """Build the error for a package that is not installed, which the extra of that name brings."""
    remedy = f'pip install "twofour[{extra}]"'
    return kind(what, got=explained(error), wanted=wanted, remedy=remedy)


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {cut(text, 400)}" if text else type(error).__name__


class PatternError(TwofourError, ValueError):
    """A sparsity pattern does not parse, is not built yet, or does not fit the tensor."""


class LayerError(TwofourError, ValueError):
    """A layer cannot be pruned or addressed as asked."""


class MaskError(TwofourError, RuntimeError):
    """A mask cannot be attached, kept or restored."""


class RecipeError(TwofourError, ValueError):
    """A recipe is malformed or names layers that do not exist."""


class PackingError(TwofourError, ValueError):
    """A weight cannot be written in the packed form, or packed bytes are inconsistent."""


class PermutationError(TwofourError, RuntimeError):
    """The channels of a model cannot be put in another order without changing what it computes."""


class ShrinkError(TwofourError, ValueError):
    """Channels or layers of a model cannot be cut as asked."""


class KernelError(TwofourError, RuntimeError):
    """No kernel can run the operation, or one was given bytes made for another."""


class CompileError(TwofourError, RuntimeError):
    """A model cannot be compiled as asked."""


class FormatError(TwofourError, ValueError):
    """A file is truncated, malformed or of another format."""


class ExportError(TwofourError, RuntimeError):
    """A model cannot be written in another tool's format, or does not compute the same there."""


class TrainingError(TwofourError, RuntimeError):
    """A training run cannot start or continue."""


class QuantizationError(TwofourError, ValueError):
    """A model cannot compute in so few bits as asked."""


class MeasureError(TwofourError, RuntimeError):
    """A measurement was asked for that cannot be made."""


class HardwareError(TwofourError, ValueError):
    """A machine is unknown, cannot exist, or has no unit for what is asked of it."""


class ReportError(TwofourError, ValueError):
    """A run cannot be read, or its report cannot be written."""


class OptimizeError(TwofourError, RuntimeError):
    """A model cannot be optimised as asked."""


class DataError(TwofourError, ValueError):
    """A data set is missing or not in the expected form."""


class SourceError(TwofourError, ValueError):
    """A model source given on the command line cannot be read."""
