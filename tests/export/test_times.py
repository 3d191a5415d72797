"""The times that a saved model carries: a machine that has them starts without measuring, others add their own."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from twofour.compiler.plan import _FROM_FILE
from twofour.export import layers
from twofour.export.file import read, write
from twofour.measure import travelling
from twofour.measure.travelling import MOST_CASES, MachineTimes


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", "off")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    twofour.save(twofour.compile(twofour.prune(network(), "2:4"), torch.randn(2, 8, 6, 6), tokens=(1, 4)), path)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was measured since, the names of each race."""
    found: list[tuple[str, ...]] = []

    def race(calls: dict[str, object], **_: object) -> tuple[dict[str, float], float]:
        found.append(tuple(calls))
        return {name: 1.0 + place for place, name in enumerate(calls)}, 0.0

    for module in ("choose", "fused_matmuls", "graph"):
        monkeypatch.setattr(f"twofour.compiler.{module}.race", race)
    return found


class Network(nn.Module):
    """A convolution, and products of one input that a graph joins."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.query, self.key, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3))
        query, key = (layer(x).unflatten(-1, (4, 4)) for layer in (self.query, self.key))
        return self.head((query * key).flatten(1))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Network()


def times_in(path: Path) -> list[dict[str, Any]]:
    return read(path).settings["times"]


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    contents = read(path)
    contents.settings["times"] = change(contents.settings["times"])
    write(path, contents)


def elsewhere(path: Path, **facts: object) -> None:
    """Let the file be measured on another machine."""
    rewrite(path, lambda machines: [{**machine, **facts} for machine in machines])


def test_a_start_from_a_file_measures_nothing(file: Path, measured: list[object]) -> None:
    fast = twofour.load(file, network(1))
    assert not measured
    (here,) = times_in(file)
    assert all(
        here["cpu"] in layer.reason and "from the file, measured on" in layer.reason for layer in fast.plan.layers
    )
    first, *others = str(fast.plan).splitlines()
    assert first.startswith("times from the file, measured on") and "from the file" not in "".join(others)


def test_rows_whose_times_differ_in_origin_say_theirs(file: Path, measured: list[object]) -> None:
    """The head said "from the file" of rows that were measured here too."""
    plan = twofour.load(file, network(1)).plan
    timed = [layer for layer in plan.layers if layer.dense_ms is not None]
    (whence,) = {f" ({found})" for layer in timed for found in _FROM_FILE.findall(layer.reason)}
    one = replace(timed[0], reason=timed[0].reason.replace(whence, ""))
    rest = [layer for layer in plan.layers if layer is not timed[0]]
    mixed = str(replace(plan, layers=(one, *rest)))
    assert len(timed) > 1 and not mixed.startswith("times from the file") and whence in mixed
    row = next(line for line in mixed.splitlines() if line.startswith(one.name + " "))
    assert "from the file" not in row
    in_part = replace(one, reason=f"{one.reason} (in part from the file, measured on another)")
    mixed = str(replace(plan, layers=(in_part, *rest)))
    assert whence in mixed and "(in part from the file, measured on another)" in mixed


def test_it_chooses_what_was_chosen(tmp_path: Path, measured: list[object]) -> None:
    compiled = twofour.compile(twofour.prune(network(), "2:4"), torch.randn(2, 8, 6, 6), tokens=(1, 4))
    twofour.save(compiled, tmp_path / "a")
    loaded = twofour.load(tmp_path / "a", network(1))
    assert [layer.dispatch for layer in loaded.plan.layers] == [layer.dispatch for layer in compiled.plan.layers]
    twofour.save(loaded, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_dense_weight_in_groups_is_known_again(tmp_path: Path, measured: list[object]) -> None:
    """The file holds its int4 numbers, whose group of inputs was part of the case: a tied head was measured again."""
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 96)), "2:4", skip=["2"])
    options = {"dtype": "int4", "tokens": (1, 4), "graph": False}
    compiled = twofour.compile(model, torch.randn(4, 64), **options)
    twofour.save(compiled, tmp_path / "a")
    measured.clear()
    loaded = twofour.load(tmp_path / "a", nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 96)))
    assert not measured
    assert [layer.dispatch for layer in loaded.plan.layers] == [layer.dispatch for layer in compiled.plan.layers]
    (reason,) = (layer.reason for layer in loaded.plan.layers if layer.name == "2")
    assert "have 3 or 4 non-zeros in int4" in reason  # rounding makes zeros


def test_shards_carry_them_too(file: Path, tmp_path: Path, measured: list[object]) -> None:
    twofour.save(twofour.load(file, network()), tmp_path / "folder", max_shard_bytes=1024)
    twofour.load(tmp_path / "folder", network())
    assert not measured


def test_a_graph_measures_nothing_either(tmp_path: Path, measured: list[object]) -> None:
    example = torch.randn(2, 8, 6, 6)
    compiled = twofour.compile(twofour.prune(network(), "2:4"), example, tokens=(1, 4), graph=True)
    twofour.save(compiled, tmp_path / "model")
    assert ("together", "apart") in measured
    measured.clear()
    loaded = twofour.load(tmp_path / "model", network(1), graph=True, example=example)
    assert not measured
    kernels = [[(layer.name, layer.kernel) for layer in fast.plan.layers] for fast in (compiled, loaded)]
    assert kernels[0] == kernels[1]
    assert "from the file, measured on" in loaded.plan.account.reason
    assert loaded.plan.account.engine_ms == compiled.plan.account.engine_ms


def test_another_cpu_with_the_same_instruction_sets_is_believed(file: Path, measured: list[object]) -> None:
    elsewhere(file, cpu="Example CPU 9000", date="2020-02-02")
    fast = twofour.load(file, network())
    assert not measured
    assert all("measured on Example CPU 9000, 2020-02-02" in layer.reason for layer in fast.plan.layers)


def test_other_instruction_sets_measure_and_both_machines_stay_in_the_file(
    file: Path, tmp_path: Path, measured: list[object]
) -> None:
    elsewhere(file, extras=["quantum"], cpu="Example CPU 9000")
    fast = twofour.load(file, network())
    assert measured and "from the file" not in str(fast.plan)
    twofour.save(fast, tmp_path / "both")
    assert [machine["extras"] == ["quantum"] for machine in times_in(tmp_path / "both")] == [False, True]
    measured.clear()
    twofour.load(tmp_path / "both", network())
    assert not measured


def test_its_own_times_come_before_those_of_others(file: Path, measured: list[object]) -> None:
    rewrite(file, lambda machines: [{**machines[0], "cpu": "Example CPU 9000"}, *machines])
    assert "Example" not in str(twofour.load(file, network()).plan)


def test_a_kernel_that_the_file_does_not_know_is_measured(file: Path, measured: list[tuple[str, ...]]) -> None:
    (here,) = times_in(file)
    case = next(case for case in here["seconds"] if case.startswith("16x16"))
    name = next(iter(here["seconds"][case]))
    seconds = {**here["seconds"], case: {"no_such_kernel": 1e-9, **here["seconds"][case]}}
    del seconds[case][name]
    rewrite(file, lambda _: [{**here, "seconds": seconds}])
    fast = twofour.load(file, network(), graph=False)
    assert len(measured) == 1 and name in measured[0]
    assert "no_such_kernel" not in str(fast.plan)
    assert any("in part from the file" in layer.reason for layer in fast.plan.layers)


def test_measuring_can_be_asked_for(file: Path, tmp_path: Path, measured: list[object]) -> None:
    fast = twofour.load(file, network(), graph=False, measure=True)
    assert measured and "from the file" not in str(fast.plan)
    twofour.save(fast, tmp_path / "again")
    (before,), (after,) = times_in(file), times_in(tmp_path / "again")
    assert before["seconds"].keys() == after["seconds"].keys() and before["seconds"] != after["seconds"]


def test_another_thread_count_is_measured(file: Path, measured: list[object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        twofour.load(file, network())
    finally:
        torch.set_num_threads(before)
    assert measured


GOOD = MachineTimes("avx2", (), "cpu", "torch", "2020-02-02", {"case": {"kernel": 1.0}}).to_json()


@pytest.mark.parametrize(
    "times",
    [
        *(7, "words", {}, [7], [[]], [{}], [{**GOOD, "more": 1}], [{**GOOD, "isa": 7}], [{**GOOD, "cpu": "x" * 9999}]),
        *(
            [{**GOOD, "cpu": "\x1b[2J"}],
            [{**GOOD, "extras": "avx"}],
            [{**GOOD, "extras": [7]}],
            [{**GOOD, "seconds": 7}],
        ),
        *([{**GOOD, "extras": ["x"] * 999}], [{**GOOD, "seconds": {"case": []}}], [{**GOOD, "seconds": {"case": {}}}]),
        *([{**GOOD, "seconds": {"case": {"k": seconds}}}] for seconds in (0.0, -1.0, 1, True, "1", None, 1e300, [])),
        [{**GOOD, "seconds": {str(n): {"k": 1.0} for n in range(MOST_CASES + 1)}}],
        [{**GOOD, "seconds": {"case": {str(n): 1.0 for n in range(999)}}}],
    ],
)
def test_malformed_times_are_left_out_and_said(times: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "twofour"):
        assert travelling.read_machines(times) == ()
    assert "times of 1 machines are malformed and not used" in caplog.text
    assert travelling.read_machines([*times, GOOD] if isinstance(times, list) else [GOOD])[0].cpu == "cpu"


def test_a_file_with_malformed_times_measures(file: Path, measured: list[object]) -> None:
    rewrite(file, lambda machines: [{**machines[0], "isa": None}])
    x = torch.randn(2, 8, 6, 6)
    assert twofour.load(file, network())(x).shape == (2, 8)
    assert measured


def test_a_planted_time_decides_between_kernels_that_compute_the_same(file: Path, measured: list[object]) -> None:
    x = torch.randn(2, 8, 6, 6)
    want = twofour.load(file, network())(x)

    def reversed_(machines: list[dict[str, Any]]) -> object:
        cases = machines[0]["seconds"]
        return [{**machines[0], "seconds": {c: {k: 1 / s for k, s in times.items()} for c, times in cases.items()}}]

    rewrite(file, reversed_)
    torch.testing.assert_close(twofour.load(file, network())(x), want)


def test_a_file_keeps_the_latest_machines_alone(file: Path, tmp_path: Path, measured: list[object]) -> None:
    rewrite(file, lambda machines: [{**machines[0], "isa": f"isa{n}"} for n in range(20)])
    twofour.save(twofour.load(file, network()), tmp_path / "many")
    found = times_in(tmp_path / "many")
    assert len(found) == travelling.MOST_MACHINES and found[0]["isa"] == twofour.native.isa()


def test_a_file_asks_for_no_more_work_than_there_is_leave_for(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen counts that each stay below a million, of a file that carries no times."""
    contents = read(file)
    large = [(1 << 20) - 1 - place for place in range(15)]
    contents.settings.update(tokens=[4, *large], times=[], counts={"query": 1 << 19}, images={})
    write(file, contents)
    monkeypatch.setattr(layers, "MOST_WORK", 1 << 24)
    fast = twofour.load(file, network())
    assert fast.plan.tokens == (4,) and not fast.plan.counts
    assert "tokens in the file are not measured: too many" in caplog.text


def test_cases_that_are_alike_count_once() -> None:
    allowance = layers.Allowance()
    assert allowance.takes(1, [(1024, 1024, 1 << 19)]) and allowance.left == layers.MOST_WORK - (1 << 39)
    assert allowance.takes(1, [(1024, 1024, 1 << 19)] * 9) and allowance.left == layers.MOST_WORK - (1 << 39)
    assert not allowance.takes(1, [(1024, 1024, 1 << 20)])
    assert not allowance.takes(layers.LARGEST_INPUT + 1, [(1, 1, 1)]) and allowance.takes(1, [(1024, 1024, 1 << 18)])
