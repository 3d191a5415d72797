"""Weight and Expectation: one weight to check, wherever it is, and what the caller promises of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twofour.errors import LayerError, cut
from twofour.layers import KINDS as LAYER_KINDS
from twofour.layers import Reduction, matches
from twofour.patterns import COUNTED_DTYPES, Pattern, parse

KINDS = {2: "linear", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
"""What a tensor without a model is taken for, by its number of axes."""
FIRST = {2: "hf_conv1d", 3: "conv_transpose1d", 4: "conv_transpose2d", 5: "conv_transpose3d"}
"""The same where its reduction axis is known to be 0."""

RECURRENT = tuple(kind.name for kind in LAYER_KINDS if issubclass(kind.base, nn.RNNBase | nn.RNNCellBase))
"""Kinds of the weights of recurrent layers."""
MATRICES = ("matmul", *RECURRENT)
"""Kinds whose weights are matrices, or in ONNX stacks of them: the last two axes are those of the product."""

JUDGED = tuple(dtype for dtype in COUNTED_DTYPES if dtype.is_floating_point or dtype is torch.int8)
"""Types that weights come in; other whole numbers are indices, bits or several values in one."""

LEFT_OUT = "not named by include"
"""Why a weight that `include` does not name is skipped."""

Expect = str | Pattern | Mapping[str, str | Pattern] | None
Skipped = list[tuple[str, str]]
"""Names of tensors that are not checked, and why."""


@dataclass(frozen=True)
class Weight:
    """A weight to check: as stored, the axis its product sums over, and what was promised.

    Attributes:
        name: Its name.
        kind: Kind of weight, a name of `layers.KINDS`, "hf_conv1d" or "matmul".
        shape: Shape as stored.
        axis: The axis that its product sums over.
        read: Returns its values in that shape; called once, so that one weight at a time is in memory.
        promise: Pattern that it was promised to obey.
        keep: Returns the mask that was promised, of the weight's shape.
        other: Another axis that may be the right one, where nothing tells which.
        outputs: The axis of the outputs, where it is not the other one of the first two.
        by: Who promised it: "mask", "expect", "metadata", "packed form", "compressed-tensors", "apex mask", or
            the name of a compressed form, "marlin-24".
        notes: What the reader should know of how it was found.
        width: Widths of a layer of low bits, "w2a8", or how its whole numbers are packed, "s2".
        unread: Why the product does not read these values, so that nothing tells whether a promise is kept.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    axis: Reduction
    read: Callable[[], Tensor]
    promise: Pattern | None = None
    keep: Callable[[], Tensor] | None = None
    other: Reduction | None = None
    outputs: int | None = None
    by: str | None = None
    notes: tuple[str, ...] = ()
    unread: str = ""
    width: str | None = None

    @property
    def out(self) -> int:
        """The axis of the outputs."""
        return 1 - self.axis.axis if self.outputs is None else self.outputs

    @property
    def rows(self) -> int:
        """How many outputs the weight has, kernel positions and stacked matrices not counted."""
        return self.shape[self.out] * self.axis.parts

    @property
    def columns(self) -> int:
        """How many values one output sums over, at one kernel position."""
        return self.axis.length(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix or a stack of them, not a convolution's."""
        return len(self.shape) == 2 or self.kind in MATRICES


def unaligned(rows: int, columns: int) -> str:
    """Say why a weight of these sizes is not one of those that ASP prunes, "" where it is one."""
    return "" if rows % 8 == columns % 16 == 0 else f"({rows}, {columns}) is not a multiple of (8, 16) (ASP's rule)"


@dataclass(frozen=True)
class Expectation:
    """What a caller promises, parsed.

    Attributes:
        named: Weight names and their patterns.
        everywhere: The pattern of every eligible weight that is not named.
    """

    named: Mapping[str, Pattern] = field(default_factory=dict)
    everywhere: Pattern | None = None

    @classmethod
    def of(cls, expect: Expect) -> Expectation:
        """Parse what a caller gave.

        Raises:
            PatternError: A pattern does not parse.
            LayerError: A name is no text.
        """
        if expect is None:
            return cls()
        if isinstance(expect, Mapping):
            if wrong := [name for name in expect if not isinstance(name, str)]:
                raise LayerError(
                    "a promise names no weight",
                    got=f"{cut(repr(wrong[0]), 80)}, of type {type(wrong[0]).__name__}",
                    wanted='names of weights, such as "encoder.fc1.weight", and their patterns',
                    remedy="the report of check(model) lists the names",
                )
            return cls({name: parse(text) for name, text in expect.items()})
        return cls(everywhere=parse(expect))

    def __bool__(self) -> bool:
        return bool(self.named or self.everywhere)

    def find(self, *names: str) -> Pattern | None:
        """Return what is promised of a weight by the first of its names that is named."""
        return next((self.named[name] for name in names if name in self.named), None)

    def require_known(self, seen: Collection[str]) -> None:
        """Refuse a promise of a weight that is not there.

        Raises:
            LayerError: A name is not among `seen`.
        """
        if missing := sorted(set(self.named) - set(seen)):
            known = sorted(seen)
            raise LayerError(
                "a promise names a weight that is not there",
                got=", ".join(missing[:5]),
                wanted=f"names among {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}",
                remedy="check the model that the promise was made for",
            )


def named_by(globs: Sequence[str], name: str) -> bool:
    """Tell whether `include` names a weight; it names all of them where it is empty."""
    return not globs or any(matches(glob, name) for glob in globs)


def require_names(option: str, globs: Iterable[str], names: Sequence[str], place: object) -> None:
    """Refuse globs of the option `include` or `axes` that name no weight of a file.

    Raises:
        LayerError: One names none of `names`.
    """
    if unknown := [glob for glob in globs if not any(matches(glob, name) for name in names)]:
        raise LayerError(
            f"a glob in `{option}` names no weight",
            got=", ".join(map(repr, unknown[:5])),
            wanted=f"a name in {place}, or a glob of such names",
            remedy=f"names there: {', '.join(list(names)[:5])}",
        )
