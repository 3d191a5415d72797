"""What a long step says of itself: lines at a bounded rate in a log, bars on a terminal, nothing where it is short."""

import itertools
import re
import time
from collections.abc import Iterator

import pytest

import twofour
from twofour import progress
from twofour.progress import Lines, Progress


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lines twenty times a second, as if a day were over since the last."""
    monkeypatch.setattr(progress, "EVERY", 0.05)
    monkeypatch.setattr(Lines, "_ended", float("-inf"))
    yield
    Lines._since = 0.0


def until(condition, seconds: float = 30.0) -> bool:
    """Wait for another thread; a busy machine may take its time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_line_says_what_is_done_and_what_is_left() -> None:
    lines = Lines("training sparse, steps", 400, 100)
    lines._began = 0.0
    lines.move(200, what="loss 0.5")
    assert lines.text(90.0) == "training sparse, steps: 200 of 400, loss 0.5, 1 min 30 s so far, about 3 min 0 s left"
    lines.begin("reading")
    lines._began = 0.0
    assert lines.text(7265.0) == "reading, 2 h 1 min so far"


def test_a_long_step_writes_lines_where_standard_error_is_a_file(often: None, capsys: pytest.CaptureFixture) -> None:
    said: list[str] = []
    with Progress() as shown:
        shown.begin("pruning", 10)
        shown.advance()
        assert until(lambda: bool(said.append(capsys.readouterr().err) or len("".join(said).splitlines()) >= 2))
    first, *_ = "".join(said).splitlines()
    assert first.startswith("pruning: 1 of 10, 0 s so far")
    capsys.readouterr()
    time.sleep(0.12)
    assert not capsys.readouterr().err, "it ends with its step"


def test_steps_inside_steps_share_the_rate(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float]] = []
    monkeypatch.setattr(Lines, "text", lambda self, now: str(written.append((self._title, now))))
    with Progress() as around, Progress(), Progress() as inside:
        around.begin("around")
        inside.begin("inside")
        assert until(lambda: len(written) >= 5)
    assert all(later - earlier >= 0.05 for (_, earlier), (_, later) in itertools.pairwise(written))
    assert {title for title, _ in written} <= {"inside", "working"}, "the innermost speaks"


def test_the_silence_of_short_steps_adds_up(often: None, capsys: pytest.CaptureFixture) -> None:
    said: list[str] = []

    def short_step() -> bool:
        with Progress() as shown:
            shown.begin("a part")
            time.sleep(0.01)
        said.append(capsys.readouterr().err)
        return any("a part" in text for text in said)

    assert until(short_step)


def test_a_short_step_writes_nothing(capsys: pytest.CaptureFixture) -> None:
    with Progress() as shown:
        shown.begin("pruning", 10)
        shown.move(3, 10, "a layer")
    assert capsys.readouterr() == ("", "")


def test_what_is_not_shown_starts_nothing(often: None, capsys: pytest.CaptureFixture) -> None:
    with Progress(shown=False) as shown:
        shown.begin("pruning", 10)
        shown.advance("a layer")
        time.sleep(0.12)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(stays=True) as shown:
        shown.begin("pruning", 10)
        shown.move(3, what="[a] layer")
    said = capsys.readouterr().err
    assert "pruning" in said and "3/10" in said and "[a] layer" in said


def test_training_in_a_log_says_how_far_it_is(often: None, capsys: pytest.CaptureFixture) -> None:
    import torch
    from torch import nn

    model, batch = nn.Linear(16, 16), (torch.randn(4, 16), torch.randn(4, 16))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return nn.functional.mse_loss(output, target)

    twofour.prune(model, "2:4")
    twofour.finetune(model, [batch] * 100, loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.01), epochs=1)
    assert re.search(r"^training sparse, steps: \d+ of 100, loss \d", capsys.readouterr().err, re.MULTILINE)
