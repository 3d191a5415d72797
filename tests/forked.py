"""Forked processes that end here, whatever is raised in them: one that went on would be a second test run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

FAILED = 70
"""Exit status of a child whose work raised."""


def forked(work: Callable[[], int | None]) -> int:
    """Fork a process for `work`, whose answer is its exit status, None being 0; return its number."""
    child = os.fork()
    if child:
        return child
    status = FAILED
    try:
        status = work() or 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def status_of(work: Callable[[], int | None]) -> int:
    """Return the exit status of a process forked for `work`, minus the signal where one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
