"""compressed-tensors' `marlin-24`, written until its release 0.14: int4 or int8 values in the order of one GPU kernel.

Of each Linear NAME (out, in) it stores `NAME.weight_packed` int32 (in / 32, out * 16 * bits / 32), `NAME.scale_packed`
float16 (groups, out) and `NAME.meta` int16 (in / 32, out * 2). The kept values stand input first, in tiles of 16 x 16,
each run of 1024 of them permuted as the lanes of a warp load them; whole numbers are shifted to be unsigned. vLLM took
the kernel out in 0.19, so that nothing but a permutation undone makes such a file readable. Widths and groups follow
from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.importing.base import Found, Source, Sparse, kept_of, malformed, pack_integers, shown, spread, stems
from twofour.layers import Reduction
from twofour.packing import LARGEST_WEIGHT, Header, Packed
from twofour.packing.encodings import INT4

VALUES, SCALES, META = "weight_packed", "scale_packed", "meta"
PARTS = (VALUES, SCALES, META)

RUN = 1024
"""Values that are permuted among each other: tiles of 16 inputs by 64 outputs."""

META_ROWS = 64
"""Outputs whose metadata is moved among each other."""

TILE = 16
GROUP = 128
"""Inputs that share a scale: the only group size that the format has beside whole rows."""


class _Layer(NamedTuple):
    """The stored parts of a layer, and what their shapes say."""

    values: Tensor
    scales: Tensor
    meta: Tensor
    rows: int
    columns: int
    bits: int


@dataclass(frozen=True)
class Marlin:
    """`marlin-24`."""

    name: str = "marlin-24"

    def recognises(self, source: Source) -> bool:
        """See `Format`."""
        return bool(_layers(source))

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """See `Format`."""
        layers = _layers(source)
        taken = {f"{layer}.{part}" for layer in layers for part in PARTS}
        plain = {name: tensor for name, tensor in source.tensors.items() if name not in taken}
        if others := [name for name in plain if name.rpartition(".")[2] in (*PARTS, "weight_scale", "weight_g_idx")]:
            layer = others[0].rpartition(".")[0]
            raise malformed(source, layer, f"`{others[0]}` without the rest", ", ".join(PARTS))
        sparse = {f"{layer}.weight": _weight(source, layer) for layer in layers}
        if both := sorted(plain.keys() & sparse.keys()):
            raise malformed(source, both[0], "the weight beside its packed form", "one of them")
        real = [name for name, found in sparse.items() if isinstance(found.weight, Tensor)]
        notes = [f"{len(real)} weights of int8 with groups became float32, such as `{real[0]}`"] if real else []
        if any(isinstance(found.weight, Packed) and found.weight.header.encoding == INT4 for found in sparse.values()):
            notes.append("packed, the scales of int4 become bfloat16: a weight moves by 0.4 % at most")
        return Found(plain, sparse, tuple(notes))


def _layers(source: Source) -> list[str]:
    return [layer for layer in stems(source, VALUES) if f"{layer}.{META}" in source.tensors]


def permutation(bits: int) -> Tensor:
    """Return which of a run's values stands at each place: int64 (1024,).

    A run is four tiles of 16 x 16. Lane i of a warp holds 32 of its values: of tile i // 8, eight columns and the four
    rows that `mma` gives lane i % 4. In each word the even ones come before the odd ones, so that one shift and mask
    unpacks two (Sparse-Marlin; compressed-tensors' get_permutations_24).
    """
    lane = torch.arange(32, device="cpu")
    column, pair = lane // 4, lane % 4
    start = column // 2 * 256 + column % 2 * 8
    rows = torch.stack([2 * pair, 2 * pair + 1, 2 * pair + 8, 2 * pair + 9], -1)  # (lane, 4)
    block = torch.tensor([0, 4], dtype=torch.long, device="cpu").view(1, 1, 2, 1)
    step = torch.arange(4, device="cpu").view(1, 4, 1, 1)
    order = (start.view(32, 1, 1, 1) + step + block + 16 * rows.view(32, 1, 1, 4)).flatten()
    together = 32 // bits
    interleaved = torch.cat([torch.arange(0, together, 2, device="cpu"), torch.arange(1, together, 2, device="cpu")])
    return order.view(-1, together)[:, interleaved].flatten()


def _weight(source: Source, layer: str) -> Sparse:
    stored = _stored(source, layer)
    indices = _indices(stored)
    header = Header("2:4", "int8", (stored.rows, stored.columns), 1)
    found = Packed(header, _unpermuted(stored), indices)
    try:
        found.validate()
    except PackingError as error:
        raise malformed(source, layer, f"{error.what}: {error.got}", error.wanted or "legal indices") from error
    keep = kept_of(found)
    # Packed again, since the places of kept zeros are not the canonical ones.
    return _scaled(pack_integers(spread(found.values, keep)), _scales(source, layer, stored), keep, stored.bits)


def _stored(source: Source, layer: str) -> _Layer:
    parts = [source.tensors.get(f"{layer}.{part}") for part in PARTS]
    values, scales, meta = parts
    if not isinstance(values, Tensor) or not isinstance(scales, Tensor) or not isinstance(meta, Tensor):
        raise malformed(source, layer, ", ".join(map(shown, parts)), f"the tensors {', '.join(PARTS)}")
    types = (values.dtype, meta.dtype, scales.dtype in (torch.float16, torch.bfloat16, torch.float32))
    if types != (torch.int32, torch.int16, True) or {values.ndim, scales.ndim, meta.ndim} != {2}:
        raise malformed(source, layer, ", ".join(map(shown, parts)), "int32, real and int16 of two axes")
    rows, columns = meta.shape[1] // 2, meta.shape[0] * 32
    fitting = (
        min(rows, columns) > 0 and rows % META_ROWS == 0 and meta.shape[1] % 2 == 0 and rows * columns <= LARGEST_WEIGHT
    )
    width = {rows * TILE * bits // 32: bits for bits in (4, 8)}
    if not fitting or values.shape[0] != columns // 32 or values.shape[1] not in width:
        wanted = f"{VALUES} (in / 32, out * 16 * bits / 32), {META} (in / 32, out * 2), out a multiple of {META_ROWS}"
        raise malformed(source, layer, ", ".join(map(shown, parts)), wanted)
    groups = scales.shape[0]
    if scales.shape[1] != rows or (groups != 1 and (groups == 0 or groups * GROUP != columns)):
        raise malformed(source, layer, f"{SCALES} {shown(scales)}", f"(1 or {columns} / {GROUP}, {rows})")
    return _Layer(values, scales, meta, rows, columns, width[values.shape[1]])


def _indices(stored: _Layer) -> Tensor:
    """Return the metadata as our index stream, uint8 (out, in / 8): the same codes in the order of the weight.

    The writer moved rows within groups of 64 (the bits of a row's number: 0 to 1, 1 to 5, 2 to 0, 3 to 5 one down),
    exchanged the off-diagonal entries of each 2 x 2 block, and stored two columns interleaved, pair after pair
    (CUTLASS's `ColumnMajorInterleaved<2>`).
    """
    row, column = torch.arange(stored.rows, device="cpu").unsqueeze(1), torch.arange(stored.columns // 16, device="cpu")
    within = row % 2 * 2 + row % 4 // 2 * 32 + row % 8 // 4 + row % META_ROWS // 8 * 4
    row = row // META_ROWS * META_ROWS + within
    across = column % 2 - row % 2  # +1 at the top right of a block, -1 at the bottom left
    place = (column - across) // 2 * (2 * stored.rows) + (row + across) * 2 + (column - across) % 2
    return stored.meta.flatten()[place].contiguous().view(torch.uint8)


def _unpermuted(stored: _Layer) -> Tensor:
    """Return the kept values, int8 (out, in / 2), in the order of the weight."""
    words = stored.values.contiguous().numpy().view(np.uint32)
    each = np.stack([words >> (stored.bits * i) & (1 << stored.bits) - 1 for i in range(32 // stored.bits)], -1)
    runs = torch.from_numpy(each.astype(np.int16)).view(-1, RUN)
    back = torch.empty_like(runs)
    back[:, permutation(stored.bits)] = runs
    tiles = back.view(stored.columns // 32, stored.rows // TILE, TILE, TILE).permute(1, 3, 0, 2)
    return (tiles.reshape(stored.rows, stored.columns // 2) - (1 << stored.bits - 1)).to(torch.int8)


def _scales(source: Source, layer: str, stored: _Layer) -> Tensor:
    """Return the scales, float32 (out, groups), in the order of the weight."""
    scales = stored.scales.float()
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise malformed(source, layer, "a scale that is not finite or not positive", "positive finite scales")
    # The writer compared the group with the inputs that are kept, so that two groups stay in order.
    if len(scales) > 1 and stored.columns // 2 > GROUP:
        scales = scales.reshape(-1, 4, 2).transpose(1, 2).reshape(scales.shape)  # eights of 0 4 1 5 2 6 3 7
    return scales.t().contiguous()


def _scaled(packed: Packed, scales: Tensor, keep: Tensor, bits: int) -> Sparse:
    """Give whole numbers their scales: int4 with groups, int8 with one a row; int8 with groups becomes float32."""
    if bits == 8 and scales.shape[1] == 1:
        return Sparse(replace(packed, scales=scales), keep=keep)
    if bits == 8:
        whole = packed.unpack().float().view(len(scales), scales.shape[1], -1)
        return Sparse((whole * scales.unsqueeze(-1)).view(packed.header.shape), keep=keep)
    columns = packed.header.shape[1]
    group = GROUP if scales.shape[1] > 1 else next(size for size in reversed(INT4.groups) if columns % size == 0)
    header = replace(packed.header, dtype=INT4.name, group=group)
    each = scales.repeat_interleave(columns // group // scales.shape[1], 1)
    return Sparse(Packed(header, INT4.store(packed.values), packed.indices, each), keep=keep)
