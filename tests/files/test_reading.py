"""Plain files alone are opened, at once, and texts are read up to a size and a depth."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import twofour
from twofour import allocation, measure
from twofour.checkpoints import Checkpoint
from twofour.errors import TwofourError
from twofour.files import opened, read_bytes, read_json, read_toml
from twofour.hardware import systolic
from twofour.importing import decode
from twofour.recipe import Recipe


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # a socket's path is short
        made.bind(path.name)


READERS: dict[str, Callable[[Path], object]] = {
    "a.safetensors": twofour.check,
    "b.safetensors": Checkpoint.open,
    "c.safetensors": lambda path: twofour.load(path, torch.nn.Linear(4, 4)),
    "d.onnx": twofour.check,
    "e.pt": decode,
    "f": decode,
    "g.toml": Recipe.load,
    "h.cfg": systolic.read_settings,
    "i.csv": systolic.read_topology,
    "j.json": measure.load,
    "k.json": allocation.Sensitivities.load,
}


@pytest.mark.parametrize(("make", "said"), [(pipe, "a pipe"), (device, "a device"), (listening, ""), (Path.mkdir, "")])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, monkeypatch, make, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    if make in (pipe, device):
        pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
    for name, read in READERS.items():
        if make in (pipe, device) or name not in ("d.onnx",):
            make(tmp_path / name)
            with pytest.raises(TwofourError) as caught:
                read(tmp_path / name)
            assert said in str(caught.value), name


def test_a_file_without_permission_is_not_called_missing(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    for name in READERS:
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr("twofour.files.reading.os.open", refuse)  # root may read whatever there is
    for name, read in READERS.items():
        with pytest.raises(TwofourError, match=r"(?i)permission denied") as caught:
            read(tmp_path / name)
        assert "no such file" not in str(caught.value), name


def test_a_file_is_read_up_to_its_largest_size_and_refused_beyond(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_bytes(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(ValueError, match="8 bytes, at most 7"):
        read_bytes(tmp_path / "file", 7)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and is refused before it does
    with pytest.raises(ValueError, match=r"1099511627776 bytes, at most 16777216"):
        read_json(tmp_path / "sparse")


def test_text_is_nested_as_deep_as_python_reads_it_and_no_deeper(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("[" * 100 + "]" * 100)
    assert read_json(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)
    path.write_text("a = " + "[" * 50_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_toml(path)


@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "[[{}]]", "a = {{ {} = 1 }}", "'=' . {} = 1"])
def test_a_dotted_key_has_as_many_parts_as_a_layer_and_no_more(tmp_path: Path, form: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(form.format(".".join(["a"] * 63)))
    assert read_toml(path)
    for parts in (65, 400_000):  # the second would fill the memory
        path.write_text(form.format(".".join(["a"] * parts)))
        with pytest.raises(ValueError, match=r"a key of \d+ parts, at most 64"):
            read_toml(path)


def test_a_dotted_key_does_not_hide_behind_texts(tmp_path: Path) -> None:
    path, key = tmp_path / "recipe.toml", ".".join(["a"] * 1000)
    for text in (f'x = {{b = "\\"", {key} = 1}}', f"x = {{b = '\"', {key} = 1}}", f"x = {{b = '''y''z''', {key} = 1}}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"parts|several lines"):
            read_toml(path)
    path.write_text('skip = ["' + ".".join(["a"] * 1000) + '"]')
    assert len(read_toml(path)["skip"][0]) == 1999


def test_a_recipe_larger_than_any_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("# " + "x" * (1 << 20))
    with pytest.raises(TwofourError, match="1048578 bytes, at most 1048576"):
        Recipe.load(path)


def test_a_link_to_a_plain_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps([1]))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == [1]
    with opened(tmp_path / "link") as file:
        assert file.read() == b"[1]"
