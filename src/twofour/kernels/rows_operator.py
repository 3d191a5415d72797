"""`twofour::rows`: rows of a prepared weight as an embedding returns them, for torch.compile and torch.export."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels.base import Kernel, Prepared, row_numbers
from twofour.kernels.registration import register
from twofour.kernels.table import find
from twofour.native.surroundings import by_operators, followed

_SCHEMA = "rows(Tensor weight, Tensor places, str kernel, int width) -> Tensor"


def look_up(prepared: Prepared, places: Tensor, width: int) -> Tensor:
    """Return rows of a prepared weight, by the registered operator where something follows the call.

    Arguments and errors as of `Kernel.rows`.
    """
    if by_operators():
        with followed():
            return torch.ops.twofour.rows(prepared.tensor, places, prepared.kernel.name, width)
    return prepared.kernel.rows(prepared, places, width)


def _rows(weight: Tensor, places: Tensor, kernel: str, width: int) -> Tensor:
    found = find(kernel, Kernel)
    return found.rows(Prepared(found, weight), places, width)


def _fake(weight: Tensor, places: Tensor, kernel: str, width: int) -> Tensor:
    return weight.new_empty((*row_numbers(places).shape, width), dtype=getattr(torch, find(kernel, Kernel).dtype))


register(_SCHEMA, _fake, CompositeExplicitAutograd=_rows)
