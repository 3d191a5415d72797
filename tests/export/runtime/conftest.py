"""What the tests of libtwofour share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.export.runtime.models import ROOT, compiled
from twofour import export
from twofour.export.runtime import include
from twofour.export.runtime import library as libtwofour

EXAMPLE = ROOT / "examples" / "runtime" / "run.c"


@pytest.fixture(autouse=True)
def poisoned_empty() -> None:
    """Nothing: what fills a new tensor with NaN is a call of torch's, and would be recorded."""


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """A file of an MLP, an input and its answer."""
    fast, example = compiled("mlp")
    path = tmp_path_factory.mktemp("runtime") / "mlp.2f4"
    given = example(4)
    export.to_runtime(fast, path, given)
    with torch.inference_mode():
        return path, given["input"], fast(**given).clone()


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C, compiled."""
    out, library = tmp_path_factory.mktemp("example") / "run", tmp_path_factory.mktemp("library") / "libtwofour.so.1"
    library.symlink_to(libtwofour())  # by the name that it is looked for under
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{include()}"]
    link = [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(["cc", *flags, str(EXAMPLE), "-o", str(out), *link], check=True)
    return out
