"""The experiments of low bits: rows held to whole numbers, their page, and nets that a GPU trains."""

import json

import pytest
import torch
from torch import nn

import twofour
from tests.experiments.toys import toy


@pytest.mark.parametrize("key", ["float", "w1a2", "w2a2", "w1.58a8"])
def test_a_row_of_low_bits_is_trained_and_held_to_whole_numbers(key, monkeypatch):
    import low_bit_nets
    import run
    from twofour import quantization

    task = toy()
    model = task.network(0)
    monkeypatch.setattr(run, "console", run.Console(quiet=True))
    row = low_bit_nets.measured(
        task, model, key, 0, run._evaluated(task, model), run._evaluated, lambda *given: run._trained(*given)
    )
    assert row.key == key and row.value > row.dense - 5 and row.epochs == task.epochs
    assert {held.widths.name for held in quantization.of(model).values()} == ({key} if key != "float" else set())


@pytest.mark.parametrize("wrong", ["whole numbers", "compiled kernels"])
def test_one_answer_of_other_bits_is_found_whatever_the_metric(wrong, tmp_path, monkeypatch):
    import low_bit_nets
    from twofour import quantization
    from twofour.compiler.low_bits import LinearOfCodes
    from twofour.errors import TrainingError

    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))
    task = toy()
    model = twofour.quantize(task.network(0), "w2", "a2", data=task.calibration()).eval()
    whole, call = quantization.layer.integer_product, LinearOfCodes.forward

    def bent(found):
        found.view(-1)[-1] += (len(found) > len(task.example())) * 1e-6 * found.abs().max()
        return found

    def evaluate(task, model):
        with torch.no_grad():
            model(task.x)
        return 50.0

    if wrong == "whole numbers":
        monkeypatch.setattr("twofour.quantization.layer.integer_product", lambda *given: bent(whole(*given)))
    else:
        monkeypatch.setattr(LinearOfCodes, "forward", lambda *given: bent(call(*given)), raising=False)
        monkeypatch.setattr("twofour.compiler.low_bits.race", lambda calls, **_: ({n: 1.0 for n in calls}, 0.0))
    with pytest.raises(TrainingError, match=f"{wrong} answer otherwise"):
        low_bit_nets.require_whole(task, model, evaluate, value=50.0)


def test_the_page_of_low_bits_judges_one_and_two_bits(tmp_path, monkeypatch):
    import low_bits_page
    import records
    from records import Records, Row

    def row(key: str, seed: int, value: float) -> Row:
        return Row(key, seed, 90.0, 30.0, value + seed, 1.0, 4, "none")

    metric = {"name": "accuracy", "unit": "%", "higher": True, "held_out": 100, "of": "images", "decimals": 2}
    monkeypatch.setattr(records, "TRACKED", tmp_path)
    assert low_bits_page.sections(tmp_path) == []
    kept = Records("low-bits-fashion", metric, True)
    for seed in range(2):
        for key, value in (("float", 90.0), ("w1a1", 84.0), ("w1a2", 86.0)):
            kept.add(row(key, seed, value + seed * (key == "w1a1") / 2))
        assert (
            seed or "(missed: 4.00) and above w1a1 (above it: +2.00, one seed)" in low_bits_page.sections(tmp_path)[1]
        )
    _, section = low_bits_page.sections(tmp_path)
    assert "| w1a2 | 30.00" in section and "| -4.00 ± 0.00 | 2 |" in section
    assert "(missed: 4.00) and above w1a1 (tied with it: +1.75 ± 3.18)" in section and "Not run: w2a2." in section


def test_nets_that_a_gpu_trains_are_kept_and_held_to_whole_numbers_here(here, monkeypatch, capsys):
    """The whole way on tiny nets and images, on the CPU: trained, stopped, gone on with, answered, on the page."""
    import gpu_low_bits
    import low_bits_page
    import run
    from records import Brought, load
    from tasks import convnets
    from twofour.errors import DataError

    def net(channels: int) -> nn.Module:
        convolution = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        layers = [convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def images(count: int):
        labels = torch.arange(count) % 4
        noise = torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(count))
        rows = torch.linspace(0, 40, 28).sin().view(28, 1)  # stripes along one axis, both or none
        wide, high = (labels % 2).view(-1, 1, 1, 1), (labels // 2).view(-1, 1, 1, 1)
        return noise / 2 + 2 * wide * rows + 2 * high * rows.t(), labels

    monkeypatch.setitem(convnets.NETS, "vgg", net)
    monkeypatch.setattr(convnets, "_read", lambda kind: (images(600), images(300)))
    monkeypatch.setenv("TWOFOUR_CACHE", str(here / "cache"))
    out, told = here / "gpu", dict(task="fashion", nets="vgg", seeds="0", only="float,w1a2", device="cpu")
    gpu_low_bits.main(
        out,
        **told,
        epochs=1,
        start_epochs=3,
        taught=True,
        seconds=-1,
        batch=60,
        rate=0.01,
        halves=True,
        keep=True,
        images=0,
        held=0,
    )
    assert "stopped after" in capsys.readouterr().out and not list(out.glob("*.json"))
    gpu_low_bits.main(
        out,
        **told,
        epochs=1,
        start_epochs=3,
        taught=True,
        seconds=99,
        batch=60,
        rate=0.01,
        halves=True,
        keep=False,
        images=0,
        held=0,
    )
    start = json.loads((out / "fashion-vgg-start-0.json").read_text())
    assert start["value"] > 80, "weights that autocast keeps a copy of do not learn"
    assert (out / "fashion-vgg-w1a2-0.safetensors").stat().st_size < 1 << 14
    run.low_bits_from_gpu(out, only="*", whole=100, threads=0, record=True)
    head, rows = load(here / "records" / "low-bits-fashion-vgg.json", Brought)
    low = next(row for row in rows if row.key == "w1a2")
    assert (
        len(rows) == 2
        and (low.answers, low.whole, low.taught) == (300, 100, True)
        and head["metric"]["held_out"] == 300
    )
    assert low.value == pytest.approx(low.there, abs=1)
    (section,) = low_bits_page.sections(here / "records")[1:]
    assert "has 3 epochs of the first 600 training images" in section and "1 more, taught by the float net" in section
    assert "nets of few bits: Adam, rate 0.01 at most, no weight decay" in section
    assert "All 300 answers of compiled kernels and the first 100 of 64-bit whole numbers" in section
    (out / "fashion-vgg-w2a2-0.json").write_text(
        (out / "fashion-vgg-w1a2-0.json").read_text().replace(": 60,", ": 90,")
    )
    with pytest.raises(DataError, match=r"not trained alike(.|\n)*600, 60, Adam(.|\n)*600, 90, Adam"):
        run.low_bits_from_gpu(out, only="*", whole=100, threads=0, record=True)
