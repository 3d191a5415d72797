"""The commands for a GPU: what they would measure, and that without one they say so and end well."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tensor_core.test_bits import TOOLS
from twofour.measure import load
from twofour.native import gpu
from twofour.tensor_core import INSTRUCTIONS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch):
    """Import a script of benchmarks/ or experiments/, and forget its neighbours afterwards."""
    folders: list[str] = []

    def load(folder: str, name: str):
        folders.append(str(ROOT / folder))
        monkeypatch.syspath_prepend(folders[-1])
        return importlib.import_module(name)

    yield load
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(folders)):
            del sys.modules[name]


@pytest.mark.skipif(gpu.unavailable() is None, reason="there is a GPU: make bench-gpu runs there")
@pytest.mark.parametrize(
    "folder,name",
    [("benchmarks", "gpu"), *(("experiments", name) for name in ("gpu_training", "gpu_low_bits", "gpu_step"))],
)
def test_without_a_gpu_it_says_so_and_writes_nothing(
    folder: str, name: str, suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite(folder, name).main(tmp_path / "out")
    assert "not run: this machine needs an NVIDIA GPU" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_step_is_taken_apart_into_its_operators(suite, tmp_path: Path) -> None:
    suite("experiments", "gpu_step").main(tmp_path, only="resnet9", tiny=True)
    (net,) = json.loads((tmp_path / "step.json").read_text())["nets"]
    products = {"forward": 9, "input gradient": 8, "weight gradient": 9}  # the images need no gradient
    for part, times in products.items():
        assert sum(row["times"] for row in net["rows"] if row["part"] == part) == times
    assert net["operators_ms"] == pytest.approx(sum(row["ms"] for row in net["rows"])) and net["step_ms"] > 0
    assert {"norms", "elementwise", "optimiser"} < set(net["parts_ms"])


def test_the_page_of_training_steps_is_what_the_package_tells(suite) -> None:
    page = suite("experiments", "step_page")
    text = page.PAGE.read_text().split(page.START)[1].split(page.END)[0]
    found = page.estimates({"resnet9": page.NETS["resnet9"]})
    for machine, step in found["resnet9"].items():
        sdgp = step.variant("sdgp")
        cell = f"{sdgp.saved:.1%}, {sdgp.every_saved:.1%}, {step.paper_saved:.1%}"
        row = next(line for line in text.splitlines() if line.startswith(f"| {machine} | "))
        assert cell in row, "run `python experiments/step_page.py`"
    said = (page.ROOT / "docs" / "sdgp.md").read_text()
    most = [max(s.variant("sdgp").saved for s in found["resnet9"].values())]
    most += [max(s.paper_saved for s in found["resnet9"].values())]
    assert all(f"{100 * share:.1f} %" in said for share in most)
    for parts in page.measured().values():
        assert f"| {sum(parts.values()):.2f} ms, " in text


@pytest.mark.long
def test_the_whole_page_of_training_steps_is_what_the_package_tells(suite) -> None:
    page = suite("experiments", "step_page")
    rest = page.PAGE.read_text().split(page.START)[1]
    assert rest.split(page.END)[0].strip() == page.text(), "run `python experiments/step_page.py`"


def test_the_grid_has_sixty_products_of_each_type(suite) -> None:
    names = [case.name for case in suite("benchmarks", "cases.gpu_products").grid()]
    assert len(set(names)) == len(names) == 180
    for dtype in ("bfloat16", "float8", "int8"):
        assert sum(f"-{dtype}-" in name for name in names) == 60


MEASURED = {
    "grid-bfloat16-8192x8192-8192": [("dense_matmul_bf16_linear__cuda", "nm_matmul_2x4_bf16_cusparselt__cuda")],
    "bits-w1a1-4096x14336-1": [("dense_matmul_int8_scaled__cuda", "bits_matmul_planes__triton")],
    "bits-w1a2-4096x14336-1": [("dense_matmul_int8_scaled__cuda", "bits_matmul_planes__triton")],
    "compress-bfloat16-4096x4096": [
        ("copy", "canonical"),
        ("torch: prune_dense_static_sort", "cutlass and mask"),
    ],
    "compress-float32-4096x4096": [("copy", "canonical")],
    "small-bfloat16-4096x14336-1-137eecc": [("dense_matmul_bf16_linear__cuda", "nm_matmul_2x4_bf16_few__triton")],
}
"""Record -> the candidates whose times the page gives, a row each."""


def test_the_page_says_what_the_records_hold(suite) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    found = re.findall(r"^\| `([\w.-]+)` \| .* \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    wanted = []
    for name, pairs in MEASURED.items():
        (record,) = load(ROOT / "benchmarks" / "records" / "gpu" / f"{name}-h100.json")
        assert record.meta["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
        wanted += [(name, *(f"{1e6 * record.median(candidate):.1f}" for candidate in pair)) for pair in pairs]
    assert found == wanted[:-1]
    name, dense, ours = wanted[-1]
    assert f"took {ours} us" in text and f"dense product {dense} (`{name}`)" in text
    (rates,) = load(ROOT / "benchmarks" / "records" / "gpu" / "rates-h100.json")
    assert suite("benchmarks", "cases.gpu_rates").table(rates) in (ROOT / "docs" / "sparse_tensor_core.md").read_text()


@pytest.mark.parametrize(
    "name,count", [("mma.m16n8k16.bf16", 8), ("mma.m16n8k32.e4m3", 16), ("mma.sp.m16n8k32.bf16", 8)]
)
def test_what_rates_execute_is_not_less_than_they_count(name: str, count: int, suite, tmp_path: Path) -> None:
    """The assembler makes two products of 16 bits of one of e4m3, and must not make one for all sums."""
    rates = suite("benchmarks", "cases.gpu_rates")
    if name in rates.DENSE:
        arch, opcode, a, b, _ = rates.DENSE[name]
        text = rates.source(arch, opcode, a, b, 4, "")
    else:
        row = INSTRUCTIONS[name]
        opcode = row.ptx("f32", row.a.name, ordered=True)
        text = rates.source(row.arch, opcode, row.a_registers, row.b_registers, 4, ", %e0, 0")
    (tmp_path / "rate.ptx").write_text(text)
    made = [str(TOOLS / "ptxas"), "-arch", "sm_90a", str(tmp_path / "rate.ptx"), "-o", str(tmp_path / "rate.cubin")]
    assert not subprocess.run(made, capture_output=True, text=True, timeout=60, check=True).stderr
    shown = [str(TOOLS / "cuobjdump"), "-sass", str(tmp_path / "rate.cubin")]
    code = subprocess.run(shown, capture_output=True, text=True, timeout=60, check=True).stdout
    assert len(re.findall(r"\bHMMA\.", code)) >= count


@pytest.mark.skipif(gpu.unavailable(triton=True) is not None, reason=str(gpu.unavailable(triton=True)))
def test_products_of_codes_are_checked_before_they_are_timed(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    products = suite("benchmarks", "cases.gpu_products")
    names = [case.name for case in products.bits()]
    assert len(set(names)) == len(names) == 54 and "bits-w1.58a8-4096x14336-8" in names
    asked = {}
    monkeypatch.setattr(products, "compare_on_gpu", lambda calls, **options: asked.update(calls) or options["meta"])
    monkeypatch.setattr(products.gpu, "l2_bytes", lambda: 512)
    meta = products.product_of_codes("w2a2", 48, 96, 3)
    assert meta["copies"]["bits_matmul_planes__triton"] == 2 and len(asked) == 3
    for call in asked["bits_matmul_planes__triton"]:
        assert call().shape == (3, 48)


def test_blocks_of_models_run(suite) -> None:
    blocks = suite("benchmarks", "models.blocks")
    x = torch.randn(2, 5, 64)
    assert blocks.EncoderBlock(64, 4, 128)(x).shape == x.shape
    decoder = blocks.DecoderBlock(64, 4, 2, 128)
    assert decoder(x).shape == x.shape
    step = blocks.Decoding(torch.nn.ModuleList([decoder]), 7, 2)
    assert step(x[:, :1]).shape == (2, 1, 64)


def test_one_token_behind_a_cache_is_the_last_of_a_prefill(suite) -> None:
    blocks = suite("benchmarks", "models.blocks")
    decoder = blocks.DecoderBlock(64, 4, 2, 128).double()
    x = torch.randn(1, 6, 64, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watch(q, k, v, **options):
        seen.extend((k, v))
        return plain(q, k, v, **options)

    blocks.functional.scaled_dot_product_attention, kept = watch, plain
    try:
        whole = decoder(x)
        keys, values = seen[0][:, :, :-1], seen[1][:, :, :-1]
        last = decoder(x[:, -1:], keys, values)
    finally:
        blocks.functional.scaled_dot_product_attention = kept
    assert torch.allclose(last, whole[:, -1:], atol=1e-9)
