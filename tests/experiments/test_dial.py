"""The dial: rows are pruned as they are called and go on where they stopped; the page sets them beside the line."""

from dataclasses import replace

import pytest
import torch

import twofour
from tests.experiments.toys import toy
from twofour import masks


@pytest.fixture
def turning(here, monkeypatch):
    """A dial of toy data, its rows in a folder of the test."""
    import dial
    import dial_command
    import run

    monkeypatch.setitem(dial.DIALS, "toy", dial.Dial("toy", lambda task: task.x[:48], "48 points"))
    monkeypatch.setitem(dial_command.TASKS, "toy", toy)
    return lambda only="*": dial_command.Turning("toy", only.split(","), True, run.dense_model)


def test_rows_are_pruned_as_they_are_called_and_go_on(turning, monkeypatch):
    import dial

    said = list(turning("dense,auto: 2:4,auto: 2:4+25%").accuracy())
    assert [line.partition(": ")[0] for line in said] == ["dense", "auto", "auto"]
    rows = turning().rows.rows
    assert rows["dense", 0].density == 1 and rows["dense", 0].away == 0 and rows["auto: 2:4", 0].density == 0.5
    assert 0 < rows["auto: 2:4+25%", 0].away < rows["auto: 2:4", 0].away
    assert rows["auto: 2:4+25%", 0].density == 0.625
    monkeypatch.setattr(dial, "measured", lambda *given: pytest.fail("a row is measured again"))
    assert len(list(turning("dense,auto: 2:4,auto: 2:4+25%").accuracy())) == 0


def test_a_kept_model_is_the_one_that_was_scored_and_can_be_made_again(turning):
    import dial

    one = turning()
    row = dial.measured(one.task, one.fresh, "auto", "2:4+25%")
    kept = dial.again(one.task, one.fresh, row)
    dial.path(one.task, row).unlink()
    made = dial.again(one.task, one.fresh, row)
    with torch.inference_mode():
        assert one.task.evaluate(kept) == row.value and torch.equal(kept(one.task.x), made(one.task.x))
    assert {mask.pattern.name for mask in masks.of(kept).values()} == {"2:4+25%"} and twofour.check(kept).ok


def test_a_mixed_recipe_wants_times_and_stays_within_them(turning, monkeypatch):
    import typer

    import dial
    import dial_command

    one = turning()
    with pytest.raises(typer.BadParameter, match="--stage layers first"):
        list(one.mixed())
    (said,) = one.layers()
    assert said.startswith("auto: the layers take ")
    costs = {"dense": 2.0, "2:4": 1.0, "2:4+12.5%": 1.3, "2:4+25%": 1.45, "2:4+50%": 2.0}
    found = dial.sensitivities(one.task, one.fresh(), "auto")
    assert found.measured == "task" and found.timing
    priced = _priced(found, costs)  # what a machine measures is its own
    monkeypatch.setattr(dial, "sensitivities", lambda *given: priced)
    monkeypatch.setattr(dial_command.dials, "SHARES", (50,))
    (said,) = one.mixed()
    row = one.rows.rows["auto: mixed 50 %", 0]
    assert said.startswith("auto: mixed 50 %: ") and set(row.recipe) == {"0"}
    assert row.recipe["0"] in ("2:4", "2:4+12.5%", "2:4+25%") and costs[row.recipe["0"]] <= 1.5


def _priced(found, costs):
    layers = [
        replace(layer, candidates=tuple(replace(entry, ms=costs[entry.pattern]) for entry in layer.candidates))
        for layer in found.layers
    ]
    return replace(found, layers=tuple(layers))


def test_models_are_timed_in_turns(turning, monkeypatch):
    import dial_times

    monkeypatch.setattr(dial_times, "ROUNDS", 2)
    list(turning("dense,auto: 2:4").accuracy())
    assert list(turning().times(True)) == ["dense: compiled", "auto: 2:4: compiled"]
    assert len(list(turning().times(False))) == 2
    rows = turning().clocked.rows
    assert {key for key, _ in rows} == {"dense", "auto: 2:4"}
    for row in rows.values():
        assert 0 < row.lower <= row.ms <= row.upper and row.samples == 2 and sum(row.operations.values()) == 2
    assert len(list(turning("dense").times(False))) == 1
    assert {key for key, _ in turning().clocked.rows} == {"dense"}  # what another run took stands beside no row


