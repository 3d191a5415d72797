"""What an executor records: which calls, for how long, in which memory, and what it leaves to Python."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graph.executor.straight import PRODUCT, SCALE, SHIFT, WIDTH, Straight, agree, heads, product, same, simple
from twofour.graph import Calls, Executor
from twofour.graph.executor.kept import KEPT, MOST_COUNTED, Recordings
from twofour.kernels.norm import norm


def test_sizes_are_recorded_when_they_come_again() -> None:
    executor, calls = Executor(Straight(lambda x: ran.append(1) or simple(x), a=SCALE)), []  # type: ignore[arg-type]
    ran: list[int] = calls
    for rows, times in ((3, 1), (5, 2), (3, 3), (5, 4), (3, 4), (5, 4)):
        executor(torch.randn(rows, WIDTH))
        assert len(ran) == times


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x * x.sum().item(),), "`item` asks for values of a tensor"),
        (lambda x: (x if x.sum() > 0 else -x,), "`__bool__` asks for values of a tensor"),
        (lambda x: (x.add_(1),), "`add_` writes into an input or a constant"),
        (lambda x: (x + SHIFT,), "a tensor comes from outside of the graph"),
        (lambda x: (x[:0] + 1,), "a tensor is empty, not on the CPU, or negated when it is read"),
    ],
)
def test_what_cannot_be_recorded_runs_in_python_and_says_why(function: Any, reason: str) -> None:
    executor, x = Executor(Straight(function)), torch.randn(3, WIDTH)  # type: ignore[arg-type]
    assert executor.prepare([x]).reason == reason
    assert same(executor(x.clone())[0], function(x.clone())[0])


@pytest.mark.parametrize("later", [lambda y: y, lambda y: y + 1, lambda y: norm(y, None, None, 1e-5)])
def test_memory_written_by_what_nobody_saw_is_not_replayed(later: Any) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        with torch._C.DisableTorchFunction():
            y.copy_(x)
        return (later(y),)

    reason = Executor(Straight(run)).prepare([torch.randn(3, WIDTH)]).reason  # type: ignore[arg-type]
    assert reason == "memory is read that was written by a call that was not seen"


def test_a_size_that_depends_on_values_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    executor = Executor(Straight(lambda x: (torch.nonzero(x > 0),)))  # type: ignore[arg-type]
    x = torch.ones(3, WIDTH)
    assert not executor.prepare([x]).reason
    x[0] = -1
    with caplog.at_level("INFO", "twofour.graph"):
        assert executor(x)[0].shape == (2 * WIDTH, 2)
    assert "another size" in caplog.text


def test_quantized_tensors_between_functions_of_torch_are_replayed() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.quantize_per_tensor(norm(x, None, None, 1e-5), 0.05, 128, torch.quint8)
        return (norm(whole.dequantize(), SCALE, SHIFT, 1e-5),)

    executor, x = Executor(Straight(run, a=SCALE, b=SHIFT)), torch.randn(3, WIDTH)  # type: ignore[arg-type]
    with warnings.catch_warnings():  # torch says once that they are deprecated
        warnings.simplefilter("ignore")
        calls = executor.prepare([x])
    assert not calls.reason and calls.native == 2 and calls.torch == 2
    agree(executor, torch.randn(3, WIDTH))


@torch.inference_mode()
def test_sizes_that_never_come_again_push_out_no_recording() -> None:
    executor, x = Executor(Straight(simple, a=SCALE)), torch.randn(2, WIDTH)  # type: ignore[arg-type]
    agree(executor, x)
    for rows in range(3, 36 + KEPT):
        executor(torch.randn(rows, WIDTH))
    assert executor.met([x]) is not None and len(executor._recordings) == 1
    for rows in range(3, 36 + KEPT):
        executor.prepare([torch.randn(rows, WIDTH)])
    assert executor.met([x]) is None and len(executor._recordings) == KEPT
    assert all(len(arena._values) <= KEPT for arena in executor._arenas)


@torch.inference_mode()
def test_recordings_of_given_up_tensors_go() -> None:
    executor = Executor(Straight(simple, a=SCALE))  # type: ignore[arg-type]
    few, many = torch.randn(2, WIDTH), torch.randn(600, WIDTH)
    for x in (few, many):
        executor.prepare([x])
    replays = executor._recordings.replays()
    executor.forget({id(few)})
    assert len(executor._recordings) == 2
    replays[1].values.append(gone := torch.ones(3))
    executor.forget({id(gone)})
    assert executor.met([few]) is not None and executor.met([many]) is None
    assert executor._arenas == []
    agree(executor, many)


def test_more_kinds_of_calls_than_are_kept_are_not_recorded_again_and_again() -> None:
    recordings, recorded, rounds = Recordings(), 0, 40
    for _ in range(rounds):
        for key in range(KEPT + 36):  # in turns: what is dropped as the oldest would come next
            if recordings.used(key) is None and recordings.is_due(key):
                recorded += 1
                recordings.put(key, Calls())
    assert len(recordings) == KEPT and recorded < KEPT + 36 * (2 + 2 * rounds / MOST_COUNTED)
    for _ in range(MOST_COUNTED + 2):  # a new kind that comes often gets a place, and keeps it
        if recordings.used("new") is None and recordings.is_due("new"):
            recordings.put("new", Calls())
    assert recordings.get("new") is not None


@torch.inference_mode()
def test_two_threads_and_one_have_recordings_of_their_own() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (product(norm(product(x), SCALE, SHIFT, 1e-5)), heads(x))

    executor, x = Executor(Straight(run, a=SCALE, b=SHIFT, c=PRODUCT)), torch.randn(512, WIDTH)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            assert (executor.met([x]) is None) == (len(executor._recordings) < count)
            agree(executor, x)
    finally:
        torch.set_num_threads(before)


def test_weights_that_recordings_alone_keep_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {}

    def run(x: Tensor) -> tuple[Tensor, ...]:
        if held.get("size") != len(x):  # as oneDNN's weight for another size
            held.update(size=len(x), weight=torch.ones(1000))
        return (x + held["weight"],)

    monkeypatch.setattr("twofour.graph.executor.MOST_WEIGHTS", 9000)
    executor = Executor(Straight(run, a=held))  # type: ignore[arg-type]
    for size in range(1, 9):
        for _ in range(3):
            assert torch.equal(executor(torch.ones(size, 1000))[0], torch.full((size, 1000), 2.0))
    assert 1 <= len(executor._recordings.replays()) <= 4
