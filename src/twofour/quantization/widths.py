"""Widths as users write them, "w2" and "a2", and the encodings they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from twofour.errors import QuantizationError, cut
from twofour.kernels.bits_matmul import Levels
from twofour.kernels.quantization import REAL, Quantization
from twofour.layers import matches, require_matches
from twofour.packing import encodings
from twofour.packing.encodings import WIDEST, Bits

FLOAT = "float"
"""What leaves weights or inputs as they are."""

_WEIGHTS = {"w1": "b1", "w1.58": "ternary"} | {f"w{bits}": f"s{bits}" for bits in range(2, WIDEST + 1)}
_INPUTS = {f"a{bits}": f"u{bits}" for bits in range(1, WIDEST + 1)}
_LEVELS = {"weights": ("twos", "bipolar", "ternary"), "activations": ("unsigned", "twos", "bipolar")}
_THREE = 'three levels of an input take the time of four: "a2" (0 to 3) or "s2" (-2 to 1)'
_REMEDIES = {(role, "s1"): "one bit of two's complement is {-1, 0}: b1 is {-1, 1}" for role in _LEVELS}
_REMEDIES |= {("activations", text): _THREE for text in ("a1.58", "w1.58", "ternary", "ternary5")}
"""What to try instead of a width that is not there, where it is not the default of the role."""


@dataclass(frozen=True)
class Widths:
    """How a layer's weight and inputs are written.

    Attributes:
        weights: Encoding of the weight.
        inputs: Encoding of the inputs; None: they stay floats.
    """

    weights: Bits
    inputs: Bits | None

    @property
    def name(self) -> str:
        """As plans spell it: "w2a2", of encodings that have no such name theirs, "b3s4"."""
        return _spelt(self.weights, _WEIGHTS) + ("" if self.inputs is None else _spelt(self.inputs, _INPUTS))

    @classmethod
    def parse(cls, text: str) -> Widths:
        """Read a name such as "w2a8" or "b3s4".

        Raises:
            QuantizationError: It is none of a weight and of inputs.
        """
        for end in range(1, len(text) if isinstance(text, str) and len(text) < 16 else 0):
            try:
                weights, inputs = encoding_of(text[:end], "weights"), encoding_of(text[end:], "activations")
            except QuantizationError:
                continue
            if weights is not None and inputs is not None:
                return cls(weights, inputs)
        raise QuantizationError(
            "the widths of a layer are not known",
            got=cut(repr(text), 60),
            wanted='those of a weight and of inputs: "w2a2", "w1.58a8", "b3s4"',
            remedy='"w4a8"',
        )

    def longest(self, *, shifted: bool = False) -> int:
        """Return how many products a sum may have to surely fit int32, as the kernels count them: see `Levels.longest`.

        `shifted`: of weights with zero points.
        """
        return 1 << 40 if self.inputs is None else self.levels.longest(self.range(), shifted=shifted)

    @property
    def levels(self) -> Levels:
        """What the codes of a weight stand for, as kernels take them."""
        return Levels(self.weights.bits, self.weights.alpha, self.weights.beta)

    def range(self, scale: float | None = None, zero: int = 0) -> Quantization:
        """Return the range of inputs as kernels take it: one scale and zero point, or None for each token's own.

        Of inputs that stay floats it says that they do.
        """
        if self.inputs is None:
            return Quantization(levels=REAL)
        levels = self.inputs.levels
        zero = zero if levels == "unsigned" else 0
        return Quantization(scale, zero, bits=self.inputs.bits, levels=levels)


def _spelt(encoding: Bits, names: Mapping[str, str]) -> str:
    return next((name for name, held in names.items() if held == encoding.name), encoding.name)


def encoding_of(text: object, role: str) -> Bits | None:
    """Return what a width stands for, None for "float".

    Args:
        text: "w1" (bipolar) to "w8" (two's complement), "w1.58" (ternary), "a1" to "a8" (unsigned), or the name of an
            encoding.
        role: "weights" or "activations".

    Raises:
        QuantizationError: It is no width, or one whose levels mean nothing there.
    """
    names = _WEIGHTS if role == "weights" else _INPUTS
    if text == FLOAT or (text is None and role == "activations"):
        return None
    found = encodings.find(names.get(text, text)) if isinstance(text, str) else None
    if not isinstance(found, Bits) or found.levels not in _LEVELS[role] or (found.levels, found.bits) == ("twos", 1):
        exact = "s2 to s8, b1 to b8" + (", ternary, ternary5" if role == "weights" else ", u1 to u8")
        plain = f"{role[0]}{said}" if (said := str(text).strip().lower().removeprefix("int")).isdigit() else said
        raise QuantizationError(
            f"the width of {role} is not known",
            got=cut(repr(text), 60),
            wanted=f'"{next(iter(names))}" to "{list(names)[-1]}", '
            + ('"w1.58", ' if role == "weights" else "")
            + f'"float", or an encoding: {exact}',
            remedy=_REMEDIES.get((role, plain))
            or f'{role}="{plain if plain in names else "w2" if role == "weights" else "a2"}"',
        )
    return found


@dataclass(frozen=True)
class Rules:
    """Ordered globs of layers and what they are written in; the first that matches decides."""

    rules: tuple[tuple[str, Bits | None], ...]

    @classmethod
    def parse(cls, given: object, role: str, model: nn.Module) -> Rules:
        """Read a width for every layer, or a mapping from globs to widths.

        Raises:
            QuantizationError: A width is not known, or a glob names no layer.
        """
        if not isinstance(given, Mapping):
            return cls((("*", encoding_of(given, role)),))
        known: Mapping[Any, Any] = given
        if not known or not all(isinstance(glob, str) for glob in known):
            raise QuantizationError(
                f"the rules of {role} are malformed",
                got=cut(repr(given), 80),
                wanted='globs of layers and widths: {"encoder.*": "w2", "*": "w4"}',
                remedy='a width alone is for every layer: "w2"',
            )
        require_matches(model, known, f"a rule of {role}", QuantizationError)
        globs = list(known)
        if (every := next((at for at, glob in enumerate(globs) if not glob.strip("*")), len(globs))) < len(globs) - 1:
            raise QuantizationError(
                f"a rule of {role} can never apply",
                got=f"{globs[every + 1]!r} behind {globs[every]!r}, which matches every layer",
                wanted="the rule for all others at the end: the first that matches decides",
                remedy=cut(repr({glob: known[glob] for glob in (*globs[every + 1 :], globs[every])}), 120),
            )
        return cls(tuple((glob, encoding_of(text, role)) for glob, text in known.items()))

    def find(self, layer: str) -> tuple[Bits | None, bool]:
        """Return what a layer is written in, and whether a rule names it by more than "*"."""
        for glob, encoding in self.rules:
            if matches(glob, layer):
                return encoding, bool(glob.strip("*"))
        return None, False
