"""The documentation site: what `mkdocs build` adds to the pages of docs/ (mkdocs.yml names this file as its hook).

    make docs

* pages that are made from what stands elsewhere in the repository: the API reference, of docstrings; the examples; a
  page for each README of the kernels; the project's own pages; files and folders that a page links to;
* links that leave docs/ lead to those pages;
* a figure stands below the paragraph that names it as `docs/figures/NAME.svg`; all are drawn where one is missing or
  older than what it is drawn from.

Nothing here but `on_files` needs mkdocs: `tests/test_site.py` reads the lists without it.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGE = ROOT / "src" / "twofour"
FIGURES = DOCS / "figures"

PLUMBING = {"shapes", "files", "progress", "drawing", "calls", "native", "capture", "graph", "demo", "cli"}
"""Stages without a page of reference: their functions are for the other stages alone."""
PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "RELEASE.md", "SECURITY.md", "CHANGELOG.md", "README.md")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml", ".json": "json"}
"""Files that are shown where a page links to them; records (.json) are copied."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```[ \t]*$", re.M | re.S)
FIGURE = re.compile(r"`docs/figures/([\w*.-]+\.svg)`")
DRAWN_FROM = (
    "benchmarks",
    "experiments/dial_page.py",
    "experiments/versagnn.py",
    "experiments/records/hardware",
    "src/twofour/hardware",
    "src/twofour/tensor_core",
)
"""Records, tables and programs that figures are drawn from."""


# Pages ---------------------------------------------------------------------------------------------------------------


def stages() -> list[str]:
    """Return the stages that have a page of reference, in the order of ARCHITECTURE.md."""
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    return [name for name in named if name not in PLUMBING]


@cache
def sources() -> dict[str, Path]:
    """Return what each page of the site is made of: its place in the site, and a file or folder of the repository.

    Pages of docs/ are there as well; a page of reference is made of its stage.
    """
    found = {page.name: page for page in sorted(DOCS.glob("*.md"))}
    found["reference/index.md"] = PACKAGE / "__init__.py"
    found |= {f"reference/{name}.md": _module(name) for name in stages()}
    found["examples/index.md"] = ROOT / "examples"
    found |= {f"examples/{path.stem}.md": path for path in sorted((ROOT / "examples").glob("*.py"))}
    kernels = PACKAGE / "kernels"
    for page in sorted(kernels.rglob("README.md")):
        found[f"kernels/{'-'.join(page.parent.relative_to(kernels).parts)}.md"] = page
    found |= {f"project/{name.lower()}": ROOT / name for name in PROJECT}
    for linked in _linked(list(found.values())):
        if linked not in found.values() and linked.suffix != ".json":
            found[f"files/{linked.relative_to(ROOT).as_posix()}.md"] = linked
    return found


@cache
def copied() -> dict[str, Path]:
    """Return files that the site holds as they are: records that pages link to, alone or by their folder."""
    linked = _linked([path for path in sources().values() if path.suffix == ".md"])
    inside = [path for folder in linked if folder.is_dir() for path in sorted(folder.glob("*.json"))]
    records = [path for path in linked if path.suffix == ".json"] + inside
    return {f"files/{path.relative_to(ROOT).as_posix()}": path for path in records}


def below(folder: str) -> list[str]:
    """Return the pages that an entry of the navigation which ends in a slash stands for."""
    pages = [uri for uri in sources() if uri.startswith(folder)]
    return sorted(pages, key=lambda uri: not uri.endswith("/index.md"))


def filled(entry: Any) -> Any:
    """Return the navigation with the pages that such entries stand for."""
    if isinstance(entry, list):
        return [filled(part) for part in entry]
    if isinstance(entry, dict):
        return {name: filled(part) for name, part in entry.items()}
    return [{_entry(uri): uri} for uri in below(entry)] if entry.endswith("/") else entry


def _entry(uri: str) -> str:
    """Return what the navigation calls a page that is made here: its headings say more than fits."""
    folder, name = posixpath.split(uri.removesuffix(".md"))
    if name == "index":
        return "Overview"
    if folder == "examples":
        return name.replace("_", " ")
    return name.capitalize() if folder == "project" else name


