"""Whatever torch's modes are and whatever kind a tensor is of: a call answers rightly or says what it cannot take."""

import json
import os
import subprocess
import sys

import pytest

from tests.test_architecture import ROOT


def ends_of(*words: str) -> dict[str, str]:
    """Return what became of each case that has the words; none can end this process."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TWOFOUR_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.surroundings", *words],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    return ends_of()


@pytest.fixture(scope="module")
def freed() -> dict[str, str]:
    return ends_of("freed")


@pytest.mark.long
def test_every_case_is_right_or_refused(ends: dict[str, str]) -> None:
    bad = {case: end for case, end in ends.items() if end not in ("right", "refused")}
    assert not bad, "\n".join(f"{case}: {end}" for case, end in bad.items())


@pytest.mark.long
def test_the_defaults_of_torch_change_nothing(ends: dict[str, str]) -> None:
    """Whatever default device or dtype: not refused, but right."""
    defaults = {case: end for case, end in ends.items() if "default" in case or "device" in case}
    assert len(defaults) > 200
    assert set(defaults.values()) == {"right"}, [case for case, end in defaults.items() if end != "right"]


@pytest.mark.parametrize("kind", ["freed", "freed behind strides", "freed, with one more axis"])
def test_no_row_reads_a_storage_that_was_freed(freed: dict[str, str], kind: str) -> None:
    """Also where torch copies or rounds an operand before the kernel looks at it."""
    rows = {case: end for case, end in freed.items() if case.endswith(f"/ {kind}")}
    assert len(rows) > 20 and set(rows.values()) == {"refused"}, rows


@pytest.mark.long
@pytest.mark.parametrize("name", ["forward float32", "forward bfloat16", "forward int8", "forward int4", "convolution"])
def test_compiled_layers_are_traced_by_make_fx_and_refuse_derivatives(ends: dict[str, str], name: str) -> None:
    assert ends[f"{name} / make_fx"] == ends[f"{name} / negated"] == ends[f"{name} / imaginary part"] == "right"
    for around in ("dual", "jvp", "vmap", "gradient", "fake mode"):
        assert ends[f"{name} / {around}"] == "refused"
    assert ends[f"{name} / nested"] == ends[f"{name} / jagged"] == "refused"
