"""Every file that a page, a comment or a docstring cites by name is in the repository."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "src",
    "include",
    "packages",
    "tests",
    "benchmarks",
    "experiments",
    "examples",
    "docs",
    "requirements",
    ".ci",
    ".github",
)
FILES = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
FILES |= {path for path in ROOT.iterdir() if path.is_file()}
NAMES = {path.relative_to(ROOT).as_posix() for path in FILES}
ENDS = {"/".join(name.split("/")[start:]) for name in NAMES for start in range(name.count("/") + 1)}
READERS = sorted(path for path in FILES if path.suffix in (".md", ".py", ".h", ".cc", ".inc"))

ELSEWHERE = {
    "README.base.md": "a file that export writes",
    "apex/contrib/sparsity/asp.py": "apex",
    "contrib/sparsity/asp.py": "apex",
    "src/README.md": "BitNet",
    "toy_problem.py": "apex",
    "checkpointing_test_part1.py": "apex",
    "checkpointing_test_part2.py": "apex",
    "checkpointing_test_reference.py": "apex",
    "transformers/utils/generic.py": "transformers",
    "transformers/modeling_outputs.py": "transformers",
    "torch/sparse/_semi_structured_conversions.py": "torch",
    "include/dlpack/dlpack.h": "DLPack",
    "test_tir_ptx_mma_sp.py": "TVM",
    "lib/data.py": "SparseGPT and Wanda",
}
"""Cited files of other projects -> whose they are."""

CITED = re.compile(r"(?<![\w/*<{$-])((?:[\w.-]+/)*\w[\w.-]*\.(?:md|cc|h|inc|py))\b(?![\w*{/-])")
ADDRESS = re.compile(r"\w+://[^\s)>\]]+")
NATIVE_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def prose(name: str, source: str) -> str:
    """What people read of a file: a whole page, the comments of C++, the comments and docstrings of Python."""
    if name.endswith(".md"):
        return source
    if not name.endswith(".py"):
        return "\n".join(NATIVE_COMMENT.findall(source))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.append(node.value.value)
    return "\n".join(texts)


def cited(name: str, source: str) -> list[str]:
    if not CITED.search(source):  # a name that comments are taken apart for
        return []
    return CITED.findall(ADDRESS.sub("", prose(name, source)))


@cache
def citations() -> dict[Path, set[str]]:
    """Each file and the names that it cites."""
    return {path: set(cited(path.name, path.read_text())) for path in READERS}


def exists(citation: str, folder: Path) -> bool:
    """`..` starts at the file that cites; every other name may leave out the folders in front of it."""
    if citation.startswith("../"):
        return (folder / citation).exists()
    if citation.startswith("_"):  # the end of several names: "files that end in _triton.py"
        return any(name.endswith(citation) for name in NAMES)
    return citation in ENDS


def test_cited_files_exist() -> None:
    ghosts = [
        f"{path.relative_to(ROOT)} cites {name}"
        for path, names in citations().items()
        for name in sorted(names - set(ELSEWHERE))
        if not exists(name, path.parent)
    ]
    assert not ghosts, "\n".join(ghosts)


def test_files_of_other_projects_are_still_cited_and_not_ours() -> None:
    assert set(ELSEWHERE) <= set.union(*citations().values())
    assert [name for name in ELSEWHERE if exists(name, ROOT)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("page.md", "see [the ghost](docs/ghost.md) and https://example.org/other.md"),
        ("code.h", '#include "other.h"\nint a; // layout in ghost.md\n/* docs/\n other */'),
        ("code.cc", "int a; /* one\n see docs/ghost.md */"),
        ("code.py", '"""In docs/ghost.md."""\nname = "other.md"'),
        ("code.py", "x = 1  # docs/ghost.md says why\n"),
    ],
)
def test_a_ghost_is_seen(name: str, source: str) -> None:
    (citation,) = cited(name, source)
    assert citation.endswith("ghost.md") and not exists(citation, ROOT)
