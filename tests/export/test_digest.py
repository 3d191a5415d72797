"""A damaged number is a number still: only the digest of a file tells, and only where it has one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import twofour
from tests.export.small import Net, masked, quick
from tests.export.test_malformed import files
from twofour.errors import FormatError
from twofour.export.digest import DIGEST, digest_of

PARTS = ("fc.weight.values", "fc.weight.indices", "fc.bias", "norm.num_batches_tracked")


def header(path: Path) -> tuple[int, dict]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return 8 + length, json.loads(content[8 : 8 + length])


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def flip_in(path: Path, name: str) -> None:
    """Flip the lowest bit of a tensor's middle byte; of indices one that gives legal ones, (0, 1) -> (0, 2) say."""
    begin, table = header(path)
    first, last = table[name]["data_offsets"]
    place = begin + (first + last) // 2
    if name.endswith(".indices"):
        legal = {0x4, 0x8, 0xC, 0x9, 0xD, 0xE}
        found = (
            at for at in range(begin + first, begin + last) if path.read_bytes()[at] & 15 in legal - {0xE, 0xC, 0x4}
        )
        place = next(found)  # 0x8 -> 0x9, 0x9 -> 0x8, 0xD -> 0xC
    flip(path, place)


def without_digest(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        said = {key: text for key, text in file.metadata().items() if key != DIGEST}
    save_file(load_file(path), path, metadata=said)


def loaded(path: Path, how: str) -> object:
    if how == "read":
        return twofour.export.read(path)
    if how == "masked":
        return twofour.load(path, Net(), masked=True)
    return twofour.load(path, Net(), mapped=how == "mapped", graph=False, tokens=(2,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    twofour.save(masked(), tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("how", ["read", "masked", "mapped", "unmapped"])
@pytest.mark.parametrize("name", PARTS)
def test_a_flipped_bit_of_a_tensor_is_refused(path: Path, name: str, how: str) -> None:
    flip_in(path, name)
    with pytest.raises(FormatError, match="the file is damaged") as caught:
        loaded(path, how)
    said = str(caught.value)
    assert caught.value.code == "digest" and str(path) in said and DIGEST in said and "save the model again" in said


@pytest.mark.parametrize("name", PARTS)
def test_a_file_without_a_digest_is_read_as_before(path: Path, name: str) -> None:
    without_digest(path)
    assert torch.equal(twofour.load(path, Net(), masked=True).fc.weight, masked().fc.weight)
    flip_in(path, name)
    twofour.load(path, Net(), masked=True)


def test_a_table_on_the_files_own_pages_is_looked_through(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = torch.nn.Sequential(torch.nn.Embedding(2000, 64), torch.nn.Linear(64, 64)).eval()
    twofour.save(twofour.compile(model, torch.arange(8)[None], progress=False), path)
    fast = twofour.load(path, model)
    assert any("pages of the file" in note for note in fast.plan.notes)
    flip_in(path, "0.weight")
    with pytest.raises(FormatError, match="the file is damaged"):
        twofour.load(path, model)


def test_a_flipped_bit_of_one_of_several_files_is_refused_by_its_name(tmp_path: Path) -> None:
    twofour.save(masked(), tmp_path / "hub", max_shard_bytes=10_000)
    assert len(files(tmp_path / "hub")) > 2
    shard = next(
        one for name in files(tmp_path / "hub") if "fc.weight.values" in header(one := tmp_path / "hub" / name)[1]
    )
    flip_in(shard, "fc.weight.values")
    with pytest.raises(FormatError, match=shard.name) as caught:
        twofour.load(tmp_path / "hub", Net(), masked=True)
    assert caught.value.code == "digest"


def test_a_flipped_bit_anywhere_is_refused_or_harmless(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8)).eval()
    twofour.save(twofour.prune(model, "2:4", progress=False), path := tmp_path / "m.safetensors")
    whole, good = path.read_bytes(), twofour.export.read(path)
    for place in range(0, len(whole), 2):
        flip(path, place, place % 8)
        try:
            found = twofour.export.read(path)
        except FormatError as error:
            assert error.code and error.got and error.wanted, error
        else:
            assert torch.equal(found.packed["0.weight"].values, good.packed["0.weight"].values), place
            assert torch.equal(found.plain["0.bias"], good.plain["0.bias"]), place
            assert (found.packed["0.weight"].header, found.settings) == (good.packed["0.weight"].header, good.settings)
        path.write_bytes(whole)


@pytest.mark.parametrize("said", ["", "0", "x" * 16, "0" * 16])
def test_a_digest_that_is_none_or_another_is_refused(path: Path, said: str) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | {DIGEST: said}
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(FormatError) as caught:
        twofour.export.read(path)
    assert caught.value.code == "digest"


def test_the_digest_is_of_names_and_bytes_and_not_of_their_order(path: Path) -> None:
    tensors = {"b": torch.arange(4.0), "a": torch.ones(3, 2).T, "none": torch.empty(0)}
    same = {"none": torch.empty(0), "a": torch.ones(2, 3), "b": torch.arange(4.0)}
    assert digest_of("{}", tensors) == digest_of("{}", same) == "2b9ba4fb7cd1f9ff"
    assert digest_of("{}", tensors) != digest_of("{}", {**tensors, "none": torch.zeros(1)})
    assert digest_of("{}", tensors) != digest_of("{ }", tensors)
    assert digest_of("{}", tensors) != digest_of("{}", {"a": tensors["b"], "b": tensors["a"], "none": torch.empty(0)})
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
    assert said[DIGEST] == digest_of(said["twofour"], load_file(path))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_file_of_save_has_a_digest(tmp_path: Path, packed: bool, compiled: bool) -> None:
    model = quick(masked()) if compiled else masked()
    twofour.save(model, tmp_path / "m.safetensors", packed=packed)
    twofour.save(model, tmp_path / "hub", packed=packed, max_shard_bytes=10_000)
    found = [tmp_path / "m.safetensors", *(tmp_path / "hub" / name for name in files(tmp_path / "hub"))]
    assert len(found) > 3 and all(DIGEST in header(file)[1]["__metadata__"] for file in found)


def lost(path: Path, *keys: str) -> None:
    with safe_open(path, framework="pt") as file:
        said = {key: text for key, text in file.metadata().items() if key not in keys}
    save_file(load_file(path), path, metadata=said)


@pytest.mark.parametrize("keys", [("twofour",), ("twofour", DIGEST)])
@pytest.mark.parametrize("read", [twofour.export.read, lambda path: twofour.load(path, Net(), masked=True)])
def test_a_packed_file_without_its_description_says_so(path: Path, keys: tuple[str, ...], read: Callable) -> None:
    lost(path, *keys)
    with pytest.raises(FormatError, match="no metadata key `twofour`") as caught:
        read(path)
    said = str(caught.value)
    assert caught.value.code == "no-description" and "2 packed weights" in said and str(path) in said


def test_plain_files_of_others_are_read_as_before(tmp_path: Path) -> None:
    others = {"fc.weight": torch.empty(0, dtype=torch.uint8), "fc.weight.values": torch.ones(4), "x": torch.ones(2)}
    save_file(others, tmp_path / "m.safetensors")
    assert set(twofour.export.read(tmp_path / "m.safetensors").plain) == set(others)
