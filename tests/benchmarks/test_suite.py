"""The benchmark suite runs, writes records with their machine, resumes, and refuses wrong kernels."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

import twofour
from tests.benchmarks.suite import ROOT, here, suite
from tests.conftest import of_benchmarks, threads
from twofour import checker, measure, patterns
from twofour.errors import DataError, MeasureError
from twofour.kernels import Prepared


def test_modules_of_the_experiments_stand_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both folders have a run.py, and each finds its own after the other."""
    other = ModuleType("run")
    other.__file__ = str(ROOT.parent / "experiments" / "run.py")
    monkeypatch.setitem(sys.modules, "run", other)
    monkeypatch.syspath_prepend(str(ROOT))
    found = []
    for _ in range(2):
        with of_benchmarks(ROOT):
            import run

            found.append(run)
        assert sys.modules["run"] is other
    assert found[0] is found[1] and Path(found[0].__file__) == ROOT / "run.py"


def test_linear_writes_records_and_a_table(tiny: Path, tmp_path: Path, benchmarks: Path):
    out = tmp_path / "r.json"
    words = ("linear", "--shapes", str(tiny), "--threads", "1", "--tokens", "1,4", "--hot", "--seconds", "0.02")
    done = here(*words, "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "float32, 1 thread, weights hot: best dense / best 2:4" in done.stdout
    assert "geomean" in done.stdout and "torch" in done.stdout
    found = measure.load(out)
    assert [(r.meta["shape"], r.meta["tokens"]) for r in found] == [
        ("64x32", 1), ("64x32", 4), ("32x64", 1), ("32x64", 4),
    ]  # fmt: skip
    for record in found:
        assert record.baseline[:2] == ("F.linear", "oneDNN prepacked") and set(record.baseline) < set(record.timings)
        assert ("MKL prepacked" in record.baseline) == torch.backends.mkl.is_available()
        assert (record.clock, record.threads, record.weights) == ("thread", 1, "hot")
        assert record.machine["cpu"] and record.noise is not None
    before = [record.created for record in found]
    again = here(*words, "--json", str(out), "--resume")
    assert again.returncode == 0 and [record.created for record in measure.load(out)] == before


def test_other_cells_of_a_file_are_kept_when_a_run_goes_on(cases, tmp_path: Path):
    records, path = cases["records"], tmp_path / "r.json"

    def made(cell: dict[str, object]) -> measure.Record:
        return measure.Record({"a": measure.Timing(*(1e-3,) * 4, 5, 1)}, meta=cell, note=str(len(taken)))

    taken: list[int] = []
    first, second = ({"case": "models", "model": "a", "batch": batch} for batch in (1, 8))
    for cells, resume, expected in (([first], False, [1]), ([second], True, [1, 8]), ([first], False, [1])):
        taken.append(0)
        done = records.run(cells, made, path, resume)
        assert [record.meta["batch"] for record in done] == [cell["batch"] for cell in cells]
        assert [record.meta["batch"] for record in measure.load(path)] == expected


@pytest.mark.long
def test_bits_writes_records_and_a_table(tmp_path: Path):
    out = tmp_path / "r.json"
    words = ("bits", "--sizes", "3x65x72,1x512x512:cold", "--widths", "w1a1,w1.58a8/2:4", "--seconds", "0.02")
    grouped = suite("bits", "--sizes", "2x64x128", "--widths", "w4a8/g32,w2/g64", "--seconds", "0.02")
    assert grouped.returncode == 0 and re.search("peer +ms +ratio", grouped.stdout), grouped.stderr
    assert re.search("w4a8/g32.* (MatMulNBits|torch int4) ", grouped.stdout)
    done = suite(*words, "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "GOP/s" in done.stdout and "bytes w8a8 ms" in done.stdout
    found = measure.load(out)
    assert [(r.meta["weights"], r.meta["tokens"], r.meta["dtype"]) for r in found] == [
        ("hot", 3, "w1a1"), ("hot", 3, "w1.58a8/2:4"), ("cold", 1, "w1a1"), ("cold", 1, "w1.58a8/2:4"),
    ]  # fmt: skip
    for record in found:
        assert record.baseline == ("bytes w8a8", "torch._int_mm") and record.clock == "thread"
        assert sum(name.startswith("bits_matmul_") for name in record.timings) >= 2


@pytest.mark.long
def test_nets_of_low_bits_are_held_to_whole_numbers_and_set_beside_openvino(tmp_path: Path):
    pytest.importorskip("openvino", reason="needs the extra [peers]")
    pytest.importorskip("nncf", reason="needs the extra [peers]")
    out = tmp_path / "r.json"
    words = ("bits-nets", "--nets", "vgg", "--widths", "w1a2", "--batch", "1", "--seconds", "0.05", "--json", str(out))
    done = suite(*words)
    assert done.returncode == 0, done.stderr
    assert "OpenVINO int8 ms" in done.stdout
    (record,) = measure.load(out)
    assert record.baseline == ("OpenVINO int8", "OpenVINO") and record.clock == "process"
    assert record.meta["model"] == "vgg" and record.meta["dtype"] == "w1a2"


def test_trained_nets_are_timed_by_the_state_of_their_first_seed(cases, tmp_path: Path, monkeypatch):
    from cases import bits_nets

    def net(channels: int) -> torch.nn.Module:
        layers = (torch.nn.Conv2d(channels, 8, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, 2), torch.nn.ReLU())
        return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10))

    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(bits_nets.NETS, "vgg", net)
    with pytest.raises(DataError, match="no trained vgg of w1a2"):
        bits_nets.cells(["vgg"], ["w1a2"], [1], tmp_path)
    x = torch.randn(2, 1, 28, 28)
    model = twofour.quantize(net(1).eval(), "w1", "a2", data=[x])
    for seed in (2, 1):
        twofour.save(model, tmp_path / f"fashion-vgg-w1a2-{seed}.safetensors")
    (cell,) = bits_nets.cells(["vgg"], ["w1a2"], [1], tmp_path)
    assert cell["weights"] == str(tmp_path / "fashion-vgg-w1a2-1.safetensors")
    with torch.inference_mode():
        assert torch.allclose(bits_nets._compiled("vgg", "w1a2", x, cell["weights"])(x), model(x))
        assert not torch.allclose(bits_nets._compiled("vgg", "w1a2", x, None)(x), model(x))


