"""Searching configurations: wrong ones are not trusted, the fastest right one is kept, the file survives anything."""

import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofour.kernels.nm_matmul.cuda.tuning import Found, Tuning, key
from twofour.measure.distance import distance

WANT = torch.arange(1.0, 5.0)
NAME = key("kernel", 4, 8, 16)
DAMAGED = (
    *({"k": {"configuration": [1, "x"], "seconds": 1.0}}, {"k": {"configuration": [1], "seconds": -1.0}}),
    *({"k": {"configuration": [1], "seconds": 1.0, "more": 1}}, {"k": {"seconds": 1.0}}, {"k": 1}, [], 3, None),
)


def search(
    tuning: Tuning, answers: dict[int, list[torch.Tensor | Exception]], seconds: dict[int, float]
) -> Found | None:
    """Configuration (i,) gives `answers[i]` in turn and takes `seconds[i]`."""
    running: list[int] = []

    def run(configuration: tuple[int, ...]) -> torch.Tensor:
        index = configuration[0]
        running.append(index)
        answer = answers[index][min(running.count(index), len(answers[index])) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def took(call) -> float:
        call()
        return seconds[running[-1]]

    return tuning.search(NAME, [(index,) for index in answers], run, WANT, took, tolerance=1e-2)


def test_the_fastest_right_configuration_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuning = Tuning(tmp_path / "gpu.json")
    answers = {
        0: [WANT],
        1: [WANT * 1.001],
        2: [WANT * 2],  # always wrong
        3: [WANT, WANT + 1],  # wrong the second time
        4: [RuntimeError("no such algorithm")],
        5: [WANT * float("nan")],
    }
    with caplog.at_level(logging.WARNING):
        found = search(tuning, answers, {0: 2.0, 1: 1.0, 2: 0.1, 3: 0.1, 5: 0.1})
    assert found == Found((1,), 1.0, tried=6, wrong=3, failed=1)
    assert tuning.configuration(NAME) == (1,)
    assert sum("is not used" in record.message for record in caplog.records) == 3
    tuning.save()
    assert Tuning(tmp_path / "gpu.json").configuration(NAME) == (1,)
    assert Tuning(tmp_path / "gpu.json").configuration("another") is None
    assert tuning.chosen(NAME, (7,)) == (1,) and tuning.chosen("another", (7,)) == (7,)
    assert tuning.chosen(NAME, (7, 8)) == (7, 8)  # a damaged file may say less than the row needs


def test_nothing_right_leaves_the_default() -> None:
    tuning = Tuning(None)
    assert search(tuning, {0: [RuntimeError("no")], 1: [-WANT]}, {}) is None
    assert tuning.configuration(NAME) is None
    tuning.save()


def test_what_another_process_found_meanwhile_is_kept(tmp_path: Path) -> None:
    first, second = Tuning(tmp_path / "gpu.json"), Tuning(tmp_path / "gpu.json")
    first.found["a"], second.found["b"] = Found((1, 2), 1e-5), Found((3,), 1e-6)
    first.save()
    second.save()
    assert set(Tuning(tmp_path / "gpu.json").found) == {"a", "b"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(DAMAGED).map(lambda value: json.dumps(value).encode()),
    )
)
def test_a_damaged_file_is_not_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(content)
    assert Tuning(path).found == {}


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    tuning = Tuning(None)
    tuning.path = tmp_path / "file" / "gpu.json"
    tuning.found["a"] = Found((1,), 1.0)
    with caplog.at_level(logging.WARNING):
        tuning.save()
    assert "could not be kept" in caplog.text


def test_distance_sees_what_is_not_a_number() -> None:
    assert distance([WANT], [WANT]) == 0
    assert not distance([WANT * float("nan")], [WANT]) <= 1e9
