import os
import stat
import subprocess
import sys
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
