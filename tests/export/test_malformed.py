"""Every way in which a file can be malformed has one error: a row of docs/formats.md, and a case here."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import twofour
from tests.export.small import Net, masked
from twofour import checkpoints
from twofour.checkpoints import INDEX
from twofour.checkpoints import entry as checkpoint_entry
from twofour.errors import FormatError, PackingError
from twofour.export import Contents
from twofour.export.file import write
from twofour.packing import pack
from twofour.patterns import parse

ROOT = Path(__file__).parent.parent.parent
FC = "fc.weight"

Damage = Callable[[Path], object]
CASES: dict[str, list[Damage]] = {}


def case(code: str) -> Callable[[Damage], Damage]:
    """Add a damage that must be refused with this code."""

    def add(damage: Damage) -> Damage:
        CASES.setdefault(code, []).append(damage)
        return damage

    return add


def change(path: Path, edit: Callable[[dict, dict], object]) -> None:
    """Edit a file's tensors and its JSON."""
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["twofour"])
    tensors = load_file(path)
    text = edit(tensors, described)
    save_file(tensors, path, metadata={"twofour": text if isinstance(text, str) else json.dumps(described)})


def flip(path: Path) -> None:
    """Change the last byte, of a tensor."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def header(**fields: object) -> Damage:
    """Change fields of a packed weight's header; None takes one away."""

    def edit(_: dict, described: dict) -> None:
        changed = {**described["packed"][FC], **fields}
        described["packed"][FC] = {key: value for key, value in changed.items() if value is not None}

    return lambda path: change(path, edit)


