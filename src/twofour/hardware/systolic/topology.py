"""Topologies: SCALE-Sim's lists of layers, as convolutions or as products, read unchanged."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from twofour.errors import HardwareError, cut
from twofour.files import read_text, reason
from twofour.hardware.systolic.layer import Layer

FORMS = ("gemm", "conv")
CHANNELS = 1 << 16
"""Channels of a depth-wise convolution at most: each becomes a layer."""

_CONV, _GEMM = 8, 4
"""Fields of a row before its sparsity: name, six sizes and a stride; or name, M, N and K."""


def read_topology(path: str | os.PathLike[str], form: str | None = None) -> tuple[Layer, ...]:
    """Read a topology .csv, a heading and one layer a row.

    Convolution: name, input height and width, filter height and width, channels, filters, stride[, N:M]. Product: name,
    M, N, K[, N:M]. Rows end in a comma; one that does not is read whole (SCALE-Sim drops its last field). A name with
    "DP" is a depth-wise convolution, one layer for each channel.

    Args:
        path: File.
        form: "conv" or "gemm"; None tells it from the number of fields.

    Raises:
        HardwareError: The file cannot be read or a row is not of the form.
    """
    source = Path(path)
    try:
        lines = read_text(source).splitlines()
    except (OSError, ValueError) as error:
        raise _wrong(source, reason(error)) from error
    rows = [(number, _fields(line)) for number, line in enumerate(lines[1:], 2) if line.strip()]
    if not rows:
        raise _wrong(source, "no layer below the heading")
    if form is None:
        form = "conv" if len(rows[0][1]) >= _CONV else "gemm"
    if form not in FORMS:
        raise _wrong(source, f"the form {form!r}")
    found: list[Layer] = []
    for number, fields in rows:
        found += _layers(source, number, fields, form)
    return tuple(found)


def _fields(line: str) -> list[str]:
    fields = [field.strip() for field in line.split(",")]
    while fields and not fields[-1]:
        fields.pop()
    return fields


def _layers(source: Path, number: int, fields: list[str], form: str) -> list[Layer]:
    wanted = _CONV if form == "conv" else _GEMM
    sparsity = fields[wanted] if len(fields) > wanted else "1:1"
    sizes, ratio = fields[1:wanted], sparsity.split(":")
    numbers = [*sizes, *ratio]
    if (
        len(fields) not in (wanted, wanted + 1)
        or len(ratio) != 2
        or not all(re.fullmatch("[0-9]{1,9}", text) for text in numbers)
    ):
        raise _wrong(source, f"line {number}: {cut(', '.join(fields), 80)}")
    values = [int(text) for text in numbers]
    layer = Layer.gemm(fields[0], *values) if form == "gemm" else Layer(fields[0], *values)
    if form == "conv" and "DP" in layer.name:
        if layer.channels > CHANNELS:
            raise _wrong(source, f"line {number}: a depth-wise convolution of {layer.channels} channels")
        return [replace(layer, name=f"{layer.name}Channel_{i}", channels=1) for i in range(layer.channels)]
    return [layer]


def _wrong(source: Path, got: str) -> HardwareError:
    return HardwareError(
        f"{source} is no topology",
        got=got,
        wanted="name, height, width, filter height, width, channels, filters, stride[, N:M], or name, M, N, K[, N:M]",
        remedy='a row for each layer below a heading; form="gemm" or "conv" where it is not told from the first row',
    )
