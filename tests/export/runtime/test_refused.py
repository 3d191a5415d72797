"""libtwofour: no file or caller that ends the process; each is refused with its reason."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.export.runtime import library as lib
from tests.export.runtime.models import compiled, same_bits
from tests.fuzz import drive
from tests.fuzz.targets import judge, target
from tests.native.calls import products
from twofour import export, native
from twofour.export.runtime.file import HEADER, encoded, seal
from twofour.export.runtime.program import Constants, Lying, Program


def changed(content: bytes, place: int, form: str, value: int) -> bytearray:
    found = bytearray(content)
    struct.pack_into(form, found, place, value)
    seal(found)
    return found


@pytest.mark.parametrize(
    ("damage", "status", "text"),
    [
        (lambda c: c[:40], lib.DAMAGED, "shorter than a header"),
        (lambda c: c[:-1], lib.DAMAGED, "where its header says"),
        (lambda c: b"x" * 200, lib.DAMAGED, "does not begin"),
        (lambda c: c[:100] + b"\xff" + c[101:], lib.DAMAGED, "its digest"),
        (lambda c: changed(c, 8, "<I", 2), lib.VERSION, "version 2 of the format; this library reads 1"),
        (lambda c: changed(c, 24, "<Q", 1 << 62), lib.DAMAGED, "parts outside"),
        (lambda c: changed(c, HEADER.size, "<I", 1 << 31), lib.DAMAGED, "more than there can be"),
        (lambda c: changed(c, HEADER.size + 4, "<Q", 1 << 40), lib.DAMAGED, "a constant outside"),
        (lambda c: bytes(sealed(c.replace(b"__", b"_x", 1))), lib.UNSUPPORTED, "does not have"),
    ],
)
def test_files_that_are_none_are_refused(
    small: tuple[Path, Tensor, Tensor], damage: Callable[[bytes], bytes], status: int, text: str, tmp_path: Path
) -> None:
    bad = damage(small[0].read_bytes())
    with pytest.raises(lib.RefusedError, match=text) as error:
        lib.Model(bytearray(bad))
    assert error.value.status == status
    (tmp_path / "bad").write_bytes(bad)
    with pytest.raises(lib.RefusedError, match=text):
        lib.Model(tmp_path / "bad")


def sealed(content: bytes) -> bytearray:
    found = bytearray(content)
    seal(found)
    return found


def test_a_kernel_of_instructions_that_this_cpu_lacks_is_named() -> None:
    missing = [row for row in native.rows("nm_matmul") if not native.extension().cpu_has(row.isa)]
    if not missing:
        pytest.skip("this CPU has every instruction set that products are written for")
    _, function, arguments = next(one for one in products(1) if one[1].__name__ == "nm_matmul")
    old, new = native.rows("nm_matmul")[arguments[0]].name, missing[-1]

    def renamed(call: bytes) -> bytes:
        texts = [struct.pack("<H", len(name)) + name.encode() for name in (old, new.name)]
        assert texts[0] in call
        return call.replace(texts[0], texts[1])

    made = lib.recorded_call(function, arguments, renamed)
    assert made is not None
    with pytest.raises(
        lib.RefusedError, match=f"{new.name} cannot run on this CPU; got a CPU without {new.isa}"
    ) as error:
        lib.Model(made[0])
    assert error.value.status == lib.UNSUPPORTED


def test_changed_files_are_refused_or_run_within_their_memory() -> None:
    """Some of the inputs of the fuzzer's target, which `python -m tests.fuzz.run --target runtime` makes more of."""
    module, draw = target("runtime"), random.Random(0)
    known = list(module.SEEDS)
    outcomes = {module.run(module.build(seed)) for seed in known}
    assert outcomes == {"good"}
    for _ in range(3000):
        data = drive.mutated(draw, known)
        outcomes.add(judge(module, data))
        known.append(data)
    assert len(outcomes) >= 4, outcomes


