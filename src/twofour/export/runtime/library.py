"""Where libtwofour and its header stand."""

from __future__ import annotations

from pathlib import Path

from twofour import native
from twofour.errors import ExportError

ABI = 1
"""The number in the library's name, which CMakeLists.txt gives it."""
HEADER = "twofour.h"


def library() -> Path:
    """Return the shared library that C programs link, built with the extension; `include` has its header.

    Raises:
        ExportError: It was not built, or not installed beside the extension.
    """
    folder = _folder()
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


def include() -> Path:
    """Return the folder with the library's header, `twofour.h`, as compilers take it: `cc -I FOLDER`.

    Raises:
        ExportError: It was not installed beside the extension.
    """
    folder = _folder()
    for place in (folder / "include", folder.parents[2] / "include"):  # of an installation, of a checkout
        if (place / HEADER).is_file():
            return place
    raise ExportError(
        f"{HEADER} is not here",
        got=f"{folder} without include/{HEADER}",
        wanted="the header that is installed with libtwofour",
        remedy="`make build` in a checkout, or `pip install` again",
    )


def _folder() -> Path:
    """Return the folder of the extension, where the library and its header are installed."""
    return Path(str(native.extension().__file__)).parent
