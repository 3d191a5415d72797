"""Damaged files at random: refused with a reason, or read whole and correct; `make fuzz` goes on where this ends."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import twofour
from tests.export.small import masked
from tests.fuzz.targets import judge, read
from twofour.checkpoints import INDEX
from twofour.errors import FormatError, TwofourError

quickly = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.binary(min_size=2, max_size=40))
@settings(quickly, max_examples=300)
def test_damaged_files_are_refused_or_read_correctly(data: bytes) -> None:
    judge(read, data)


@given(st.data())
@settings(quickly, max_examples=150)
def test_bytes_changed_anywhere_are_noticed_or_harmless(data: st.DataObject) -> None:
    good = bytearray(read.build(data.draw(st.sampled_from(read.SEEDS))))
    (size,) = struct.unpack("<Q", good[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, size + 8), st.integers(0, len(good) - 1)))
        good[place] = data.draw(st.integers(0, 255))
    try:
        assert read.run(bytes(good)) == "read"
    except TwofourError as error:
        assert error.code and error.got and error.wanted, error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(index=JSON | st.dictionaries(st.just("weight_map"), JSON) | st.text())
@example(index={"weight_map": {"fc.bias": "../../../etc/passwd.safetensors"}})
@settings(quickly, max_examples=60)
def test_an_index_of_anything_is_refused(tmp_path: Path, index: object) -> None:
    folder = tmp_path / "hub"
    if not folder.exists():
        twofour.save(masked(), folder, max_shard_bytes=20_000)
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(FormatError) as caught:
        twofour.export.read(folder)
    assert caught.value.code and caught.value.code.startswith("index-")