def test_the_page_sets_rows_beside_the_straight_line(here, monkeypatch):
    import dial
    import dial_page
    from records import Clocked, Records, Turned

    monkeypatch.setattr(
        dial_page, "DIALS", {"toy": dial.Dial("toy", lambda task: None, "48 points", ("auto", "wanda"))}
    )
    monkeypatch.setattr(dial_page, "TASKS", {"toy": type(toy())})
    metric = {"name": "accuracy", "unit": "%", "higher": True, "held_out": 256, "of": "points"}
    rows, times = Records("dial-toy", metric, True, Turned), Records("dial-toy-times", {}, True, Clocked)
    figures = {  # value, distance of the answers, milliseconds
        "dense": (90.0, 0.0, 3.0),
        "auto: 2:4": (89.9, 0.2, 2.0),
        "auto: 2:4+25%": (89.95, 0.15, 2.5),
        "wanda: 2:4": (80.0, 0.4, 2.0),
        "wanda: 2:4+25%": (86.0, 0.3, 2.5),
        "wanda: mixed 50 %": (83.0, 0.3, 2.4),
    }
    assert "Not measured yet: `python experiments/run.py dial toy --record`." in _sections(dial_page, here)
    for key, (value, away, ms) in figures.items():
        rows.add(Turned(key, 0, value, away, 0.5, 1.0, "abc", {"0": "2:4"} if "mixed" in key else {}))
        times.add(Clocked(key, 0, ms, ms, ms, 9, 1.0, "abc", {"nm_matmul": 3, "dense_matmul": 1}))
    text = _sections(dial_page, here)
    assert "| wanda: 2:4+25% | 86.00 | 0.3000 | 50 % | 3 of 4 | 2.50 | 60 % | 25 % | 50 % |" in text
    assert "| auto: 2:4+25% | 89.95 | 0.1500 | 50 % | 3 of 4 | 2.50 |  | 25 % | 50 % |" in text  # 0.1 is no loss
    assert "wanda: 2:4 loses 10.00 (standard error at most 3.42). By the task the curve lies partly above" in text
    assert "line: mixed 50 % -10, 2:4+25% +10. By the answers the curve lies below the straight line: " in text
    assert "auto: 2:4 loses 0.10 (standard error at most 2.80), which chance can make. It is where dense is: " in text
    assert "By the answers the curve lies below the straight line: 2:4+25% -25." in text and "-0" not in text
    assert "Not measured yet: auto: 2:4+12.5%, auto: 2:4+50%, auto: mixed 25 %, " in text
    assert "pruned by twofour at abc, timed at abc." in text
    assert text.count("| dense | 90.00") == 1 and (here / "figures" / "dial.svg").exists()


@pytest.mark.parametrize("timed", [{"dense": 3.0}, {"auto: 2:4": 3.0}, {"dense": 3.0, "auto: 2:4": 3.0}])
def test_the_page_has_no_curve_where_nothing_can_be_given_up(timed, here, monkeypatch):
    import dial
    import dial_page
    from records import Clocked, Records, Turned

    monkeypatch.setattr(dial_page, "DIALS", {"toy": dial.Dial("toy", lambda task: None, "48 points", ("auto",))})
    monkeypatch.setattr(dial_page, "TASKS", {"toy": type(toy())})
    metric = {"name": "accuracy", "unit": "%", "higher": True, "held_out": 256, "of": "points"}
    rows, times = Records("dial-toy", metric, True, Turned), Records("dial-toy-times", {}, True, Clocked)
    for key, away in (("dense", 0.0), ("auto: 2:4", 0.2)):
        rows.add(Turned(key, 0, 90.0, away, 0.5, 1.0, "abc", {}))
    for key, ms in timed.items():
        times.add(Clocked(key, 0, ms, ms, ms, 9, 1.0, "abc", {"nm_matmul": 3}))
    assert "No curve: 2:4 and dense are not both timed, or 2:4 takes no less time." in _sections(dial_page, here)


def _sections(dial_page, here):
    return "\n".join(dial_page.sections(here / "records", here / "figures"))
