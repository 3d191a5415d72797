"""How much the model of a config.json may be: layers, modules, and time to make it."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as registration

from twofour.errors import cut

LAYERS = 2048
"""Layers that a config.json may ask for by one of its numbers."""
COUNT = 1 << 20
"""The largest of its other numbers of things: labels, experts, heads."""
POSITIONS = 1 << 24
"""The longest text that it may be made for."""
MODULES = 1 << 18
"""Modules of a model; the largest, experts counted one by one, have a third of it."""
SECONDS = 30.0
"""Processor time that making a model without values may take."""

_LAYERS = re.compile(r"(layers?|depths?|blocks|stages)$")
_POSITIONS = re.compile(r"max_.*position|n_positions$")
_COUNTS = re.compile(r"^(n|num)_")
_EVERY = 0.1
"""Seconds between two looks at the clock."""


class _TooLong(BaseException):
    """Raised inside the thread that makes a model: no `except Exception` on the way holds it up."""


def require_modest(content: Any, key: str = "") -> None:
    """Refuse numbers in a config.json that would be counted up to before anything is made.

    Raises:
        ValueError: There is one; the text says which, and what is allowed.
    """
    if isinstance(content, Mapping):
        for name, value in content.items():
            require_modest(value, str(name))
    elif isinstance(content, list):
        for value in content:
            require_modest(value, key)
        if _LAYERS.search(key) and (total := sum(value for value in content if type(value) is int)) > LAYERS:
            raise ValueError(f"`{cut(key, 80)}` of {total} in all, at most {LAYERS} are made")
    elif type(content) is int:
        limits = ((_LAYERS, LAYERS), (_POSITIONS, POSITIONS), (_COUNTS, COUNT))
        most = next((most for names, most in limits if names.search(key)), content)
        if content > most:
            raise ValueError(f"`{cut(key, 80)}` of {content}, at most {most} are made")


@contextmanager
def limited() -> Iterator[None]:
    """End the making of a model inside that takes more than `MODULES` or `SECONDS`.

    Raises:
        ValueError: It did.
    """
    ident, made = threading.get_ident(), 0

    def count(*_: object) -> None:
        nonlocal made
        if threading.get_ident() == ident:
            made += 1
            if made > MODULES:
                raise ValueError(f"a model of more than {MODULES} modules, at most so many are made")

    handle = registration.register_module_module_registration_hook(count)
    watch = _Watch(ident)
    try:
        try:
            yield
        finally:
            watch.end()
    except _TooLong:
        watch.end()  # again: it may have come in the middle of the first
        raise ValueError(
            f"a model that takes more than {SECONDS:g} seconds to make, at most so many are spent"
        ) from None
    finally:
        handle.remove()


def size_of(model: nn.Module) -> int:
    """Return how many bytes the parameters and buffers of a model take, or would take with values."""
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))


class _Watch:
    """Looks at the processor time of a thread, and raises `_TooLong` in it when it is over."""

    def __init__(self, ident: int) -> None:
        self.ident, self.over = ident, threading.Event()
        self.lock = threading.Lock()
        self.clock = getattr(time, "pthread_getcpuclockid", None)
        self.start = self._spent()
        threading.Thread(target=self._run, name="twofour-watch", daemon=True).start()

    def end(self) -> None:
        with self.lock:
            self.over.set()
        # One raised meanwhile arrives at a jump backwards: here, not in the code that follows. Taking it back by
        # SetAsyncExc(NULL) would leave the interpreter's flag up for good, and a profiler hangs on that (CPython 3.11).
        for _ in range(2):
            pass

    def _spent(self) -> float:
        return time.clock_gettime(self.clock(self.ident)) if self.clock else time.monotonic()

    def _run(self) -> None:
        while not self.over.wait(_EVERY):
            with self.lock:
                if not self.over.is_set() and self._spent() - self.start > SECONDS:
                    _raise_in(self.ident, _TooLong)
                    return


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
