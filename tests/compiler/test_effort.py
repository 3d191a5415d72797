"""How much compile measures, what it says of what it left out, and what it says it won."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import twofour
from tests.report.runs import timing
from twofour.compiler import against_dense, compile
from twofour.compiler.choose import DEFAULT_TOKENS, QUICK_TOKENS
from twofour.errors import CompileError
from twofour.measure import Record, chooser
from twofour.measure.effort import FULL, QUICK, effort, measuring

from .small import TOKENS, mlp

X = torch.randn(3, 64)


def test_quick_measures_fewer_counts_and_says_which_it_left_out(no_measuring: None) -> None:
    masked = twofour.prune(mlp(), "2:4")
    full, quick = twofour.compile(masked, X), twofour.compile(masked, X, effort="quick")
    torch.testing.assert_close(quick(X), full(X))
    assert full.plan.tokens == DEFAULT_TOKENS and set(full.plan.layers[0].times) == {3, *DEFAULT_TOKENS}
    assert quick.plan.tokens == QUICK_TOKENS and set(quick.plan.layers[0].times) == {3, *QUICK_TOKENS}
    said = '; 8, 128, 512 tokens were not measured and take the kernel of the nearest count that was; effort="full"'
    assert said in str(quick.plan) and "effort" not in str(full.plan)
    asked = twofour.compile(masked, X, effort="quick", tokens=(2, 64))
    assert set(asked.plan.layers[0].times) == {2, 3, 64} and "tokens were not measured" not in str(asked.plan)
    on_example = twofour.compile(masked, torch.randn(128, 64), effort="quick")
    assert "; 8, 512 tokens were not measured" in str(on_example.plan)


def test_the_effort_is_that_of_every_race(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def milliseconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        seen.append(effort())
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(against_dense, "milliseconds", milliseconds)
    for name in ("quick", "full"):
        twofour.compile(twofour.prune(mlp(), "2:4"), X, tokens=TOKENS, effort=name)
    assert seen == [QUICK, FULL] and effort() is FULL


def test_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compare(calls: Mapping[str, object], *, repeats: int, seconds: float) -> Record:
        seen.append((repeats, seconds))
        return Record({name: timing(1.0) for name in calls}, ())

    monkeypatch.setattr(chooser, "compare_on_gpu", compare)
    for how in (FULL, QUICK):
        with measuring(how):
            chooser.race({"a": lambda: None}, seconds=0.5, gpu=True)
    assert seen == [(7, 0.5), (QUICK.rounds, 0.5 * QUICK.box)]


def test_a_quick_file_asks_for_no_more_when_it_is_loaded(no_measuring: None, tmp_path: Path) -> None:
    masked = twofour.prune(mlp(), "2:4")
    twofour.save(twofour.compile(masked, X, effort="quick"), tmp_path / "model.safetensors")
    assert twofour.load(tmp_path / "model.safetensors", mlp()).plan.tokens == QUICK_TOKENS


@pytest.mark.parametrize("wrong", ["fast", None, 3, ["quick"]])
def test_an_unknown_effort_is_refused(wrong: object) -> None:
    with pytest.raises(CompileError, match="the effort is not known") as failure:
        twofour.compile(mlp(), X, effort=wrong)  # type: ignore[arg-type]
    assert '"full" or "quick"' in str(failure.value)


def test_without_an_example_the_log_and_the_plan_say_what_is_missing(
    no_measuring: None, caplog: pytest.LogCaptureFixture
) -> None:
    masked = twofour.prune(mlp(), "2:4")
    caplog.clear()  # without data magnitude prunes, with a word
    with caplog.at_level(logging.WARNING, "twofour"):
        fast = twofour.compile(masked, tokens=TOKENS)
    (said,) = [message for message in caplog.messages if "busy" not in message]
    assert said.startswith("without an example there is no graph") and "compile(model, example)" in said
    assert said in str(fast.plan)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "twofour"):
        twofour.compile(masked, tokens=TOKENS, graph=False)
        twofour.compile(masked, X, tokens=TOKENS)
    assert not [message for message in caplog.messages if "busy" not in message]


def test_what_was_won_heads_the_plan_and_is_logged(
    no_measuring: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(against_dense, "milliseconds", lambda calls: {"dense": 3.0, "compiled": 2.0})
    with caplog.at_level(logging.INFO, "twofour"):
        fast = twofour.compile(twofour.prune(mlp(), "2:4"), X, tokens=TOKENS)
    won = "one call on the example: dense 3.000 ms, compiled 2.000 ms, 1.50 times as fast (graph, "
    assert str(fast.plan).startswith(won) and fast.plan.won in caplog.messages
    assert "dense is the model as it was given, in eager torch" in fast.plan.won
    fast = twofour.compile(twofour.quantize(mlp(), "w4", "a8"), X, tokens=TOKENS)
    assert "dense is the rounded model in eager torch; the float model is not here" in fast.plan.won


def test_progress_is_told_of_each_layer_and_of_the_whole_model(
    no_measuring: None, capsys: pytest.CaptureFixture
) -> None:
    masked, told = twofour.prune(mlp(), "2:4"), []
    compile(masked, X, tokens=TOKENS, progress=lambda *step: told.append(step))
    assert told == [(0, 3, "0"), (1, 3, "2"), (2, 3, "3"), (3, 3, "the whole model")]
    compile(masked, X, tokens=TOKENS, progress=False)
    compile(masked, X, tokens=TOKENS)
    assert capsys.readouterr() == ("", ""), "a short compilation writes nothing into a log"


def test_progress_is_a_bar_on_a_terminal(
    no_measuring: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    compile(twofour.prune(mlp(), "2:4"), X, tokens=TOKENS)
    assert "measuring the kernels" in capsys.readouterr().err
