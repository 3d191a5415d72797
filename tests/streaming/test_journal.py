"""A run that was killed goes on where it stopped and ends with the same bytes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.small import shards
from twofour import streaming
from twofour.checkpoints import Checkpoint
from twofour.errors import FormatError, SourceError
from twofour.recipe import Recipe


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    files = [{f"{file}.{n}.weight": torch.randn(32, 64) for n in range(3)} for file in "abcd"]
    return shards(tmp_path / "in", *files)


def plan(source: Path, pattern: str = "2:4") -> streaming.Plan:
    return streaming.plan_file(Checkpoint.open(source), Recipe.parse(pattern), [("*", 1)])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Stop(BaseException):
    pass


def stop_at(name: str):
    def progress(done: int, total: int, what: str) -> None:
        if what == name:
            raise Stop

    return progress


KILLED = """
import os, signal, sys
from pathlib import Path
from twofour import streaming
from twofour.checkpoints import Checkpoint
from twofour.recipe import Recipe
plan = streaming.plan_file(Checkpoint.open(sys.argv[1]), Recipe.parse("2:4"), [("*", 1)])
die = lambda done, total, what: os.kill(os.getpid(), signal.SIGKILL) if what == "c.1.weight" else None
streaming.prune(plan, Path(sys.argv[2]), progress=die)
"""


def test_metadata_is_written_in_one_order(tmp_path: Path):
    for n in range(4):  # safetensors gives it back in another order each time
        save_file({"fc.weight": torch.ones(16, 32)}, tmp_path / "w.safetensors", metadata={k: k for k in "zyxwvu"})
        streaming.prune(plan(tmp_path / "w.safetensors"), tmp_path / str(n))
    assert len({(tmp_path / str(n) / "model.safetensors").read_bytes() for n in range(4)}) == 1


def test_killed_half_way_and_resumed_to_the_same_bytes(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, source, out], capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    finished = [file for file in content(out) if file.endswith(".safetensors")]
    assert len(finished) == 2 and any(file.endswith(".tmp") for file in content(out))  # the third was half-written
    before = {file: (out / file).stat().st_mtime_ns for file in finished}
    report = streaming.prune(plan(source), out)
    assert report.resumed == 2 and len(report.layers) == 12
    assert {file: (out / file).stat().st_mtime_ns for file in finished} == before  # they were kept, not written again
    whole = streaming.prune(plan(source), tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole") and report.layers == whole.layers and whole.resumed == 0


@pytest.mark.parametrize("name", ["a.0.weight", "b.2.weight", "d.2.weight"])
def test_stopped_anywhere(tmp_path: Path, source: Path, name: str):
    with pytest.raises(Stop):
        streaming.prune(plan(source), tmp_path / "out", progress=stop_at(name))
    assert (tmp_path / "out.journal.json").exists() == (name[0] != "a")  # a run without a finished file leaves nothing
    streaming.prune(plan(source), tmp_path / "out")
    streaming.prune(plan(source), tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_finished_file_that_is_gone_or_cut_is_written_again(tmp_path: Path, source: Path):
    with pytest.raises(Stop):
        streaming.prune(plan(source), tmp_path / "out", progress=stop_at("d.0.weight"))
    one, two, three = sorted((tmp_path / "out").glob("*.safetensors"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-8])
    assert streaming.prune(plan(source), tmp_path / "out").resumed == 1
    streaming.prune(plan(source), tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole") and three.exists()


def test_a_finished_file_that_changed_at_the_same_size_is_written_again(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("d.0.weight"))
    one, *_ = sorted(out.glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-1] + b"x")
    assert streaming.prune(plan(source), out).resumed == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{one} changed since it was written: it is written again"
    ]
    streaming.prune(plan(source), tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_checksums_are_those_of_the_files(tmp_path: Path, source: Path):
    streaming.prune(plan(source), tmp_path / "out")
    done = json.loads((tmp_path / "out.journal.json").read_text())["done"]
    assert len(done) == 4
    assert all(zlib.crc32((tmp_path / "out" / file).read_bytes()) == noted["crc32"] for file, noted in done.items())


def test_files_of_a_journal_without_checksums_are_written_again(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
):
    out, journal = tmp_path / "out", tmp_path / "out.journal.json"
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("c.0.weight"))
    found = json.loads(journal.read_text())
    del next(iter(found["done"].values()))["crc32"]
    journal.write_text(json.dumps(found))
    assert streaming.prune(plan(source), out).resumed == 1
    assert ["has no checksum in the journal" in record.getMessage() for record in caplog.records] == [True]
    streaming.prune(plan(source), tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def refused(plan: streaming.Plan, out: Path, *texts: str) -> None:
    before = {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else {}
    with pytest.raises(SourceError) as error:
        streaming.prune(plan, out)
    for text in texts:
        assert text in str(error.value)
    assert before == ({path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else {})


def test_another_run_does_not_go_on_with_it(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("c.0.weight"))
    refused(plan(source, "1:4"), out, "another recipe", "remove out.journal.json and out to start anew")
    found = json.loads((tmp_path / "out.journal.json").read_text())
    found["done"]["model-00001-of-00004.safetensors"]["weights"] = [{"name": "a.0.weight"}]
    unreadable = json.dumps(found)
    file = source / "model-00001-of-00004.safetensors"
    os.utime(file, ns=(1, 1))
    refused(plan(source), out, "another source")
    for text in ("{", "[]", '{"format": 1, "done": {"x": 3}, "asked": {}}', '{"done": [], "asked": 1}', unreadable):
        (tmp_path / "out.journal.json").write_text(text)
        refused(plan(source), out, "cannot be gone on with")
    (tmp_path / "out.journal.json").unlink()
    refused(plan(source), out, "files in", "no journal beside it", "move what is yours in it elsewhere")


def test_a_journal_that_names_files_elsewhere_counts_none_of_them(tmp_path: Path, source: Path):
    with pytest.raises(Stop):
        streaming.prune(plan(source), tmp_path / "out", progress=stop_at("c.0.weight"))
    journal = tmp_path / "out.journal.json"
    found = json.loads(journal.read_text())
    (tmp_path / "mine.txt").write_text("four")
    found["done"] = {"../mine.txt": {"bytes": 4, "weights": []}}
    journal.write_text(json.dumps(found))
    assert streaming.prune(plan(source), tmp_path / "out").resumed == 0
    assert (tmp_path / "mine.txt").read_text() == "four"


def test_files_of_the_user_in_an_unfinished_folder_stay(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("c.0.weight"))
    (out / "notes.txt").write_text("mine")
    (out / ".model.safetensors.twofour-a1b2c3d4.tmp").write_text("half a file")
    streaming.prune(plan(source), out)
    assert (out / "notes.txt").read_text() == "mine" and not list(out.glob(".*"))


def test_companions_that_cannot_be_written_to_are_copied_again(tmp_path: Path, source: Path):
    (source / "tokenizer").mkdir()
    for name in ("vocab.txt", "tokenizer/merges.txt"):
        (source / name).write_text("a")
        (source / name).chmod(0o444)
    streaming.prune(plan(source), tmp_path / "out")
    streaming.prune(plan(source), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer" / "merges.txt").read_text() == "a"


def test_two_processes_do_not_write_the_same_result(tmp_path: Path, source: Path):
    with pytest.raises(Stop):
        streaming.prune(plan(source), tmp_path / "out", progress=stop_at("c.0.weight"))
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused(plan(source), tmp_path / "out", "another process is writing the same result")
    finally:
        os.close(handle)
    assert streaming.prune(plan(source), tmp_path / "out").resumed == 2


def test_a_disk_without_room(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=50_000))
    with pytest.raises(SourceError, match="no room") as error:
        streaming.prune(plan(source), tmp_path / "out")
    assert "0.00 GB, the bytes of 4 files" in str(error.value) and not (tmp_path / "out").exists()


def test_a_source_that_changed_after_the_plan(tmp_path: Path, source: Path):
    made = plan(source)
    shards(source, *({f"{file}.weight": torch.randn(32, 64)} for file in "abcd"))
    with pytest.raises(FormatError, match="changed after the plan was made"):
        streaming.prune(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_that_fails_takes_no_file_of_the_user_with_it(tmp_path: Path, source: Path):
    out, journal = tmp_path / "out", tmp_path / "out.journal.json"
    die = KILLED.replace("c.1.weight", "a.1.weight")  # before any file is finished
    done = subprocess.run([sys.executable, "-c", die, source, out], capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL and json.loads(journal.read_text())["done"] == {}
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("a.1.weight"))
    assert [path.name for path in out.iterdir()] == ["thesis.txt"] and journal.exists()
    assert streaming.prune(plan(source), out).resumed == 0
    assert (out / "thesis.txt").read_text() == "mine" and len(list(out.glob("*.safetensors"))) == 4


def test_a_file_of_the_user_under_the_name_of_a_companion_is_not_overwritten(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    (source / "notes.txt").write_text("theirs")
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("c.0.weight"))
    (out / "notes.txt").write_text("mine")
    with pytest.raises(SourceError, match=r"notes.txt is in the way(.|\n)*move it elsewhere") as error:
        streaming.prune(plan(source), out)
    assert "finished files are kept" in str(error.value) and (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    streaming.prune(plan(source), out)
    assert (out / "notes.txt").read_text() == "theirs"
    streaming.prune(plan(source), out)  # written by this run: written again


def test_a_run_that_fails_takes_no_journal_of_the_next_one_with_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    out, journal, rmdir = tmp_path / "out", tmp_path / "out.journal.json", Path.rmdir

    def and_the_next_begins(folder: Path) -> None:
        rmdir(folder)
        if folder == out:
            journal.write_text("the next run's")

    monkeypatch.setattr(Path, "rmdir", and_the_next_begins)
    with pytest.raises(Stop):
        streaming.prune(plan(source), out, progress=stop_at("a.1.weight"))
    assert not out.exists() and journal.read_text() == "the next run's"
