"""Forked processes that end here, whatever is raised in them: one that went on would be a second test run.

A child has none of the threads that OpenMP started for its parent and waits for them for ever where it asks for
several (docs/environment.md), so that its work runs on one, whatever the parent's runs on.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import torch

FAILED = 70
"""Exit status of a child whose work raised."""

LONGEST = 120
"""Seconds after which a child is ended, as by SIGALRM: one that hangs fails its test, and the others go on."""


def forked(work: Callable[[], int | None]) -> int:
    """Fork a process for `work`, whose answer is its exit status, None being 0; return its number."""
    child = os.fork()
    if child:
        return child
    status = FAILED
    try:
        signal.alarm(LONGEST)
        torch.set_num_threads(1)
        status = work() or 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def status_of(work: Callable[[], int | None]) -> int:
    """Return the exit status of a process forked for `work`, minus the signal where one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
