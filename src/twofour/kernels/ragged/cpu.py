"""Between padded batches and packed ones on the CPU: native calls on tensors of any type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twofour import native
from twofour.native.surroundings import plain


class Layout(NamedTuple):
    """Where the real tokens of a padded batch stand in a packed one.

    Attributes:
        rows: int64 (room,): the place of each packed row in the padded batch, counted through; the rows behind the last
            real token repeat the first.
        offsets: int64 (sequences + 2,): where each sequence begins in the packed batch, where the last one ends, and
            where the repetitions do, which are a sequence of their own.
        places: int64 (sequences, length): the packed row of each place, -1 of padding.
    """

    rows: Tensor
    offsets: Tensor
    places: Tensor


def real_tokens(mask: Tensor) -> int:
    """Return how many tokens of a padded batch are real.

    Args:
        mask: (sequences, length) of int64, bool or float32: 1 of a real token, 0 of padding.

    Returns:
        Their number; -1 where a sequence does not begin with a real token, or other numbers stand there.

    Raises:
        KernelError: The mask is none of that.
    """
    return native.extension().real_tokens(mask)


def lay_out(mask: Tensor, room: int) -> Layout:
    """Return the layout that packs a padded batch.

    Args:
        mask: As in `real_tokens`, which counts at least one token in it.
        room: Rows of the packed batch: as many as there are real tokens, or more.

    Raises:
        KernelError: The mask has other numbers, or more tokens than there is room for.
    """
    sequences = mask.shape[0]
    rows, offsets = (torch.empty(size, dtype=torch.int64, device="cpu") for size in (room, sequences + 2))
    found = Layout(rows, offsets, torch.empty(mask.shape, dtype=torch.int64, device="cpu"))
    native.extension().lay_out(mask, *found)
    return found


def take_tokens(x: Tensor, rows: Tensor) -> Tensor:
    """Return the real tokens of a padded batch one behind the other.

    Args:
        x: (sequences, length, ..., width), the numbers of a row contiguous.
        rows: As in `Layout`.

    Returns:
        (1, room, ..., width) of x's dtype, contiguous.

    Raises:
        KernelError: The operands do not fit, or a row is none of x.
    """
    (x, rows) = plain("packing a batch", x, rows)
    return _taken(x, rows, (1, rows.shape[0], *x.shape[2:]))


def pad_tokens(x: Tensor, places: Tensor) -> Tensor:
    """Return a padded batch of packed tokens: the inverse of `take_tokens`, zeros where padding stands.

    Args:
        x: (1, room, ..., width), the numbers of a row contiguous.
        places: As in `Layout`.

    Returns:
        (sequences, length, ..., width) of x's dtype, contiguous.

    Raises:
        KernelError: The operands do not fit, or a place is no row of x.
    """
    (x, places) = plain("padding a batch", x, places)
    return _taken(x, places, (*places.shape, *x.shape[2:]))


def _taken(x: Tensor, order: Tensor, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape, dtype=x.dtype, device="cpu")
    flat = x.flatten(2) if x.ndim > 3 else x
    native.extension().take_rows(flat, order, out.flatten(2) if out.ndim > 3 else out, native.threads())
    return out
