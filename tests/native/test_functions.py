"""A compiled extension that is older than the sources is named where something is asked of it that it does not have."""

from __future__ import annotations

import os
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
        if path.parent.name == "native" or "extension()" in text:
            found |= set(re.findall(r"\bextension(?:\(\))?\.([a-z]\w*)", text))
            if "getattr(extension" in text:
                found |= {name for name in re.findall(r"\"(\w+)\"", text) if name.startswith("nm_stripes_")}
    return found


def test_the_extension_has_what_the_package_calls():
    names = called()
    assert {"nm_matmul", "table", "nm_stripes_assign", "layout_pack", "dense_int4_pack"} <= names
    assert names <= set(vars(native.extension()))


def test_every_table_that_the_package_asks_for_has_rows():
    asked = {
        name
        for path in SOURCES
        for name in re.findall(r"\b(?:native\.(?:best|rows)\(|rows_of\(\w+,)\s*\"(\w+)\"", path.read_text("utf-8"))
    }
    assert asked == set(native.tables())


def test_what_an_older_extension_does_not_have_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    old = ModuleType("_ext")
    old.__file__ = "_ext.so"
    old.use_threads = lambda source, library: True  # type: ignore[attr-defined]
    monkeypatch.setattr(native, "import_module", lambda name: old)
    loaded = native.extension.__wrapped__()
    with pytest.raises(KernelError, match="older than the sources") as error:
        loaded.nm_ties()
    assert "_ext.so without nm_ties\n" in str(error.value) and "make build" in str(error.value)
    assert not hasattr(loaded, "_what_tools_look_for")


def test_a_compiled_part_that_is_older_than_its_sources_is_told_of(tmp_path: Path, caplog) -> None:
    sources, library = tmp_path / "twofour", tmp_path / "site" / "native" / "_ext.abi3.so"
    for path in (sources / "kernels" / "norm.cc", sources / "kernels" / "a.inc", sources / "plan.py", library):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        os.utime(path, (100, 100))
    os.utime(library.parent, (200, 200))
    os.utime(sources / "plan.py", (300, 300))
    native.tell_of_newer_sources(sources, library)
    assert not caplog.records, "put there later than any native source changed"
    os.utime(sources / "kernels" / "norm.cc", (300, 300))
    os.utime(sources / "kernels" / "a.inc", (300, 300))
    native.tell_of_newer_sources(sources, library)
    (said,) = [record.message for record in caplog.records]
    changed = f"{library} was built before {os.path.join('kernels', 'a.inc')} and 1 more changed; `make build`"
    assert "the compiled part is older than its sources" in said and changed in said