def content(uri: str, source: Path) -> str:
    """Return the Markdown of one page."""
    if uri == "reference/index.md":
        return _reference()
    if uri.startswith("reference/"):
        return _reference_of(Path(uri).stem)
    if source.is_dir():
        return _folder(source)
    text = source.read_text()
    if source.suffix == ".md":
        return text
    fence = f"```{LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n```\n"
    return f"# {source.relative_to(ROOT)}\n\n{fence}"


def with_links(markdown: str, uri: str, known: dict[str, Path], found: dict[str, Path]) -> str:
    """Return a page whose links out of its own folder lead to the pages of the site.

    Args:
        markdown: The page.
        uri: Its place in the site.
        known: `sources()`.
        found: `copied()`.
    """
    if uri not in known or uri.startswith("reference/"):
        return markdown
    places = {path: place for place, path in [*known.items(), *found.items()]}
    source = known[uri]
    folder = source if source.is_dir() else source.parent

    def moved(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (folder / target).resolve()
        place = places.get(path)
        if place is None and path.parent == FIGURES:
            place = f"figures/{path.name}"
        if place is None:
            return match[0]  # mkdocs says that it leads nowhere
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{mark}{anchor}{match[3]}"

    return _outside_fences(markdown, lambda text: LINK.sub(moved, text))


def with_figures(markdown: str, uri: str) -> str:
    """Return a page with its figures below the paragraphs that name them, as far as they are drawn."""

    def shown(text: str) -> str:
        blocks = text.split("\n\n")
        for place, block in enumerate(blocks):
            for pattern in FIGURE.findall(block):
                for name in sorted(fnmatch.filter((path.name for path in FIGURES.glob("*.svg")), pattern)):
                    target = posixpath.relpath(f"figures/{name}", posixpath.dirname(uri) or ".")
                    blocks[place] += f"\n\n![{Path(name).stem}]({target}){{ loading=lazy }}"
        return "\n\n".join(blocks)

    return _outside_fences(markdown, shown)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Apply a change to what stands outside of blocks of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _linked(pages: list[Path]) -> list[Path]:
    """Return files and folders of the repository that pages link to and that are no pages of docs/."""
    found: dict[Path, None] = {}
    for page in pages:
        if page.suffix == ".md":
            for _, target, _ in LINK.findall(FENCE.sub("", page.read_text())):
                path = (page.parent / target.partition("#")[0]).resolve()
                if "://" not in target and path.exists() and path.suffix not in (".md", ".svg"):
                    found[path] = None
    return [path for path in found if path not in (DOCS, ROOT)]


def _module(name: str) -> Path:
    package = PACKAGE / name / "__init__.py"
    return package if package.exists() else PACKAGE / f"{name}.py"


def _said(source: Path) -> str:
    """Return the first sentence of a module."""
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0].replace("\n", " ")


