"""SCALE-Sim's configurations and topologies: read, and small layers simulated."""

from __future__ import annotations

import math
import zlib

from tests.fuzz.cursor import NUMBERS, Cursor, edit_bytes
from tests.fuzz.shelf import put
from twofour.errors import HardwareError
from twofour.hardware.systolic.settings import Settings, read_settings
from twofour.hardware.systolic.simulate import simulate
from twofour.hardware.systolic.topology import read_topology

TRACED = ("twofour.hardware.systolic", "twofour.files")
SEEDS = (b"", b"\x01\x01", b"\x02\x02", b"\x03\x03")

LINES = ["[general]", "run_name = r", "[architecture_presets]", "ArrayHeight = 4", "ArrayWidth = 4"]
LINES += ["IfmapSramSzkB = 1", "FilterSramSzkB = 1", "OfmapSramSzkB = 1", "IfmapOffset = 0", "FilterOffset = 100000"]
LINES += ["OfmapOffset = 200000", "Dataflow = ws", "Bandwidth = 10", "[sparsity]", "SparsitySupport = false"]
LINES += ["SparseRep = ellpack_block", "OptimizedMapping = false", "BlockSize = 4", "RandomNumberGeneratorSeed = 40"]
LINES += ["[run_presets]", "InterfaceBandwidth = CALC", "UseRamulatorTrace = False"]
VALUES = ["ws", "os", "is", "true", "True", "false", "CALC", "USER", "csr", "csc", "ellpack_block", "", "-1", "10,20"]
VALUES += ["1e3", "0x10", "../x", "%(x)s", "${x}", "\0", "٣", "0", "1", "2", "3", "6", "999999999", "9999999999"]
ROWS = [
    "l, 4, 4, 3, 3, 2, 4, 1,",
    "l, 6, 6, 3, 3, 4, 4, 2, 2:4,",
    "g, 8, 8, 8,",
    "g, 8, 8, 8, 2:4,",
    "DP, 4, 4, 3, 3, 2, 1, 1,",
]
SMALL = 1 << 11
"""Products of a layer that is simulated."""


def build(data: bytes) -> tuple[bytes, bytes]:
    """Return the .cfg and the .csv."""
    cursor = Cursor(data)
    lines, row = list(LINES), cursor.number(len(ROWS))
    rows = ["Layer, sizes", *([ROWS[row]] * (1 + cursor.number(2)))]
    for _ in range(6):
        if cursor.empty:
            break
        action, place = cursor.number(8), cursor.number(256)
        if action < 4:
            key = lines[place % len(lines)].partition("=")[0]
            value = cursor.pick(VALUES) if cursor.number(2) else str(cursor.number(64))
            lines[place % len(lines)] = f"{key}= {value}"
        elif action < 6:
            fields = rows[1 + place % (len(rows) - 1)].split(",")
            text = cursor.pick([*VALUES, "2:4", "1:1", "0:0", "4:2", *map(str, NUMBERS)])
            fields[cursor.number(len(fields))] = str(cursor.number(16)) if cursor.number(2) else text
            rows[1 + place % (len(rows) - 1)] = ",".join(fields)
        elif action == 6:
            lines.insert(place % len(lines), lines.pop(cursor.number(len(lines))))
        else:
            parts = ["\n".join(lines).encode(), "\n".join(rows).encode()]
            which = cursor.number(2)
            parts[which] = edit_bytes(cursor, parts[which])
            return parts[0], parts[1]
    return "\n".join(lines).encode(), "\n".join(rows).encode()


def run(built: tuple[bytes, bytes]) -> str:
    """Read both; one in sixteen is simulated where its layers are small."""
    settings = read_settings(put("array.cfg", built[0]))
    layers = read_topology(put("layers.csv", built[1]))
    if zlib.crc32(built[0] + built[1]) % 16 or any(not _small(settings, layer.m, layer.n, layer.k) for layer in layers):
        return "read"
    for layer in layers[:2]:
        try:
            found = simulate(layer, settings)
        except HardwareError as error:
            assert error.got, error
            return "not simulated"
        assert found.cycles >= found.stalls >= 0 and math.isfinite(found.overall), found
    return "simulated"


def _small(settings: Settings, *sizes: int) -> bool:
    return math.prod(sizes) <= SMALL and settings.array.units <= SMALL
