"""Machines: published peaks exactly, and what a machine lacks is refused with what to try."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.turns import in_turn
from twofour.errors import HardwareError
from twofour.hardware import DTYPES, MACHINES, Machine, ampere_like, estimate, machine, sme_core
from twofour.hardware.machine import stored_bytes

# Dense and sparse TFLOP/s (TOP/s) as the data sheets print them; None where there is no unit.
PUBLISHED = {
    "a100-pcie": {"float32": (19.5, None), "tf32": (156, 312), "float16": (312, 624), "bfloat16": (312, 624)}
    | {"int8": (624, 1248), "int4": (1248, 2496)},
    "h100-pcie": {"tf32": (378, 756), "bfloat16": (756, 1513), "float8": (1513, 3026), "int8": (1513, 3026)},
    "h200": {"float32": (67, None), "tf32": (494, 989), "bfloat16": (989, 1979), "float16": (989, 1979)}
    | {"int8": (1979, 3958), "float8": (1979, 3958)},
    "b200": {"tf32": (1100, 2200), "bfloat16": (2250, 4500), "float8": (4500, 9000), "int8": (4500, 9000)},
    "rtx-4090": {"tf32": (82.6, 165.2), "bfloat16": (165.2, 330.4), "float8": (330.3, 660.6)}
    | {"int8": (660.6, 1321.2), "int4": (1321.2, 2642.4)},
    "rtx-5080": {"tf32": (56.3, 112.6), "bfloat16": (112.6, 225.2), "float8": (225.1, 450.2), "int8": (450.2, 900.4)},
    "gb10": {"bfloat16": (125, 250), "float8": (250, 500), "int8": (250, 500)},
}
PUBLISHED |= {"a100-sxm": PUBLISHED["a100-pcie"], "h100-sxm": PUBLISHED["h200"]}


def test_the_names_are_those_of_the_design():
    assert list(MACHINES) == [
        "a100-pcie",
        "a100-sxm",
        "h100-pcie",
        "h100-sxm",
        "h200",
        "b200",
        "rtx-4090",
        *("rtx-5080", "gb10"),
    ]
    assert DTYPES == ("float32", "tf32", "float16", "bfloat16", "float8", "int8", "int4")


@in_turn("name", PUBLISHED)
def test_peaks_are_the_published_ones(name: str):
    for dtype, (dense, sparse) in PUBLISHED[name].items():
        assert machine(name).peak(dtype) == pytest.approx(dense * 1e12, rel=1e-12)
        if sparse is None:
            with pytest.raises(HardwareError, match="no 2:4 matrix unit"):
                machine(name).peak(dtype, sparse=True)
        else:
            assert machine(name).peak(dtype, sparse=True) == pytest.approx(sparse * 1e12, rel=1e-12)


@in_turn(
    ("name", "flops_a_cycle"),
    [
        *(("a100-pcie", 2048), ("h100-pcie", 4096), ("h100-sxm", 4096), ("h200", 4096), ("b200", 8192)),
        *(("rtx-4090", 512), ("rtx-5080", 512), ("gb10", 1024)),
    ],
)
def test_units_times_rate_times_clock_give_the_peak(name: str, flops_a_cycle: int):
    """From the architecture whitepapers: float16 operations a cycle of one multiprocessor."""
    found = machine(name)
    assert found.units * flops_a_cycle * found.clock == pytest.approx(found.peak("float16"), rel=5e-3)


@in_turn("name", MACHINES)
def test_every_number_has_its_source(name: str):
    found = machine(name)
    assert all(found.sources[key] for key in ("units", "clock", "dense", "sparse", "bandwidth", "l2", "watts"))
    with pytest.raises(TypeError):
        found.dense["bfloat16"] = 1.0  # type: ignore[index]


def test_the_parametric_ones():
    ampere = ampere_like()
    for dtype in ("float32", "tf32", "float16", "int8", "int4"):
        assert ampere.peak(dtype) == pytest.approx(machine("a100-pcie").peak(dtype), rel=2e-3)
    assert ampere_like(units=54).peak("int8", sparse=True) == pytest.approx(ampere.peak("int8", sparse=True) / 2)
    core = sme_core(vector_bits=512, clock=4e9)
    assert core.peak("float32") == 2 * 16 * 16 * 4e9  # FMOPA: one 16 x 16 outer product a cycle
    assert core.peak("int8", sparse=True) == 2 * core.peak("int8") == 16 * core.peak("float32") / 2
    with pytest.raises(HardwareError, match="384"):
        sme_core(vector_bits=384)


def test_refusals_say_what_to_try():
    with pytest.raises(
        HardwareError, match=r"h100-sxm has no dense matrix unit for int4\n.*\n.*wanted.*\n.*dtype=\"int8\""
    ):
        machine("h100-sxm").peak("int4")
    with pytest.raises(HardwareError, match="no dense matrix unit for float8"):
        machine("a100-sxm").peak("float8")
    with pytest.raises(HardwareError, match='dtype="tf32"'):
        machine("h200").peak("float32", sparse=True)
    with pytest.raises(HardwareError, match="the dtype 'fp16' is unknown"):
        machine("h200").peak("fp16")
    with pytest.raises(HardwareError, match='machine="a100-sxm"'):
        machine("a100-smx")
    with pytest.raises(HardwareError, match="cannot exist"):
        Machine("none", 0, 1e9, {}, {}, 1e9, 1e6, 10, "other", {})


def test_bytes_of_a_sparse_weight():
    """9/16 of the dense bytes in 16 bits and tf32, 5/8 in 8 and 4 bits (docs/formats.md, cuSPARSELt)."""
    expected = {"tf32": 9 / 16, "float16": 9 / 16, "bfloat16": 9 / 16, "float8": 5 / 8, "int8": 5 / 8, "int4": 5 / 8}
    for dtype, share in expected.items():
        assert stored_bytes(dtype, sparse=True) / stored_bytes(dtype, sparse=False) == share


def test_a_machine_that_is_not_named_is_asked_for() -> None:
    for options in ({}, {"training": True}):
        with pytest.raises(HardwareError, match=r"no machine is named\n  wanted +one of a100-pcie, (.|\n)*ampere_like"):
            estimate(nn.Linear(32, 32), torch.randn(8, 32), **options)
