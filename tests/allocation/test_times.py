"""Measured times beside the sensitivities, and the page that shows both."""

import sys

import pytest
import torch
from torch import nn

from twofour import masks
from twofour.allocation import PATTERNS, Budget, allocate, plot, sensitivity, timed, uniform
from twofour.errors import CompileError, MeasureError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def measured(x, times_cache):
    """Sensitivities with times, of untied layers, of tied ones, and of patterns without a sparse kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOFOUR_CACHE", str(times_cache))
        models = {name: network() for name in ("plain", "tied", "dense")}
        models["tied"][2].weight = models["tied"][0].weight
        patterns = {"dense": ("dense", "4:8")}
        before = [parameter.clone() for parameter in network().parameters()]
        found = {
            name: timed(sensitivity(model, x, patterns.get(name, PATTERNS), progress=False), model, x)
            for name, model in models.items()
        }
    plain = models["plain"]
    assert all(torch.equal(a, b) for a, b in zip(before, plain.parameters(), strict=True)), "it stays as it was"
    assert all(type(part) in (nn.Linear, nn.ReLU) and part.training for part in plain) and not masks.of(plain)
    return found


@pytest.fixture
def found(measured):
    return measured["plain"]


def test_legal_patterns_take_the_faster_time_and_others_the_dense_one(found):
    assert found.timing
    for entry in found.layers:
        ms = {candidate.pattern: candidate.ms for candidate in entry.candidates}
        assert ms["2:4"] == ms["1:4"] <= ms["dense"] == ms["4:8"] and ms["2:4"] > 0
    same = uniform(found, "2:4")
    got = allocate(found, Budget(latency=same.latency))
    assert got.latency <= same.latency * (1 + 1e-9) and got.loss <= same.loss


def test_tied_layers_take_the_time_of_both(measured):
    (both,) = measured["tied"].layers
    alone, _ = measured["plain"].layers
    assert both.layers == ("0", "2") and both.values == alone.values
    assert both.find("2:4").ms <= both.find("dense").ms


def test_layers_without_a_legal_pattern_are_timed_dense(measured):
    assert all(entry.find("4:8").ms == entry.find("dense").ms > 0 for entry in measured["dense"].layers)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_page_shows_layers_patterns_and_the_choice(found, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    chosen = allocate(found, Budget(density=0.5))
    path = plot(found, tmp_path / f"page.{suffix}", chosen=chosen)
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    for word in ("2:4 everywhere", "chosen: density at most 0.5", "1:4", "fraction of values kept"):
        assert word in text
    assert plot(found, path, chosen=chosen).read_bytes() == content, "the same records draw the same file"
    by_time = plot(found, path, chosen=allocate(found, Budget(latency=1e3))).read_text()
    assert "measured ms of these layers" in by_time


def test_drawing_without_matplotlib_names_the_remedy(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MeasureError) as caught:
        plot(found, tmp_path / "page.svg")
    assert str(caught.value).startswith("drawing needs matplotlib, which is not installed")
    assert 'pip install "twofour[figures]"' in str(caught.value)


def test_a_page_that_cannot_be_drawn_says_why(found, tmp_path):
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    (tmp_path / "file").write_text("")
    for name in ("page.txt", "file/page.svg"):
        with pytest.raises(MeasureError, match=r"cannot be drawn\n  got     .*\n  wanted  a .svg, .png or .pdf"):
            plot(found, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_times_are_those_of_the_computing_type(x, times_cache, monkeypatch):
    """int4 has no kernels for dense groups: there they take the dense time."""
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    model = nn.Sequential(nn.Linear(64, 64))
    found = sensitivity(model, x, ("dense", "2:4+25%"), progress=False)
    for dtype in ("int8", torch.bfloat16, "int4"):
        (layer,), timing = (priced := timed(found, model, x, dtype=dtype)).layers, priced.timing
        dense, dial = (candidate.ms for candidate in layer.candidates)
        assert timing.endswith(f", {str(dtype).removeprefix('torch.')}") and 0 < dial <= dense
        assert dtype != "int4" or dial == dense
    with pytest.raises(CompileError, match="dtype is not known"):
        timed(found, model, x, dtype="float12")
