"""Cases of the benchmark suite that are about the graph engine: whole models, algebra, blocks, counts, memory."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import twofour
from tests.benchmarks.suite import here, suite
from tests.benchmarks.suite import record as record_of
from twofour import engines, measure
from twofour.errors import DataError

pytestmark = pytest.mark.usefixtures("benchmarks")


def test_fusion_counts_kernels_and_bytes(monkeypatch, capsys: pytest.CaptureFixture[str]):
    from cases import counts, fusion
    from models import Subject

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
    subject = Subject("tiny", "random weights", net.requires_grad_(False), (torch.randn(4, 32),), 1, 4)
    monkeypatch.setattr(fusion, "FUSION", {"tiny": lambda: subject})
    for name in ("openvino", "inductor"):
        monkeypatch.setattr(engines, name, lambda *_, **__: pytest.fail("left out"))
    left_out = [fusion.INDUCTOR, fusion.OPENVINO, fusion.OPENVINO_SPARSE]
    bench = fusion.FusionBench(0.02, without=left_out, count=False)
    record = bench(fusion.cells(["tiny"])[0])
    assert set(record.timings) == {fusion.EAGER, fusion.ORT, fusion.LAYERS, *fusion.OURS.values()}
    assert record.meta["memory"][fusion.EAGER]["bytes"] >= 4 * (64 + 64 + 32) * 4
    fusion.show([record], Console(width=250))
    assert "left out by --without" in capsys.readouterr().out
    found = counts.onnxruntime_kernels(subject)
    assert 2 <= found["all"] <= found["nodes"]
    assert 2 <= record.meta["kernels"][fusion.DENSE]["all"] <= 4
    with pytest.raises(DataError, match="there is no model 'nothing'"):
        fusion.cells(["nothing"])


def test_the_sweep_takes_the_default_call_and_says_where_ours_is_slower(monkeypatch, capsys):
    from cases import sweep
    from models import Subject

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
    asked = []

    def subject(name: str, batch: int, tokens: int) -> Subject:
        asked.append((name, batch, tokens))
        return Subject(name, "random weights", net.requires_grad_(False), (torch.randn(tokens, 32),), batch, tokens)

    monkeypatch.setattr(sweep, "SWEEP", ("tiny", "deit-small-12x384"))
    monkeypatch.setattr(sweep, "subject", subject)
    given = []
    monkeypatch.setattr(sweep.twofour, "compile", lambda *a, of=twofour.compile, **k: given.append(k) or of(*a, **k))
    cells = sweep.cells(["tiny", "deit-small-12x384"], "float32", [1], [4, 8], [1])
    assert [(cell["model"], cell["tokens"]) for cell in cells] == [("tiny", 4), ("tiny", 8), ("deit-small-12x384", 1)]
    bench = sweep.Bench(0.02, without=[sweep.INDUCTOR, sweep.OPENVINO, sweep.ORT])
    found = [bench(cell) for cell in cells[:2]]
    assert asked == [("tiny", 1, 4), ("tiny", 1, 8)] and given == [{}] * 4
    assert set(found[0].timings) == {sweep.EAGER, *sweep.OURS}
    sweep.show(found, Console(width=250))
    shown = capsys.readouterr().out
    assert "tiny; 1 x 8" in shown and "not built: tiny; 1 x 4: ONNX Runtime: left out by --without" in shown
    with pytest.raises(DataError, match="there is no model 'nothing'"):
        sweep.cells(["nothing"], "float32", [1], [4], [1])


def test_the_line_of_a_slower_model_names_it(monkeypatch):
    from cases import sweep

    times = {sweep.OPENVINO: 2e-3, sweep.ORT: 3e-3, sweep.DENSE: 2.2e-3, sweep.SPARSE: 1e-3}
    found = record_of(times, (sweep.OPENVINO, sweep.ORT), model="vit-base-12x768", batch=8, tokens=1)
    told = dict(zip(sweep.HEADS, sweep.line(found), strict=True))
    assert told["best peer"] == sweep.OPENVINO and (told["dense / it"], told["2:4 / it"]) == ("1.10", "0.50")
    assert told["slower than noise"] == "dense" and told["model; batch x tokens"] == "vit-base-12x768; 8"


@pytest.mark.parametrize("name", ["bert-tiny-4x128", "smollm-30x576", "mobilenet-v2"])
def test_models_of_the_sweep_answer(name):
    from models.sweep import IMAGES, subject

    found = subject(name, 1, 8)
    with torch.no_grad():
        answer = found.model(*found.inputs)
    assert answer.shape[0] == 1 and answer.isfinite().all() and answer.std() > 0
    assert found.tokens == (1 if name in IMAGES else 8)


def test_algebra_measures_both_kinds_of_rules(monkeypatch, capsys: pytest.CaptureFixture[str]):
    from cases import algebra
    from models import Subject

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)).eval()
    subject = Subject("tiny", "random weights", net.requires_grad_(False), (torch.randn(4, 32),), 1, 4)
    monkeypatch.setattr(algebra, "ALGEBRA", {"tiny": lambda: subject})
    for name in ("openvino", "inductor"):
        monkeypatch.setattr(engines, name, lambda *_, **__: pytest.fail("left out"))
    bench = algebra.AlgebraBench(0.02, without=[algebra.INDUCTOR, algebra.OPENVINO])
    record = bench(algebra.cells(["tiny"])[0])
    assert set(record.timings) == {algebra.EAGER, algebra.ORT, algebra.EXACT, algebra.CLOSE}
    assert record.meta["rewrites"][algebra.EXACT]["linear layers in a row"] == 1
    algebra.show([record], Console(width=200))
    assert "geometric mean" in capsys.readouterr().out
    with pytest.raises(DataError, match="there is no block 'nothing'"):
        algebra.cells(["nothing"])


def test_calls_in_the_text_of_inductor_are_counted():
    from cases import counts

    lines = """
    buf0 = empty_strided_cpu((4, 64), (64, 1), torch.float32)
    extern_kernels.addmm(arg0_1, arg1_1, alpha=1, beta=1, out=buf0)
    cpp_fused_relu_0(buf0)
    buf3 = torch.ops.mkldnn._linear_pointwise.default(buf0, constant0, None, 'relu', [], '')
    buf4 = reinterpret_tensor(buf3, (4, 64), (64, 1))
    """.splitlines()
    assert [sum(bool(kind.match(line)) for line in lines) for kind in (counts.KERNEL, counts.EXTERN)] == [1, 2]


def test_blocks_are_timed_against_eager(tmp_path: Path) -> None:
    out = tmp_path / "blocks.json"
    words = ("blocks", "--only", "chain,softmax", "--floats", "8192", "--without", "Inductor", "--seconds", "0.02")
    done = here(*words, "--processes", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "eager's speed" in done.stdout
    found = [(record.meta["model"], record.meta["shape"]) for record in measure.load(out)]
    assert found == [("chain", "8x1024"), ("softmax", "128x64"), ("softmax", "8x1024"), ("softmax", "2x4096")]


@pytest.mark.long
def test_blocks_are_timed_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "blocks.json"
    words = ("blocks", "--only", "chain", "--floats", "8192", "--without", "Inductor", "--seconds", "0.02")
    done = suite(*words, "--processes", "2", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert len(measure.Record.load(out).meta["medians"]["twofour"]) == 2


def test_records_of_processes_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    """The median of their medians, with each of them; what a process prints is a record."""
    from cases import blocks, processes
    from operation_tables import of_fused

    cell = blocks.cells(["chain"], [1], 4096)[0]
    blocks.main(json.dumps({"cell": cell, "seconds": 0.01, "without": [blocks.INDUCTOR]}))
    one = measure.Record.from_dict(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert one.meta["shape"] == "4x1024" and set(one.timings) == {"eager", "twofour"}

    def found(eager: float, inductor: float, ours: float) -> measure.Record:
        times = {"eager": eager, "Inductor": inductor, "twofour": ours}
        made = {name: measure.Timing(t, 0.9 * t, 1.1 * t, 0.8 * t, 20, 3) for name, t in times.items()}
        return measure.Record(made, ("eager",), noise=ours / 100, meta=dict(cell))

    record = processes.joined([found(8.0, 2.0, 4.0), found(8.5, 3.0, 1.0), found(9.0, 4.0, 3.0)])
    assert (record.median("Inductor"), record.median("twofour"), record.noise) == (3.0, 3.0, 0.03)
    timing = record.timing("twofour")
    assert (timing.lower, timing.upper, timing.minimum, timing.samples) == (2.0, 3.5, 0.8, 60)
    assert processes.ratios(record, "twofour", "Inductor") == [0.5, 4 / 3, 3.0]
    assert "| 1.00 (0.50-3.00) |" in of_fused([record])
    assert measure.Record.from_dict(record.to_dict()) == record
    single = found(8.0, 2.0, 4.0)
    assert processes.ratios(single, "twofour", "Inductor") == [0.5] and "| 0.50 |" in of_fused([single])


def test_an_unknown_block_is_refused() -> None:
    done = here("blocks", "--only", "nothing")
    assert done.returncode == 2 and done.stderr.startswith("DataError: ") and "long_chain" in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.fixture
def subject():
    from models import Subject

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval().requires_grad_(False)
    return Subject("tiny", "random weights", net, (torch.randn(4, 64),), 1, 4)


def test_layers_stand_beside_those_of_the_paper(subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from cases import layers
    from models.paper import Published

    monkeypatch.setattr(layers, "PAPER", {"tiny": Published(6, 2, lambda: subject)})
    layers.run(["tiny"], tmp_path / "r.json")
    row = json.loads((tmp_path / "r.json").read_text())["rows"][0]
    assert (row["captured"], row["decomposed"]) == (3, 3) and 2 <= row["calls"] <= 4  # what is fused was measured
    row["calls"] = 2
    assert layers.table({"rows": [row]})[1] == [["tiny", "6", "2", "3", "3", "2", "1.5", "3.0"]]
    with pytest.raises(DataError, match="there is no model 'nothing'"):
        layers.run(["nothing"], tmp_path / "r.json")


def test_models_of_the_paper_answer():
    from models.paper import PAPER, UNet

    assert all(published.before > published.after for published in PAPER.values())
    net = UNet((8, 16, 32)).eval()
    assert net(torch.randn(1, 3, 16, 24)).shape == (1, 2, 16, 24)
    tiny = PAPER["tinybert"].build()
    assert tiny.model(*tiny.inputs).shape == (1, 128, 312)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_run_holds_weights_and_intermediates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from cases import peak_child
    from models import Subject

    net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64)).eval().requires_grad_(False)
    rows = 2048
    tiny = Subject("tiny", "random weights", net, (torch.randn(rows, 64),), 1, rows)
    monkeypatch.setattr(peak_child, "MEMORY", {"tiny": lambda: tiny})
    hidden = rows * 4096 * 4
    held, most, seconds, _ = peak_child.grown(peak_child.eager("tiny", "float32", tmp_path))
    assert most >= hidden and held <= most  # 33 MB: malloc maps it and gives it back
    assert len(seconds) == peak_child.RUNS
    assert peak_child.main("export", "tiny", "float32", str(tmp_path)) == sum(p.nbytes for p in net.parameters())
    assert peak_child.grown(peak_child.onnxruntime("tiny", "float32", tmp_path))[1] >= hidden
    assert peak_child.main("ONNX Runtime", "tiny", "bfloat16", str(tmp_path)) is None


def test_peaks_are_shown_in_megabytes():
    from cases import peak
    from use_tables import of_peak

    held = {name: 10_000_000 * (index + 1) for index, name in enumerate(peak.RUNTIMES) if name != "OpenVINO"}
    meta = {"model": "tiny", "dtype": "int8", "weights": 5_000_000, "held": held, "peak": {**held, "torch eager": 6e7}}
    timing = measure.Timing(1.0, 1.0, 1.0, 1.0, 20, 1)
    record = measure.Record({"torch eager": timing}, meta=meta, machine=measure.machine())
    _, row = peak.lines([record])
    assert row[:5] == ["tiny, int8", "5", "10 (60)", "20 (20)", "-"] and len(row) == 2 + len(peak.RUNTIMES)
    assert "| tiny, int8 | 5 | 10 (60) |" in of_peak([record])
    for models, dtypes, what in ((["nothing"], ["int8"], "model 'nothing'"), (["gpt2"], ["int3"], "type 'int3'")):
        with pytest.raises(DataError, match=f"there is no {what}"):
            peak.cells(models, dtypes)


@pytest.mark.long
def test_ragged_times_packed_and_padded_batches(monkeypatch, capsys: pytest.CaptureFixture[str]):
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    from cases import ragged
    from models import Subject
    from models.encoder import LastHidden

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, vocab_size=100)
    encoder = LastHidden(transformers.BertModel(config, add_pooling_layer=False)).eval().requires_grad_(False)
    inputs = torch.randint(0, 100, (8, 128)), torch.ones(8, 128, dtype=torch.long)
    bench = ragged.Bench(0.02, without=[ragged.ORT, ragged.OPENVINO])
    bench.subject = lambda batch: Subject("tiny", "random weights", encoder, inputs, batch, 1024)
    records = [bench(cell) for cell in ragged.cells(["mixed", "full"], ["float32"], [8], [1])]
    for record in records:
        assert set(record.timings) == {ragged.EAGER, *ragged.OURS}
        assert "real tokens" in record.meta["plans"]["twofour 2:4"]
    ragged.show(records, Console(width=200))
    assert "41%" in capsys.readouterr().out
    with pytest.raises(DataError, match="no cell has the lengths 'nothing'"):
        ragged.cells(["nothing"], ["float32"], [8], [1])


def test_every_size_of_lengths_has_a_record_of_its_own():
    from cases import lengths, records

    cells = lengths.cells(lengths.SIZES, ["float32", "int8"], [1, 2])
    assert len({records.key(cell) for cell in cells}) == len(cells) == 4 * len(lengths.SIZES)


@pytest.mark.long
def test_lengths_are_served_by_one_compiled_model(monkeypatch, capsys: pytest.CaptureFixture[str]):
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    from cases import lengths
    from models import Subject
    from models.encoder import LastHidden
    from use_tables import of_lengths

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, vocab_size=20_000)
    encoder = LastHidden(transformers.BertModel(config, add_pooling_layer=False)).eval().requires_grad_(False)
    inputs = torch.randint(0, 100, (1, 128)), torch.ones(1, 128, dtype=torch.long)
    bench = lengths.Bench(0.02, without=[lengths.OPENVINO])
    bench.subject = lambda batch: Subject("tiny", "random weights", encoder, inputs, batch, 128)
    monkeypatch.setattr(lengths, "RANDOM", "4 random")
    assert len(lengths.sizes("4 random")) == 4 and lengths.sizes("8x16") == [(8, 16)]
    records = [bench(cell) for cell in lengths.cells(["1x8", "8x16"], ["float32"], [1])]
    monkeypatch.setattr(lengths, "SIZES", ("4 random",))
    records += [bench(cell) for cell in lengths.cells(["4 random"], ["float32"], [1])]
    for record in records:
        assert set(record.timings) >= {lengths.EAGER, lengths.ORT, *lengths.OURS}
        assert set(dict(record.meta["missing"])) == {lengths.OPENVINO}
    assert len(bench.compiled) == 2
    lengths.show(records, Console(width=200))
    assert "8x16" in capsys.readouterr().out and "| 4 random |" in of_lengths(records)
    with pytest.raises(DataError, match="no cell has the size '0x0'"):
        lengths.cells(["0x0"], ["float32"], [1])


@pytest.mark.long
def test_provider_times_onnx_runtime_with_and_without_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    from cases import provider
    from models import Subject
    from models.encoder import LastHidden

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, vocab_size=20_000)
    encoder = LastHidden(transformers.BertModel(config, add_pooling_layer=False)).eval().requires_grad_(False)
    inputs = torch.randint(0, 100, (1, 128)), torch.ones(1, 128, dtype=torch.long)
    bench = provider.Bench(0.02, tmp_path)
    bench.subject = lambda batch: Subject("tiny", "random weights", encoder, inputs, batch, 128)
    records = [bench(cell) for cell in provider.cells(["torch"], [1])]
    for record in records:
        assert set(record.timings) >= {provider.CPU, provider.OURS}
        assert float(str(record.meta["error"])) < 1e-5
        assert bool(record.meta["by_c"]) == (record.meta["batch"] == 1 and shutil.which("cc") is not None)
    provider.show(records, Console(width=200))
    assert "torch; 8 x 128" in capsys.readouterr().out
    with pytest.raises(DataError, match="there is no such exporter"):
        provider.cells(["nobody"], [1])
