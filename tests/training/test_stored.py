"""Checkpoints that are whole archives and cannot be what they are said to be: refused when they are read."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.small import noisy_loader, pair_of_models, recipe
from twofour.errors import FormatError, TrainingError
from twofour.training import checkpoint, finetune

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "plain SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
}


class Stop(Exception):
    pass


def run(folder: Path, steps: int = 99, **changes: Any) -> Any:
    calls: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > steps:
            raise Stop
        return torch.nn.functional.cross_entropy(output, target)

    model, _ = pair_of_models()
    arguments = {**recipe(), "loss": loss, "checkpoint_every": 1, **changes}
    return finetune(model, noisy_loader(), **arguments, checkpoint=folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(Stop):
        run(folder, 4)
    return torch.load(folder / "sparse.pt", weights_only=True)


def first(state: dict[str, Any]) -> dict[str, Any]:
    return state["optimizer"]["state"][0]


def words(state: dict[str, Any]) -> list[Any]:
    return state["random"]["numpy"]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a part of the optimiser's state is missing": lambda s: first(s).pop("exp_avg"),
    "it has another shape": lambda s: first(s).update(exp_avg=torch.zeros(3, 3)),
    "it is a number": lambda s: first(s).update(exp_avg_sq=1.0),
    "it is whole numbers": lambda s: first(s).update(exp_avg=first(s)["exp_avg"].long()),
    "it is not finite": lambda s: first(s)["exp_avg"].fill_(float("nan")),
    "its values share one place": lambda s: first(s).update(
        exp_avg=torch.zeros(1, 1).expand(first(s)["exp_avg"].shape)
    ),
    "the step is a word": lambda s: first(s).update(step="four"),
    "the step is far below zero": lambda s: first(s).update(step=torch.tensor(-1e9)),
    "a setting is missing": lambda s: s["optimizer"]["param_groups"][0].pop("betas"),
    "a setting has one value too many": lambda s: s["optimizer"]["param_groups"][0].update(betas=(0.9, 0.9, 0.9)),
    "a setting overflows": lambda s: s["optimizer"]["param_groups"][0].update(betas=(1e300, 0.9)),
    "a setting that no schedule moves is another": lambda s: s["optimizer"]["param_groups"][0].update(eps="1"),
    "a number is written as a text": lambda s: s["optimizer"]["param_groups"][0].update(lr="0.1"),
    "a number is a truth value": lambda s: s["optimizer"]["param_groups"][0].update(lr=True),
    "the schedule counts in text": lambda s: s["schedule"].update(last_epoch="4"),
    "a group has more parameters": lambda s: s["optimizer"]["param_groups"][0]["params"].append(77),
    "there is state of a parameter that is not held": lambda s: s["optimizer"]["state"].update({77: {"step": 1}}),
    "numpy's state is cut": lambda s: words(s).__setitem__(1, words(s)[1][:5]),
    "numpy's position is impossible": lambda s: words(s).__setitem__(2, 10**30),
    "numpy's generator is another": lambda s: words(s).__setitem__(0, "PCG64"),
    "torch's state is cut": lambda s: s["random"].update(torch=s["random"]["torch"][:9]),
    "Python's state is cut": lambda s: s["random"].update(python=[3, [1, 2], None]),
    "the schedule's step is a word": lambda s: s["schedule"].update(last_epoch="four"),
    "an epoch lacks its loss": lambda s: s["history"].append({"epoch": 1}),
    "the position is infinite": lambda s: s["position"].update(step=float("inf")),
    "the position is before the start": lambda s: s["position"].update(step=-1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_does_not_fit_is_refused_before_a_step(
    tmp_path: Path, stopped: dict[str, Any], change: str
) -> None:
    state = copy.deepcopy(stopped)
    CHANGES[change](state)
    torch.save(state, tmp_path / "sparse.pt")
    before = (tmp_path / "sparse.pt").read_bytes()
    with pytest.raises(FormatError, match=r"cannot be continued; it is left as it is\n  got ") as caught:
        run(tmp_path)
    assert "move the file away to start the run anew" in str(caught.value)
    assert (tmp_path / "sparse.pt").read_bytes() == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimiser_wrote_is_taken(tmp_path: Path, name: str) -> None:
    changes = {"optimizer": OPTIMIZERS[name], "schedule": None}
    with pytest.raises(Stop):
        run(tmp_path, 3, **changes)
    assert run(tmp_path, **changes).sparse.history


def test_compressed_entries_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "sparse.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 24))
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("an entry was inflated"))
    with pytest.raises(FormatError, match="a compressed entry"):
        checkpoint.read(tmp_path / "sparse.pt")


def test_entries_that_lie_over_each_other_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "sparse.pt", "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 16))
        for number in range(1, 9):  # each says that its bytes are those of the first
            entry = copy.copy(archive.filelist[0])
            entry.filename = f"archive/data/{number}"
            archive.filelist.append(entry)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("an entry was read"))
    with pytest.raises(FormatError, match=r"entries that overlap|Overlapped"):
        checkpoint.read(tmp_path / "sparse.pt")


HOLDS = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
"""Another process that holds what `files.locked` does; no fork of this one, whose threads it would not have."""


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout and other.stdout.readline() == "held\n"
            with pytest.raises(TrainingError) as refused:
                run(tmp_path)
        finally:
            other.communicate("")
    said = str(refused.value)
    assert "another process is writing the same result" in said and "pass another `checkpoint` folder" in said
    assert run(tmp_path).sparse.history and {path.name for path in tmp_path.iterdir()} == {"sparse.pt"}


def test_what_killed_runs_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".sparse.pt.twofour-abcdefgh.tmp").write_text("half")
    (tmp_path / ".control.pt.twofour-abcdefgh.tmp").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sparse.pt", "notes.txt"}
