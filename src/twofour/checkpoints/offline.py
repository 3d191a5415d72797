"""No connection while a folder is read: the hub's own switch is set, and sockets of this thread are refused.

A config.json can name a backbone, an adapter or a kernel that lies elsewhere, and transformers fetches it by several
ways. Other threads keep their connections: they may be the caller's.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HERE: dict[int, int] = {}
"""Threads that read a folder, and how many times over."""
_LOCK = threading.Lock()
_GUARDED = ((socket.socket, ("connect", "connect_ex", "sendto")), (socket, ("getaddrinfo", "gethostbyname")))


class Refused(ConnectionError):
    """A connection that was asked for while a folder was read."""


class _InThisThread:
    """True in threads that read a folder: what stands in for the hub's constant, so that others stay online."""

    def __init__(self, otherwise: object) -> None:
        self.otherwise = otherwise

    def __bool__(self) -> bool:
        return threading.get_ident() in _HERE or bool(self.otherwise)


@contextmanager
def offline() -> Iterator[None]:
    """Refuse every connection that this thread asks for inside."""
    ident = threading.get_ident()
    with _LOCK:
        if not _HERE:
            _undo.extend((*_switch_hub(), *(_guard(place, name) for place, names in _GUARDED for name in names)))
        _HERE[ident] = _HERE.get(ident, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _HERE[ident] -= 1
            if not _HERE[ident]:
                del _HERE[ident]
            while not _HERE and _undo:
                _undo.pop()()


_undo: list[Callable[[], None]] = []


def _switch_hub() -> Iterator[Callable[[], None]]:
    try:
        from huggingface_hub import constants  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = _InThisThread(before)
    yield lambda: setattr(constants, "HF_HUB_OFFLINE", before)


def _guard(place: Any, name: str) -> Callable[[], None]:
    """Put a function that refuses before one of Python's; return what takes it away again."""
    original, own = getattr(place, name), name in vars(place)

    def guarded(*args: Any, **options: Any) -> Any:
        if threading.get_ident() in _HERE:
            raise Refused("a connection was asked for, and reading a folder opens none")
        return original(*args, **options)

    def undo() -> None:
        if vars(place).get(name) is not guarded:
            return  # somebody else has put a function before this one since, and it calls ours, which lets all pass
        if own:
            setattr(place, name, original)
        else:
            delattr(place, name)

    setattr(place, name, guarded)
    return undo
