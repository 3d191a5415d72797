"""Settings: what a SCALE-Sim .cfg says, read unchanged; what is not modelled is refused."""

from __future__ import annotations

import configparser
import os
import re
from dataclasses import dataclass
from pathlib import Path

from twofour.errors import HardwareError, cut
from twofour.files import read_text, reason
from twofour.hardware.systolic.array import SystolicArray

REPRESENTATIONS = ("csr", "csc", "ellpack_block")
"""How SCALE-Sim's sparse report counts the bytes of a filter."""


@dataclass(frozen=True)
class Settings:
    """One configuration.

    Attributes:
        name: Of the run, and of the folder its reports go to.
        array: The array.
        kilobytes: Of the memories beside the array: inputs, weights, outputs; half of each is filled while the other
            half is read, a value takes one byte.
        offsets: First address of inputs, weights and outputs.
        bandwidth: Values a cycle from and to memory, (reads of either operand, writes); None where SCALE-Sim estimates
            what no cycle waits for (`InterfaceBandwidth: CALC`).
        representation: How sparse filters are stored, one of `REPRESENTATIONS`; None where everything is dense.
        block: Rows of a block where each filter has a sparsity of its own (`OptimizedMapping`); None: one N:M a layer.
        seed: Of those sparsities.
    """

    name: str
    array: SystolicArray
    kilobytes: tuple[int, int, int]
    offsets: tuple[int, int, int]
    bandwidth: tuple[int, int, int] | None
    representation: str | None
    block: int | None
    seed: int


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a SCALE-Sim .cfg; versions 2 and 3 of the file, sections that are missing take SCALE-Sim's defaults.

    Raises:
        HardwareError: The file cannot be read, a value is missing or impossible, or it asks for what is not modelled:
            layouts of the memories with a given bandwidth, and Ramulator's traces.
    """
    source = Path(path)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(read_text(source))
    except (OSError, ValueError, configparser.Error) as error:
        raise _wrong(source, reason(error), "a SCALE-Sim .cfg") from error
    return _Reader(source, parser).settings()


@dataclass(frozen=True)
class _Reader:
    path: Path
    parser: configparser.ConfigParser

    def settings(self) -> Settings:
        block = self.integer("sparsity", "BlockSize", 4) if self.flag("sparsity", "OptimizedMapping") else None
        sparse = self.flag("sparsity", "SparsitySupport")
        representation = self.word("sparsity", "SparseRep", "ellpack_block").lower()
        if sparse and representation not in REPRESENTATIONS:
            raise _wrong(self.path, f"SparseRep: {representation}", f"one of {', '.join(REPRESENTATIONS)}")
        place = "architecture_presets"
        rows, columns = (self.integer(place, key) for key in ("ArrayHeight", "ArrayWidth"))
        array = SystolicArray(rows, columns, self.word(place, "Dataflow").lower())
        sizes = tuple(self.integer(place, f"{kind}SramSzkB") for kind in ("Ifmap", "Filter", "Ofmap"))
        offsets = tuple(self.integer(place, f"{kind}Offset", least=0) for kind in ("Ifmap", "Filter", "Ofmap"))
        found = Settings(
            name=self.word("general", "run_name"),
            array=array,
            kilobytes=(sizes[0], sizes[1], sizes[2]),
            offsets=(offsets[0], offsets[1], offsets[2]),
            bandwidth=self.bandwidth(),
            representation=representation if sparse else None,
            block=block if sparse else None,
            seed=self.integer("sparsity", "RandomNumberGeneratorSeed", 40, least=0),
        )
        self.check(found)
        return found

    def check(self, found: Settings) -> None:
        if found.name != Path(found.name).name or found.name in ("", ".", "..") or "\0" in found.name:
            raise _wrong(self.path, f"run_name: {found.name}", "a name that is no path: the reports' folder")
        if found.block is not None:
            if found.array.dataflow != "ws":
                raise _wrong(self.path, f"OptimizedMapping with {found.array.dataflow}", "Dataflow: ws, as SCALE-Sim")
            if found.block < 2 or found.block % 2 or 2 * found.array.rows % found.block:
                raise _wrong(self.path, f"BlockSize: {found.block}", "an even size that divides twice the array's rows")

    def bandwidth(self) -> tuple[int, int, int] | None:
        mode = self.word("run_presets", "InterfaceBandwidth")
        if self.flag("run_presets", "UseRamulatorTrace"):
            raise _wrong(self.path, "UseRamulatorTrace: True", "False: memory timings of Ramulator are not modelled")
        if mode == "CALC":
            return None
        if mode != "USER":
            raise _wrong(self.path, f"InterfaceBandwidth: {mode}", "USER or CALC")
        if any(self.flag("layout", f"{kind}CustomLayout") for kind in ("Ifmap", "Filter")):
            raise _wrong(
                self.path, "a custom layout with InterfaceBandwidth: USER", "no layout: banks are not modelled"
            )
        reads = [self.integer("layout", f"{kind}SRAMBankBandwidth", 10) for kind in ("Ifmap", "Filter")]
        given = self.word("architecture_presets", "Bandwidth").split(",")[0].strip()
        if not re.fullmatch("[0-9]{1,9}", given) or int(given) < 1:
            raise _wrong(self.path, f"Bandwidth: {cut(given, 40)}", "values a cycle, from 1")
        return reads[0], reads[1], int(given)

    def word(self, section: str, key: str, default: str | None = None) -> str:
        found = self.parser.get(section, key, fallback=default)
        if found is None:
            raise _wrong(self.path, f"no {key} in [{section}]", f"{key} : a value")
        return found.strip()

    def integer(self, section: str, key: str, default: int | None = None, least: int = 1) -> int:
        found = self.word(section, key, None if default is None else str(default))
        if not re.fullmatch("[0-9]{1,9}", found) or int(found) < least:
            raise _wrong(self.path, f"{key}: {cut(found, 40)}", f"a whole number from {least}, of nine digits at most")
        return int(found)

    def flag(self, section: str, key: str) -> bool:
        found = self.word(section, key, "false").lower()
        if found not in ("true", "false"):
            raise _wrong(self.path, f"{key}: {found}", "True or False")
        return found == "true"


def _wrong(path: Path, got: str, wanted: str) -> HardwareError:
    return HardwareError(
        f"{path} is no configuration that can be simulated", got=got, wanted=wanted, remedy="docs/hardware.md"
    )
