from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from twofour.compiler import attention_int8, choose, fused_matmuls, low_bits, ragged
from twofour.compiler import graph as compiled_graph
from twofour.graph import Executor
from twofour.graph.executor.replay import Arena, Replay
from twofour.kernels import Kernel
from twofour.measure.cache import Cache


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


@pytest.fixture(autouse=True)
def both_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record every graph at its first call, and hold each replay against the Python program, bit for bit."""
    replayed, called = Replay.run, Executor.__call__

    def checked(executor: Executor, *leaves: Any) -> tuple[Any, ...]:
        if executor.met(leaves) is None:
            said = executor.prepare(leaves).reason
            assert "differs" not in said and "raised" not in said, said
        return called(executor, *leaves)

    def run(replay: Replay, leaves: Sequence[Any], arena: Arena) -> tuple[Any, ...] | None:
        arena.buffer.fill_(255)  # NaN
        return replayed(replay, leaves, arena)

    monkeypatch.setattr(Executor, "__call__", checked)
    monkeypatch.setattr(Replay, "run", run)


@pytest.fixture(scope="session")
def decoders() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Decoders by their names, masked and compiled, for `models` of decoders.py.

    No module holds them: what a module holds to the end, Python frees without looking for cycles, and a compiled model
    is one, so that its native objects would be told of as leaks.
    """
    held: dict[str, tuple[Any, Any]] = {}
    yield held
    held.clear()


@pytest.fixture
def own_cache(shared_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "times"))
    return tmp_path / "times"


@pytest.fixture
def graph_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the graph beat the layers, whatever a busy machine makes of a small model."""
    monkeypatch.setattr(compiled_graph, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))


@pytest.fixture
def codes_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels of codes beat floats, whatever a busy machine makes of small layers."""
    times = {"kernels": 1e-6, "floats": 2e-6}
    monkeypatch.setattr(low_bits, "race", lambda calls, **_: ({name: times[name] for name in calls}, 0.0))
    stored = Cache.times

    def of_calls(cache: Cache, key: str, names: Any, measure: Any) -> dict[str, float]:
        return measure()[0] if set(names) == set(times) else stored(cache, key, names, measure)

    monkeypatch.setattr(Cache, "times", of_calls)


@pytest.fixture
def panels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers run on panels of ours where there are any, in the file's reader too, whatever a machine measures."""

    def measure(kernels: list[Kernel], *_: object) -> tuple[dict[str, float], float]:
        order = sorted(kernels, key=lambda kernel: "panels" not in kernel.name)
        return {kernel.name: 1.0 + index for index, kernel in enumerate(order)}, 0.0

    monkeypatch.setenv("TWOFOUR_CACHE", "off")  # these times are for no other test
    monkeypatch.setattr(choose, "_measure", measure)


@pytest.fixture
def no_measuring(graph_wins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernel and engine is faster is for a quiet machine to say: here the first kernel and the graph are."""

    def first(kernels: list[Kernel], *_: object) -> tuple[dict[str, float], float]:
        return {kernel.name: 1.0 + index for index, kernel in enumerate(kernels)}, 1.0

    monkeypatch.setenv("TWOFOUR_CACHE", "off")  # these times are for no other test
    monkeypatch.setattr(choose, "_measure", first)
    monkeypatch.setattr(ragged, "_raced", lambda *_: ({"padded": 2.0, "packed": 1.0}, 0.0))
    monkeypatch.setattr(fused_matmuls, "together_and_apart", lambda *_: ({"together": 1.0, "apart": 2.0}, 0.0))
    monkeypatch.setattr(attention_int8, "_raced", lambda *_: ({"bfloat16": 1.0, "int8": 2.0}, 0.0))
