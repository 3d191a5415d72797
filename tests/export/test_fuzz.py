"""Damaged files, at random and from the corpus of `make fuzz`: refused with a reason, or read whole and correct."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import twofour
from tests.export.small import masked
from tests.fuzz.damage import KINDS, damaged
from tests.fuzz.loader import outcome
from twofour.checkpoints import INDEX
from twofour.errors import FormatError

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"

quickly = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=["/".join(kind[:2]) for kind in KINDS])
def test_the_good_files_are_read(tmp_path: Path, kind: int) -> None:
    (tmp_path / "good.safetensors").write_bytes(damaged(bytes([kind])))
    assert outcome(tmp_path / "good.safetensors") == "read"


@given(st.binary(min_size=2, max_size=40))
@settings(quickly, max_examples=300)
def test_damaged_files_are_refused_or_read_correctly(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "fuzz.safetensors").write_bytes(damaged(data))
    outcome(tmp_path / "fuzz.safetensors")


@given(st.data())
@settings(quickly, max_examples=150)
def test_bytes_changed_anywhere_are_noticed_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    good = bytearray(damaged(bytes([data.draw(st.integers(0, len(KINDS) - 1))])))
    (size,) = struct.unpack("<Q", good[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, size + 8), st.integers(0, len(good) - 1)))
        good[place] = data.draw(st.integers(0, 255))
    (tmp_path / "fuzz.safetensors").write_bytes(good)
    outcome(tmp_path / "fuzz.safetensors")


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


def test_the_corpus_of_the_fuzzer_holds(tmp_path: Path) -> None:
    inputs = sorted(CORPUS.iterdir())
    found = set()
    for entry in inputs:
        (tmp_path / "fuzz.safetensors").write_bytes(damaged(entry.read_bytes()))
        found.add(outcome(tmp_path / "fuzz.safetensors"))
    assert len(found) > 20, "the corpus reaches most of the ways of being malformed"
