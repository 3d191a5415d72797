"""Source lines of each stage beside its budget, in pyproject.toml; `make check` prints them.

A stage that outgrows its budget is a question to its author: is the same idea there twice, or is a new one worth the
lines? Then the budget is raised in the same commit, which says why.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "twofour"
NATIVE = (".cc", ".h", ".inc", ".def")


def sizes() -> dict[str, tuple[int, int]]:
    """Lines of Python, docstrings included, and of native code, by stage; "twofour" is the package's front door."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(PACKAGE.rglob("*.*")):
        if path.suffix in (".py", *NATIVE):
            inner = path.relative_to(PACKAGE)
            stage = (
                inner.parts[0].removesuffix(".py") if inner.name != "__init__.py" or len(inner.parts) > 1 else "twofour"
            )
            python, native = found.get(stage, (0, 0))
            lines = len(path.read_text().splitlines())
            found[stage] = (python + lines, native) if path.suffix == ".py" else (python, native + lines)
    return found


def budgets() -> dict[str, int]:
    """Lines that each stage may have, Python and native together."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["twofour"]["lines"]


def over(found: dict[str, tuple[int, int]], allowed: dict[str, int]) -> list[str]:
    """Say of each stage that has no budget, or more lines than that."""
    return [
        f"{stage}: {sum(lines)} lines, budget {allowed.get(stage, 'none')} (pyproject.toml, [tool.twofour.lines])"
        for stage, lines in found.items()
        if sum(lines) > allowed.get(stage, 0)
    ]


def main() -> int:
    """Print the table; 1 where a stage is over its budget."""
    found, allowed = sizes(), budgets()
    print(f"{'stage':<14}{'Python':>8}{'native':>8}{'budget':>8}")
    for stage, (python, native) in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"{stage:<14}{python:>8,}{native or '-':>8}{allowed.get(stage, 0):>8,}")
    print(f"{'all':<14}{sum(p for p, _ in found.values()):>8,}{sum(n for _, n in found.values()):>8,}")
    print(*over(found, allowed), sep="\n", file=sys.stderr)
    return 1 if over(found, allowed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
