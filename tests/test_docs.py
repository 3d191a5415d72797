"""Documentation has tests: what exists is documented, and what is shown runs."""

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.turns import in_turn
from twofour import criteria
from twofour.cli.app import COMMANDS, app
from twofour.kernels.table import listing

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "src").rglob("README.md"))
LONG = {
    "01_prune_and_train",
    "02_finetune_with_control",
    "03_compile",
    "06_hugging_face_trainer",
    "07_lightning",
    "08_torchrun",
    "09_sdgp",
    "10_low_bits",
    "11_learned_widths",
    "12_sentence_transformers",
}
"""Examples that train, take in another package or do what README's program does; the others prune, save and load."""

EXAMPLES = [
    pytest.param(example, marks=[pytest.mark.long] * (example.stem in LONG), id=example.stem)
    for example in sorted((ROOT / "examples").glob("*.py"))
]


def text(*names: str) -> str:
    return "\n".join((ROOT / name).read_text() for name in names)


def test_the_table_of_kernels_is_written_from_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    if not any(kernel.isa == "avx2" for kernel in listing()):
        pytest.skip("the page lists the kernels of x86-64")
    assert f"{tables.START}\n{tables.table()}\n{tables.END}" in text("docs/kernels.md"), "run `make tables`"


def test_the_table_of_rules_is_written_from_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    assert f"{tables.START}\n{tables.rules()}\n{tables.END}" in text("docs/rewriting.md"), "run `make tables`"


def test_every_operation_and_design_of_a_kernel_is_documented() -> None:
    page = text("docs/kernels.md")
    operations = {kernel.operation for kernel in listing()}
    assert {name for name in re.findall(r"^\| `(\w+)` \| [^`]", page, re.M) if name in operations} == operations
    products = ("nm_matmul", "dense_matmul", "nm_conv", "dense_conv")
    name = re.compile(r"(?:nm_[a-z]+_(?:\dx\d|any)|dense_[a-z]+)_(?:(?:f|bf|int|fp)\d+_)?(\w+?)__")
    designs = {name.match(kernel.name).group(1) for kernel in listing() if kernel.operation in products}  # pyright: ignore[reportOptionalMemberAccess]
    documented = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`[^|]+`) \|", page, re.M))))
    assert designs <= documented and len(designs) > 15
    known = {kernel.name for kernel in listing()}
    assert set(re.findall(r"`((?:nm|dense|attention|norm)_\w+__\w+)`", page)) <= known


def test_every_command_is_documented() -> None:
    assert set(COMMANDS) == {
        "demo",
        "optimize",
        "bench",
        "report",
        "shrink",
        "prune",
        "check",
        "import",
        "export",
        "advise",
        "explain",
        "estimate",
        "simulate",
        "kernels",
    }
    for command in COMMANDS:
        assert f"`twofour {command}" in text("docs/cli.md")
    assert set(re.findall(r"`twofour (\w+)", text("README.md"))) <= set(COMMANDS)


FENCE = re.compile(r"^```\w*\n(.*?)^```[ \t]*$", re.M | re.S)
PRINTED = "model  "
"""How the table begins that `optimize` printed, whose rows begin with our name."""


def lines_of_commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks that run our command, those that are continued as one."""
    blocks = [block for block in FENCE.findall(page.read_text()) if not block.startswith(PRINTED)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(python -m )?twofour ", line)]


def parse(line: str) -> None:
    """Take a line apart as the command does, without running it; raises what the command would print."""
    group: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    root = group.make_context("twofour", words[words.index("twofour") + 1 :])
    name, command, rest = group.resolve_command(root, [*root._protected_args, *root.args])
    command.make_context(name, rest, parent=root)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_that_runs_our_command_is_one_that_it_takes(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in lines_of_commands(page):
        try:
            parse(line)
        except Exception as error:
            pytest.fail(f"{page.name}: {line}: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "twofour check file what it promises",
        "twofour check file --expected 2:4",
        "twofour prune file",
        "twofour chek file",
    ],
)
def test_a_line_that_our_command_does_not_take_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)unexpected|no such|missing"):
        parse(line)


@in_turn("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_stand_beside_a_command_are_its_own(page: Path) -> None:
    """In `twofour COMMAND --option`, and in a command's row of the table of commands."""
    if page.name == "CHANGELOG.md":  # of releases before
        return
    group: Any = typer.main.get_command(app)
    text = FENCE.sub("", page.read_text())
    named = re.findall(r"`twofour (\w+)([^`]*)`", text) + re.findall(r"^\| `twofour (\w+)(.*)$", text, re.M)
    for name, rest in named:
        own = {option for one in group.commands[name].params for option in (*one.opts, *one.secondary_opts)}
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) <= own, f"{page.name}: twofour {name}"