def test_inputs_and_outputs_that_are_not_the_programs_are_refused(small: tuple[Path, Tensor, Tensor]) -> None:
    path, x, _ = small
    model, y = lib.Model(path), torch.empty(4, 8)
    good, answer = lib.given_tensor("input", x), lib.given_tensor("output", y)

    def but(one: lib.Given, **fields: Any) -> lib.Given:
        values = {field[0]: getattr(one, field[0]) for field in one._fields_} | fields
        return lib.Given(**values)

    inputs = [
        ([], "no program takes these inputs; got none; wanted `input` float32 \\(4, 64\\)"),
        ([lib.given_tensor("x", x)], "got `x` float32"),
        ([lib.given_tensor("input", x[:2])], "write the file with an example of this size"),
        ([lib.given_tensor("input", x.long())], "got `input` int64"),
        ([good, lib.given_tensor("more", x)], "no program takes"),
        ([good, good], "two tensors of one name"),
        ([but(good, data=None)], "takes 1024 bytes; got NULL"),
        ([but(good, bytes=1000)], "takes 1024 bytes; got 1000"),
        ([but(good, data=x.data_ptr() + 1)], "multiple of a number's size"),
        ([but(good, name=None)], "whose name is NULL"),
        ([but(good, shape=None)], "whose shape is NULL"),
        ([but(good, axes=-1)], "whose shape is NULL"),
        ([but(good, type=99)], "type 99"),
    ]
    outputs = [
        (lib.given_tensor("y", y), "no output has this name"),
        (lib.given_tensor("output", y[:2]), "another type or shape"),
        (lib.given_tensor("output", y.bfloat16()), "another type or shape"),
        (but(answer, data=None), "got NULL"),
        (but(answer, bytes=4), "got 4"),
    ]
    for given, text in inputs:
        with pytest.raises(lib.RefusedError, match=text) as error:
            model.call(given, [answer])
        assert error.value.status in (lib.INPUT, lib.ARGUMENT)
    for given, text in outputs:
        with pytest.raises(lib.RefusedError, match=text) as error:
            model.call([good], [given])
        assert error.value.status == lib.INPUT
    model.call([good], [but(answer, shape=None, axes=0)])
    model.call([good], [])  # nothing is asked for


def test_nulls_and_strange_numbers_are_refused() -> None:
    found, handle, text = lib.functions(), c_void_p(), (lib.ctypes.c_char * 200)()
    assert found.twofour_load(None, None, byref(handle), text, 200) == lib.ARGUMENT and b"`path` is NULL" in text.value
    assert found.twofour_load(b"x", None, None, text, 200) == lib.ARGUMENT
    assert found.twofour_load(b"/nothing/here", None, byref(handle), None, 0) == lib.FILE
    assert found.twofour_load(b"/", None, byref(handle), text, 200) == lib.FILE and b"is a folder" in text.value
    assert found.twofour_load_memory(None, 5, None, byref(handle), text, 12) == lib.ARGUMENT
    assert text.value == b"twofour_loa"  # cut, with its zero
    assert found.twofour_run(None, None, 0, None, 0, text, 200) == lib.ARGUMENT
    assert found.twofour_programs(None) == found.twofour_inputs(None, 0) == found.twofour_outputs(None, 3) == 0
    assert found.twofour_input(None, 0, 0, None) == lib.ARGUMENT
    found.twofour_free(None)
    size = lib.ctypes.sizeof(lib.Options)
    for options in (lib.Options(0, 1), lib.Options(size, -1), lib.Options(1 << 40, 1)):
        assert found.twofour_load(b"x", byref(options), byref(handle), text, 200) == lib.ARGUMENT
    larger = (lib.Options * 2)(lib.Options(2 * size, 1))  # of a later version, whose fields may say something
    assert found.twofour_load(b"/nothing/here", larger, byref(handle), text, 200) == lib.FILE
    larger[1].threads = 1
    assert found.twofour_load(b"/nothing/here", larger, byref(handle), text, 200) == lib.ARGUMENT
    assert b"of a newer one" in text.value


def one_place(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytearray:
    """Make a file without calls, whose output is such a place in its input, 16 numbers of uint8."""
    place = Lying("input", 0, 0, dtype, shape, strides)
    program = Program([("x", torch.zeros(16, dtype=torch.uint8))], [("y", 0)], 0, [place])
    return encoded([program], Constants())


def test_places_that_no_kernel_may_read_are_refused() -> None:
    model = lib.Model(one_place(torch.uint8, (1, 4), (7, 2)))
    given = torch.arange(16, dtype=torch.uint8)
    assert model.run({"x": given})["y"].tolist() == [[0, 2, 4, 6]]
    for strides in ((1 << 62, 2), (-1, 2)):
        with pytest.raises(lib.RefusedError, match="impossible strides") as error:
            lib.Model(one_place(torch.uint8, (1, 4), strides))
        assert error.value.status == lib.DAMAGED
    with pytest.raises(lib.RefusedError, match="wider numbers in an input"):
        lib.Model(one_place(torch.float32, (4,), (1,)))


def test_an_index_out_of_range_is_refused(tmp_path: Path) -> None:
    fast, example = compiled("words")
    export.to_runtime(fast, tmp_path / "words.2f4", example(2))
    model, given = lib.Model(tmp_path / "words.2f4"), example(2)
    want = model.run(given)
    for bad in (50, -1, 1 << 62):
        wrong = given["input_ids"].clone()
        wrong[0, 0] = bad
        with pytest.raises(lib.RefusedError) as error:
            model.run({**given, "input_ids": wrong})
        assert error.value.status == lib.REFUSED and str(bad) in str(error.value)
    same_bits(model.run(given), want)
