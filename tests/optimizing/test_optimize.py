"""The whole of optimize on a model of three layers: what it leaves, that it goes on, and what it refuses."""

from __future__ import annotations

import errno
import html
import importlib
import json
import logging
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import twofour
from twofour import engines, measure, optimizing
from twofour.engines.candidates import Candidates
from twofour.engines.quantized import _errors_alone
from twofour.errors import CompileError, ExportError, OptimizeError
from twofour.files import writing
from twofour.journal import Journal, name_of
from twofour.optimizing.folder import JOURNAL, RESULTS
from twofour.optimizing.samples import parted

FAST: dict[str, Any] = {"without": ("torch.compile", "OpenVINO", "ONNX Runtime"), "seconds": 0.02, "progress": False}
FAST |= {"criterion": "magnitude"}
DATA = [part for part in torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).split(8)]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10)).eval()


def test_a_run_leaves_a_model_that_loads_and_what_was_found(tmp_path: Path) -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = optimizing.optimize(model, DATA, tmp_path / "run", **FAST)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {path.name for path in outcome.folder.iterdir()} == {JOURNAL, *RESULTS}
    names = {"twofour 2:4, float32", "twofour dense, float32"}
    assert set(outcome.record.timings) == names | {"torch eager"} and outcome.record.baseline == ("torch eager",)
    assert outcome.kept in names and outcome.held and outcome.speedup > 0
    assert outcome.quality["twofour dense, float32"].value == pytest.approx(100.0, abs=1e-2)
    assert 0 < outcome.quality["twofour 2:4, float32"].value < 100
    assert outcome.reasons["OpenVINO"] == "not timed: left out as asked"
    (record,) = measure.load(outcome.folder / "results.json")
    assert record.meta["case"] == "optimize" and record.meta["kept"] == outcome.kept
    (closer,) = record.meta["quality"][1:]
    assert closer["title"] == "The samples that lost most" and closer["scores"][0]["name"] == "dense"
    by_name = {score["name"]: score for score in closer["scores"]}
    assert by_name["twofour 2:4, float32"]["value"] < outcome.quality["twofour 2:4, float32"].value
    assert closer["title"] in (outcome.folder / "report.html").read_text() and closer["title"] in outcome.measured
    masks = 2 if outcome.kept == "twofour 2:4, float32" else 0
    assert record.meta["losses"].keys() == {"0", "2"} and len(record.meta["weights"]) == masks
    assert {row["name"] for row in json.loads((outcome.folder / "plan.json").read_text())["layers"]} >= {"0", "2", "3"}
    scope: dict[str, Any] = {"model": small()}
    exec(outcome.loading, scope)
    with torch.no_grad():
        assert outcome.model is not None and torch.equal(scope["fast"](DATA[0]), outcome.model(DATA[0]))


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    step = Journal.step

    def noted(journal: Journal, name: str, make: Any) -> Any:
        steps.extend([] if name in journal.done else [name])
        return step(journal, name, make)

    monkeypatch.setattr(Journal, "step", noted)
    given = (small(), DATA, tmp_path / "run")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module = importlib.import_module("twofour.optimizing.optimize")
    with monkeypatch.context() as patch:
        patch.setattr(module, "timed", stopped)
        with pytest.raises(KeyboardInterrupt):
            optimizing.optimize(*given, **FAST)
    whole = list(steps)
    assert whole[0] == "judge the dense model" and len(whole) == 3 + 4 + 1
    steps.clear()
    outcome = optimizing.optimize(*given, **FAST)
    assert steps == [whole[-1], "finished"], "of the steps only the one that was stopped is made again"
    steps.clear()
    again = optimizing.optimize(*given, **FAST)
    assert not steps and (again.kept, again.quality, again.record.timings) == (
        outcome.kept,
        outcome.quality,
        outcome.record.timings,
    )
    with pytest.raises(OptimizeError, match="holds another run") as raised:
        optimizing.optimize(*given, within=2.0, **FAST)
    assert "the same within" in str(raised.value)
    other = small()
    nn.init.zeros_(other[0].bias)  # type: ignore[index]
    with pytest.raises(OptimizeError, match="the same weights"):
        optimizing.optimize(other, *given[1:], **FAST)
    calibrating = [*parted(given[0], DATA, 128).used]
    changed = [part + 1 if torch.equal(part, calibrating[0].inputs) else part for part in DATA]
    with pytest.raises(OptimizeError, match="the same data"):
        optimizing.optimize(given[0], changed, given[2], **FAST)


def test_a_full_disk_is_not_remembered_as_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("twofour.optimizing.optimize")
    save = module.save

    def full(model: nn.Module, file: Path) -> None:
        if "dense" in file.name:
            with writing(file, ExportError):
                raise OSError(errno.ENOSPC, "No space left on device")
        save(model, file)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save", full)
        with pytest.raises(ExportError, match="free space on the disk"):
            optimizing.optimize(small(), DATA, tmp_path / "run", **FAST)
    assert not any("dense," in step for step in json.loads((tmp_path / "run" / JOURNAL).read_text())["done"])
    assert "twofour dense, float32" in optimizing.optimize(small(), DATA, tmp_path / "run", **FAST).record.timings


def test_another_function_of_the_same_name_is_another_run() -> None:
    def function(body: str) -> Any:
        scope: dict[str, Any] = {}
        exec(f"def evaluate(model):\n    return max(x for x in {body} if x in {{'a', 'b'}})", scope)
        return scope["evaluate"]

    assert name_of(function("'ab'")) == name_of(function("'ab'")) != name_of(function("'ba'"))


