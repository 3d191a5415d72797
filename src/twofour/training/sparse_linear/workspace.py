"""What gradients are packed into: fresh pages in every step would cost as much as the packing.

What one backward pass has packed for the next to multiply by stands here too.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.autograd import Variable


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
        """Leave something for the next one on this thread: until it is taken, the buffer is, or the backward pass ends.

        Outside a backward pass nothing is left. One that fails ends nothing: what it left stays until the next.
        """
        if torch._C._current_graph_task_id() == -1:
            return
        self._threads.made = made
        Variable._execution_engine.queue_callback(self._forget)

    def take(self) -> object | None:
        """Return what was left on this thread, and forget it."""
        made: object | None = getattr(self._threads, "made", None)
        self._forget()
        return made

    def _forget(self) -> None:
        self._threads.made = None

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:  # a copy gets buffers of its own
        return Workspace, ()
