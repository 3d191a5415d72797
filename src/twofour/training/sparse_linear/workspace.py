"""What gradients are packed into: fresh pages in every step would cost as much as the packing.

What one backward pass has packed for the next to multiply by stands here too.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Workspace:
    """A buffer for each thread, as large as the largest gradient so far, which the layers of one `attach` share."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def buffer(self, size: int) -> Tensor:
        """Return this thread's buffer, uint8, of at least `size` bytes; what it holds is overwritten by the next."""
        self.take()
        buffer: Tensor | None = getattr(self._threads, "buffer", None)
        if buffer is None or len(buffer) < size:
            self._threads.buffer = buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer

    def leave(self, made: object) -> None:
        """Leave something for the next one on this thread: until it is taken, or the buffer is."""
        self._threads.made = made

    def take(self) -> object | None:
        """Return what was left on this thread, and forget it."""
        made: object | None = getattr(self._threads, "made", None)
        self._threads.made = None
        return made

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:  # a copy gets buffers of its own
        return Workspace, ()
