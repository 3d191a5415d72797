"""Files under a live model that are cut, overwritten in place or removed: the model keeps its values."""

from __future__ import annotations

import copy
import gc
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import twofour
from tests.forked import status_of
from twofour.checkpoints import Checkpoint
from twofour.errors import FormatError
from twofour.native import mapped
from twofour.native.mapped import MappedFile

linux = pytest.mark.skipif(sys.platform != "linux", reason="files are guarded by leases on Linux alone")


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


def on_pages(tensor: torch.Tensor, path: Path) -> bool:
    """Whether a tensor's memory is pages of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


def table(model: nn.Module) -> torch.Tensor:
    return model.get_parameter("0.weight")


def notes(model: nn.Module) -> tuple[str, ...]:
    return cast(Any, model).plan.notes


def leased(path: Path) -> bool:
    """Whether somebody who opens the file to write to it would have to wait."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return True
    return False


@pytest.fixture
def path(tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    torch.manual_seed(0)
    twofour.save(twofour.prune(small(), "2:4", skip=["1"]), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@linux
def test_a_table_is_the_pages_of_its_file_for_as_long_as_it_lives(path: Path) -> None:
    fast, other = (twofour.load(path, model, tokens=(1,)) for model in (empty(), small()))
    held = (table(fast), table(other))
    assert all(on_pages(one, path) for one in held)
    shared = sum(
        one.nbytes for one in fast.parameters() if on_pages(one, path)
    )  # the dense Linear's where torch is faster
    assert shared >= 512 * 64 * 4
    assert f"{shared / 1e6:.2f} MB of it are pages of the file, which processes share" in notes(fast)
    with torch.no_grad():
        table(other).zero_()  # of this model alone
    assert table(fast).any() and torch.equal(table(fast), twofour.export.read(path).plain["0.weight"])
    del fast, other, held
    gc.collect()
    assert not leased(path) and str(path) not in Path("/proc/self/maps").read_text()


def resident(path: Path) -> int:
    """Return the bytes of a file's pages that this process holds."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@linux
def test_pages_that_no_call_has_read_take_no_memory(path: Path) -> None:
    fast, other = (twofour.load(path, empty(), tokens=(1,), graph=False) for _ in range(2))
    assert on_pages(table(fast), path)
    shared = sum(one.nbytes for one in fast.parameters() if on_pages(one, path))
    assert resident(path) < shared / 2, "two models of one file, of which only ends of tensors were read"
    want = twofour.export.read(path).plain["0.weight"]
    assert torch.equal(table(fast), want) and resident(path) >= shared / 2
    mapped.forget(other.parameters())
    assert torch.equal(table(other), want)


@linux
def test_pages_of_a_table_in_fewer_bits_take_none_either(tmp_path: Path) -> None:
    path, ids = tmp_path / "model.safetensors", torch.arange(8)[None]
    model = nn.Sequential(nn.Embedding(20_000, 64), nn.Linear(64, 64)).eval()
    twofour.save(twofour.compile(copy.deepcopy(model), ids, embeddings="int8", effort="quick"), path)
    loaded = twofour.load(path, copy.deepcopy(model))
    rows = max(loaded.buffers(), key=lambda one: one.nbytes)
    assert rows.dtype is torch.int8 and on_pages(rows, path) and resident(path) < rows.nbytes / 2
    assert (loaded(ids) - model(ids)).norm() < 0.02 * model(ids).norm()


@linux
def test_pages_that_are_the_processs_own_are_not_forgotten(path: Path) -> None:
    fast = twofour.load(path, empty(), tokens=(1,))
    want = twofour.export.read(path).plain["0.weight"]
    cut(path)
    assert not on_pages(table(fast), path)
    mapped.forget(fast.parameters())
    assert torch.equal(table(fast), want)


@linux
@pytest.mark.parametrize("command", ["cp /bin/sh {}", "dd if=/dev/zero count=1 of={}"])
def test_another_process_that_writes_to_a_file_waits_until_its_pages_are_copied(path: Path, command: str) -> None:
    fast, again = (twofour.load(path, empty(), tokens=(1,)) for _ in range(2))
    want = table(fast).clone()
    assert on_pages(table(fast), path) and on_pages(table(again), path)
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # dd has a fault of its own
    subprocess.run(command.format(path).split(), check=True, timeout=30, stderr=subprocess.DEVNULL, env=plain)
    for model in (fast, again):
        assert torch.equal(table(model), want) and not on_pages(table(model), path)
    assert not leased(path)


@linux
def test_a_process_that_forks_owns_its_pages_and_its_child_too(path: Path) -> None:
    fast = twofour.load(path, empty(), tokens=(1,))
    want = table(fast).clone()
    assert on_pages(table(fast), path)

    def written_under() -> int:
        cut(path)
        return 0 if torch.equal(table(fast), want) else 3

    assert status_of(written_under) == 0
    assert torch.equal(table(fast), want) and not on_pages(table(fast), path)


@linux
def test_other_threads_read_the_pages_while_they_are_copied(path: Path) -> None:
    fast = twofour.load(path, empty(), tokens=(1,))
    want, sums, done = table(fast).double().sum(), [], threading.Event()
    begun = threading.Semaphore(0)

    def reads() -> None:
        while not done.is_set():
            sums.append(table(fast).double().sum())
            begun.release()

    threads = [threading.Thread(target=reads) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.acquire(timeout=60)
    cut(path)
    done.set()
    for thread in threads:
        thread.join()
    assert sums and all(torch.equal(one, want) for one in sums)


@linux
def test_a_file_that_somebody_may_write_to_is_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twofour.checkpoints")
    with open(path, "r+b"):
        fast = twofour.load(path, empty(), tokens=(1,))
    assert not on_pages(table(fast), path) and not any("pages" in note for note in notes(fast))
    assert (
        f"{path} is read into memory of this process alone, not mapped: somebody has it open to write to it"
        in caplog.text
    )
    assert not on_pages(table(twofour.load(path, empty(), tokens=(1,), mapped=False)), path)
    assert not on_pages(table(twofour.load(path, small(), masked=True)), path)


@linux
def test_a_file_that_is_cut_between_two_of_its_tables_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, parts = MappedFile.part, []

    def late(pages: MappedFile, begin: int, nbytes: int) -> torch.Tensor | None:
        if len(parts) == 1:
            cut(path)
        parts.append(part(pages, begin, nbytes))
        return parts[-1]

    def cut_within() -> int:
        monkeypatch.setattr(MappedFile, "part", late)
        with pytest.raises(FormatError) as caught:
            twofour.load(path, empty(), tokens=(1,))
        told = caught.value.code == "file-shorter" and [one is None for one in parts] == [False, True]
        return 0 if told and bool(parts[0].any()) else 3

    assert status_of(cut_within) == 0  # a bus error would end the process


@linux
def test_a_live_model_outlives_a_writer_whom_no_queued_signal_can_tell_of(path: Path) -> None:
    def written_under() -> int:
        fast = twofour.load(path, empty(), tokens=(1,))
        want, shared = table(fast).clone(), on_pages(table(fast), path)
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))  # type: ignore[attr-defined]
        subprocess.run(["sh", "-c", f": > {path}"], check=True, timeout=30)
        return 0 if shared and torch.equal(table(fast), want) else 3

    assert status_of(written_under) == 0


def with_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])


def with_handler() -> None:
    signal.signal(signal.SIGIO, lambda *_: None)


def with_ignored() -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)


@linux
@pytest.mark.parametrize(
    ("taken", "reason"), [(with_blocked, "is blocked"), (with_handler, "handler"), (with_ignored, "is ignored")]
)
def test_a_file_is_read_where_no_signal_would_tell_of_a_writer(
    path: Path, caplog: pytest.LogCaptureFixture, taken: Callable[[], None], reason: str
) -> None:
    caplog.set_level(logging.INFO, "twofour.checkpoints")

    def read() -> int:
        twofour.load(path, empty(), tokens=(1,))  # had the signal before
        taken()
        fast = twofour.load(path, empty(), tokens=(1,))
        return 0 if not on_pages(table(fast), path) and "SIGIO" in caplog.text and reason in caplog.text else 3

    assert status_of(read) == 0