def test_runtimes_own_tools_leave_logging_as_it_was() -> None:
    root = logging.getLogger()
    before = root.level
    with pytest.raises(ValueError, match="inside"), _errors_alone(None):
        assert root.level == logging.ERROR
        raise ValueError("inside")
    assert root.level == before


def test_an_answer_of_zeros_is_right_where_zeros_are_due() -> None:
    found = Candidates()
    found.add("zeros", lambda: lambda: np.zeros(3), np.zeros(3, np.float32), "float32")
    found.add("ones", lambda: lambda: np.ones(3), np.zeros(3, np.float32), "float32")
    assert found.errors == {"zeros": 0.0} and found.missing["ones"].startswith("wrong")


def test_a_runtime_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    found = Candidates()
    build = partial(engines.quantize_openvino, None, [(torch.zeros(1, 4),)], "int8")
    found.add("OpenVINO, int8", build, np.zeros(3, np.float32), "int8")
    said = found.missing["OpenVINO, int8"]
    assert said.startswith("int8 of OpenVINO is made by the package nncf") and 'pip install "twofour[peers]"' in said


def test_openvino_takes_int8_of_the_weights_alone() -> None:
    pytest.importorskip("openvino", reason="needs the extra [peers]")
    pytest.importorskip("nncf", reason="needs the extra [peers]")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(1, 64)
    subject: Any = SimpleNamespace(model=model, inputs=(x,))
    run, want = engines.openvino(subject, "int8", 1, weights=True), model(x).detach().numpy()
    error = np.linalg.norm(run() - want) / np.linalg.norm(want)
    assert 0 < error < 0.02


@pytest.mark.long
def test_within_a_limit_all_types_are_tried_and_a_function_judges(tmp_path: Path) -> None:
    def evaluate(model: nn.Module) -> float:
        """Answer 1 for what is near enough to the dense model: int8 is not."""
        error = (model(DATA[0]) - want).norm() / want.norm()
        return 1.0 if error < 1e-3 else 0.5

    with torch.no_grad():
        want = small()(DATA[0])
    outcome = optimizing.optimize(
        small(), DATA, tmp_path / "run", evaluate=evaluate, within=0.5, widths=["w8a8"], **FAST
    )
    assert len(outcome.quality) == 1 + 6 + 1 and outcome.quality["dense"].value == 100.0
    assert outcome.kept == "twofour dense, float32" and outcome.held and not outcome.sparse
    assert outcome.quality["twofour 2:4, w8a8"].value == 50.0
    assert "does not hold" in outcome.reasons["twofour 2:4, int8"]
    assert "Nothing sparse was faster at a quality that holds" in outcome.verdict
    page = (outcome.folder / "report.html").read_text()
    assert "the least that was allowed" in page and "twofour 2:4, int8" in page


@pytest.mark.long
def test_a_shrunk_model_loads_into_the_large_one_and_its_search_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = twofour.shrinking.Budget(parameters=0.8)
    module, steps, step = importlib.import_module("twofour.optimizing.optimize"), list[str](), Journal.step

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def noted(journal: Journal, name: str, make: Any) -> Any:
        steps.extend([] if name in journal.done else [name])
        return step(journal, name, make)

    with monkeypatch.context() as patch:
        patch.setattr(module, "prune", stopped)
        with pytest.raises(KeyboardInterrupt):
            optimizing.optimize(small(), DATA, tmp_path / "run", budget=budget, **FAST)
    monkeypatch.setattr(Journal, "step", noted)
    outcome = optimizing.optimize(small(), DATA, tmp_path / "run", budget=budget, **FAST)
    page = html.unescape((outcome.folder / "report.html").read_text())
    assert "Shrunk first: parameters 17,226 -> " in page
    assert "prune to 2:4" in steps and not any("loses" in name for name in steps)
    assert outcome.quality["twofour 2:4, float32"].value < 100


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"within": -1.0}, "the loss allowed is impossible"),
        ({"within": float("nan")}, "the loss allowed is impossible"),
        ({"seconds": 0.0}, "the time box is impossible"),
        ({"without": ("torch eager",)}, "no such runtime to leave out"),
        ({"pooling": "max"}, "the pooling is not known"),
        ({"widths": ["w99"]}, "the widths of a layer are not known"),
        ({"smooth": True}, "smoothed before int8 rounds them, on data"),
        ({"embeddings": "int4"}, "the type of embeddings is not known"),
        ({"batch": 9}, "no batch of the data has 9 samples"),
        ({"samples": 0}, "`samples` cannot be used"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(twofour.errors.TwofourError, match=said):
        optimizing.optimize(small(), DATA, tmp_path / "run", **{**FAST, **given})
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OptimizeError, match="holds something else") as raised:
        optimizing.optimize(small(), DATA, tmp_path, **FAST)
    assert "mine.txt" in str(raised.value) and [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_dense_runtimes_get_keyword_arguments_and_answer_alike() -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra [peers]")
    pytest.importorskip("openvino", reason="needs the extra [peers]")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, scale: torch.Tensor, *, twice: bool) -> dict[str, Any]:
            y = self.one(x) * scale
            return {"first": y, "rest": (self.two(y), y + 1 if twice else y)}

    example = {"x": torch.randn(2, 64), "scale": torch.full((1,), 2.0), "twice": True}
    record = optimizing.bench(Net().eval(), example, without=("torch.compile",), seconds=0.02)
    assert set(record.timings) == {"torch eager", "ONNX Runtime", "OpenVINO", "twofour, float32"}
    errors = record.meta["errors"]
    assert isinstance(errors, dict) and max(errors.values()) < 1e-5
    with pytest.raises(CompileError, match="the dtype is not known"):
        optimizing.bench(Net().eval(), example, "float8", without=FAST["without"])