@pytest.mark.long
def test_language_models_of_low_bits_are_set_beside_int8_in_tokens_a_second(tmp_path: Path):
    out = tmp_path / "r.json"
    done = suite("bits-lm", "--nets", "gpt", "--seconds", "0.05", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "twofour int8" in done.stdout and "/s" in done.stdout
    (record,) = measure.load(out)
    assert record.baseline == ("twofour int8", "twofour float32", "torch float32") and record.meta["tokens"] == 64


@pytest.mark.parametrize(("sizes", "widths"), [(["3x4x4"], ["w1"]), (["3x4"], ["w1a1"])])
def test_bits_refuses_sizes_and_widths_that_are_none(cases, sizes: list[str], widths: list[str]):
    with pytest.raises(DataError, match="not known"):
        cases["bits"].cells(sizes, widths)


def test_mask_writes_records(tiny: Path, tmp_path: Path, benchmarks: Path):
    out = tmp_path / "m.json"
    with threads(2):
        done = here("mask", "--shapes", str(tiny), "--threads", "1,2", "--seconds", "0.02", "--json", str(out))
        assert done.returncode == 0 and torch.get_num_threads() == 2, done.stderr
    for column in ("mask/copy", "compress/copy", "mask/clone", "compress/clone", "topk/mask"):
        assert column in done.stdout
    assert "2 threads, geometric means: mask/copy " in done.stdout
    assert all(
        set(r.timings) == {"2:4 mask", "2:4 compress", "copy_", "clone", "torch.topk"} for r in measure.load(out)
    )
    assert [(r.meta["shape"], r.threads, r.clock) for r in measure.load(out)][:2] == [
        ("64x32", 1, "thread"), ("64x32", 2, "wall"),
    ]  # fmt: skip


@pytest.mark.long
def test_threads_times_each_source(tmp_path: Path):
    out = tmp_path / "t.json"
    done = suite("threads", "--threads", "1", "--seconds", "0.01", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "own/openmp" in done.stdout and "geometric means: torch/openmp " in done.stdout
    found = measure.load(out)
    assert len(found) == 8 and {"torch", "own"} <= set(found[0].timings)
    assert {record.meta["beside"] for record in found} == {"nothing", "torch"}


def test_errors_are_in_their_form():
    done = suite("linear", "--shapes", "nowhere.txt")
    assert done.returncode == 2
    assert "DataError: there is no list of shapes 'nowhere.txt'" in done.stderr and "kernels.txt" in done.stderr


def test_every_list_of_shapes_reads(cases, tmp_path: Path):
    convolutions = cases["shapes"].CONVOLUTIONS
    for path in sorted((ROOT / "shapes").glob("*.txt")):
        read = cases["shapes"].read_convolutions if path.name in convolutions else cases["shapes"].read
        assert read(path.name)
    assert len({shape.text for shape in cases["shapes"].read_all()}) == len(cases["shapes"].read_all()) >= 10
    assert cases["shapes"].read_convolutions("resnet50.txt")[1].text == "64x64x3x3/1 @56x56"
    assert [shape.text for shape in cases["shapes"].read("kernels.txt")] == [
        "384x384", "1536x384", "768x768", "3072x768", "4096x4096", "11008x4096",
    ]  # fmt: skip
    bad = tmp_path / "bad.txt"
    bad.write_text("a 64\n")
    with pytest.raises(DataError, match=r"bad\.txt:1 is malformed(.|\n)*a 64(.|\n)*name out in"):
        cases["shapes"].read(str(bad))


def test_a_wrong_kernel_is_not_timed(cases):
    linear = cases["linear"]
    layer = linear.Layer.of(cases["shapes"].Shape("a", 64, 32))
    x = torch.randn(4, 32)
    right = torch.nn.functional.linear(x, layer.weight, layer.bias)
    for dtype, factor in (("float32", 1.001), ("bfloat16", 1.02), ("int8", 1.1), ("int4", 1.5)):
        linear._verify(layer, dtype, x, {"right": lambda: right})
        with pytest.raises(MeasureError, match=r"wrong is wrong and is not timed(.|\n)*64x32"):
            linear._verify(layer, dtype, x, {"wrong": lambda factor=factor: right * factor})
        with pytest.raises(MeasureError):
            linear._verify(layer, dtype, x, {"nan": lambda: right * float("nan")})


def test_cold_cells_rotate_over_copies(cases):
    linear = cases["linear"]
    layer = linear.Layer.of(cases["shapes"].Shape("a", 64, 32))
    candidates = linear._candidates(layer, "float32", torch.randn(1, 32), 5)
    assert {len(calls) for calls in candidates.values()} == {5}
    for layout in layer.layouts.values():
        tensors = [copy.tensor if isinstance(copy, Prepared) else copy for copy in layout]
        if not tensors[0].is_mkldnn:
            assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert any(name.startswith("nm_matmul_") for name in candidates)


def test_a_wrong_mask_or_packed_weight_is_not_timed(cases, monkeypatch: pytest.MonkeyPatch):
    mask, weight = cases["mask"], torch.randn(16, 32)
    mask.verify(weight)
    right = mask.compress(weight)
    monkeypatch.setattr(mask, "compress", lambda w: (right[0], right[1], right[2] ^ 1))
    with pytest.raises(MeasureError, match="2:4 compress is wrong and is not timed"):
        mask.verify(weight)
    monkeypatch.setattr(mask, "by_topk", lambda w: torch.zeros(w.shape, dtype=torch.bool))
    with pytest.raises(MeasureError, match="2:4 mask is wrong and is not timed"):
        mask.verify(weight)


def test_a_wrong_check_is_not_timed(cases):
    from cases import check

    report = checker.check_weights({f"{i}": torch.randn(8, 16) for i in range(check.TENSORS)})
    check.verify(report, "dense")
    with pytest.raises(MeasureError, match="check is wrong"):
        check.verify(report, "2:4")


def test_the_common_mask_is_ours(cases):
    weight = torch.randn(16, 32)
    assert torch.equal(cases["mask"].by_topk(weight), patterns.parse("2:4").project(weight, absolute=True))


@pytest.mark.long
def test_conv_writes_records(tmp_path: Path):
    shapes, out = tmp_path / "convs.txt", tmp_path / "c.json"
    shapes.write_text("a 16 16 3 1 8 8\nb 16 32 1 1 4 4\nc 16 16 3 2 8 8\n")
    done = suite("conv", "--shapes", str(shapes), "--threads", "1", "--seconds", "0.02", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "1 thread: best dense / best 2:4: geometric mean" in done.stdout
    found = measure.load(out)
    assert [r.meta["geometry"] for r in found] == ["16x16x3x3/1 @8x8", "16x32x1x1/1 @4x4", "16x16x3x3/2 @8x8"]
    torchs = {"dense_conv_f32_channels_last__torch", "dense_conv_f32_prepacked__onednn"}
    assert all(torchs <= set(r.baseline) < set(r.timings) for r in found)
    close = [sorted(name for name in r.timings if "winograd" in name) for r in found]
    assert close[0] and not close[1] and not close[2] and not set(close[0]) & set(found[0].baseline)
    refused = suite("conv", "--dtype", "int8")
    assert refused.returncode == 2 and "this benchmark times convolutions in float32" in refused.stderr


@pytest.mark.long
def test_recurrent_writes_records_and_a_table(tmp_path: Path):
    out = tmp_path / "r.json"
    sizes = ("--layers", "gru", "--hidden", "16", "--steps", "2", "--seconds", "0.02")
    done = suite("recurrent", *sizes, "--json", str(out))
    assert done.returncode == 0, done.stderr
    (record,) = measure.load(out)
    assert record.meta["model"] == "gru" and record.meta["tokens"] == 2 and record.clock == "process"
    assert {"torch", "ours dense", "ours 2:4"} <= record.timings.keys() and "torch" in record.baseline
    assert "microseconds a step" in done.stdout and "ours 2:4 int8" in done.stdout


def test_a_recurrent_layer_that_answers_wrongly_is_not_timed(cases, monkeypatch: pytest.MonkeyPatch):
    case = cases["recurrent"]
    monkeypatch.setattr(case, "_onnx", lambda model, inputs, int8: lambda: [torch.zeros(2, 1, 16)])
    answers = {"2:4": (torch.zeros, 0.5, ""), None: (torch.zeros, 0.0, "it is faster")}
    monkeypatch.setattr(case, "_ours", lambda _, __, pattern, ___: answers.get(pattern, (torch.zeros, 0.0, "")))
    inputs = torch.randn(2, 1, 16), torch.zeros(1, 1, 16)
    missing: dict[str, str] = {}
    names = [name for name, _ in case._candidates(case.Streaming("gru", 16).eval(), inputs, missing, {})]
    assert "ONNX Runtime" not in names and "off by" in missing["ONNX Runtime"]
    assert {"ours 2:4", "ours dense"}.isdisjoint(names) and "ours block:8x1@0.9" in names
    assert "off by" in missing["ours 2:4"] and "it is faster" in missing["ours dense"]


def test_int8_steps_of_openvino_are_run_with_and_without_ranges_of_inputs(cases):
    from cases import generate

    assert list(generate._runtimes("int8")) == ["OpenVINO", "ONNX Runtime", generate.OPENVINO_WEIGHTS]
    assert list(generate._runtimes("float32")) == ["OpenVINO", "ONNX Runtime"]


def test_models_time_what_is_built_and_say_what_is_not(cases, monkeypatch, capsys: pytest.CaptureFixture[str]):
    models, table = cases["models"], cases["models_table"]
    from models import Subject

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
    subject = Subject("tiny", "random weights", net, (torch.randn(4, 32),), 1, 4)
    monkeypatch.setattr(models, "BUILDERS", {"tiny": lambda batch: subject})

    def fails(*_: object, **__: object):
        raise ValueError("no such thing")

    for name in ("openvino", "onnxruntime", "inductor"):
        monkeypatch.setattr(models.engines, name, fails)
    (cell,) = models.cells(["tiny"], "float32", [1], [1])
    record = models.Bench(0.02, without=[models.INDUCTOR])(cell)
    assert set(record.timings) == {models.EAGER, models.DENSE, models.SPARSE} and record.baseline == (models.EAGER,)
    missing = record.meta["missing"]
    assert (
        missing[models.OPENVINO] == "ValueError: no such thing" and missing[models.INDUCTOR] == "left out by --without"
    )
    assert all(error < 1e-5 for error in record.meta["errors"].values())
    table.show_models([record], Console(width=250))
    shown = capsys.readouterr().out
    assert "not built: tiny float32: OpenVINO: ValueError: no such thing" in shown and "tiny: random weights" in shown
    assert table.figures(record)["dense / OpenVINO"] is None and table.figures(record)["2:4 / dense"] > 0
    with pytest.raises(DataError, match="there is no model 'nothing'"):
        models.cells(["nothing"], "float32", [1], [1])


def test_shrunk_models_are_timed_beside_what_was_promised(cases, monkeypatch, capsys: pytest.CaptureFixture[str]):
    shrunk = cases["shrunk"]
    from models import Subject

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
    subject = Subject("tiny", "random weights", net, (torch.randn(4, 32),), 1, 4)
    monkeypatch.setattr(shrunk, "BUILDERS", {"tiny": None})

    def shrink(model, example, budget, **options):
        small = twofour.shrinking.shrink(model, example, budget.time, **options)
        report = twofour.shrinking.report_of(small)
        twofour.shrinking.report.attach(small, dataclasses.replace(report, milliseconds=(2.0, 1.2), timing="fake"))
        return small

    monkeypatch.setattr(twofour, "shrink", shrink)
    monkeypatch.setattr(shrunk.engines, "openvino", shrunk.engines.eager)
    bench = shrunk.Bench(0.02)
    bench.builders = {"tiny": lambda batch: subject}
    (cell,) = shrunk.cells(["tiny"], [0.6])
    record = bench(cell)
    assert set(record.timings) == {shrunk.OPENVINO, shrunk.DENSE, shrunk.SHRUNK, shrunk.SPARSE}
    assert record.meta["promised"] == 0.6 and record.meta["parameters"][1] <= 0.6 * record.meta["parameters"][0]
    shrunk.show([record], Console(width=250))
    shown = capsys.readouterr().out
    assert "0.600" in shown and f"{record.median(shrunk.SHRUNK) / record.median(shrunk.DENSE):.3f}" in shown
    with pytest.raises(DataError, match="there is no model 'nothing'"):
        shrunk.cells(["nothing"], [0.5])


def test_a_wrong_answer_is_not_timed(cases):
    models, reference = cases["models"], torch.ones(3).numpy()
    side = models.Side()
    side.add("right", lambda: lambda: torch.ones(3), reference, "float32")
    side.add("wrong", lambda: lambda: torch.ones(3) * 1.1, reference, "float32")
    side.add("rough", lambda: lambda: torch.ones(3) * 1.1, reference, "int8")
    assert list(side.calls) == ["right", "rough"] and side.missing == {"wrong": "wrong: relative error 1.0e-01"}


@torch.no_grad()
def test_decoding_steps_look_at_the_cache_up_to_their_position(cases):
    from models.gpt2 import Gpt2Step
    from models.llama import LlamaStep

    torch.manual_seed(0)
    gpt2, llama = Gpt2Step(2, 4, 32, 8, 50).eval(), LlamaStep(2, 32, 64, 4, 2).eval()
    for net, groups, entry in ((gpt2, 4, torch.tensor([[7]])), (llama, 2, torch.randn(1, 1, 32))):
        keys, values = torch.randn(2, 2, 1, groups, 8, 8).unbind()
        step = torch.tensor([3])
        y, key, value = net(entry, step, keys, values)
        assert key.shape == value.shape == (2, 1, groups, 1, 8)
        same, _, _ = net(entry, step, keys[:, :, :, :3], values[:, :, :, :3])
        assert torch.allclose(y, same, atol=1e-6)
        assert not torch.allclose(y, net(entry, step, keys, values + 1)[0], atol=1e-3)
