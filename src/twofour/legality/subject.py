"""Subject: one weight to examine, wherever it is: how to get at its values, and what was promised of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.layers import Reduction
from twofour.patterns import CENSUS_DTYPES, Pattern

KINDS = {2: "linear", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
"""What a tensor without a model is taken for, by its number of axes."""
FIRST = {2: "hf_conv1d", 3: "conv_transpose1d", 4: "conv_transpose2d", 5: "conv_transpose3d"}
"""The same where its reduction axis is known to be 0."""

JUDGED = tuple(dtype for dtype in CENSUS_DTYPES if dtype.is_floating_point or dtype is torch.int8)
"""Types that weights come in; other whole numbers are indices, bits or several values in one."""


@dataclass(frozen=True)
class Subject:
    """A weight to examine: as stored, the axis its product sums over, and what was promised.

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
        return len(self.shape) == 2 or self.kind == "matmul"
