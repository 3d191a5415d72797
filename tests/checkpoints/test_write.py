"""Files are those of safetensors' own writer, byte by byte, and are written where they were asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from twofour.checkpoints import DTYPES, write_tensors
from twofour.errors import FormatError


def every_type() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(4, 6)
    found = {f"b.{name}": wide.to(dtype) for name, dtype in DTYPES.items()}
    return found | {"a.scalar": torch.tensor(1.5), "z.empty": torch.zeros(0, 3), "a.é": torch.arange(3)}


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_the_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    for number, metadata in enumerate(({}, {"format": "pt"})):
        ours, theirs = tmp_path / f"ours-{number}", tmp_path / f"theirs-{number}"
        write_tensors(ours, every_type(), metadata)
        save_file(every_type(), theirs, metadata=metadata or None)
        assert ours.read_bytes() == theirs.read_bytes()


def test_strides_and_shared_memory_do_not_matter(tmp_path: Path) -> None:
    base = torch.randn(8, 8)
    one = base.as_strided((1, 1), (3, 7))  # an axis of one value, which torch calls contiguous
    ours = {"t": base.T, "v": base[::2, 1:], "again": base, "one": one}
    write_tensors(tmp_path / "ours", ours, {"b": "1", "a": "2"})
    apart = {"t": base.T.clone(memory_format=torch.contiguous_format), "v": base[::2, 1:].clone(), "again": base}
    apart["one"] = torch.full((1, 1), float(one))
    write_tensors(tmp_path / "apart", apart, {"a": "2", "b": "1"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "apart").read_bytes()


def test_the_file_that_was_given_is_written_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    before = os.stat(path).st_ino
    write_tensors(path, every_type(), {})
    assert os.stat(path).st_ino == before and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_type_without_a_name_is_refused_by_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="`w` is complex128"):
        write_tensors(tmp_path / "file", {"w": torch.zeros(2, dtype=torch.complex128)}, {})
