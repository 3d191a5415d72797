"""widths_of: how wide a group of channels may become, in multiples of what kernels like."""

from __future__ import annotations

import math


def widths_of(size: int, multiple: int | None, least: float) -> tuple[int, ...]:
    """Return the widths that a group may have, descending: multiples of what kernels like, down to a least share.

    Args:
        size: Channels that it has.
        multiple: The multiple; a group that is narrower than it stays whole. None takes 16 from 128 channels on and 8
            from 32 on, since 2:4 wants reduction axes of 16 and rows of 8 (apex asp.py), else 1.
        least: The least share that stays, rounded up to whole channels.
    """
    unit = multiple or (16 if size >= 128 else 8 if size >= 32 else 1)
    whole = math.ceil(size * least - 1e-9)  # 0.07 * 100 is 7.000000000000001
    floor = max(1, -(-whole // unit) * unit)
    return (size, *(width for width in range((size - 1) // unit * unit, 0, -unit) if width >= floor))
