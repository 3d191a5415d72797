"""Models to files and back."""

from twofour.export.file import Contents, read
from twofour.export.save_load import load, save

__all__ = ["Contents", "load", "read", "save"]
