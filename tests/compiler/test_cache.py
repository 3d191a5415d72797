"""Which times are remembered, for how long, and what is said of those that a busy machine disturbed."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import mlp, quick
from twofour.measure.cache import Cache
from twofour.measure.effort import QUICK


class Kernels:
    """Two kernels whose times are given, measured as often as they are asked for."""

    def __init__(self, *looks: tuple[float, float, float]) -> None:
        self.looks = list(looks)

    def measure(self) -> tuple[dict[str, float], float]:
        a, b, doubt = self.looks.pop(0)
        return {"a": a, "b": b}, doubt

    def times(self, cache: Cache, key: str = "case") -> dict[str, float]:
        return cache.times(key, ["a", "b"], self.measure)


def test_a_settled_case_is_measured_once(own_cache: Path) -> None:
    kernels = Kernels((1.0, 2.0, 0.05))
    first = Cache.for_this_machine([])
    assert kernels.times(first) == kernels.times(first) == {"a": 1.0, "b": 2.0}
    first.save()
    assert kernels.times(Cache.for_this_machine([])) == {"a": 1.0, "b": 2.0}


def test_what_a_busy_machine_measured_is_kept_after_a_second_look(own_cache: Path) -> None:
    kernels = Kernels((1.0, 3.0, 0.4), (4.0, 2.0, 0.4))
    first = Cache.for_this_machine([])
    assert kernels.times(first) == kernels.times(first) == {"a": 1.0, "b": 3.0}, "one process looks once"
    first.save()
    second = Cache.for_this_machine([])
    assert kernels.times(second) == {"a": 1.0, "b": 2.0}, "of each kernel the time that was disturbed less"
    second.save()
    assert kernels.times(Cache.for_this_machine([])) == {"a": 1.0, "b": 2.0} and not kernels.looks


def test_a_kernel_that_is_new_is_measured(own_cache: Path) -> None:
    cache = Cache.for_this_machine([])
    cache.put("case", {"a": 1.0})
    cache.save()
    assert Kernels((3.0, 2.0, 0.0)).times(Cache.for_this_machine([])) == {"a": 1.0, "b": 2.0}


def test_what_little_effort_measured_serves_compilations_of_no_more(own_cache: Path) -> None:
    kernels = Kernels((1.0, 3.0, 0.0), (4.0, 2.0, 0.0))
    first = Cache.for_this_machine([], effort=QUICK)
    kernels.times(first)
    first.finish()
    assert kernels.times(Cache.for_this_machine([], effort=QUICK)) == {"a": 1.0, "b": 3.0}
    full = Cache.for_this_machine([])
    assert kernels.times(full) == {"a": 1.0, "b": 2.0} and not kernels.looks
    full.save()
    assert kernels.times(Cache.for_this_machine([])) == {"a": 1.0, "b": 2.0}


def test_little_effort_settles_nothing_however_often_it_looks(own_cache: Path) -> None:
    for found in ({"a": 1.0}, {"b": 3.0}, {"a": 2.0, "b": 3.0}):
        cache = Cache.for_this_machine([], effort=QUICK)
        cache.put("case", found)
        cache.save()
    kernels, full = Kernels((4.0, 2.0, 0.0)), Cache.for_this_machine([])
    assert not full.looked_at("case")
    assert kernels.times(full) == {"a": 1.0, "b": 2.0} and full.looked_at("case")
    full.save()
    quick = Cache.for_this_machine([], effort=QUICK)
    quick.put("case", {"a": 1.0})
    quick.save()
    assert kernels.times(Cache.for_this_machine([])) == {"a": 1.0, "b": 2.0}, "what was settled stays so"
    another = Cache.for_this_machine([], effort=QUICK)
    another.put("case", {"c": 1.0})
    another.save()
    assert not Cache.for_this_machine([]).looked_at("case"), "a kernel that is new is not"


def test_a_compilation_says_how_much_it_measured(own_cache: Path) -> None:
    kernels = Kernels((1.0, 3.0, 0.0))
    cache = Cache.for_this_machine([])
    cache.put("known", {"a": 1.0, "b": 2.0})
    cache.save()
    cache = Cache.for_this_machine([])
    for key in ("known", "case", "case"):
        kernels.times(cache, key)
    assert re.fullmatch(r"1 cases measured here in 0\.\d s, 1 known before", *cache.finish())


def test_processes_add_to_one_file(own_cache: Path) -> None:
    one, other = Cache.for_this_machine([]), Cache.for_this_machine([])
    one.put("a", {"kernel": 1.0})
    other.put("b", {"kernel": 2.0})
    one.save()
    other.save()
    both = Cache.for_this_machine([])
    assert both.get("a") == {"kernel": 1.0} and both.get("b") == {"kernel": 2.0}


def test_a_busy_machine_is_told_of_in_one_line(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twofour.measure.timing._doubt", lambda runners: 0.3)
    with caplog.at_level(logging.WARNING, logger="twofour"):
        fast = quick(twofour.prune(mlp(), "2:4"))
    (said,) = [record.message for record in caplog.records if "busy" in record.message]
    assert re.fullmatch(
        r"6 of 6 times were taken on a busy machine, the worst in doubt by 30 % "
        r"\(a product by \d+x\d+ of \d+ tokens\): they serve now, and the next compile takes them once more",
        said,
    )
    assert said in str(fast.plan)
    caplog.clear()
    for _ in range(2):
        quick(twofour.prune(mlp(), "2:4"))
    assert "busy" not in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        *("{", "[]", "\xff", "[" * 100_000, '{"a": {"kernel": 1.0}}', '{"a": {"seconds": {"k": -1.0}, "looks": 2}}'),
        *('{"a": {"seconds": {"k": "fast"}, "looks": 2}}', '{"a": {"seconds": {"k": 1.0}, "looks": "two"}}'),
        *('{"a": {"seconds": [1.0], "looks": 2}}', '{"a": {"seconds": {"k": NaN}, "looks": 2}}'),
    ],
)
def test_a_damaged_cache_is_reported_and_ignored(
    own_cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = Cache.for_this_machine([])
    cache.put("case", {"kernel": 1.0})
    cache.save()
    assert Cache.for_this_machine([]).get("case") == {"kernel": 1.0}
    (file,) = own_cache.glob("*.json")
    file.write_text(damage, encoding="latin-1")
    with caplog.at_level(logging.WARNING, logger="twofour"):
        assert Cache.for_this_machine([]).get("case") == {}
    assert "not readable" in caplog.text


def test_the_cache_can_be_off_or_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", "off")
    quick(twofour.prune(nn.Linear(64, 64), "2:4"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, logger="twofour"):
        quick(twofour.prune(nn.Linear(64, 64), "2:4"))
    assert "could not be kept" in caplog.text


def test_planted_times_choose_among_right_kernels_alone(own_cache: Path) -> None:
    masked, x = twofour.prune(mlp(), "2:4"), torch.randn(3, 64)
    quick(masked, x)
    (file,) = own_cache.glob("times-*.json")
    kept = json.loads(file.read_text())
    foreign = {"no_such_kernel__cpu": 1e-12, "nm_matmul_any_reference__torch": 1e-12}
    for draw in range(4):
        planted = {}
        for case, entry in kept.items():
            own = {name: 1e-9 * (1 + (7 * place + draw) % 5) for place, name in enumerate(entry["seconds"])}
            planted[case] = {"looks": 2, "seconds": foreign | own}
        file.write_text(json.dumps(planted))
        fast = quick(masked, x)
        names = {name for layer in fast.plan.layers for name in layer.times[3]}
        assert names <= {name for entry in kept.values() for name in entry["seconds"]}
        torch.testing.assert_close(fast(x), masked(x), atol=1e-4, rtol=1e-4)


def test_a_cache_that_ends_early_is_not_used(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    quick(twofour.prune(mlp(), "2:4"))
    (file,) = own_cache.glob("times-*.json")
    file.write_text(file.read_text()[:-20])
    quick(twofour.prune(mlp(), "2:4"))
    assert "not readable" in caplog.text and json.loads(file.read_text()), "it is written anew"
