"""Command line: one sub-command per verb, no logic of its own."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads that wait spin for some 0.1 ms, as those of our own pool do, and sleep then: twofour/native/waiting.py has
    # the reason. libgomp reads it when torch is imported, so it stands before the import below.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from twofour.cli.app import app, main

__all__ = ["app", "main"]
