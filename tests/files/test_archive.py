"""Files of torch.save are sized before torch reads them: entries, pickles, and what unpickling would make."""

import io
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from twofour.errors import FormatError
from twofour.files import archive, require_sound
from twofour.files.pickled import DEPTH, require_small
from twofour.importing import decode

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
"""What a file of torch before 1.6 begins with."""


def legacy(content: bytes) -> bytes:
    return MAGIC + content + pickle.dumps([], 2)


def repeated(levels: int) -> bytes:
    """A dict whose key is a tuple of one tuple twice, and so on: 2^levels leaves."""
    body = b"".join(b"q" + bytes([at]) + b"h" + bytes([at]) + b"\x86" for at in range(levels))
    return b"\x80\x02}K\x01\x85" + body + b"K\x01s."


def doubled(levels: int) -> bytes:
    """A list of one list twice, and so on."""
    return (
        b"\x80\x02]q\x00"
        + b"".join(b"](h%bh%beq%b" % (bytes([n]), bytes([n]), bytes([n + 1])) for n in range(levels))
        + b"."
    )


def nested(depth: int) -> bytes:
    return b"\x80\x02}K\x01" + b"\x85" * depth + b"K\x01s."


def called(function: str, arguments: bytes) -> bytes:
    return b"\x80\x02c" + function.replace(" ", "\n").encode() + b"\n" + arguments + b"R."


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a tuple twice in a tuple, forty times": (repeated(40), "at most 8388608 values"),
    "a tuple nested a million deep": (nested(1_000_000), f"at most 8388608 values, {DEPTH} deep"),
    "a list twice in a list, forty times": (doubled(40), "at most 8388608 values"),
    "a hundred billion bytes": (called("builtins bytearray", b"\x8a\x05\x00\xe8\x76\x48\x17\x85"), "bytearray"),
    "a codec of quadratic time": (
        called("_codecs encode", b"X\x04\x00\x00\x00aaaaX\x08\x00\x00\x00punycode\x86"),
        "another codec",
    ),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", "after it was put"),
    "an opcode of another protocol": (pickle.dumps({"a": 1}, 4), "which torch does not read"),
    "an empty stack": (b"\x80\x02\x86.", "finds nothing"),
    "nothing": (b"", "not enough|exhausted|no STOP|before"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_that_would_make_too_much_is_refused(tmp_path: Path, case: str, zipped: bool) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / "hostile.pt"
    if zipped:
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("archive/data.pkl", content)
            made.writestr("archive/version", "3\n")
    else:
        path.write_bytes(legacy(content))
    with pytest.raises(FormatError, match=said):
        decode(path)


def test_a_container_is_as_deep_as_allowed_and_no_deeper() -> None:
    require_small(io.BytesIO(nested(DEPTH - 1)))
    with pytest.raises(ValueError, match=f"{DEPTH + 1} deep"):
        require_small(io.BytesIO(nested(DEPTH)))


def test_what_stands_in_several_places_is_counted_in_each() -> None:
    require_small(io.BytesIO(repeated(20)))
    with pytest.raises(ValueError, match="values"):
        require_small(io.BytesIO(repeated(22)))


def test_what_training_saves_passes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    plain = {"n": None, "f": 1.5, "big": 1 << 70, "b": b"\xff", "t": (1, (2, {3})), "s": torch.Size([2]), "d": "x" * 99}
    states = [
        model.state_dict(),
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "counts": Counter("aab"), **plain},
        OrderedDict(a=torch.nn.Parameter(torch.ones(2)), b=torch.float16, c=torch.get_rng_state()),
        {
            "tied": model[0].weight,
            "again": model[0].weight,
            "half": torch.ones(3).half(),
            "strided": torch.ones(4, 4)[::2],
        },
    ]
    for content in states:
        for zipped in (True, False):
            torch.save(content, tmp_path / "state.pt", _use_new_zipfile_serialization=zipped)
            require_sound(tmp_path / "state.pt")
            torch.load(tmp_path / "state.pt", weights_only=True)


def overlapping(path: Path) -> None:
    """Two hundred names of the same bytes."""
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02}.")
        made.writestr("archive/data/0", b"\0" * 4096)
        again = made.infolist()[-1]
        for number in range(1, 200):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.header_offset, entry.CRC = again.header_offset, again.CRC
            entry.file_size = entry.compress_size = again.file_size
            made.filelist.append(entry)
            made.NameToInfo[entry.filename] = entry
        made._didModify = True  # pyright: ignore[reportAttributeAccessIssue]


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", b"\x80\x02}." + b"\0" * 100_000)


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02}.")
        made.writestr("archive/DATA.PKL", b"\x80\x02}.")


def followed(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02}.")
    path.write_bytes(path.read_bytes() + b"more")


def commented(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02}.")
        made.comment = b"PK\5\6" + bytes(18)


def crowded(path: Path) -> None:
    """An end that says a million entries."""
    twice(path)
    content = bytearray(path.read_bytes())
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1_000_000, 1_000_000, 46_000_000, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(content) - 22, 1)
    path.write_bytes(content[:-22] + end + locator + content[-22:])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (overlapping, "reaches over another"),
        (compressed, "compressed entry"),
        (twice, "two entries of one name"),
        (followed, "something behind its end|cut short"),
        (commented, "something before its start or behind"),
        (crowded, "1000000 entries, at most 131072"),
    ],
)
def test_an_archive_that_is_more_than_its_bytes_is_refused(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / "hostile.pt")
    with pytest.raises(FormatError, match=said):
        decode(tmp_path / "hostile.pt")


def test_an_archive_has_as_many_entries_as_allowed_and_no_more(tmp_path: Path, monkeypatch) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as made:
        count = len(made.infolist())
    monkeypatch.setattr(archive, "ENTRIES", count)
    require_sound(tmp_path / "state.pt")
    monkeypatch.setattr(archive, "ENTRIES", count - 1)
    with pytest.raises(ValueError, match=f"{count} entries, at most {count - 1}"):
        require_sound(tmp_path / "state.pt")


def test_pickles_before_an_archive_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    twice(tmp_path / "zip")
    (tmp_path / "both.pt").write_bytes(legacy(repeated(40)) + (tmp_path / "zip").read_bytes())
    with pytest.raises(FormatError, match="values"):
        decode(tmp_path / "both.pt")
