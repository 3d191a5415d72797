import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twofour.files import replacing


def test_what_is_written_becomes_the_file(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file.txt"
    with replacing(target) as temporary:
        temporary.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert [entry.name for entry in target.parent.iterdir()] == ["file.txt"]


def test_it_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    with replacing(tmp_path / "ours") as temporary:
        temporary.write_text("")
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain")}
    assert len(modes) == 1


def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "folder") as temporary:
        temporary.write_text("x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_killed_while_writing_the_old_file_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    code = f"""
import os, signal
from twofour.files import replacing
with replacing({os.fspath(target)!r}) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert target.read_text() == "old"


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "file.txt", tmp_path / "link"
    for old in (None, "old"):  # a link to nothing too
        if old:
            target.write_text(old)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with replacing(link) as temporary:
            assert temporary.parent == target.parent.resolve()
            temporary.write_text("new")
        assert link.is_symlink() and not target.is_symlink() and target.read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_an_existing_file_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    target.chmod(mode)
    with replacing(target) as temporary:
        temporary.write_text("new")
    assert stat.S_IMODE(target.stat().st_mode) == mode and target.read_text() == "new"


def test_what_is_no_plain_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name in ("pipe", "round"):
        with pytest.raises(OSError, match=name), replacing(tmp_path / name):
            raise AssertionError("the block was entered")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "round").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def killed_write(target: Path) -> Path:
    """Let a process be killed while it writes `target`, and return what it leaves."""
    code = f"""
import os, signal
from twofour.files import replacing
with replacing({os.fspath(target)!r}) as temporary:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    before = set(target.parent.iterdir())
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    (left,) = set(target.parent.iterdir()) - before
    return left


def others_than(left: Path, target: Path) -> list[Path]:
    names = (
        f".other{left.name.removeprefix(f'.{target.stem}')}",
        f".{target.name}{left.name}",
        f".{target.name}.abcdefgh",
        f"{target.name}.twofour-abcdefgh.tmp",
        f".{target.name}.twofour-abcdefgh.tmp.bak",
    )
    found = [target.parent / name for name in names]
    for path in found:
        path.write_text("not ours")
    return found


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    others = others_than(killed_write(target), target)
    with replacing(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new" and all(path.exists() for path in others)
    assert len(list(tmp_path.iterdir())) == 1 + len(others)


def test_a_write_that_is_going_on_is_left_alone_however_long_it_takes(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    with replacing(target) as slow:
        slow.write_text("slow")
        os.utime(slow, (time.time() - 7200,) * 2)
        with replacing(target) as quick:
            quick.write_text("quick")
        assert target.read_text() == "quick"
    assert target.read_text() == "slow" and len(list(tmp_path.iterdir())) == 1


def test_where_the_file_system_has_no_locks_it_goes_an_hour_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file.txt"
    left, hour = killed_write(target), 3600
    others = others_than(left, target)

    def without(handle: int, flags: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", without)
    for age, gone in ((hour - 60, False), (hour + 60, True)):
        for path in (left, *others):
            os.utime(path, (time.time() - age,) * 2)
        with replacing(target) as temporary:
            temporary.write_text("new")
        assert left.exists() != gone
    assert target.read_text() == "new" and all(path.exists() for path in others)
    assert len(list(tmp_path.iterdir())) == 1 + len(others)
