"""Saves into one folder: killed on the way, several at once, read meanwhile, beside files of others."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import twofour
from tests.export.small import Net, masked
from tests.forked import forked, status_of
from twofour.checkpoints import INDEX, WEIGHTS, Checkpoint
from twofour.errors import FormatError
from twofour.export import shards


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stored(folder: Path) -> set[str]:
    return set(json.loads((folder / INDEX).read_text())["weight_map"].values())


def killed_save(folder: Path, seed: int, at: int) -> None:
    """Let a process be killed when it is about to write its file number `at`, the index being the last."""
    calls: list[int] = []

    def counted(real):
        def call(*arguments):
            calls.append(1)
            if len(calls) > at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return call

    def saved() -> None:
        shards.write, shards.replacing = counted(shards.write), counted(shards.replacing)
        twofour.save(masked(seed), folder, max_shard_bytes=30_000)

    assert status_of(saved) == -signal.SIGKILL


def test_the_next_save_removes_what_killed_ones_left_and_nothing_of_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    twofour.save(masked(0), folder, max_shard_bytes=30_000)
    for at in (1, 2, 3):
        killed_save(folder, 1, at)
        assert torch.equal(twofour.load(folder, Net(), masked=True).fc.weight, masked(0).fc.weight)
    assert len([name for name in names(folder) if name.endswith(".safetensors")]) > len(stored(folder))
    mine = {"model-00001-of-00009.safetensors": b"weights of another program", "model.bin": b"mine"}
    for name, content in mine.items():
        (folder / name).write_bytes(content)
    save_file({"w": torch.ones(2)}, folder / "model.7-00001-of-00002.safetensors")
    twofour.save(masked(2), folder, max_shard_bytes=30_000)
    kept = {*mine, "model.7-00001-of-00002.safetensors", INDEX}
    assert set(names(folder)) == kept | stored(folder)
    assert all((folder / name).read_bytes() == content for name, content in mine.items())
    assert torch.equal(twofour.load(folder, Net(), masked=True).fc.weight, masked(2).fc.weight)


def dense_files(folder: Path, kind: str) -> None:
    """Put a model into the folder as Hugging Face does: in one file, in several, or in several beside one of ours."""
    weights = {"fc.weight": torch.ones(64, 64)}
    if kind == "file":
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    elif kind == "link":
        save_file(weights, folder / "blob", metadata={"format": "pt"})
        (folder / WEIGHTS).symlink_to("blob")
    elif kind == "torn":
        (folder / WEIGHTS).write_bytes(b"\x00" * 5)
    else:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": "precious.safetensors"}}))
    if kind in ("index", "index beside ours"):
        save_file(weights, folder / "precious.safetensors")
    if kind == "index beside ours":
        twofour.save(masked(1), folder / WEIGHTS)


@pytest.mark.parametrize("most", [None, 30_000], ids=["one file", "several"])
@pytest.mark.parametrize("kind", ["file", "link", "torn", "index", "index alone", "index beside ours"])
def test_a_model_of_others_is_neither_replaced_nor_removed(tmp_path: Path, kind: str, most: int | None) -> None:
    dense_files(tmp_path, kind)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FormatError, match="of another program") as refused:
        twofour.save(masked(0), tmp_path, max_shard_bytes=most)
    said = str(refused.value)
    assert (INDEX if "index" in kind else WEIGHTS) in said and "`twofour`" in said and "another folder" in said
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_index_whose_files_are_all_ours_is_replaced_also_where_one_was_lost(tmp_path: Path) -> None:
    for most in (None, 30_000):
        twofour.save(masked(0), tmp_path, max_shard_bytes=30_000)
        (tmp_path / min(stored(tmp_path))).unlink()
        twofour.save(masked(1), tmp_path, max_shard_bytes=most)
        assert torch.equal(twofour.load(tmp_path, Net(), masked=True).fc.weight, masked(1).fc.weight)


def test_a_link_to_a_file_of_ours_is_written_through_and_not_removed(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    twofour.save(masked(0), tmp_path / "ours.safetensors")
    link = tmp_path / "hub" / WEIGHTS
    link.symlink_to(tmp_path / "ours.safetensors")
    with pytest.raises(FormatError, match="a link"):
        twofour.save(masked(1), tmp_path / "hub", max_shard_bytes=30_000)
    twofour.save(masked(1), tmp_path / "hub")
    assert link.is_symlink() and names(tmp_path / "hub") == [WEIGHTS]
    assert torch.equal(twofour.load(tmp_path / "hub", Net(), masked=True).fc.weight, masked(1).fc.weight)


def test_a_name_is_never_given_to_files_of_two_saves(tmp_path: Path) -> None:
    seen: list[str] = []
    for seed in range(3):
        twofour.save(masked(seed), tmp_path, max_shard_bytes=30_000)
        assert not set(seen) & stored(tmp_path)
        seen += stored(tmp_path)


def test_readers_get_the_old_model_or_the_new_one_while_others_save(tmp_path: Path) -> None:
    wanted = [masked(seed).fc.weight.detach() for seed in range(3)]
    twofour.save(masked(0), tmp_path, max_shard_bytes=30_000)

    def saved(seed: int) -> None:
        for _ in range(3):
            twofour.save(masked(seed), tmp_path, max_shard_bytes=30_000)

    writers = [forked(partial(saved, seed)) for seed in (1, 2)]
    reads = 0
    while writers:
        weight = twofour.export.read(tmp_path).packed["fc.weight"].unpack()
        assert any(torch.equal(weight, one) for one in wanted)
        reads += 1
        writers = [child for child in writers if os.waitpid(child, os.WNOHANG)[0] == 0]
    assert reads and set(names(tmp_path)) == {INDEX} | stored(tmp_path)


def test_a_reader_whose_files_go_after_the_index_was_read_reads_the_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twofour.save(masked(0), tmp_path, max_shard_bytes=30_000)
    real, calls = Checkpoint.read_all, []

    def late(self):
        if not calls:
            calls.append(1)
            twofour.save(masked(1), tmp_path, max_shard_bytes=30_000)
        return real(self)

    monkeypatch.setattr(Checkpoint, "read_all", late)
    weight = twofour.export.read(tmp_path).packed["fc.weight"].unpack()
    assert calls and torch.equal(weight, masked(1).fc.weight.detach())


def test_a_second_writer_waits_and_is_refused_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PATIENCE", 0.02)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(FormatError, match="another process is writing the same result") as caught:
            twofour.save(masked(), tmp_path, max_shard_bytes=30_000)
        assert "still after 0.02 s" in str(caught.value) and not names(tmp_path)
    finally:
        os.close(handle)
