"""A compiled extension that is older than the sources is named when it is loaded, not where a function is missing."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import twofour
from twofour import native
from twofour.errors import KernelError

SOURCES = sorted(Path(twofour.__file__).parent.rglob("*.py"))


def called() -> set[str]:
    """Names that the package asks the extension for: by attribute, by a table's name, or as text."""
    found: set[str] = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "native" or "extension()" in text or "best_row(" in text:
            found |= set(re.findall(r"\bextension(?:\(\))?\.([a-z]\w*)", text))
            found |= {f"{table}_rows" for table in re.findall(r"best_row\(\"(\w+)\"", text)}
            if "getattr(extension" in text:
                found |= {name for name in re.findall(r"\"(\w+)\"", text) if name.startswith("nm_stripes_")}
    return found


def test_the_list_is_what_the_extension_has():
    has = {name for name in vars(native.extension()) if not name.startswith("_")}
    assert set(native.FUNCTIONS) == has and len(native.FUNCTIONS) == len(has)


def test_every_function_that_the_package_calls_is_in_the_list():
    names = called()
    assert {"nm_matmul", "norm_rows", "nm_stripes_assign", "layout_pack", "dense_int4_pack"} <= names
    assert names <= set(native.FUNCTIONS)


def test_an_extension_without_a_function_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    old = ModuleType("_ext")
    old.__file__ = "_ext.so"
    for name in native.FUNCTIONS:
        if name != "nm_ties":
            setattr(old, name, None)
    monkeypatch.setattr(native, "import_module", lambda name: old)
    with pytest.raises(KernelError, match="older than the sources") as error:
        native.extension.__wrapped__()
    assert "_ext.so without nm_ties\n" in str(error.value) and "make build" in str(error.value)
