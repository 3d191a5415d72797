"""Where libtwofour and its header stand."""

from __future__ import annotations

from pathlib import Path

from twofour import native
from twofour.errors import ExportError

ABI = 1
"""The number in the library's name, which CMakeLists.txt gives it."""


def library() -> Path:
    """Return the shared library that C programs link, built with the extension; its header is `include/twofour.h`.

    Raises:
        ExportError: It was not built, or not installed beside the extension.
    """
    folder = Path(str(native.extension().__file__)).parent
    names = (f"libtwofour.so.{ABI}", "libtwofour.so", f"libtwofour.{ABI}.dylib", "libtwofour.dylib")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ExportError(
        "libtwofour is not here",
        got=f"{folder} without {names[0]}",
        wanted="the library that is built with the extension",
        remedy="`make build` in a checkout, or `pip install` again",
    )
