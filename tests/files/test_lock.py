"""A folder has one writer at a time, and a killed one leaves no lock behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.forked import forked, status_of
from twofour.errors import SourceError
from twofour.files import lock, locked


def refused(folder: Path, wait: float = 0.0) -> str:
    with pytest.raises(SourceError) as caught, locked(folder, SourceError, remedy="take another", wait=wait):
        raise AssertionError("the block was entered")
    return str(caught.value)


def in_child(work, folder: Path) -> int:
    """Fork a process for `work`; its exit status is 7 where it was refused."""

    def tried() -> int:
        try:
            work(folder)
        except SourceError:
            return 7
        return 0

    return status_of(tried)


def take(folder: Path) -> None:
    with locked(folder, SourceError, remedy="take another"):
        pass


def die_inside(folder: Path) -> None:
    with locked(folder, SourceError, remedy="take another"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_second_process_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    with locked(tmp_path, SourceError, remedy="take another"):
        assert in_child(take, tmp_path) == 7
    assert in_child(take, tmp_path) == 0


def test_a_second_thread_is_refused_and_the_first_may_take_it_again(tmp_path: Path) -> None:
    said: list[str] = []
    with locked(tmp_path, SourceError, remedy="take another"), locked(tmp_path, SourceError, remedy="-"):
        thread = threading.Thread(target=lambda: said.append(refused(tmp_path)))
        thread.start()
        thread.join()
    assert (
        str(tmp_path) in said[0] and "one process or thread at a time" in said[0] and "try     take another" in said[0]
    )
    take(tmp_path)


def test_a_writer_that_may_wait_comes_after_the_other(tmp_path: Path) -> None:
    order: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with locked(tmp_path, SourceError, remedy="-"):
            inside.set()
            threading.Event().wait(0.05)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with locked(tmp_path, SourceError, remedy="-", wait=30):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_waiting_ends(tmp_path: Path) -> None:
    said: list[str] = []
    with locked(tmp_path, SourceError, remedy="-"):
        thread = threading.Thread(target=lambda: said.append(refused(tmp_path, wait=0.03)))
        thread.start()
        thread.join()
    assert "still after 0.03 s" in said[0]


def test_a_killed_writer_leaves_no_lock_and_nothing_else(tmp_path: Path) -> None:
    assert in_child(die_inside, tmp_path) == -signal.SIGKILL
    assert in_child(take, tmp_path) == 0 and not list(tmp_path.iterdir())


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    go, end = os.pipe()
    with locked(tmp_path, SourceError, remedy="-"):
        worker = forked(lambda: len(os.read(go, 1)) - 1)
    assert in_child(take, tmp_path) == 0
    os.write(end, b".")
    os.waitpid(worker, 0)


def test_a_worker_that_has_not_yet_closed_its_copy_does_not_keep_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path, SourceError, remedy="-"):
        ((_, handle),) = lock._held.values()
        copy = os.dup(handle)
    assert in_child(take, tmp_path) == 0
    os.close(copy)


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    take(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with locked(tmp_path / "new", SourceError, remedy="-"):
        (tmp_path / "new" / "file").write_text("whole")
    assert (tmp_path / "new" / "file").exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_the_kind_and_the_block_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written\n  got     NotADirectoryError" in refused(tmp_path / "file" / "folder")
    with pytest.raises(OSError, match="disk"), locked(tmp_path, SourceError, remedy="-"):
        raise OSError("disk")


def test_a_renamed_folder_stays_locked_and_its_name_is_free(tmp_path: Path) -> None:
    with locked(tmp_path / "a", SourceError, remedy="-"):
        (tmp_path / "a" / "file").write_text("")
        (tmp_path / "a").rename(tmp_path / "b")
        assert in_child(take, tmp_path / "b") == 7 and in_child(take, tmp_path / "a") == 0


def test_the_one_who_renamed_the_folder_does_not_remove_the_next_ones(tmp_path: Path) -> None:
    a = tmp_path / "a"
    with ExitStack() as first, locked_by_another_thread() as second:
        first.enter_context(locked(a, SourceError, remedy="-"))
        (a / "file").write_text("")
        a.rename(tmp_path / "b")
        second(a)
        first.close()
        assert a.is_dir() and in_child(take, a) == 7
    assert not a.exists()


@contextmanager
def locked_by_another_thread() -> Iterator[Callable[[Path], None]]:
    with ThreadPoolExecutor(1) as thread, ExitStack() as held:
        held.callback(lambda: thread.submit(inside.close).result())
        inside = ExitStack()
        yield lambda folder: thread.submit(inside.enter_context, locked(folder, SourceError, remedy="-")).result()


def test_an_empty_folder_of_the_callers_stays_and_one_for_the_lock_alone_goes(tmp_path: Path) -> None:
    for passing, stays in ((False, True), (True, False)):
        tmp_path.joinpath("empty").mkdir(exist_ok=True)
        with locked(tmp_path / "empty", SourceError, remedy="-", passing=passing):
            pass
        assert tmp_path.joinpath("empty").exists() == stays


def test_without_locks_it_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(handle: int, flags: int) -> None:
        raise OSError(errno.EBADF, "a folder on NFS")

    monkeypatch.setattr(fcntl, "flock", without)
    with caplog.at_level("WARNING", "twofour.files"):
        take(tmp_path)
    assert "has no locks" in caplog.text
