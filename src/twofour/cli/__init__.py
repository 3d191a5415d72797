"""Command line: one sub-command per verb, no logic of its own."""

from twofour.cli.app import app, main

__all__ = ["app", "main"]
