"""What a long step says of itself: lines at a bounded rate in a log, bars on a terminal, nothing where it is short."""

import itertools
import re
import threading
import time
from collections.abc import Iterator

import pytest

import twofour
from twofour import progress
from twofour.progress import Lines, Progress, Work


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


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_a_line_says_what_is_done_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    lines = Lines("training sparse, steps", 400, 100)
    assert lines.text(clock.now + 7) == "training sparse, steps: 100 of 400, 7 s so far", "nothing is known yet"
    clock.now += 90.0
    lines.move(200, what="loss 0.5")
    said = lines.text(clock.now)
    assert said == "training sparse, steps: 200 of 400, loss 0.5, 1 min 30 s so far, about 3 min 0 s left"
    clock.now += 30.0
    assert lines.text(clock.now).endswith("2 min 0 s so far, about 2 min 30 s left"), "it counts down inside a part"
    lines.move(total=300)
    assert lines.text(clock.now).endswith("about 1 min 0 s left"), "it ends sooner than it was expected to"
    lines.begin("reading")
    assert lines.text(clock.now + 7265.0) == "reading, 2 h 1 min so far"


def test_the_time_left_is_steady_beside_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of an hour, whose parts take three times as long for two minutes of it."""
    clock = Clock(monkeypatch)
    lines, left, done = Lines("training", 3600), [], 0
    while done < 3600:
        clock.now += 3.0 if 1200 <= done < 1240 else 1.0
        done += 1
        lines.move(done)
        left.append(lines.left())
    assert all(abs(after - before) < 60 for before, after in itertools.pairwise(left[60:-1]))
    assert left[1199] == pytest.approx(2400) and 2360 < left[1239] < 1.4 * 2360
    assert left[2400] == pytest.approx(1199, rel=0.1), "and forgets him"


def test_work_of_several_kinds_goes_on_at_the_pace_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    work = Work({"passes": 10.0, "solving": 40.0})
    assert work.left() is None
    with work.doing("passes", 5.0):
        clock.now += 10.0
    assert work.left() == pytest.approx(5 * 2 + 40 * 2), "what has not begun, at the pace of the others"
    work.done("solving", 10.0, 5.0)
    assert work.left() == pytest.approx(5 * 2 + 30 * 0.5)
    clock.now += 4.0
    assert work.left() == pytest.approx(21)
    clock.now += 100.0
    assert work.left() == pytest.approx(15), "no further than the longest part"
    work.skip("solving", 30.0)
    work.done("passes", 99.0, 1.0)
    assert work.left() == 0.0


def test_another_thread_may_ask_while_a_kind_of_work_begins() -> None:
    walking, begun, errors = threading.Event(), threading.Event(), []

    class Slow(str):
        """A kind at which the thread that asks stops in the middle of its walk."""

        def __hash__(self) -> int:
            if threading.current_thread() is asking:
                walking.set()
                begun.wait(0.05)
            return str.__hash__(self)

    def ask() -> None:
        try:
            work.left()
        except RuntimeError as error:
            errors.append(error)

    asking, work = threading.Thread(target=ask), Work({})
    for kind in ("passes", "outputs"):
        work.done(Slow(kind), 1.0, 1.0)
    asking.start()
    assert walking.wait(30)
    work.done("solving", 1.0, 1.0)
    begun.set()
    asking.join()
    assert not errors


def test_a_step_that_goes_back_has_more_to_do_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    lines = Lines("training", 100)
    clock.now += 10.0
    lines.move(10)
    lines.move(4)
    assert lines.left() == pytest.approx(96)
    clock.now += 6.0
    lines.move(0)
    assert lines.left() == pytest.approx(168, rel=0.05), "16 s brought 10: what brought nothing counts"


def test_a_step_that_ended_counts_down_no_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress() as shown:
        shown.begin("one", 10)
        shown.advance()
        shown.begin("other", 10, left=lambda: 61.0)
        ended, goes_on = Progress._live.tasks  # pyright: ignore[reportOptionalMemberAccess]
        assert ended.fields["left"] is None and goes_on.fields["left"]() == 61.0
        render = Progress._live.columns[4].render  # pyright: ignore
        assert [str(render(task)) for task in (ended, goes_on)] == ["-:--:--", "0:01:01"]
        shown.move(10)
        assert str(render(goes_on)) == "0:00:00"


def test_prune_says_what_it_does_and_nothing_where_it_is_not_asked(
    often: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import torch
    from torch import nn

    said: list[str] = []
    begin = Progress.begin
    monkeypatch.setattr(Progress, "begin", lambda self, *a, **options: (said.append(a[0]), begin(self, *a, **options)))
    monkeypatch.setattr(progress, "EVERY", 0.001)
    model, data = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(160, 32)
    twofour.prune(model, "2:4", data=data, samples=160, permute=True, progress=False)
    assert capsys.readouterr().err == ""
    assert [*dict.fromkeys(said)] == [
        "pruning weights",
        "ranking weights for the order of channels",
        "capturing the model for the order of channels",
        "ordering channels, groups",
        "reconstructing: looking at the order of the blocks",
        "reconstructing, steps",
    ]


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
