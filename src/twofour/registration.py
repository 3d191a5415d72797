"""What registers itself with another package when that one is imported, and imports nothing until then."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger("twofour")


def once_imported(theirs: str, ours: str) -> None:
    """Import our module as soon as theirs has been imported; at once, if it was already.

    For packages that have no entry point to find us by. A failure of ours is logged as a warning: it never breaks
    the import of theirs.

    Args:
        theirs: Full name of a module of another package, installed or not.
        ours: Full name of the module whose import registers what we have.
    """
    if theirs in sys.modules:
        _register(ours)
    else:
        sys.meta_path.insert(0, _Once(theirs, ours))


class _Once(MetaPathFinder):
    """Finds nothing itself: it has the loader of their module go on with ours, once."""

    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.theirs:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)  # by the finders that are left
        if spec is None or spec.loader is None:
            return None
        run, ours = spec.loader.exec_module, self.ours

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(ours)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]  # of this one loader alone
        return spec


def _register(ours: str) -> None:
    try:
        import_module(ours)
    except Exception as error:
        logger.warning("%s could not be registered: %s: %s", ours, type(error).__name__, error)
