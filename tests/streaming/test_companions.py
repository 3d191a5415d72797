"""What is copied beside the weights, and what is refused before a single weight is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints.small import shards
from twofour import streaming
from twofour.checkpoints import Checkpoint
from twofour.errors import SourceError
from twofour.recipe import Recipe
from twofour.streaming.companions import companions


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return shards(tmp_path / "in", {"a.weight": torch.randn(32, 64)}, {"b.weight": torch.randn(32, 64)})


def pruned(source: Path, out: Path) -> None:
    streaming.prune(streaming.plan_file(Checkpoint.open(source), Recipe.parse("2:4"), [("*", 1)]), out)


def outside(source: Path) -> None:
    (source / "passwd").symlink_to("/etc/passwd")


def beside(source: Path) -> None:
    (source.parent / "secret.txt").write_text("mine")
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "x.txt").symlink_to("../../secret.txt")


def folder_outside(source: Path) -> None:
    (source / "etc").symlink_to("/etc")


def round_and_round(source: Path) -> None:
    (source / "loop").symlink_to("loop")


def round_by_a_folder(source: Path) -> None:
    (source / "sub").mkdir()
    (source / "sub" / "up").symlink_to("..")


def dangling(source: Path) -> None:
    (source / "gone").symlink_to("nothing")


def pipe(source: Path) -> None:
    os.mkfifo(source / "pipe")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (outside, "`passwd`: a link out of the folder, to /etc/passwd"),
        (beside, "`tokenizer/x.txt`: a link out of the folder"),
        (folder_outside, "`etc`: a link out of the folder"),
        (round_and_round, "`loop`: a link that leads nowhere or in a circle"),
        (round_by_a_folder, "`sub/up`: a link to a folder that is in the checkpoint already"),
        (dangling, "`gone`: a link that leads nowhere"),
        (pipe, "`pipe`: a pipe, a socket or a device"),
    ],
)
def test_it_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path, make: Callable[[Path], None], said: str
) -> None:
    make(source)
    with pytest.raises(SourceError) as caught:
        pruned(source, tmp_path / "out")
    text = str(caught.value)
    assert said in text and "put a copy of what it points to in its place" in text and len(text) < 700
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.journal.json").exists()


def test_links_inside_the_folder_are_followed(tmp_path: Path, source: Path) -> None:
    (source / "real").mkdir()
    (source / "real" / "vocab.txt").write_text("a b")
    (source / "vocab.txt").symlink_to("real/vocab.txt")
    pruned(source, tmp_path / "out")
    copy = tmp_path / "out" / "vocab.txt"
    assert copy.read_text() == "a b" and not copy.is_symlink()


def test_a_snapshot_of_the_hubs_cache_is_copied_from_its_blobs(tmp_path: Path, source: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (source / "vocab.txt").write_text("a b")
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    pruned(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "a b"
    (snapshot / "refs").symlink_to("../../../elsewhere.txt")
    (tmp_path / "elsewhere.txt").write_text("mine")
    with pytest.raises(SourceError, match="out of the folder"):
        companions(snapshot)


def test_weights_and_temporary_files_do_not_count(source: Path) -> None:
    os.mkfifo(source / "model.bin")
    (source / ".vocab.txt.twofour-abcdefgh.tmp").write_text("half")
    (source / "vocab.txt").write_text("a")
    assert set(companions(source)) == {"vocab.txt"}
