"""Opening a checkpoint: what the headers tell, one tensor at a time, and every way of being malformed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoints.small import shards, write_index
from twofour.checkpoints import Checkpoint
from twofour.errors import FormatError

EVERY = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool)


def test_a_bare_file(tmp_path: Path):
    tensors = {
        str(dtype): torch.arange(12).reshape(3, 4).to(dtype)
        for dtype in (*EVERY, torch.uint16, torch.float8_e4m3fn, torch.complex64)
    }
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"author": "someone"})
    found = Checkpoint.open(tmp_path / "all.safetensors")
    assert found.config is None and found.files == (tmp_path / "all.safetensors",)
    assert found.metadata[found.files[0]] == {"author": "someone"}
    assert set(found.entries) == set(tensors)
    for name, tensor in tensors.items():
        assert found.entries[name].shape == tensor.shape and found.entries[name].torch_dtype is tensor.dtype
        assert found.read(name).dtype is tensor.dtype
        assert torch.equal(found.read(name).view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True
    assert found.read("scalar") == 2.5
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_sharded_folder(tmp_path: Path):
    parts = {"a": torch.randn(4, 8), "b": torch.randn(3)}, {"c": torch.randn(2, 2).bfloat16()}
    found = Checkpoint.open(shards(tmp_path / "hub", *parts))
    assert [file.name for file in found.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    for part, file in zip(parts, found.files, strict=True):
        for name, tensor in part.items():
            assert found.entries[name].file == file and torch.equal(found.read(name), tensor)
    with pytest.raises(FormatError, match="no such tensor"):
        found.read("d")


def test_one_file_comes_before_an_index_as_in_transformers(tmp_path: Path):
    shards(tmp_path, {"a": torch.zeros(2)})
    save_file({"b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path).entries) == ["b"]
    assert list(Checkpoint.open(tmp_path / "model.safetensors.index.json").entries) == ["a"]


def test_writing_into_a_tensor_leaves_the_file(tmp_path: Path):
    save_file({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    Checkpoint.open(tmp_path / "a.safetensors").read("a").fill_(1.0)
    assert (tmp_path / "a.safetensors").read_bytes() == before


def test_a_tensor_that_is_not_aligned(tmp_path: Path):
    values = torch.arange(4, dtype=torch.float64)
    header = {"flag": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    header["x"] = {"dtype": "F64", "shape": [4], "data_offsets": [3, 35]}
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + b"abc" + values.numpy().tobytes()
    (tmp_path / "odd.safetensors").write_bytes(whole)
    found = Checkpoint.open(tmp_path / "odd.safetensors").read("x")
    assert torch.equal(found, values) and found.data_ptr() % 8 == 0


def test_an_empty_tensor_where_the_last_begins(tmp_path: Path):
    header = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    header["b"] = {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    (tmp_path / "e.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + torch.arange(4.0).numpy().tobytes()
    )
    (found,) = Checkpoint.open(tmp_path / "e.safetensors").read_all().values()
    assert torch.equal(found["a"], torch.arange(4.0)) and found["b"].shape == (0, 3)


def test_a_type_without_a_name_in_torch_is_listed_and_not_read(tmp_path: Path):
    text = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "f8.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    found = Checkpoint.open(tmp_path / "f8.safetensors")
    assert found.entries["x"].dtype == "F8_E8M0" and found.entries["x"].torch_dtype is None
    with pytest.raises(FormatError, match="torch cannot hold"):
        found.read("x")
    assert bytes(found.entries["x"].bytes().tolist()) == b"1234"


def refuse(path: Path, *texts: str) -> None:
    with pytest.raises(FormatError) as error:
        Checkpoint.open(path)
    for text in texts:
        assert text in str(error.value)


def test_files_that_are_none(tmp_path: Path):
    refuse(tmp_path / "missing.safetensors", "no such file")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    refuse(tmp_path / "empty.safetensors", "not readable as safetensors")
    save_file({"a": torch.zeros(8)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    refuse(tmp_path / "cut.safetensors", "not readable as safetensors", "cut.safetensors")
    (tmp_path / "nothing").mkdir()
    refuse(tmp_path / "nothing", "holds no weights", "no file of weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    refuse(tmp_path, "holds no weights", "cut.safetensors, empty.safetensors, pytorch_model.bin", "can run code")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ("[]", "no `weight_map`"),
        ('{"weight_map": {}}', "empty one"),
        ('{"weight_map": {"a": 3}}', "the file of `a` is 3"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "no .safetensors file beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no .safetensors file beside it"),
        ('{"weight_map": {"a": "model.bin"}}', "no .safetensors file beside it"),
        (json.dumps({"weight_map": {"a": "x" * 300 + ".safetensors"}}), "no .safetensors file beside it"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, got: str):
    shards(tmp_path, {"a": torch.zeros(2)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuse(tmp_path, "the index of a checkpoint is malformed", got)


def test_an_index_and_files_that_disagree(tmp_path: Path):
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards(tmp_path, {"a": torch.zeros(2)}, {"b": torch.zeros(2)})
    write_index(tmp_path, {"a": one, "b": two, "c": two})
    refuse(tmp_path, "disagree", "`c` lies in model-00002-of-00002.safetensors, which does not hold it")
    write_index(tmp_path, {"a": two, "b": two})
    refuse(tmp_path, "`a` lies in model-00002")  # the first file is not named, so nobody looks into it
    write_index(tmp_path, {"a": two, "b": one})
    refuse(tmp_path, f"`a` lies in {two}; it lies in {one}")
    save_file({"b": torch.zeros(2), "x": torch.zeros(1)}, tmp_path / two)
    write_index(tmp_path, {"a": one, "b": two})
    refuse(tmp_path, "1 tensors of the files are not in it, such as `x`")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / two)
    refuse(tmp_path, f"`a` lies in {one} and in {two}")
    (tmp_path / two).unlink()
    refuse(tmp_path, f"1 files that it names are not there, such as {two}")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    found = Checkpoint.open(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FormatError, match="became shorter"):
        found.read("a")
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        found.read("a")


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_damaged_files_are_refused_or_read_within_their_bounds(tmp_path_factory, cut: int, at: int, byte: int):
    path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.int8)}, path)
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(bytes(content[: len(content) - cut % 40]))
    try:
        found = Checkpoint.open(path)
        values = [found.read(name) for name in found.entries]
    except FormatError:
        return
    assert all(value.nbytes <= len(content) for value in values)
    want = load_file(path)
    assert all(torch.equal(value.view(torch.uint8), want[name].view(torch.uint8)) for name, value in
               zip(found.entries, values, strict=True) if value.ndim)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_reading_takes_the_memory_of_one_tensor(tmp_path: Path):
    """40 tensors of 8 MB, one after the other: after the first the process grows by less than another.

    Where no threshold is given, glibc raises its own to the first block freed, and may keep those that follow.
    """
    save_file({str(n): torch.full((2, 1 << 20), float(n)) for n in range(40)}, tmp_path / "a.safetensors")
    code = f"""
import re
from pathlib import Path
from twofour.checkpoints import Checkpoint
found = Checkpoint.open({str(tmp_path / "a.safetensors")!r})
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
found.read("0").sum()
before = peak()
assert [found.read(str(n)).sum().item() for n in range(40)] == [float(n) * (2 << 20) for n in range(40)]
print(peak() - before)
"""
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 << 20
