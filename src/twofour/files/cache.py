"""Where measured times are kept."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_log = logging.getLogger("twofour.files")


def cache_folder() -> Path | None:
    """Return where measured times are kept: $TWOFOUR_CACHE, else $XDG_CACHE_HOME/twofour, else ~/.cache/twofour.

    None where TWOFOUR_CACHE is "off" or there is no home folder.
    """
    setting = os.environ.get("TWOFOUR_CACHE", "")
    if setting:
        return None if setting == "off" else Path(setting)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twofour"
    except RuntimeError as error:
        _log.warning("measured times are not kept: %s; set TWOFOUR_CACHE to a folder", error)
        return None