def part(suffix: str, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Change one of the tensors that a packed weight is stored as; None takes it away."""

    def changed(tensors: dict, _: dict) -> None:
        found = edit(tensors.pop(f"{FC}.{suffix}"))
        if found is not None:
            tensors[f"{FC}.{suffix}"] = found.contiguous()

    return lambda path: change(path, changed)


def described(**parts: object) -> Damage:
    return lambda path: change(path, lambda _, found: found.update(parts))


def one(pattern: str, dtype: str | None, change: Damage, columns: int = 128, **options: object) -> Damage:
    """Write a file of one packed weight of another kind first."""

    def damage(path: Path) -> None:
        weight = torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
        weight *= parse(pattern).project(weight, absolute=True)
        write(path, Contents({}, {FC: pack(weight, pattern, dtype, **options)}))
        change(path)

    return damage


INT4 = {"dtype": "int4", "pattern": "2:4"}
CASES |= {
    "no-file": [lambda path: path.unlink()],
    "not-safetensors": [
        *(lambda path, cut=cut: path.write_bytes(path.read_bytes()[:cut]) for cut in (0, 4, 8, 100, 2000, -1)),
        lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F33"', 1)),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"data_offsets":[0', b'"data_offsets":[4', 1)),
    ],
    "limit": [
        lambda path: path.write_bytes(raw({"x": ("F32", [1] * 65, 4)})),
        lambda path: path.write_bytes(raw({"x" * 4097: ("F32", [1], 4)})),
    ],
    "no-dtype": [lambda path: path.write_bytes(raw({"x": ("F8_E8M0", [4], 4)}))],
    "metadata-json": [
        lambda path: change(path, lambda *_: "{"),
        lambda path: change(path, lambda *_: "[" * 100_000),
        lambda path: change(path, lambda *_: "1" * 5000),
    ],
    "promise": [
        lambda path, lie=lie: save_file({FC: torch.zeros(8, 16)}, path, metadata={"twofour.patterns": lie})
        for lie in ("{", "[1]", '{"fc.weight": 2}')
    ],
    "digest": [lambda path: flip(path)],
    "no-description": [lambda path: save_file(load_file(path), path)],
    "metadata-keys": [lambda path: change(path, lambda *_: '{"version": 1, "packed": {}, "packed": {}}')],
    "version": [described(version=version) for version in (2, 0, "1", True, 1.0, None)]
    + [lambda path: change(path, lambda *_: "[1]")],
    "metadata-parts": [described(packed=[]), described(aliases=None), described(settings=1)],
    "alias-name": [described(aliases={"x": 3})],
    "alias-nothing": [described(aliases={"x": "y"})],
    "alias-taken": [described(aliases={"head.weight": FC}), described(aliases={FC: "head.weight"})],
    "stored-twice": [
        lambda path, own=own: change(path, lambda tensors, _: tensors.update({FC: own}))
        for own in (torch.zeros(64, 256), torch.zeros(0), torch.zeros(0, 4, dtype=torch.uint8))
    ],
    "no-values": [part("values", lambda _: None), described(packed={"gone.weight": {}})],
    "no-indices": [part("indices", lambda _: None)],
    "header-fields": [header(axis=None), header(more=1), described(packed={FC: 3})],
    "header-version": [header(version=2), header(version=True)],
    "header-layout": [header(layout="panels"), header(layout=[])],
    "header-shape": [header(shape=shape) for shape in ([], 3, [0, 4], [-64, 256], [64.0, 256], [1] * 6, [True, 256])],
    "header-size": [header(shape=[1 << 39, 4]), header(shape=[10**4000, 4])],
    "header-axis": [header(axis=axis) for axis in (2, -1, "1", True, 1.0)],
    "header-dtype": [header(dtype=dtype) for dtype in ("float64", 3, [], {})],
    "header-pattern": [header(pattern=text) for text in ("2:3:4:5", "block:4x4", 24, "4:2", "2:4" * 50, [])],
    "header-form": [header(dtype="tf32"), header(pattern="4:8-pairs"), header(pattern="2:4-transposable")],
    "header-group": [header(group=64), header(group=True), *(header(**INT4, group=n) for n in (0, 48, 32.0))],
    "header-reduction": [header(shape=[64, 254]), header(pattern="2:5")],
    "values-size": [
        header(shape=[128, 128]),
        header(dtype="bfloat16"),
        part("values", lambda t: t[:-1]),
        part("values", lambda t: t.flatten()),
    ],
    "indices-size": [part("indices", lambda t: t[:, :-1]), part("indices", lambda t: t.to(torch.int8))],
    "values-finite": [part("values", lambda t, bad=bad: t.fill_(bad)) for bad in (float("nan"), float("inf"))],
    "values-padding": [
        one("1:32", "int4", part("values", lambda t: torch.full_like(t, 0xF0)), 96, group=32),
        one("1:32", "s2", part("values", lambda t: torch.full_like(t, 0xF0)), 96),
    ],
    "values-code": [
        one("2:4", "ternary", part("values", lambda t: torch.full_like(t, 0xFF))),
        one("2:4", "ternary5", part("values", lambda t: torch.full_like(t, 0xFF))),
    ],
    "indices-order": [part("indices", lambda t, code=code: t.fill_(code)) for code in (0xFF, 0x00, 0x11)],
    "indices-dense": [one("2:4+50%", None, part("indices", lambda t: t ^ (torch.arange(len(t)) == 0).to(torch.uint8)))],
    "indices-bound": [
        one("2:6", None, part("indices", lambda t: t.fill_(0b110110)), 96),
        one("block:4x4@0.5", None, part("indices", lambda t: torch.cat([t[:3], t[3:] + 99]))),
    ],
    "indices-pointers": [
        one("block:4x4@0.5", None, part("indices", lambda t, more=more: torch.cat([t[:3] + more, t[3:]])))
        for more in (1, -1, 1 << 30)
    ],
    "header-blocks": [
        one("block:4x4@0.5", None, header(pattern="block:4x4@0.5/3")),
        one("block:4x4@0.5", None, header(pattern="block:1x2@0.5", shape=[1 << 20, 1 << 13])),
    ],
    "indices-code": [one("1:2", "tf32", part("indices", lambda t: t.fill_(0x44 + 1)))],
    "indices-padding": [one("1:8", None, part("indices", lambda t: t | 0xC0), 72)],
    "scales-missing": [one("2:4", "int4", part("scales", lambda _: None))],
    "scales-size": [
        one("2:4", "int4", part("scales", lambda t: t[:, :1])),
        one("2:4", "int8", part("scales", lambda t: t.half())),
        one("2:4", "int4", part("zeros", lambda t: t.T), symmetric=False),
    ],
    "scales-value": [
        one("2:4", "int8", part("scales", lambda t, bad=bad: t.fill_(bad)))
        for bad in (0.0, -1.0, float("nan"), float("inf"), 3e38)
    ],
    "scales-zeros": [
        one("2:4", "int4", part("zeros", lambda t, add=add: t + add), symmetric=False) for add in (0.5, 99)
    ],
}  # fmt: skip


def raw(table: dict[str, tuple[str, list[int], int]]) -> bytes:
    """Write a safetensors file by hand, of types that torch has not."""
    place, entries = 0, {}
    for name, (dtype, shape, size) in table.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(place)


@pytest.mark.parametrize(
    ("code", "damage"), [pytest.param(code, one, id=code) for code, found in CASES.items() for one in found]
)
def test_a_malformed_file_is_refused_for_its_reason(tmp_path: Path, code: str, damage: Damage) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(masked(), path)
    damage(path)
    with pytest.raises(FormatError) as caught:
        twofour.export.read(path)
    error = caught.value
    assert error.code == code, error
    assert error.got and error.wanted and "code    " + code in str(error)
    assert error.remedy or code in ("no-file", "no-dtype")


FOLDERS: dict[str, Damage] = {
    "no-weights": lambda folder: (folder / INDEX).unlink(),
    "index-json": lambda folder: (folder / INDEX).write_text("{"),
    "index-map": lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'),
    "index-place": lambda folder: places(folder, lambda found: found.update(x="../x.safetensors")),
    "index-file": lambda folder: (folder / files(folder)[0]).unlink(),
    "index-tensor": lambda folder: places(folder, lambda found: found.update(x=files(folder)[0])),
    "index-other": lambda folder: places(folder, lambda found: found.update({"head.bias": files(folder)[0]})),
    "index-foreign": lambda folder: places(folder, lambda found: found.pop("head.bias")),
    "index-twice": lambda folder: change(
        folder / files(folder)[0], lambda tensors, _: tensors.update({"head.bias": torch.zeros(10)})
    ),
    "shards-differ": lambda folder: change(folder / files(folder)[0], lambda _, found: found.update(settings={})),
}


def files(folder: Path) -> list[str]:
    return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))


def places(folder: Path, edit: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("code", FOLDERS)
def test_a_malformed_folder_is_refused_for_its_reason(tmp_path: Path, code: str) -> None:
    twofour.save(masked(), tmp_path / "hub", max_shard_bytes=10_000)
    assert len(files(tmp_path / "hub")) > 2
    FOLDERS[code](tmp_path / "hub")
    with pytest.raises(FormatError) as caught:
        twofour.export.read(tmp_path / "hub")
    assert caught.value.code == code, caught.value


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(masked(), path)
    read_header = checkpoint_entry.read_header

    def slow(file: Path) -> checkpoints.Header:
        found = read_header(file)
        file.write_bytes(file.read_bytes()[:-1])
        return found

    monkeypatch.setattr(checkpoints.checkpoint, "read_header", slow)
    with pytest.raises(FormatError) as caught:
        twofour.export.read(path)
    assert caught.value.code == "file-shorter"


def settings(**changes: object) -> Damage:
    return lambda path: change(path, lambda _, found: found["settings"].update(changes))


def low(damage: Damage) -> Damage:
    """Write a file of a model of low bits first."""

    def write_low(path: Path) -> None:
        path.write_bytes(low_file())
        damage(path)

    return write_low


@cache
def low_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "low.safetensors"
        twofour.save(twofour.quantize(masked(), {"fc": "w2", "*": "w4"}, "a8", data=[torch.randn(2, 16, 4, 4)]), path)
        return path.read_bytes()


def low_bits(**fields: object) -> Damage:
    """Let the settings say something else of the Linear `fc`."""
    return low(lambda path: change(path, lambda _, found: found["settings"]["low_bits"]["fc"].update(fields)))


def tensor(name: str, values: torch.Tensor) -> Damage:
    return lambda path: change(path, lambda tensors, _: tensors.update({name: values}))


GONE = [{"version": 1, "axes": [{"size": 10, "kept": "0-8", "places": [["gone.bias", 0]]}]}]

MODELS: dict[str, tuple[Damage, bool]] = {
    "model-missing": (lambda path: change(path, lambda tensors, _: tensors.pop("head.bias")), False),
    "model-foreign": (lambda path: change(path, lambda tensors, _: tensors.update(x=torch.zeros(2))), False),
    "model-shape": (lambda path: change(path, lambda tensors, _: tensors.update({"head.bias": torch.zeros(9)})), False),
    "model-dtype": (
        lambda path: change(path, lambda tensors, _: tensors.update({"head.bias": torch.ones(10).int()})),
        False,
    ),
    "model-axis": (lambda path: swap(path), False),
    "settings-names": (settings(patterns={"gone": "2:4"}), False),
    "settings-pattern": (settings(patterns={"head.weight": "2:3:4:5"}), False),
    "settings-range": (settings(dtype="int8", ranges={"fc": [1.0, "x"]}), False),
    "settings-low-bits": (low_bits(weights="w9"), False),
    "settings-cuts": (settings(cuts=[{"version": 1, "axes": 3}]), False),
    "model-cut": (lambda path: (settings(cuts=GONE)(path), tensor("head.bias", torch.zeros(9))(path)), True),
    "model-low-bits": (low(lambda path: change(path, renamed)), False),
    "low-bits-codes": (low_bits(weights="s3"), False),
    "low-bits-step": (low(tensor("fc.input_step", torch.tensor(float("nan")))), True),
    "no-patterns": (lambda path: save_file(masked().state_dict(), path), True),
    "model-unprunable": (settings(patterns={"norm.weight": "2:4"}), True),
    "pattern-broken": (settings(patterns={"head.weight": "2:4"}), True),
    "pattern-unfit": (settings(patterns={"head.weight": "2:24"}), True),
}


def renamed(_: dict, found: dict) -> None:
    found["settings"]["low_bits"]["norm"] = found["settings"]["low_bits"].pop("fc")


LOW: list[tuple[str, Damage]] = [
    *(
        ("settings-low-bits", low(settings(low_bits=bad)))
        for bad in (3, [1], [], "", {"fc": 2}, {"fc": {"weights": "s2"}})
    ),
    *(("settings-low-bits", low_bits(weights=bad)) for bad in (None, "float", "u2", "s1", 2, [], "int8")),
    *(("settings-low-bits", low_bits(inputs=bad)) for bad in ("ternary", "float", 8, {})),
    *(("settings-low-bits", low_bits(static=bad)) for bad in (1, None)),
    ("settings-low-bits", low_bits(more=1)),
    *(("settings-low-bits", low_bits(group=bad)) for bad in (-1, True, "8")),
    ("settings-low-bits", low_bits(zeros=1)),
    *(("settings-low-bits", low_bits(scales=bad)) for bad in ("channel", None, True, ["tensor"])),
    ("settings-low-bits", low_bits(scales="tensor", group=32)),
    ("low-bits-codes", low_bits(scales="tensor")),  # whose rows are others
    ("settings-low-bits", low_bits(weights="b2", zeros=True)),
    ("model-low-bits", low_bits(group=7)),
    ("low-bits-codes", low_bits(group=64)),
    ("low-bits-codes", low_bits(zeros=True)),
    *(("low-bits-codes", low_bits(weights=bad)) for bad in ("b2", "ternary", "s8")),
    ("low-bits-codes", low(part("scales", lambda _: None))),
    *(("scales-value", low(part("scales", lambda t, bad=bad: t.fill_(bad)))) for bad in (0.0, -1.0, float("nan"))),
    ("low-bits-step", low(part("scales", lambda t: t.fill_(1e-42)))),
    ("scales-size", low(part("scales", lambda t: t[:-1]))),
    ("values-size", low(part("values", lambda t: t[:, :-1]))),
    *(("low-bits-step", low(tensor("fc.input_step", torch.tensor(bad)))) for bad in (0.0, float("inf"))),
    *(("low-bits-step", low(tensor("fc.input_zero", torch.tensor(bad)))) for bad in (0.5, -1.0, 256.0, float("nan"))),
    ("model-shape", low(tensor("fc.input_step", torch.ones(3)))),
    ("low-bits-step", low(tensor("fc.input_zero", torch.tensor(True)))),
    ("model-dtype", low(tensor("fc.input_step", torch.tensor(3)))),
    ("model-missing", low(lambda path: change(path, lambda tensors, _: tensors.pop("fc.input_zero")))),
    ("model-foreign", low(tensor("fc.weight_scale", torch.ones(64)))),
]


@pytest.mark.parametrize("code", sorted({code for code, _ in LOW}))
def test_a_file_of_impossible_low_bits_is_refused_for_its_reason(tmp_path: Path, code: str) -> None:
    path, net = tmp_path / "m.safetensors", Net()
    for damage in (found for name, found in LOW if name == code):
        damage(path)
        with pytest.raises(FormatError) as caught:
            twofour.load(path, net, masked=True)
        assert caught.value.code == code, caught.value
    assert type(net.fc) is torch.nn.Linear


def swap(path: Path) -> None:
    """Write the square convolution's weight as if its output channels were summed over."""
    weight = masked().conv.weight.detach().transpose(0, 1).contiguous()
    packed = twofour.export.read(path)
    write(
        path, Contents(packed.plain, {**packed.packed, "conv.weight": pack(weight, "2:4", axis=0)}, {}, packed.settings)
    )


@pytest.mark.parametrize("code", MODELS)
def test_a_file_of_another_model_is_refused_for_its_reason(
    tmp_path: Path, code: str, times_cache: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    path = tmp_path / "m.safetensors"
    twofour.save(masked(), path)
    damage, as_masked = MODELS[code]
    damage(path)
    with pytest.raises(FormatError) as caught:
        twofour.load(path, Net(), masked=as_masked, tokens=None if as_masked else (2,))
    assert caught.value.code == code, caught.value


def test_scales_beside_real_numbers_are_refused_in_memory_too() -> None:
    weight = pack(torch.zeros(8, 32), "2:4")
    with pytest.raises(PackingError) as caught:
        replace(weight, scales=torch.ones(8, 1)).validate()
    assert caught.value.code == "scales-unwanted"


def test_every_code_is_in_the_table_and_has_a_case() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    table = re.findall(r"^\| `([a-z]+(?:-[a-z]+)*)` \|", page.partition("### Malformed files")[2], re.M)
    assert len(table) == len(set(table))
    assert set(table) == {*CASES, *FOLDERS, *MODELS, "file-shorter", "file-changed", "scales-unwanted"}