def test_every_environment_variable_is_documented() -> None:
    used = set(re.findall(r"\bTWOFOUR_[A-Z]+\b", "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))))
    assert used
    assert [name for name in sorted(used) if f"`{name}`" not in text("docs/environment.md")] == []


def test_every_criterion_and_pattern_kind_is_in_the_guide() -> None:
    for word in ("`2:4`", "`4:8-pairs`", "`V:N:M`"):
        assert word in text("docs/guide.md")
    for name in criteria.NAMES:
        assert f"`{name}`" in text("docs/guide.md") and f"`{name}`" in text("docs/criteria.md")


@in_turn("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_index_has_every_page_and_the_readme_the_index() -> None:
    links = re.findall(r"\]\(([\w./]+\.md)\)", text("docs/index.md"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} == {n for n in links if "/" not in n}
    assert "](docs/index.md)" in text("README.md")


def test_figures_that_pages_name_are_drawn_by_a_program() -> None:
    folders = (ROOT / "src", ROOT / "benchmarks", ROOT / "experiments")
    programs = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    names = {name for page in PAGES for name in re.findall(r"docs/figures/([\w-]+\.svg)", page.read_text())}
    assert "hardware-a100-sxm.svg" in names
    assert [name for name in sorted(names) if f'{name}"' not in programs] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(example.read_text().splitlines()) < 60
    if "sentence_transformers" in example.stem and importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("needs requirements/text-weights.txt")
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    run = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_the_readme_code_runs(times_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", text("README.md"), re.S)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    (plan,) = re.findall(r"^```\n(one call on the example: .*?)^```", text("README.md"), re.S | re.M)
    (won, *shown), (first, *printed) = plan.splitlines(), run.stdout.splitlines()
    assert re.sub(r"[\d.]+", "N", won) == re.sub(r"[\d.]+", "N", first).replace("layers", "graph").replace(
        "N threads", "N thread"
    )
    assert shown[0].split() == printed[0].split(), "the plan in README has other columns than a plan has"
    assert [line.split()[:3] for line in shown[1:3]] == [line.split()[:3] for line in printed[1:3]]
    assert len(text("README.md").splitlines()) <= 80


@pytest.mark.parametrize(
    "page",
    [
        "docs/blocks.md",
        *(
            pytest.param(f"docs/{name}.md", marks=pytest.mark.long)
            for name in ("deploy_encoder", "deploy_llm", "deploy_cnn", "hybrid", "shrink")
        ),
    ],
)
def test_the_programs_of_pages_run(
    page: str, times_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", text(page), re.S))
    if "sentence_transformers" in program and importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("needs requirements/text-weights.txt")
    (tmp_path / "page.py").write_text(program)
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    run = subprocess.run(
        [sys.executable, "page.py"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_versions_agree() -> None:
    ruff = re.findall(r"ruff==([\d.]+)", text("requirements/check.txt"))
    assert set(re.findall(r"ruff==([\d.]+)", text(".pre-commit-config.yaml"))) == set(ruff) != set()
    version = re.findall(r'^version = "(.+)"', text("pyproject.toml"), re.M)
    assert re.findall(r"^version: (.+)", text("CITATION.cff"), re.M) == version != []
    assert f"## {version[0]}" in text("CHANGELOG.md")


def test_the_workflow_says_what_is_not_run_and_runs_what_contributing_says() -> None:
    workflow, steps = (
        text(".github/workflows/ci.yml"),
        re.findall(r"^ *make ([a-z][\w-]*)", text(".ci/run"), re.M),
    )
    assert workflow.startswith("# NOT RUN YET") and "run: .ci/run" in workflow
    assert steps == ["test", "check", "fuzz-quick", "test-long"]
    assert re.search(r"^if .*SECONDS.*LIMIT.*; then\n +make test-long\nelse\n", text(".ci/run"), re.M)
    (needed,) = re.findall(r"^test-long: (.+)$", text("Makefile"), re.M)
    assert "$(VENV)/docs.stamp" in needed, "the test that builds the site would be skipped"
    said = text("CONTRIBUTING.md")
    assert "`make test`, `make check`, `make fuzz-quick`, then `make test-long` where half an hour holds it" in said


def test_the_first_command_installs_and_what_pages_tell_to_make_or_install_exists() -> None:
    commands = "".join(re.findall(r"^```\n(.*?)^```$", text("README.md"), re.S | re.M)[:2]).splitlines()
    assert commands[0] == "pip install twofour" and {"make demo", "make test"} <= {line[:9] for line in commands}
    pages = "\n".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    rules = re.search(r"^\.PHONY: (.+)$", text("Makefile"), re.M)
    assert rules and set(re.findall(r"(?:`|^)make ([a-z][\w-]*)(?= *[`#A-Z]|$)", pages, re.M)) <= set(rules[1].split())
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    extras = re.search(r"\[project\.optional-dependencies\]\n(.*?)\n\n", text("pyproject.toml"), re.S)
    named = set(re.findall(r"twofour\[(\w+)\]", pages + sources)) | {"demo", "text", "onnx", "ray"}
    assert extras and named <= set(re.findall(r"^(\w+) =", extras[1], re.M))


def test_the_release_says_what_was_not_run() -> None:
    workflow = text(".github/workflows/release.yml")
    assert workflow.startswith("# NOT RUN YET") and "make cross" in workflow and "not at all" in text("RELEASE.md")


def test_a_package_has_one_version_in_all_requirements() -> None:
    pins: dict[str, set[str]] = {}
    for page in (ROOT / "requirements").glob("*.txt"):
        if page.name == "hf4.txt":  # an environment of its own, with the versions of before
            continue
        for name, version in re.findall(r"^(\w[\w-]*)==([^\s;]+)", page.read_text(), re.M):
            pins.setdefault(name, set()).add(version)
    assert [name for name, versions in pins.items() if len(versions) > 1] == []
