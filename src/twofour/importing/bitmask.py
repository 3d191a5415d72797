"""compressed-tensors' bitmask formats, written until its release 0.14: kept values, and a bit for each value.

Of each Linear NAME `sparse-24-bitmask` stores `NAME.compressed` (rows, columns / 2), `NAME.bitmask` uint8 (rows,
bytes), the lowest bit first, and `NAME.shape`. `sparse-bitmask` is the unstructured elder: `NAME.compressed` is flat,
and `NAME.row_offsets` says where each row starts. The values may be int8 or float8 with `NAME.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from twofour.importing.base import (
    Found,
    Source,
    Sparse,
    malformed,
    pack_integers,
    require_finite,
    shown,
    spread,
    stems,
)
from twofour.layers import Reduction
from twofour.packing import LARGEST_WEIGHT
from twofour.patterns import parse

PARTS, OFFSETS = ("compressed", "bitmask", "shape"), "row_offsets"
SCALE, ZERO = "weight_scale", "weight_zero_point"
DROPPED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""What served to quantise activations; the weights stand without it."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REAL = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bitmask:
    """`sparse-24-bitmask`, and `sparse-bitmask` where its weights are 2:4."""

    name: str = "sparse-24-bitmask"

    def recognises(self, source: Source) -> bool:
        """See `Format`."""
        return bool(stems(source, "bitmask"))

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """See `Format`."""
        layers = stems(source, "bitmask")
        taken = {f"{layer}.{part}" for layer in layers for part in (*PARTS, OFFSETS, SCALE, ZERO)}
        dropped = {name for name in source.tensors if name.rpartition(".")[2] in DROPPED}
        plain = {name: tensor for name, tensor in source.tensors.items() if name not in taken | dropped}
        if others := [name for name in plain if name.rpartition(".")[2] in (SCALE, "weight_packed", "weight_g_idx")]:
            layer = others[0].rpartition(".")[0]
            raise malformed(source, layer, f"`{others[0]}`, of a quantised weight that is not sparse", "a bitmask too")
        sparse: dict[str, Sparse] = {}
        notes = [f"{len(dropped)} scales of activations are left out"] if dropped else []
        for layer in layers:
            name = f"{layer.removesuffix('.weight')}.weight"
            if name in plain:
                raise malformed(source, layer, f"`{name}` beside its packed form", "one of them")
            weight = _weight(source, layer)
            if isinstance(weight, Sparse):
                sparse[name] = weight
            else:
                plain[name] = weight
                notes.append(f"`{name}` stays plain: its bitmask is not 2:4")
        return Found(plain, sparse, tuple(notes))


def _weight(source: Source, layer: str) -> Sparse | Tensor:
    """Return a layer's weight, plain where it is not 2:4; whole numbers become real ones, int8 but in packed form."""
    rows, columns = _shape(source, layer)
    keep = _keep(source, layer, rows, columns)
    values = _values(source, layer, keep)
    dense = spread(values, keep)
    rule = parse("2:4")
    paired = columns % rule.group == 0 and rule.check(keep.view(torch.uint8)).ok
    if values.dtype in REAL:
        return Sparse(dense, keep=keep if values.ndim == 2 else None) if paired else dense
    scale = _scale(source, layer, rows)
    if paired and values.dtype == torch.int8:
        return Sparse(replace(pack_integers(dense), scales=scale.float().expand(rows, 1).contiguous()), keep=keep)
    real = (dense.float() * scale.float()).to(scale.dtype)
    require_finite(source, layer, real)
    return Sparse(real, keep=keep) if paired else real


def _shape(source: Source, layer: str) -> tuple[int, int]:
    missing = [part for part in PARTS if not isinstance(source.tensors.get(f"{layer}.{part}"), Tensor)]
    if missing:
        raise malformed(source, layer, f"no {', '.join(missing)}", "compressed, bitmask and shape")
    shape = source.tensors[f"{layer}.shape"]
    if shape.is_floating_point() or shape.is_complex() or shape.numel() != 2:
        raise malformed(source, layer, f"shape {shown(shape)}", "two whole numbers")
    rows, columns = shape.flatten().tolist()
    if min(rows, columns) < 1 or rows * columns > LARGEST_WEIGHT:
        raise malformed(source, layer, f"shape {rows} x {columns}", "positive sizes")
    return rows, columns


def _keep(source: Source, layer: str, rows: int, columns: int) -> Tensor:
    bitmask = source.tensors[f"{layer}.bitmask"]
    if bitmask.dtype != torch.uint8 or tuple(bitmask.shape) != (rows, -(-columns // 8)):
        raise malformed(source, layer, f"bitmask {shown(bitmask)}", f"{(rows, -(-columns // 8))} torch.uint8")
    bits = np.unpackbits(bitmask.numpy(), axis=1, bitorder="little")
    if bits[:, columns:].any():
        raise malformed(source, layer, "bits behind the last column", "zero bits there")
    return torch.from_numpy(bits[:, :columns].astype(bool))


def _values(source: Source, layer: str, keep: Tensor) -> Tensor:
    """Return the validated kept values: (rows, columns / 2), or flat in the unstructured format."""
    values, offsets = source.tensors[f"{layer}.compressed"], source.tensors.get(f"{layer}.{OFFSETS}")
    if values.dtype not in (*REAL, *FLOAT8, torch.int8):
        raise malformed(source, layer, f"values of {values.dtype}", "float32, float16, bfloat16, float8 or int8")
    counts = torch.from_numpy(np.count_nonzero(keep.numpy(), axis=1))
    if values.ndim == 2:
        if tuple(values.shape) != (len(keep), keep.shape[1] // 2) or not _two_of_four(keep):
            wanted = f"{(len(keep), keep.shape[1] // 2)} values, and two bits in each group of four"
            raise malformed(source, layer, f"values {shown(values)}, {int(counts.sum())} bits", wanted)
    else:
        starts = counts.cumsum(0) - counts
        fitting = isinstance(offsets, Tensor) and torch.equal(offsets.flatten().long(), starts)
        if not fitting or tuple(values.shape) != (int(counts.sum()),):
            wanted = "as many values as bits, and row offsets that count them"
            raise malformed(source, layer, f"values {shown(values)}, {int(counts.sum())} bits", wanted)
    require_finite(source, layer, values)
    return values


def _two_of_four(keep: Tensor) -> bool:
    """Whether each group of four keeps exactly two."""
    if keep.shape[1] % 4:
        return False
    first, second, third, fourth = keep.view(torch.uint8).view(-1, 4).unbind(1)
    return bool((first + second + third + fourth == 2).all())


def _scale(source: Source, layer: str, rows: int) -> Tensor:
    """Return the scale of each row, or the one of all: (rows, 1) or (1, 1)."""
    prefix = layer.removesuffix(".weight")
    scale, zero = source.tensors.get(f"{prefix}.{SCALE}"), source.tensors.get(f"{prefix}.{ZERO}")
    if not isinstance(scale, Tensor) or scale.dtype not in REAL or scale.numel() not in (1, rows) or scale.ndim > 2:
        raise malformed(source, layer, f"{SCALE} {shown(scale)}", "a real scale for the weight or for each row")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise malformed(source, layer, "a scale that is not finite or not positive", "positive finite scales")
    if isinstance(zero, Tensor) and bool(zero.float().ne(0).any()):
        raise malformed(source, layer, "zero points other than 0: pruned values are then not 0", "symmetric scales")
    return scale.reshape(-1, 1)
