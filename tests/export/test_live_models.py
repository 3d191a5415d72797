"""Files under a live model that are cut, overwritten in place or removed: the model keeps its values."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.forked import status_of
from twofour.checkpoints import Checkpoint
from twofour.errors import FormatError


def small() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512), nn.Linear(512, 64))


def empty() -> nn.Sequential:
    with torch.device("meta"):
        return small()


def cut(path: Path) -> None:
    os.truncate(path, 16)


def overwritten(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)


READ: dict[str, Callable[[Path], Callable[[], torch.Tensor]]] = {
    "masked": lambda path: sums(twofour.load(path, empty(), masked=True)),
    "compiled": lambda path: sums(twofour.load(path, empty(), tokens=(1,))),
    "read": lambda path: held(path),
}


def sums(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model(torch.arange(512)).double().sum()


def held(path: Path) -> Callable[[], torch.Tensor]:
    contents = twofour.export.read(path)
    parts = [part for weight in contents.packed.values() for part in (weight.values, weight.indices)]
    return lambda: torch.stack([tensor.double().sum() for tensor in (*contents.plain.values(), *parts)]).sum()


@pytest.mark.parametrize("damage", [cut, overwritten, os.unlink])
@pytest.mark.parametrize("way", READ)
def test_what_happens_to_a_file_later_does_not_matter(
    tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch, way: str, damage: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    twofour.save(twofour.prune(small(), "2:4", skip=["1"]), path)

    def read_and_damaged() -> int:
        torch.set_num_threads(1)
        answer = READ[way](path)
        before = answer()
        damage(path)
        return 0 if torch.equal(answer(), before) and bool(before.isfinite()) else 3

    assert status_of(read_and_damaged) == 0  # a bus error would end the process


def test_a_single_tensor_and_a_part_of_one_too(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    twofour.save(small(), path)
    entry = Checkpoint.open(path).entries["0.weight"]
    whole, part = entry.read(), entry.part(8, 16).read()
    before = whole.clone()
    cut(path)
    assert torch.equal(whole, before) and torch.equal(part, before[8:16])
    with pytest.raises(FormatError, match="became shorter"):
        entry.read()


def test_a_file_that_is_written_to_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    twofour.save(small(), path)
    found = Checkpoint.open(path)
    entries = dict(found.entries)

    class Slow(dict):
        def values(self):
            for entry in entries.values():
                yield entry
                overwritten(path)

    slow = Checkpoint(found.path, found.files, Slow(entries), found.metadata)
    with pytest.raises(FormatError, match="written to while it was read") as caught:
        slow.read_all()
    assert caught.value.code == "file-changed"


def test_a_file_that_is_renamed_over_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    twofour.save(nn.Linear(64, 64), path)
    twofour.save(nn.Linear(64, 8), other)
    real, calls = Checkpoint.read_all, []

    def late(self: Checkpoint) -> dict[Path, dict[str, torch.Tensor]]:
        if not calls:
            shutil.move(other, path)
        calls.append(1)
        return real(self)

    monkeypatch.setattr(Checkpoint, "read_all", late)
    assert twofour.export.read(path).plain["weight"].shape == (8, 64) and len(calls) == 2
