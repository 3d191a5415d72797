"""How a layer's kernels are chosen, and what is remembered of the times."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import mlp, quick
from twofour.compiler.cache import Cache, anchor_seconds
from twofour.compiler.choose import WORTH_A_COPY, Choice, _few_layouts, _one_layout, why
from twofour.kernels import find
from twofour.kernels.dense_matmul import PLAIN
from twofour.kernels.ladder import Ladder


def test_a_second_compile_measures_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.choose.STEADY", float("inf"))
    monkeypatch.setattr("twofour.compiler.cache.SLOWED", float("inf"))
    first = quick(twofour.prune(mlp(), "2:4"))
    monkeypatch.setattr("twofour.compiler.choose.compare", lambda *_, **__: pytest.fail("measured again"))
    second = quick(twofour.prune(mlp(1), "2:4"))
    assert [layer.ladder for layer in first.plan.layers] == [layer.ladder for layer in second.plan.layers]


def test_times_of_a_busy_machine_are_not_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twofour.compiler.choose.STEADY", -1.0)
    with caplog.at_level(logging.WARNING, logger="twofour"):
        quick(twofour.prune(nn.Linear(64, 64), "2:4"))
    assert "the machine is busy" in caplog.text
    assert not list(own_cache.glob("*.json"))


def test_times_of_an_evenly_slow_machine_are_not_kept(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    anchors, asked = iter([1.0, 1.2, 2.0, 1.1, 0.5]), list[str]()
    monkeypatch.setattr("twofour.compiler.cache.anchor_seconds", lambda: next(anchors))

    def seconds(cache: Cache, key: str, value: float) -> float:
        def measure() -> tuple[dict[str, float], bool]:
            asked.append(key)
            return {"kernel": value}, True

        return cache.times(key, ["kernel"], measure)["kernel"]

    cache = Cache.for_this_machine()
    assert seconds(cache, "first", 5.0) == 5.0  # the anchor took 1.0 before, 1.2 after
    with caplog.at_level(logging.WARNING, "twofour"):
        assert seconds(cache, "stalled", 9.0) == seconds(cache, "stalled", 5.0) == 9.0  # 2.0: it serves this process
    assert "stalled: the machine is 2.0 times slower than it was at best" in caplog.text
    cache.save()
    cache = Cache.for_this_machine()
    assert asked == ["first", "stalled"]
    assert seconds(cache, "first", 6.0) == 5.0
    assert asked == ["first", "stalled"], "times of a machine at its best are kept"
    cache._last = 1.0
    assert seconds(cache, "stalled", 5.0) == 5.0  # 1.1
    cache._last = 0.6
    assert seconds(cache, "again", 2.0) == 2.0  # 0.5: the machine was slow all the time before
    assert cache.get("stalled") == cache.get("first") == {} and cache.get("again") == {"kernel": 2.0}
    cache.save()
    assert Cache.for_this_machine().get("first") == {}
    assert Cache.for_this_machine().get("again") == {"kernel": 2.0}


def test_the_best_anchor_of_several_processes_counts(own_cache: Path) -> None:
    slow, quick_one = Cache.for_this_machine(), Cache.for_this_machine()
    quick_one.put("a", {"kernel": 1.0}, anchor=1.0)
    quick_one.save()
    slow.put("b", {"kernel": 2.0}, anchor=2.0)
    slow.save()
    both = Cache.for_this_machine()
    assert both.get("a") == {"kernel": 1.0} and both.get("b") == {}


def test_the_anchor_is_a_time() -> None:
    assert 1e-6 < anchor_seconds() < 1


@pytest.mark.parametrize("damage", ["{", '{"a": {"b": "fast"}}', "[]", '{"a": {"b": -1.0}}', "\xff"])
def test_a_damaged_cache_is_reported_and_ignored(
    own_cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = Cache.for_this_machine()
    cache.put("case", {"kernel": 1.0})
    cache.save()
    assert Cache.for_this_machine().get("case") == {"kernel": 1.0}
    (file,) = own_cache.glob("*.json")
    file.write_text(damage, encoding="latin-1")
    with caplog.at_level(logging.WARNING, logger="twofour"):
        assert Cache.for_this_machine().get("case") == {}
    assert "not readable" in caplog.text


def test_the_cache_can_be_off_or_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twofour.compiler.choose.STEADY", float("inf"))
    monkeypatch.setattr("twofour.compiler.cache.SLOWED", float("inf"))
    monkeypatch.setenv("TWOFOUR_CACHE", "off")
    quick(twofour.prune(nn.Linear(64, 64), "2:4"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, logger="twofour"):
        quick(twofour.prune(nn.Linear(64, 64), "2:4"))
    assert "could not be kept" in caplog.text


def test_a_layout_that_gains_too_little_is_dropped() -> None:
    rows, panels = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
    kernels = [find(rows), find(panels), find("dense_matmul_f32_linear__torch")]
    dense = kernels[2].name
    clear = {1: {rows: 1.0, panels: 2.0, dense: 2.0}, 64: {rows: 9.0, panels: 4.0, dense: 6.0}}
    assert _few_layouts(kernels, clear).names == (rows, panels)
    close = {1: {rows: 1.0, panels: 1.04, dense: 2.0}, 64: {rows: 9.0, panels: 4.0, dense: 6.0}}
    assert _few_layouts(kernels, close).names == (panels,)


def test_a_layer_that_torch_serves_best_everywhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.choose.available", lambda operation: [PLAIN] if "dense" in operation else [])
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
        return why(Choice(Ladder((), (chosen,)), {4: names}, {}), 4, "", memory)

    assert reason({rows: 1.0, dense: 2.0}, rows) == "sparse is faster"
    assert "one copy fewer" in reason({rows: 1.02, dense: 1.0}, rows)
    assert "memory" in reason({rows: 1.5, dense: 1.0}, rows, "small")
    assert "1.50x its time" in reason({panels: 1.5, dense: 1.0}, dense)
    assert "gain 2.0%" in reason({panels: 1.0, dense: 1.02}, dense)


def test_small_losses_do_not_add_up() -> None:
    names = ["nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar", "nm_matmul_2x4_f32_pairs__scalar"]
    kernels = [*(find(name) for name in names), PLAIN]
    times = {1: dict(zip([*names, PLAIN.name], (1.08, 1.04, 1.0, 1.2), strict=True))}
    assert times[1][_few_layouts(kernels, times).names[0]] <= WORTH_A_COPY


def test_small_memory_weighs_the_example_and_shows_its_own_time() -> None:
    rows, panels = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
    kernels = [find(rows), find(panels), PLAIN]
    times = {count: {rows: 1.0, panels: 3.0, PLAIN.name: 2.0} for count in (1, 8)}
    times[512] = {rows: 20.0, panels: 4.0, PLAIN.name: 8.0}
    assert _one_layout(kernels, times, (64, 64), None).names == (rows,)
    assert _one_layout(kernels, times, (64, 64), 512).names == (panels,)
    slow = Choice(Ladder((), (rows,)), times, {})
    assert (slow.at(512, "nm_matmul"), slow.at(512, "dense_matmul")) == (20.0, 8.0)
    assert "2.50x the time of dense" in why(slow, 512, "", "small")