def _verbs() -> Iterator[tuple[str, str]]:
    """Yield each verb of the package and the module it is imported from, in the order of the pipeline."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_VERBS":
            yield from ast.literal_eval(node.value).items()


def _summary(module: str, verb: str) -> str:
    """Return the first line of a function's docstring, found where its module defines or imports it."""
    for path in sorted(_module(module.partition(".")[2]).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == verb and (said := ast.get_docstring(node)):
                return said.partition("\n")[0]  # overloads say nothing
    return ""


def _reference() -> str:
    verbs = []
    for verb, module in _verbs():
        stage = module.partition(".")[2]
        anchor = _hidden(stage).get(verb, f"{module}.{verb}")
        verbs.append(f"| [`twofour.{verb}`]({stage}.md#{anchor}) | {_summary(module, verb)} |")
    modules = [f"| [`twofour.{name}`]({name}.md) | {_said(_module(name))} |" for name in stages()]
    return "\n".join(
        [
            "# Python reference",
            "",
            _said(PACKAGE / "__init__.py"),
            "",
            "## Verbs",
            "",
            "In the order of the pipeline. Each is imported from its stage when it is first used.",
            "",
            "| function | does |",
            "| --- | --- |",
            *verbs,
            "",
            "## Stages",
            "",
            "| module | holds |",
            "| --- | --- |",
            *modules,
            "",
        ]
    )


def _reference_of(stage: str) -> str:
    if stage == "compat":
        parts = [f"## {name}\n\n::: twofour.compat.{name}\n    options: {{heading_level: 3}}" for name in _parts(stage)]
        return "\n\n".join([f"# twofour.{stage}", _said(_module(stage)), *parts, ""])
    parts = [f"::: twofour.{stage}"]
    for name, place in _hidden(stage).items():
        shown = f"show_root_heading: true, show_root_toc_entry: true, heading: {name}"
        parts.append(f"::: {place}\n    options: {{{shown}}}")
    return "\n\n".join([f"# twofour.{stage}", *parts, ""])


def _hidden(stage: str) -> dict[str, str]:
    """Return what a stage hands out under the name of a module of its own, which readers of sources take it for.

    Name -> where it is defined.
    """
    package = PACKAGE / stage / "__init__.py"
    names = [
        (alias.name, f"{node.module}.{alias.name}")
        for node in (ast.parse(package.read_text()).body if package.exists() else ())
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("twofour.")
        for alias in node.names
    ]
    return {name: place for name, place in names if (PACKAGE / stage / f"{name}.py").exists()}


def _parts(stage: str) -> list[str]:
    """Return the public modules of a stage whose package hands out modules."""
    return sorted(path.stem for path in (PACKAGE / stage).glob("*.py") if not path.stem.startswith("_"))


def _folder(folder: Path) -> str:
    """Return a page that lists a folder: what each program says of itself, the records."""
    known = {*sources().values(), *copied().values()}
    lines = ["| file | |", "| --- | --- |"]
    for path in sorted(folder.iterdir()):
        name = f"[{path.name}]({path.name})" if path in known else f"`{path.name}`"
        if path.suffix == ".py":
            lines.append(f"| {name} | {_said(path)} |")
        elif path.is_file():
            lines.append(f"| {name} | {path.stat().st_size / 1000:,.0f} kB |")
    return "\n".join([f"# {folder.relative_to(ROOT).as_posix().capitalize()}", "", *lines, ""])


# Figures -------------------------------------------------------------------------------------------------------------


def outdated() -> list[str]:
    """Return the names or globs of figures that pages name and that are missing, or older than what they show."""
    parts = [ROOT / name for name in DRAWN_FROM]
    files = [path for part in parts for path in (part.rglob("*") if part.is_dir() else [part])]
    newest = max(path.stat().st_mtime for path in files if path.suffix in (".json", ".py"))
    drawn = {name: [path.stat().st_mtime for path in FIGURES.glob(name)] for name in _named()}
    return sorted(name for name, times in drawn.items() if min(times, default=0.0) < newest)


def _named() -> set[str]:
    return {name for page in DOCS.glob("*.md") for name in FIGURE.findall(page.read_text())}


def draw() -> None:
    """Draw every figure into docs/figures, from records and tables; pages stay as they are.

    Those of records that are gone go as well.
    """
    for path in {path for name in _named() for path in FIGURES.glob(name)}:
        path.unlink()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import figures
    from twofour.tensor_core.plot import plot_all

    for machine in figures.machines("linear", "models", "training"):
        figures.draw(machine)
    figures.predicted()
    plot_all(FIGURES)
    subprocess.run([sys.executable, "experiments/versagnn.py", "figure"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "experiments/dial_page.py"], cwd=ROOT, check=True)


# What mkdocs calls ---------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Write out the navigation."""
    sources.cache_clear(), copied.cache_clear()  # `mkdocs serve` builds again
    config.nav = filled(config.nav)
    return config


def on_pre_build(config: Any) -> None:
    """Draw the figures where one is outdated, in a process of its own: mkdocs need not have torch in it."""
    if outdated():
        subprocess.run([sys.executable, os.fspath(DOCS / "site.py")], cwd=ROOT, check=True)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, and the records that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for uri, source in sources().items():
        if source.parent != DOCS:
            shown = InclusionLevel.NOT_IN_NAV if uri.startswith("files/") else InclusionLevel.INCLUDED
            files.append(File.generated(config, uri, content=content(uri, source), inclusion=shown))
    for uri, source in copied().items():
        files.append(File.generated(config, uri, abs_src_path=os.fspath(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to pages of the site, and show figures."""
    uri = page.file.src_uri
    return with_figures(with_links(markdown, uri, sources(), copied()), uri)


if __name__ == "__main__":
    draw()
