"""Compiled models for libtwofour, which runs them without Python and without torch."""

from twofour.export.runtime.library import include, library
from twofour.export.runtime.write import Exported, to_runtime

__all__ = ["Exported", "include", "library", "to_runtime"]
