"""Resuming to the same bits after real kills, and files that are broken, foreign or of another run."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.small import accuracy, noisy_loader, pair_of_models, recipe, same_state
from twofour.errors import FormatError, TrainingError
from twofour.training import checkpoint, finetune, train

ROOT = Path(__file__).parents[2]


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.killed_run", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    digest = [line for line in out.splitlines() if line.startswith("DIGEST")]
    return out.count("step\n"), digest[0]


@pytest.mark.long
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path):
    unkilled = start(tmp_path / "unkilled")
    moments, killed = random.Random(20), 0
    for _ in range(4):
        process = start(tmp_path / "killed")
        for _ in range(moments.randint(1, 9)):
            process.stdout.readline()
        time.sleep(moments.random() * 0.01)
        os.kill(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.stdout.close()
    steps, digest = finish(start(tmp_path / "killed"))
    all_steps, wanted = finish(unkilled)
    assert killed == 4 and all_steps == 24 and steps < all_steps
    assert digest == wanted


class Stop(Exception):
    pass


LOADERS = {"global": {}, "own generator": {"own_generator": True}, "worker": {"workers": 1}}


@pytest.mark.parametrize(
    "stop, loader",
    [(stop, loader) for stop in (1, 5, 6, 7, 8, 11) for loader in ("global", "own generator")] + [(8, "worker")],
)
def test_stopped_anywhere_it_continues_to_the_same_bits(tmp_path, stop, loader):
    def model_after(folder, stop_at):
        model, _ = pair_of_models()
        calls = []

        def loss(output, target):
            calls.append(1)
            if len(calls) > stop_at:
                raise Stop
            return nn.functional.cross_entropy(output, target)

        arguments = {
            **recipe(),
            "loss": loss,
            "checkpoint": folder,
            "checkpoint_every": 3,
            "evaluate": accuracy,
        }
        try:
            return model, finetune(model, noisy_loader(**LOADERS[loader]), **arguments), len(calls)
        except Stop:
            return model, None, len(calls)

    assert model_after(tmp_path / "a", stop)[1] is None
    model, result, calls = model_after(tmp_path / "a", 99)
    wanted_model, wanted, _ = model_after(None, 99)
    assert calls == 12 - stop // 3 * 3
    assert same_state(model, wanted_model)
    assert result.sparse.history == wanted.sparse.history and result.sparse.before == wanted.sparse.before
    done, again, calls = model_after(tmp_path / "a", 99)
    assert calls == 0 and same_state(done, model) and again.sparse.history == wanted.sparse.history


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [1, 7]),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
        lambda opt: torch.optim.lr_scheduler.SequentialLR(
            opt,
            [
                torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8),
            ],
            [4],
        ),
    ],
)
def test_schedules_continue_where_they_were(tmp_path, schedule):
    def rates(folder, stop_at):
        model, _ = pair_of_models()
        seen = []

        def loss(output, target):
            if len(seen) == stop_at:
                raise Stop
            seen.append(optimizers[-1].param_groups[0]["lr"])
            return nn.functional.cross_entropy(output, target)

        optimizers = []

        def optimizer(params):
            optimizers.append(torch.optim.SGD(params, lr=0.1, momentum=0.9))
            return optimizers[-1]

        arguments = {**recipe(), "loss": loss, "optimizer": optimizer, "schedule": schedule}
        with contextlib.suppress(Stop):
            finetune(model, noisy_loader(), **arguments, checkpoint=folder, checkpoint_every=1)
        return seen

    whole = rates(None, 99)
    assert len(whole) == 12 and len(set(whole)) > 2
    assert rates(tmp_path, 5) + rates(tmp_path, 99) == whole


def finished(folder: Path) -> Path:
    model, _ = pair_of_models()
    finetune(model, noisy_loader(), **recipe(), checkpoint=folder)
    return folder / "sparse.pt"


def attempt(folder: Path, **changes):
    model, _ = pair_of_models()
    return finetune(model, noisy_loader(), **{**recipe(), **changes}, checkpoint=folder)


def refused(file: Path, error: type[Exception], **changes) -> str:
    content = file.read_bytes()
    with pytest.raises(error) as caught:
        attempt(file.parent, **changes)
    assert file.read_bytes() == content  # the user's file is kept
    return str(caught.value)


def test_truncated_files(tmp_path):
    file = finished(tmp_path)
    content = file.read_bytes()
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        text = refused(file, FormatError)
        assert "it is left as it is" in text and "try     move the file away" in text


def test_damaged_bytes_anywhere(tmp_path):
    file = finished(tmp_path)
    content = file.read_bytes()
    places = random.Random(1)
    found = 0
    for _ in range(40):
        damaged = bytearray(content)
        damaged[places.randrange(len(content))] ^= 0x10
        file.write_bytes(damaged)
        try:
            attempt(tmp_path)  # zip padding and time stamps may differ without harm
        except FormatError:
            found += 1
    assert found > 25


def test_foreign_files_run_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    file = tmp_path / "sparse.pt"
    for content in ({"format": Bomb()}, Bomb(), {"weight": torch.zeros(2)}, [1, 2], {"format": "other"}):
        torch.save(content, file)
        assert "twofour training checkpoint, version 1" in refused(file, FormatError)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("letter.txt", "hello")
    refused(file, FormatError)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("part", checkpoint.PARTS)
def test_a_part_that_is_missing_or_nonsense(tmp_path, part):
    file = finished(tmp_path)
    state = torch.load(file, weights_only=True)
    torch.save({key: value for key, value in state.items() if key != part}, file)
    assert f"no {part}" in refused(file, FormatError)
    if part != "before":
        torch.save({**state, part: "nonsense"}, file)
        assert f"no {part}" in refused(file, FormatError)
        torch.save({**state, part: type(state[part])()}, file)
        refused(file, (FormatError, TrainingError))


def test_a_later_version(tmp_path):
    file = finished(tmp_path)
    torch.save({**torch.load(file, weights_only=True), "version": 2}, file)
    assert "version 2" in refused(file, FormatError)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"seed": 1}, "seed: 0"),
        ({"epochs": 3, "schedule": None}, "epochs: 2"),
        ({"clip_norm": 1.0}, "clip_norm: None"),
        ({"optimizer": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9)}, "optimiser: AdamW"),
        (
            {"optimizer": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.2)},
            "settings of the optimiser",
        ),
        ({"schedule": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=13)}, "schedule"),
        ({"schedule": None}, "settings of the optimiser"),
    ],
)
def test_another_run(tmp_path, changes, word):
    text = refused(finished(tmp_path), TrainingError, **changes)
    assert "is of another run" in text and word in text and "another checkpoint folder" in text


def test_another_model_and_other_masks(tmp_path):
    file = finished(tmp_path)
    other, _ = pair_of_models(seed=1)
    with pytest.raises(TrainingError, match="masks"):
        finetune(other, noisy_loader(), **recipe(), checkpoint=tmp_path)
    wide = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    file.rename(tmp_path / "dense.pt")
    state = torch.load(tmp_path / "dense.pt", weights_only=True)
    torch.save({**state, "run": {**state["run"], "name": "dense"}}, tmp_path / "dense.pt")
    with pytest.raises(TrainingError, match="state of the model"):
        train(wide, noisy_loader(), **recipe(), checkpoint=tmp_path)


def test_a_state_that_would_need_pickle_is_refused_when_written(tmp_path):
    class Factor:
        def __init__(self):
            self.table = {1, 2}

        def __call__(self, step):
            return 1.0

    model, _ = pair_of_models()
    with pytest.raises(TrainingError, match="without running code"):
        finetune(
            model,
            noisy_loader(),
            **{**recipe(), "schedule": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Factor())},
            checkpoint=tmp_path,
        )


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    file = finished(tmp_path)
    content = file.read_bytes()
    monkeypatch.setattr(checkpoint.torch, "save", lambda state, f: f.write_bytes(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.write(file, {})
    assert file.read_bytes() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with pytest.raises(TrainingError, match=r"cannot be written\n  got +\w+: .+\n  wanted .+\n  try .+") as caught:
        finetune(pair_of_models()[0], noisy_loader(), **recipe(), checkpoint=blocked)
    assert os.fspath(blocked) in str(caught.value)

    def full(state, file):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(TrainingError, match="failed writing"):
        checkpoint.write(tmp_path / "run.pt", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["blocked"]
