"""The documentation site: every page is in its navigation, links lead into it. `make docs` builds it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def navigation() -> Any:
    """Read the `nav` of mkdocs.yml, which is plain YAML."""
    yaml = pytest.importorskip("yaml", reason="needs the extra [text], which brings PyYAML")
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for part in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(part)]


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page(site: ModuleType) -> None:
    entries = leaves(navigation())
    assert [entry for entry in entries if entry.endswith("/") and not site.below(entry)] == []
    named = leaves(site.filled(navigation()))
    assert len(named) == len(set(named))
    pages = {uri for uri in site.sources() if not uri.startswith("files/")}  # what pages show of sources has no entry
    assert set(named) == pages
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= pages


def test_every_stage_with_public_functions_has_a_page_and_every_verb_a_line(site: ModuleType) -> None:
    import twofour

    pages = {uri for uri in site.sources() if uri.startswith("reference/")}
    assert {f"reference/{name}.md" for name in twofour._STAGES} <= pages
    first = site.content("reference/index.md", ROOT)
    for verb, module in twofour._VERBS.items():
        place = rf"(\w+)\.md#{module}\.(?:{verb}\.)?{verb}"
        (line,) = re.findall(rf"^\| \[`twofour\.{verb}`\]\({place}\) \| (.*) \|$", first, re.M)
        assert module == f"twofour.{line[0]}" and len(line[1]) > 20, f"{verb} has no summary"


def test_links_out_of_the_pages_lead_into_the_site(site: ModuleType) -> None:
    known, copied = site.sources(), site.copied()
    places = {*known, *copied}
    for uri, source in known.items():
        if uri.startswith("reference/") or source.suffix != ".md":
            continue
        text = site.with_links(source.read_text(), uri, known, copied)
        for target in re.findall(r"\]\(([^)#\s]+)", site.FENCE.sub("", text)):
            if "://" not in target and not target.endswith(".svg"):
                found = (Path("/") / uri).parent / target
                assert str(found.resolve()).lstrip("/") in places, f"{uri} links to {target}"


def test_links_in_code_stay_and_figures_stand_below_their_names(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"guide.md": ROOT / "docs/guide.md", "examples/index.md": ROOT / "examples"}
    text = "[a](../examples)\n\n```\n[b](../examples)\n```\n\n[c](https://x.org) [d](#here)\n"
    moved = site.with_links(text, "guide.md", known, {})
    assert moved == text.replace("[a](../examples)", "[a](examples/index.md)")
    monkeypatch.setattr(site, "FIGURES", tmp_path)
    (tmp_path / "some-one.svg").touch()
    shown = site.with_figures("First `docs/figures/some-*.svg` here.\n\nNext.\n", "guide.md")
    assert shown.split("\n\n")[1].startswith("![some-one](figures/some-one.svg)")


def test_figures_are_drawn_anew_where_what_they_show_is_newer(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, figures = tmp_path / "records" / "one.json", tmp_path / "figures"
    record.parent.mkdir(), figures.mkdir()
    record.touch()
    for name, value in {"ROOT": tmp_path, "FIGURES": figures, "DRAWN_FROM": ("records",)}.items():
        monkeypatch.setattr(site, name, value)
    monkeypatch.setattr(site, "_named", lambda: {"a-*.svg", "b.svg"})
    assert site.outdated() == ["a-*.svg", "b.svg"]
    for name in ("a-1.svg", "a-2.svg", "b.svg"):
        (figures / name).touch()
        os.utime(figures / name, (2e9, 2e9))
    assert site.outdated() == []
    os.utime(record, (3e9, 3e9))
    assert site.outdated() == ["a-*.svg", "b.svg"]
    os.utime(figures / "a-1.svg", (4e9, 4e9)), os.utime(figures / "b.svg", (4e9, 4e9))
    assert site.outdated() == ["a-*.svg"], "one of several is old"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs requirements/docs.txt; make docs builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # as in the Makefile: Material's note on another mkdocs
    run = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    assert (tmp_path / "site" / "reference" / "patterns.html").exists()
