"""Sizes: whole numbers from 1, one wording wherever they are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from twofour.errors import HardwareError, cut


def integer(size: Any, *, arrays: bool = False) -> Any:
    """Return a size as int, an array of sizes as int64 where arrays are taken, or None where one is not whole from 1.

    int64, since products of sizes in a narrow type would wrap around.
    """
    if type(size) is int:
        return size if size >= 1 else None
    try:
        found = np.asarray(size)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that has no values
        return None
    if found.dtype.kind not in "iuf" or (found.ndim and not arrays):
        return None
    if not (np.isfinite(found) & (found >= 1) & (found < 2**63) & (found == np.floor(found))).all():
        return None
    return found.astype(np.int64) if found.ndim else int(found)


def require_integers(what: str, remedy: str, *, arrays: bool = False, **sizes: Any) -> list[Any]:
    """Return sizes as `integer` does.

    Raises:
        HardwareError: One is not a whole number from 1.
    """
    found = [integer(size, arrays=arrays) for size in sizes.values()]
    wrong = [
        f"{name}={cut(str(size), 40)}" for (name, size), fit in zip(sizes.items(), found, strict=True) if fit is None
    ]
    if wrong:
        raise HardwareError(what, got=", ".join(wrong), wanted="whole numbers from 1", remedy=remedy)
    return found
