"""libtwofour: the same bits as Python, by every call, every thread and in memory that was used before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.export.runtime import library as lib
from tests.export.runtime.models import MODELS, Words, compiled, named, same_bits
from tests.native.calls import models, products, recurrent
from twofour import export, native
from twofour.compiler import attention_int8
from twofour.export.runtime.file import encoded
from twofour.export.runtime.program import Call, Constants, Lying, Program


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
