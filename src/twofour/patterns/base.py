"""The protocol of a sparsity pattern: scores in, mask out, and a check that a weight obeys it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from twofour.errors import PatternError
from twofour.native.surroundings import out_of_reach
from twofour.shapes import Bool, Real, Shaped


@dataclass(frozen=True)
class Conformity:
    """How far a weight obeys a pattern.

    Attributes:
        groups: How many groups the weight has.
        legal: How many of them obey the pattern.
        first: Index of the first value of the first offending group, or None.
        values: The values of that group.
    """

    groups: int
    legal: int
    first: tuple[int, ...] | None = None
    values: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every group obeys the pattern."""
        return self.legal == self.groups

    @property
    def sentence(self) -> str:
        """How many groups break the pattern, and where the first one is, for messages."""
        where = "" if self.first is None else f", the first at {self.first}"
        return f"{self.groups - self.legal} of {self.groups} groups break it{where}"


class Pattern(ABC):
    """What may be zero. Groups lie along the last axis, which is the reduction axis of the product."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The text that `twofour.patterns.parse` turns into this pattern."""

    @property
    @abstractmethod
    def group(self) -> int:
        """Values per group; the reduction axis must be a multiple of it."""

    @property
    @abstractmethod
    def density(self) -> float:
        """Largest fraction of values that may be non-zero."""

    @property
    def family(self) -> str:
        """What rows of the kernel table call the weights they take, where one row takes all patterns of a kind."""
        return self.name

    @property
    def demand(self) -> str:
        """What a weight must be, for messages."""
        return f"at most {self.density:.0%} non-zeros in each group of {self.group} along the reduction axis"

    @abstractmethod
    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*rows reduction"]:
        """Return the mask that keeps the best-scored values of each group, the lowest index winning ties.

        Args:
            scores: Real scores (..., in), any floating dtype; larger is more important.
            absolute: Rank by |scores|, without making a copy of them.

        Returns:
            Bool mask of the same shape, True where a value is kept.

        Raises:
            PatternError: `scores` does not divide into groups, is not real, or holds NaN or infinity.
        """

    @abstractmethod
    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Say how many groups of `weight` (..., in) obey the pattern; -0.0 counts as zero.

        Raises:
            PatternError: `weight` does not divide into groups or has no values (meta).
        """

    @property
    def rows(self) -> Pattern:
        """What each row obeys by itself along the reduction axis: packed weights are written so."""
        return self

    def unfit(self, positions: int, reduction: int) -> str:
        """Return why a weight cannot carry the pattern, "" where it can.

        Args:
            positions: Positions of a convolution's kernel, 1 of other weights.
            reduction: Inputs of one product at each.
        """
        return (
            f"reduction axis {reduction} is not a multiple of {self.group} ({self.name})"
            if reduction % self.group
            else ""
        )

    def on_parts(self, parts: int, rows: int) -> Pattern:
        """Return the pattern for a weight whose `rows` are `parts` matrices one above the other: gates, say."""
        return self

    def within(self, other: Pattern) -> bool:
        """Tell whether every weight that obeys this pattern obeys `other` too, so that kernels of `other` run it.

        True only where that follows from the two patterns alone, whatever the weight's size.
        """
        implied = other in (self, self.rows) or other.contains(self)
        return implied or (self.rows is not self and self.rows.within(other))

    def contains(self, other: Pattern) -> bool:
        """Tell whether weights of `other` obey this pattern, where this one knows of it and `other` does not."""
        return False

    def __str__(self) -> str:
        return self.name


def require_groups(pattern: Pattern, tensor: Tensor, role: str) -> None:
    """Refuse a tensor that `pattern` cannot be laid over.

    Raises:
        PatternError: No tensor, or one that is sharded over processes (a DTensor), on the meta device, not strided,
            complex, empty, a scalar, or whose last axis is not a multiple of the group.
    """
    require_memory(tensor, role)
    if hasattr(tensor, "full_tensor"):  # native code would read a shard as if it were the whole
        raise PatternError(
            f"{role} cannot carry the pattern {pattern.name}",
            got="a DTensor, of which each process holds a part",
            wanted="whole values",
            remedy="tensor.full_tensor() gathers them, in every process; twofour.prune takes sharded models itself",
        )
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise PatternError(
            f"{role} cannot carry the pattern {pattern.name}",
            got=f"a {tensor.layout} tensor of dtype {tensor.dtype}",
            wanted="a plain (strided) real tensor",
            remedy="convert it with .to_dense() or .dequantize() first",
        )
    if tensor.ndim == 0 or tensor.numel() == 0 or shape[-1] % pattern.group:
        raise PatternError(
            f"{role} cannot carry the pattern {pattern.name}",
            got=f"shape {shape}: {_what_is_wrong(shape, pattern.group)}",
            wanted=f"a last (reduction) axis that is a positive multiple of {pattern.group}",
            remedy="leave this layer dense (skip=...), or pad the layer to a multiple of the group",
        )
    if tensor.is_meta:
        raise PatternError(
            f"{role} cannot carry the pattern {pattern.name}",
            got=f"a tensor on the meta device, shape {shape}: it has no values",
            wanted="a tensor with values",
            remedy="load the weights first, for instance with model.to_empty(device='cpu') and load_state_dict",
        )


def require_memory(tensor: object, role: str) -> None:
    """Refuse what native code could not read: a tensor of a mode or a transform, a wrapper, freed memory.

    Raises:
        PatternError: No tensor, or one without numbers of its own.
    """
    if not isinstance(tensor, Tensor):
        raise PatternError(
            f"{role} cannot carry a pattern",
            got=type(tensor).__name__,
            wanted="a torch.Tensor",
            remedy="torch.as_tensor(array) shares the memory of a NumPy array",
        )
    apart = hasattr(tensor, "full_tensor") or (tensor.layout is not torch.strided and not tensor.is_mkldnn)
    odd = None if apart else out_of_reach(tensor)  # of what is apart the caller says more
    if odd is not None:
        raise PatternError(f"{role} cannot be read", got=odd[0], wanted="a plain tensor with values", remedy=odd[1])


def _what_is_wrong(shape: tuple[int, ...], group: int) -> str:
    if not shape:
        return "a scalar has no reduction axis"
    if 0 in shape:
        return "there are no values"
    return f"{shape[-1]} is not a multiple of {group}"


def is_finite(tensor: Tensor) -> bool:
    """Tell whether no value is NaN or infinite, without allocating: both survive the extremes."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(map(isfinite, tensor.aminmax()))


def first_true(mask: Bool[Tensor, "*axes"]) -> tuple[int, ...]:
    """Return the index of the first True of a mask that has one."""
    return tuple(map(int, mask.nonzero()[0]))


def numbers(values: Shaped[Tensor, " count"]) -> tuple[float, ...]:
    """Return a vector's values as numbers."""
    return tuple(value.item() for value in values)


def non_finite(role: str, tensor: Tensor) -> PatternError:
    """Build the error for scores or weights that hold NaN or infinity."""
    bad = (~torch.isfinite(tensor)).nonzero()
    where = tuple(map(int, bad[0]))
    return PatternError(
        f"{role} cannot be ranked",
        got=f"{len(bad)} values that are NaN or infinite, the first {tensor[where].item()} at {where}",
        wanted="finite values only",
        remedy="look for a diverged training run or a broken checkpoint; torch.nan_to_num would hide it",
    )
