"""Kept: a weight as a sparse array holds it, kept values beside the rows they came from; how N:M weights get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError


@dataclass(frozen=True)
class Kept:
    """An N:M sparse weight, its zeros left out.

    Attributes:
        values: Kept values, (kept reduction, n).
        rows: Row of w that each came from, int64, ascending in each column; the low bits of it are the metadata.
        reduction: Rows of the whole weight.
        group: The M of N:M.
    """

    values: NDArray[Any]
    rows: NDArray[np.int64]
    reduction: int
    group: int

    def dense(self) -> NDArray[Any]:
        """Return the whole weight, (reduction, n)."""
        whole = np.zeros((self.reduction, self.values.shape[1]), self.values.dtype)
        np.put_along_axis(whole, self.rows, self.values, axis=0)
        return whole

    @property
    def metadata(self) -> NDArray[np.int64]:
        """Return each value's place within its group, what the hardware stores: log2(M) bits."""
        return self.rows % self.group


def keep(weight: NDArray[Any], kept: int, group: int) -> Kept:
    """Leave the zeros of an N:M sparse weight out.

    Groups with fewer than N values keep zeros at the first free places, as the packed format does (docs/formats.md).

    Args:
        weight: (k, n), at most `kept` non-zeros in each group of `group` along k; the last group may be short.
        kept: The N of N:M.
        group: The M of N:M.

    Raises:
        HardwareError: A group holds more values than are kept.
    """
    k, n = weight.shape
    whole = k // group * group
    parts = [weight[:whole].reshape(whole // group, group, n), weight[None, whole:]]
    most = max(int((part != 0).sum(1).max(initial=0)) for part in parts)
    if not 1 <= kept <= group or most > kept:
        raise HardwareError(
            f"the weight is not {kept}:{group} sparse along its reduction",
            got=f"a group of {group} with {most} values",
            wanted=f"at most {kept} of {group} rows in each column",
            remedy=f'twofour.prune(model, "{kept}:{group}"), and pass the weight transposed, (in, out)',
        )
    rows = np.concatenate([_places(part != 0, kept, group) for part in parts])
    rows[whole // group * kept :] += whole
    return Kept(np.take_along_axis(weight, rows, 0), rows, k, group)


def _places(held: NDArray[np.bool_], kept: int, group: int) -> NDArray[np.int64]:
    """Return the rows of the first `kept` places of each block (blocks, size, n), those that hold a value first."""
    blocks, size, n = held.shape
    first = np.sort(np.argsort(~held, axis=1, kind="stable")[:, :kept], axis=1)
    return (first + np.arange(blocks)[:, None, None] * group).reshape(blocks * min(kept, size), n)
