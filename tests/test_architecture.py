"""ARCHITECTURE.md lists the stages in order; the code may only import upwards in that list."""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

from tests import sizes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "twofour"
STAGES = re.findall(r"^\| `(\w+)`", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
# The front door re-exports; version, compile and so on are not stages.
FRONT_DOOR = PACKAGE / "__init__.py"


def stage(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file, which is parsed once."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    """Stages of our own package that this file imports, at the top or inside a function."""
    here, found = path.relative_to(PACKAGE.parent).parts, set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            dotted = [[*base, *(node.module or "").split("."), alias.name] for alias in node.names]
        else:
            continue
        parts = [[part for part in names if part] for names in dotted]
        found |= {names[1] for names in parts if names[0] == PACKAGE.name and len(names) > 1}
    return found & set(STAGES)


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    have = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if not path.name.startswith("_") and path.name != "py.typed"
    }
    assert have == set(STAGES)


def test_imports_point_up_the_table() -> None:
    bad = [
        f"{path.relative_to(ROOT)} ({stage(path)}) imports {target}, a later stage"
        for path in PACKAGE.rglob("*.py")
        if path != FRONT_DOOR and stage(path) in STAGES
        for target in imports(path)
        if STAGES.index(target) > STAGES.index(stage(path))
    ]
    assert not bad, "\n".join(bad)


def test_the_reader_of_imports_sees_them() -> None:
    assert imports(PACKAGE / "export" / "save_load.py") >= {"compiler", "masks", "packing"}


@cache
def module_imports() -> dict[str, set[str]]:
    """Each module of ours and the modules of ours that it imports, at the top or inside a function."""
    paths = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    names = {path: name.removesuffix(".__init__") for path, name in paths.items()}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for path, name in names.items():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                dotted = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [target if target in found else node.module for target in dotted]
            else:
                continue
            found[name] |= {target for target in targets if target in found and target != PACKAGE.name}
    return found


def test_no_modules_import_each_other() -> None:
    graphlib.TopologicalSorter(module_imports()).prepare()  # raises CycleError, naming the modules
    assert "twofour.masks.link" in module_imports()["twofour.masks.hooks"]


# Folders of kernels that are no operation: every operation may include them.
SHARED = ("layouts", "int4")


def included(path: Path, text: str) -> list[Path]:
    """Files that a native source includes by a path in quotes: beside it, or below the package."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M)
    return [path.parent / name if (path.parent / name).is_file() else PACKAGE / name for name in names]


def room(path: Path) -> str:
    """The folder of kernels that a file stands in, "" for those beside the folders."""
    parts = path.relative_to(PACKAGE / "kernels").parts
    return parts[0] if len(parts) > 1 else ""


def misplaced(path: Path, target: Path) -> str | None:
    """Say why a native file may not include another one, or None."""
    if not target.is_file():
        return "is not there"
    if STAGES.index(stage(target)) > STAGES.index(stage(path)):
        return "is of a later stage"
    inside = stage(path) == stage(target) == "kernels"
    return "is a sibling's" if inside and room(target) not in (room(path), "", *SHARED) else None


def test_native_files_include_earlier_stages_and_no_siblings() -> None:
    files = [path for path in PACKAGE.rglob("*.*") if path.suffix in (".cc", ".h", ".inc")]
    reads = {path: included(path, path.read_text()) for path in files}
    bad = [
        f"{path.relative_to(ROOT)} includes {target.relative_to(PACKAGE)}, which {why}"
        for path, targets in reads.items()
        for target in targets
        if (why := misplaced(path, target))
    ]
    assert not bad, "\n".join(bad)
    graphlib.TopologicalSorter(reads).prepare()  # raises CycleError, naming the files


def test_the_reader_of_includes_sees_what_is_wrong() -> None:
    kernels, native = PACKAGE / "kernels", PACKAGE / "native"
    norm = kernels / "norm" / "norm.cc"
    found = included(norm, '#include <cstdint>\n#include "rows.h"\n  # include "native/simd.h"\n')
    assert found == [norm.with_name("rows.h"), native / "simd.h"]
    assert [misplaced(norm, target) for target in found] == [None, None]
    assert misplaced(norm, norm.with_name("ghost.h")) == "is not there"
    assert misplaced(native / "simd.h", kernels / "matmul.h") == "is of a later stage"
    assert misplaced(norm, kernels / "attention" / "rows.h") == "is a sibling's"
    assert misplaced(kernels / "layouts" / "rows.h", kernels / "nm_matmul" / "nm_matmul.h") == "is a sibling's"
    assert misplaced(norm, kernels / "layouts" / "rows.h") is None


def reaches_into(name: str, target: str) -> bool:
    """Whether a module of one operation imports a module inside another one, which its package does not hand out.

    Modules that need Triton (on_gpu) are named themselves: a package must not import them.
    """
    ours, theirs = (module.split(".")[2:] if module.startswith("twofour.kernels.") else [] for module in (name, target))
    folders = [parts and (PACKAGE / "kernels" / parts[0]).is_dir() for parts in (ours, theirs)]
    if not all(folders) or ours[0] == theirs[0] or theirs[-1] == "on_gpu":
        return False
    return not (PACKAGE / "kernels").joinpath(*theirs).is_dir()


def test_operations_import_each_other_by_their_packages() -> None:
    pairs = [(name, target) for name, targets in module_imports().items() for target in targets]
    assert not [pair for pair in pairs if reaches_into(*pair)]
    assert reaches_into("twofour.kernels.nm_conv.cpu", "twofour.kernels.nm_matmul.layout")
    assert not reaches_into("twofour.kernels.nm_conv.cpu", "twofour.kernels.nm_matmul")
    assert not reaches_into("twofour.kernels.nm_conv.cpu", "twofour.kernels.problem")


def test_stages_stay_within_their_budgets() -> None:
    assert not sizes.over(sizes.sizes(), sizes.budgets())
    assert set(sizes.budgets()) == set(sizes.sizes())
    assert sizes.over({"new": (3, 4), "old": (9, 2)}, {"old": 10}) == [
        "new: 7 lines, budget none (pyproject.toml, [tool.twofour.lines])",
        "old: 11 lines, budget 10 (pyproject.toml, [tool.twofour.lines])",
    ]


def test_files_stay_small() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path in PACKAGE.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 400
    ]
    assert not long, "\n".join(long)


def test_functions_stay_small() -> None:
    long = []
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node, clean=False)
                lines = (node.end_lineno or 0) - node.lineno + 1 - (len(doc.splitlines()) if doc else 0)
                if lines > 40:
                    long.append(f"{path.relative_to(ROOT)}:{node.name}: {lines} lines without its docstring")
    assert not long, "\n".join(long)


def test_error_sentences_end_without_a_full_stop() -> None:
    """Their next line is "got", and a layer's name may stand before them."""
    ending = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("Error")
        and node.args
        and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
        and ast.unparse(node.args[0]).rstrip("'\"").endswith(".")
    ]
    assert not ending, "\n".join(ending)
