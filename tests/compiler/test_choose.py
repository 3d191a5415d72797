"""How a layer's kernels are chosen."""

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import mlp, quick
from twofour.compiler.choose import Choice, _of_codes
from twofour.compiler.layouts import WORTH_A_COPY, few_layouts, one_layout
from twofour.compiler.reasons import explain
from twofour.kernels import find
from twofour.kernels.bits_matmul import BitWeight, twos
from twofour.kernels.dense_matmul import ONEDNN, PLAIN, native_dense_rows
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.quantization import Quantization


def test_a_second_compile_measures_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.measure.cache.SETTLED", float("inf"))
    first = quick(twofour.prune(mlp(), "2:4"))
    monkeypatch.setattr("twofour.compiler.choose.race", lambda *_, **__: pytest.fail("measured again"))
    second = quick(twofour.prune(mlp(1), "2:4"))
    assert [layer.dispatch for layer in first.plan.layers] == [layer.dispatch for layer in second.plan.layers]


def test_a_layout_that_gains_too_little_is_dropped() -> None:
    rows, panels = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
    kernels = [find(rows), find(panels), find("dense_matmul_f32_linear__torch")]
    dense = kernels[2].name
    clear = {1: {rows: 1.0, panels: 2.0, dense: 2.0}, 64: {rows: 9.0, panels: 4.0, dense: 6.0}}
    assert few_layouts(kernels, clear).names == (rows, panels)
    close = {1: {rows: 1.0, panels: 1.04, dense: 2.0}, 64: {rows: 9.0, panels: 4.0, dense: 6.0}}
    assert few_layouts(kernels, close).names == (panels,)


def test_a_tie_goes_to_the_kernel_whose_calls_take_in_their_neighbours() -> None:
    ours = next(kernel for kernel in native_dense_rows() if kernel.whole_rows)
    kernels = [ours, ONEDNN, PLAIN]
    times = {count: {ours.name: 1.04, ONEDNN.name: 1.0, PLAIN.name: 1.2} for count in (8, 128)}
    assert few_layouts(kernels, times).names == (ours.name,)
    times[8][ours.name] = 1.06
    assert ours.name not in few_layouts(kernels, times).names
    sparse = find("nm_matmul_2x4_f32_rows__scalar")
    faster = {count: found | {sparse.name: 0.7} for count, found in times.items()}
    assert few_layouts([*kernels, sparse], faster).names == (sparse.name,)


def test_a_layer_that_torch_serves_best_everywhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.choose.available", lambda operation: [PLAIN])
    monkeypatch.setattr("twofour.compiler.choose.sparse_products", lambda: [])
    model = twofour.prune(mlp(), "2:4")
    fast = quick(model, torch.randn(3, 64))
    assert type(fast[0]) is nn.Linear and fast[0].weight is not model[0].weight
    assert fast.plan.layers[0].kernel == PLAIN.name
    x = torch.randn(4, 64)
    assert torch.equal(fast(x), model(x))


def test_the_reason_is_true() -> None:
    rows, panels = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
    dense = PLAIN.name

    def reason(names: dict[str, float], chosen: str, memory: str = "fast") -> str:
        return explain(Choice(DispatchTable((), (chosen,)), {4: names}, {}), 4, "", memory)

    assert reason({rows: 1.0, dense: 2.0}, rows) == "sparse is faster"
    assert "one copy fewer" in reason({rows: 1.02, dense: 1.0}, rows)
    assert "memory" in reason({rows: 1.5, dense: 1.0}, rows, "small")
    assert "1.50x its time" in reason({panels: 1.5, dense: 1.0}, dense)
    assert "gain 2.0%" in reason({panels: 1.0, dense: 1.02}, dense)


def test_small_losses_do_not_add_up() -> None:
    names = ["nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar", "nm_matmul_2x4_f32_pairs__scalar"]
    kernels = [*(find(name) for name in names), PLAIN]
    times = {1: dict(zip([*names, PLAIN.name], (1.08, 1.04, 1.0, 1.2), strict=True))}
    assert times[1][few_layouts(kernels, times).names[0]] <= WORTH_A_COPY


def test_small_memory_weighs_the_example_and_shows_its_own_time() -> None:
    rows, panels = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
    kernels = [find(rows), find(panels), PLAIN]
    times = {count: {rows: 1.0, panels: 3.0, PLAIN.name: 2.0} for count in (1, 8)}
    times[512] = {rows: 20.0, panels: 4.0, PLAIN.name: 8.0}
    assert one_layout(kernels, times, (64, 64), None).names == (rows,)
    assert one_layout(kernels, times, (64, 64), 512).names == (panels,)
    slow = Choice(DispatchTable((), (rows,)), times, {})
    assert (slow.at(512, sparse=True), slow.at(512, sparse=False)) == (20.0, 8.0)
    assert "2.50x the time of dense" in explain(slow, 512, "", "small")


@pytest.mark.parametrize("pattern", ["dense", "2:4"])
def test_small_memory_counts_the_bytes_of_codes_where_they_are_2x4(pattern: str) -> None:
    """Dense codes are the fastest, in whatever layout; of 2:4 ones the fewest bytes are kept."""
    codes = torch.full((64, 128), 4, dtype=torch.uint8)  # 4 stands for 0
    codes[:, ::4], codes[:, 1 :: 4 if pattern == "2:4" else 1] = 1, 2
    weight = BitWeight(codes, twos(3), torch.ones(64))
    kernels = _of_codes(weight, Quantization(bits=8))
    assert any(kernel.sparse for kernel in kernels) is (pattern == "2:4")
    sizes = {kernel.name: kernel.prepare(weight).nbytes for kernel in kernels}  # type: ignore[arg-type]
    largest = max(sizes, key=sizes.__getitem__)
    times = {8: {name: 1.0 if name == largest else 2.0 for name in sizes}}
    (kept,) = one_layout(kernels, times, (64, 128), None, lambda kernel: kernel.prepare(weight)).names  # type: ignore[arg-type]
    if pattern == "dense":
        assert kept == largest
    else:
        assert sizes[kept] <= 1.05 * min(sizes.values()) < sizes[largest]
