"""SCALE-Sim's files: every report of the recorded runs byte for byte; what it crashes on is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofour.errors import HardwareError
from twofour.hardware import systolic
from twofour.hardware.systolic import Layer, SystolicArray, cycles, read_settings, read_topology, simulated
from twofour.hardware.systolic.reports import texts, write_reports

RECORDED = json.loads(Path(__file__).with_name("scalesim.json").read_text())
CASES = {case["name"]: case for case in RECORDED["cases"]}
RAN = [name for name, case in CASES.items() if "reports" in case]


def written(folder: Path, name: str) -> tuple[Path, Path]:
    config, topology = folder / "run.cfg", folder / "layers.csv"
    config.write_text(CASES[name]["config"])
    topology.write_text(CASES[name]["topology"])
    return config, topology


def test_what_was_recorded():
    """`python experiments/systolic.py` writes the file: os, ws and is; convolutions and products; dense and N:M."""
    assert RECORDED["versions"]["scalesim"] == "3.0.0"
    layers = sum(case["reports"]["COMPUTE_REPORT.csv"].count("\n") - 1 for case in CASES.values() if "reports" in case)
    assert layers == 204


@pytest.mark.parametrize("name", RAN)
def test_reports_are_those_of_scalesim(name: str, tmp_path: Path):
    config, topology = written(tmp_path, name)
    chosen = read_settings(config)
    rows = list(simulated(read_topology(topology), chosen))
    assert texts(rows, chosen) == CASES[name]["reports"]
    for row in rows:
        if chosen.representation is None:
            layer = row.layer
            assert row.cycles - row.stalls + 1 == cycles(chosen.array, layer.m, layer.n, layer.k)


@pytest.mark.parametrize("name", [name for name in CASES if name not in RAN])
def test_what_crashes_scalesim_is_refused(name: str, tmp_path: Path):
    config, _ = written(tmp_path, name)
    with pytest.raises(HardwareError, match="Dataflow: ws"):
        read_settings(config)


def test_reports_are_written_beside_each_other(tmp_path: Path):
    config, topology = written(tmp_path, "csr")
    chosen = read_settings(config)
    folder = write_reports(list(simulated(read_topology(topology), chosen)), chosen, tmp_path / "out")
    assert {path.name: path.read_text() for path in folder.iterdir()} == CASES["csr"]["reports"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(HardwareError, match="cannot be written"):
        write_reports([], chosen, blocked)


OLD = """[general]
run_name = old
[architecture_presets]
ArrayHeight:    {height}
ArrayWidth:     32
IfmapSramSzkB:    {memory}
FilterSramSzkB:   {memory}
OfmapSramSzkB:    {memory}
IfmapOffset:    0
FilterOffset:   10000000
OfmapOffset:    20000000
Dataflow : {dataflow}
Bandwidth : {bandwidth}
[run_presets]
InterfaceBandwidth: {mode}
{more}"""


def settings_of(tmp_path: Path, **changes: object) -> systolic.Settings:
    path = tmp_path / "old.cfg"
    choices = {"height": 32, "memory": 64, "dataflow": "os", "bandwidth": 10, "mode": "CALC", "more": ""}
    path.write_text(OLD.format(**{**choices, **changes}))
    return read_settings(path)


def test_a_file_of_version_two_needs_no_later_sections(tmp_path: Path):
    found = settings_of(tmp_path)
    assert found.array == SystolicArray(32, 32, "os") and found.bandwidth is None and found.representation is None
    assert settings_of(tmp_path, mode="USER", bandwidth="20,30").bandwidth == (10, 10, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 0}, "ArrayHeight: 0"),
        ({"height": "many"}, "a whole number from 1"),
        ({"dataflow": "rs"}, "the dataflow 'rs' is unknown"),
        ({"mode": "FAST"}, "USER or CALC"),
        ({"mode": "USER", "bandwidth": "x"}, "Bandwidth: x"),
        ({"more": "UseRamulatorTrace: True"}, "Ramulator"),
        ({"mode": "USER", "more": "[layout]\nIfmapCustomLayout: True"}, "banks are not modelled"),
        ({"more": "[sparsity]\nSparsitySupport: yes"}, "True or False"),
        ({"more": "[sparsity]\nSparsitySupport: true\nSparseRep: coo"}, "SparseRep: coo"),
        ({"more": "[general]"}, "already exists"),
    ],
)
def test_impossible_configurations(changes: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(HardwareError, match=message):
        settings_of(tmp_path, **changes)


def test_small_memories_make_the_array_wait(tmp_path: Path):
    """Half of 4 kB does not hold an operand of 4096 values, half of 8 kB does; the cycles worked stay the same."""
    rows = [
        next(simulated((Layer.gemm("fc", 64, 64, 64),), settings_of(tmp_path, memory=memory, mode="USER")))
        for memory in (1, 4, 8)
    ]
    assert rows[0].stalls > 0 < rows[1].stalls and rows[2].stalls == 0
    assert {row.cycles - row.stalls for row in rows} == {4 * (64 + 62) - 1}


def test_missing_and_binary_files(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path / "x"):
        with pytest.raises(HardwareError):
            read_settings(path)
        with pytest.raises(HardwareError):
            read_topology(path)


def topology(tmp_path: Path, text: str) -> tuple[Layer, ...]:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read_topology(path)


def test_both_forms_are_told_apart(tmp_path: Path):
    assert topology(tmp_path, "L, M, N, K,\nfc, 4, 5, 6,\n\n") == (Layer.gemm("fc", 4, 5, 6),)
    assert topology(tmp_path, "h\nfc, 4, 5, 6, 2:4") == (Layer.gemm("fc", 4, 5, 6, 2, 4),)
    found = topology(tmp_path, "h\nDPa, 8, 8, 3, 3, 2, 1, 1,\nb, 8, 7, 3, 2, 4, 5, 2, 1:4,\n")
    assert [layer.name for layer in found] == ["DPaChannel_0", "DPaChannel_1", "b"] and found[0].channels == 1
    assert (found[2].m, found[2].n, found[2].k, found[2].kept) == (4 * 4, 5, 24, 1)


MALFORMED = (
    "",
    "fc, 4, 5,",
    "fc, 4, 5, x,",
    "fc, 4, 5, 6, 2:4:8,",
    "fc, 4, 5, 6, 5:4,",
    "fc, 0, 5, 6,",
    "fc, 4, 5, 1e3,",
)
MALFORMED += (
    "c, 8, 8, 9, 3, 2, 1, 1,",
    "c, 8, 8, 3, 3, 2, 1, 0,",
    "c, 8, 8, 3, 3, 2, 1, 1, 1:1, 7,",
    "fc, 4, 5, " + "9" * 5000,
)


@pytest.mark.parametrize("row", MALFORMED)
def test_malformed_topologies(row: str, tmp_path: Path):
    with pytest.raises(HardwareError):
        topology(tmp_path, f"h\n{row}\n")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data: st.DataObject, tmp_path: Path):
    """A few characters of real files changed, cut or doubled: an answer or our own error, nothing else."""
    case = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    for key, read in (("config", read_settings), ("topology", read_topology)):
        text = case[key]
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(text)))
            text = (
                text[:at]
                + data.draw(st.sampled_from(["", "-", "9", ",", "\n", ":", "[", "%", "\x00", "é"]))
                + text[at + 1 :]
            )
        path = tmp_path / key
        path.write_text(text)
        with contextlib.suppress(HardwareError):
            read(path)


def test_a_layer_too_large_is_refused_before_memory_runs_out(tmp_path: Path):
    with pytest.raises(HardwareError, match=r"layer `fc`.*too large"):
        list(simulated((Layer.gemm("fc", 999999999, 64, 999999),), settings_of(tmp_path)))
    with pytest.raises(HardwareError, match=r"layer `fc`.*too large"):
        list(simulated((Layer.gemm("fc", 4, 4, 4),), settings_of(tmp_path, height=999999999)))


def test_a_layer_of_one_cycle_has_no_rates(tmp_path: Path):
    one = dataclasses.replace(settings_of(tmp_path), array=SystolicArray(1, 1, "os"))
    with pytest.raises(HardwareError, match="too small for a report"):
        list(simulated((Layer.gemm("fc", 1, 1, 1),), one))


def test_a_depth_wise_row_does_not_fill_memory(tmp_path: Path):
    with pytest.raises(HardwareError, match="999999999 channels"):
        topology(tmp_path, "h\nDP, 5, 5, 3, 3, 999999999, 1, 1,\n")


def test_a_named_form_must_fit(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("h\nfc, 4, 5, 6,\n")
    for form in ("conv", "mnk"):
        with pytest.raises(HardwareError):
            read_topology(path, form)
