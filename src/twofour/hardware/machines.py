"""The machines that are known, each number with its source, and two that take their numbers from the caller."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from twofour.errors import HardwareError, one_of
from twofour.hardware.machine import Machine

T = 1e12

AMPERE = "NVIDIA A100 Tensor Core GPU datasheet (2021) and A100 architecture whitepaper: 108 SM, 1410 MHz, 40 MB L2"
HOPPER = "NVIDIA H100 Tensor Core GPU datasheet (2023) and H100 architecture whitepaper: 50 MB L2"
HOPPER_200 = "NVIDIA H200 datasheet (2024); the GPU is that of H100 SXM"
BLACKWELL = "NVIDIA HGX B200 and DGX B200 datasheets (2025), an eighth of the eight-GPU figures, int8 as float8"
ADA = "NVIDIA Ada GPU architecture whitepaper 2.02, GeForce RTX 4090, float32 accumulation for 16 and 8 bits"
RTX_5080 = "NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5080, float32 accumulation for 16 and 8 bits"
GB10 = "NVIDIA DGX Spark datasheet (2025): 6144 CUDA cores, 128 an SM; 1 PFLOP/s of sparse FP4; 273 GB/s; 140 W a chip"
GB10_RATES = "an eighth, a quarter and a half of the sparse FP4 figure for tf32, 16 and 8 bits dense and their doubles"


def _rates(dense: Mapping[str, float]) -> dict[str, float]:
    return {name: rate * T for name, rate in dense.items()}


def _doubled(dense: Mapping[str, float]) -> dict[str, float]:
    return {name: 2 * rate for name, rate in dense.items()}


def _sources(sheet: str, **others: str) -> dict[str, str]:
    numbers = ("units", "clock", "dense", "sparse", "bandwidth", "l2", "watts", "family")
    return {**dict.fromkeys(numbers, sheet), **others}


_A100 = {"tf32": 156, "float16": 312, "bfloat16": 312, "int8": 624, "int4": 1248}
_H100_PCIE = {"tf32": 378, "float16": 756, "bfloat16": 756, "float8": 1513, "int8": 1513}
_H100_PCIE_SPARSE = {"tf32": 756, "float16": 1513, "bfloat16": 1513, "float8": 3026, "int8": 3026}
_H100 = {"tf32": 494, "float16": 989, "bfloat16": 989, "float8": 1979, "int8": 1979}
_H100_SPARSE = {"tf32": 989, "float16": 1979, "bfloat16": 1979, "float8": 3958, "int8": 3958}
_B200 = {"tf32": 1100, "float16": 2250, "bfloat16": 2250, "float8": 4500, "int8": 4500}
_ADA = {"tf32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8": 330.3, "int8": 660.6, "int4": 1321.2}
_5080 = {"tf32": 56.3, "float16": 112.6, "bfloat16": 112.6, "float8": 225.1, "int8": 450.2}
_GB10 = {"tf32": 62.5, "float16": 125, "bfloat16": 125, "float8": 250, "int8": 250}
_CLOCK = "the clock at which units times operations a cycle give the published peak; the boost clock is higher"


def _a100(name: str, bandwidth: float, watts: float) -> Machine:
    dense, sparse = _rates({"float32": 19.5, **_A100}), _rates(_doubled(_A100))
    return Machine(name, 108, 1.41e9, dense, sparse, bandwidth, 40e6, watts, "ampere", _sources(AMPERE))


def _hopper(name: str, bandwidth: float, watts: float, sheet: str) -> Machine:
    dense, sparse = _rates({"float32": 67, **_H100}), _rates(_H100_SPARSE)
    return Machine(name, 132, 1.83e9, dense, sparse, bandwidth, 50e6, watts, "hopper", _sources(sheet, clock=_CLOCK))


MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _a100("a100-pcie", 1.935e12, 300),
        _a100("a100-sxm", 2.039e12, 400),
        Machine(
            *("h100-pcie", 114, 1.62e9, _rates({"float32": 51, **_H100_PCIE}), _rates(_H100_PCIE_SPARSE)),
            *(2.0e12, 50e6, 350, "hopper", _sources(HOPPER, clock=_CLOCK)),
        ),
        _hopper("h100-sxm", 3.35e12, 700, HOPPER),
        _hopper("h200", 4.8e12, 700, HOPPER_200),
        Machine(
            *("b200", 148, 1.85e9, _rates({"float32": 75, **_B200}), _rates(_doubled(_B200))),
            *(8.0e12, 126e6, 1000, "blackwell"),
            _sources(BLACKWELL, clock=_CLOCK, units="torch.cuda device properties", l2="torch.cuda device properties"),
        ),
        Machine(
            *("rtx-4090", 128, 2.52e9, _rates({"float32": 82.6, **_ADA}), _rates(_doubled(_ADA))),
            *(1.008e12, 72e6, 450, "ada", _sources(ADA)),
        ),
        Machine(
            *("rtx-5080", 84, 2.617e9, _rates({"float32": 56.3, **_5080}), _rates(_doubled(_5080))),
            *(0.96e12, 64e6, 360, "blackwell-rtx", _sources(RTX_5080)),
        ),
        Machine(
            *("gb10", 48, 2.54e9, _rates({"float32": 31, **_GB10}), _rates(_doubled(_GB10))),
            *(0.273e12, 24e6, 140, "blackwell-rtx"),
            _sources(GB10, clock=_CLOCK, dense=GB10_RATES, sparse=GB10_RATES, l2="torch.cuda device properties"),
        ),
    )
}
"""By name on the command line."""


def machine(name: str | Machine | None) -> Machine:
    """Return the machine of a name; a machine is returned as it is.

    Raises:
        HardwareError: No machine has that name, or none is named.
    """
    if isinstance(name, Machine):
        return name
    if not isinstance(name, str) or name not in MACHINES:
        near = difflib.get_close_matches(str(name), MACHINES, 1)
        raise HardwareError(
            "no machine is named" if name is None else f"the machine {name!r} is unknown",
            got=None if name is None else repr(name),
            wanted=f"one of {', '.join(MACHINES)}, or a twofour.hardware.Machine",
            remedy=f'machine="{near[0]}"' if near else "describe it: twofour.hardware.ampere_like(...)",
        )
    return MACHINES[name]


def ampere_like(
    name: str = "ampere-like",
    *,
    units: int = 108,
    clock: float = 1.41e9,
    fma: int = 1024,
    bandwidth: float = 1.935e12,
    l2: float = 40e6,
    watts: float = 300,
) -> Machine:
    """Describe a GPU built like an A100: the defaults are the A100 PCIe.

    Args:
        name: Its name.
        units: Multiprocessors.
        clock: Cycles a second.
        fma: Dense float16 multiply-adds a cycle of each multiprocessor, 1024 in an A100 (its whitepaper).
        bandwidth: Bytes a second of memory.
        l2: Bytes of the last cache.
        watts: Power limit.

    Raises:
        HardwareError: A number is not positive.
    """
    base = 2 * fma * units * clock
    scale = {"tf32": 0.5, "float16": 1, "bfloat16": 1, "int8": 2, "int4": 4}
    dense = {key: base * factor for key, factor in scale.items()}
    sparse = _doubled(dense)
    sources = _sources("the caller; ratios between types and sparse = 2 dense as in the A100 whitepaper")
    return Machine(name, units, clock, {"float32": base / 16, **dense}, sparse, bandwidth, l2, watts, "ampere", sources)


def sme_core(
    name: str = "arm-sme",
    *,
    units: int = 1,
    clock: float = 3.2e9,
    vector_bits: int = 512,
    bandwidth: float = 100e9,
    l2: float = 16e6,
    watts: float = 10,
) -> Machine:
    """Describe Arm cores with SME and its structured-sparsity outer products (FEAT_SME_TMOP: FTMOPA, BFTMOPA, STMOPA).

    One outer product a cycle is assumed: vector_bits / 32 squared multiply-adds in float32, two products summed in
    16-bit types, four in int8 (Arm A-profile architecture, A64 SME instructions). A TMOP takes two dense vectors and
    keeps 2 of 4 by 2-bit indices: twice the dense rate, if it issues as often, which no public part has shown. The
    defaults are those of no product: the clock and the memory are the caller's to state.

    Args:
        name: Its name.
        units: Cores, each with a matrix unit.
        clock: Cycles a second.
        vector_bits: Streaming vector length, 128 to 2048.
        bandwidth: Bytes a second of memory.
        l2: Bytes of the last cache.
        watts: Power of the units together.

    Raises:
        HardwareError: The vector length is none that SME has, or a number is not positive.
    """
    lengths = (128, 256, 512, 1024, 2048)
    one_of("no SME unit has this streaming vector length", vector_bits, lengths, HardwareError, "vector_bits=512")
    base = 2 * (vector_bits // 32) ** 2 * units * clock
    dense = {"float32": base, "float16": 2 * base, "bfloat16": 2 * base, "int8": 4 * base}
    sparse = {key: 2 * rate for key, rate in dense.items() if key != "float32"}
    sources = _sources("the caller; rates: one outer product a cycle, Arm A-profile architecture (SME, SME_TMOP)")
    return Machine(name, units, clock, dense, sparse, bandwidth, l2, watts, "arm", sources)
