"""Files of earlier releases are read for good; each holds a weight of whole numbers that anyone can recompute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.turns import in_turn
from twofour.export import Contents, read
from twofour.export.file import write
from twofour.packing import Packed, pack, read_pattern
from twofour.patterns import VNM, parse

GOLDEN = Path(__file__).parent / "golden"
KINDS = {
    "2x4-float32": ("2:4", "float32"),
    "2x4-bfloat16": ("2:4", "bfloat16"),
    "2x4-int8": ("2:4", "int8"),
    "2x4-int4": ("2:4", "int4"),
    "1x2-tf32": ("1:2", "tf32"),
    "4x2x8-float16": ("4:2:8", "float16"),
    "4x8-pairs-int4": ("4:8-pairs", "int4"),
    "dense-int8": ("dense", "int8"),
}


def weight(pattern: str) -> torch.Tensor:
    """Return (8, 64) whole numbers from -7 to 7, the same on every machine, that obey the pattern."""
    place = torch.arange(8 * 64)
    values = ((place * 37 + place // 64 * 11) % 15 - 7).view(8, 64).float()
    values[:, ::16] = 7  # the largest of a row and of a group of int4: scales are exactly 1, or 7 / 127
    return values * read_pattern(pattern).project(values, absolute=True)


def packed(pattern: str, dtype: str) -> Packed:
    values = weight(pattern).to(torch.int8) if pattern.endswith("pairs") else weight(pattern)
    return pack(values, pattern, dtype, **({"group": 32} if dtype == "int4" else {}))


def said_of(pattern: str) -> dict[str, str]:
    """Return what settings say of the weight: nothing of a dense one."""
    return {} if pattern == "dense" else {"fc.weight": pattern}


WRITERS = ("v1", "v1-guarded", "v1-digest")
"""Version 1 as 0.2.0 wrote it, with a tensor that fits nothing under the name of each packed weight, and a digest."""


@in_turn(
    ("writer", "name"),
    [(writer, name) for writer in WRITERS for name in KINDS if (writer, name) != ("v1", "dense-int8")],
)
def test_version_1_is_read(name: str, writer: str) -> None:
    pattern, dtype = KINDS[name]
    contents = read(GOLDEN / f"{writer}-{name}.safetensors")
    found = contents.packed["fc.weight"]
    assert (found.header.pattern, found.header.dtype, found.header.version) == (pattern, dtype, 1)
    torch.testing.assert_close(found.unpack().float(), weight(pattern), atol=0.0 if dtype != "int8" else 0.03, rtol=0)
    assert contents.aliases == {"tied.weight": "fc.weight"} and contents.settings["patterns"] == said_of(pattern)
    assert torch.equal(contents.plain["fc.bias"], torch.arange(8.0))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_today_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    """A change of these bytes is a change of the format: a new file beside the old ones, and a new row of Versions."""
    pattern, dtype = KINDS[name]
    contents = Contents(
        {"fc.bias": torch.arange(8.0)},
        {"fc.weight": packed(pattern, dtype)},
        {"tied.weight": "fc.weight"},
        {"kind": "masked", "patterns": said_of(pattern)},
    )
    write(tmp_path / "now.safetensors", contents)
    assert (tmp_path / "now.safetensors").read_bytes() == (GOLDEN / f"{WRITERS[-1]}-{name}.safetensors").read_bytes()
    if dtype != "int8":
        rule = parse(pattern)
        assert (rule.rows if isinstance(rule, VNM) else rule).check(contents.packed["fc.weight"].unpack()).ok
