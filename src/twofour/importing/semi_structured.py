"""torch's semi-structured tensors in a state dict: kept values, and metadata in the order of CUTLASS or cuSPARSELt.

`torch.save` writes them as tensor subclasses; other writers store the parts of `__tensor_flatten__` on their own, as
`NAME.packed`, `NAME.meta` and so on. In CUTLASS's form `packed` is (m, k / 2) and `meta` int16 (int8: int32); in
cuSPARSELt's `packed` holds values and metadata one after the other. NVIDIA calls that order opaque, and it differs from
one GPU to the next: it is read only where the file can prove it, by the transposed copy or the bitmask that torch
stores for training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS

from twofour.errors import FormatError, PackingError
from twofour.importing.base import Found, Source, Sparse, kept_of, malformed, shown, stems
from twofour.layers import Reduction
from twofour.packing import LARGEST_WEIGHT, Packed
from twofour.tensor_core import from_sm80

PACKED, META, PACKED_T, META_T = "packed", "meta", "packed_t", "meta_t"
BITMASK = "compressed_swizzled_bitmask"
PARTS = (PACKED, META, PACKED_T, META_T, BITMASK)

ELEMENTS = {torch.float32: "tf32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int8: "s8"}
"""Type of the values -> the element type of the tensor cores that it is packed for."""

TILE = 128
"""Rows and columns of a weight in torch's cuSPARSELt form must be multiples of it."""


class _Parts(NamedTuple):
    """The stored tensors of a weight, and its shape; a flattened file says only what they imply."""

    rows: int
    columns: int
    packed: Tensor | None
    meta: Tensor | None
    packed_t: Tensor | None
    meta_t: Tensor | None
    bitmask: Tensor | None
    cutlass: bool


@dataclass(frozen=True)
class SemiStructured:
    """torch's `SparseSemiStructuredTensor` of both backends."""

    name: str = "semi-structured"

    def recognises(self, source: Source) -> bool:
        """See `Format`."""
        return any(isinstance(tensor, SparseSemiStructuredTensor) for tensor in source.tensors.values()) or bool(
            _flattened(source)
        )

    def decode(self, source: Source, axes: Mapping[str, Reduction] | None) -> Found:
        """See `Format`."""
        flattened = _flattened(source)
        taken = {f"{name}.{part}" for name in flattened for part in PARTS}
        whole = {name: t for name, t in source.tensors.items() if isinstance(t, SparseSemiStructuredTensor)}
        if both := sorted(whole.keys() & set(flattened)):
            raise malformed(source, both[0], "the weight beside its parts", "one of them")
        plain = {name: t for name, t in source.tensors.items() if name not in taken and name not in whole}
        parts = {name: _unwrapped(source, name, tensor) for name, tensor in whole.items()}
        parts |= {name: _gathered(source, name) for name in flattened}
        sparse = {name: _weight(source, name, found) for name, found in parts.items()}
        bare = [name for name, found in sparse.items() if not found.weight.is_floating_point()]  # type: ignore[union-attr]
        notes = (f"{len(bare)} weights are whole numbers without scales, such as `{bare[0]}`",) if bare else ()
        return Found(plain, sparse, notes)


def _flattened(source: Source) -> list[str]:
    found = stems(source, PACKED)
    return [name for name in found if not isinstance(source.tensors[f"{name}.{PACKED}"], SparseSemiStructuredTensor)]


def _unwrapped(source: Source, name: str, tensor: Any) -> _Parts:
    """Take a subclass apart; what the file set on it may be missing or of any type."""
    shape, cutlass = tuple(tensor.shape), isinstance(tensor, SparseSemiStructuredTensorCUTLASS)
    if len(shape) != 2:
        raise malformed(source, name, f"shape {shape}", "two axes")
    return _checked(source, name, shape, {part: getattr(tensor, part, None) for part in PARTS}, cutlass)


def _gathered(source: Source, name: str) -> _Parts:
    parts = {part: source.tensors.get(f"{name}.{part}") for part in PARTS}
    packed, meta = parts[PACKED], parts[META]
    if not isinstance(packed, Tensor) or packed.ndim != 2 or not isinstance(meta, Tensor):
        got = f"packed {shown(packed)}, meta {shown(meta)}"
        raise malformed(source, name, got, "packed (m, k / 2) and meta; cuSPARSELt's form does not say its shape")
    return _checked(source, name, (packed.shape[0], packed.shape[1] * 2), parts, True)


def _checked(source: Source, name: str, shape: tuple[int, ...], parts: dict[str, Any], cutlass: bool) -> _Parts:
    if wrong := [part for part, tensor in parts.items() if tensor is not None and type(tensor) is not Tensor]:
        raise malformed(source, name, f"{wrong[0]} is {type(parts[wrong[0]]).__name__}", "plain tensors")
    if min(shape) < 1 or shape[0] * shape[1] > LARGEST_WEIGHT:
        raise malformed(source, name, f"shape {shape}", "positive sizes")
    return _Parts(shape[0], shape[1], *(parts[part] for part in PARTS), cutlass)  # pyright: ignore[reportCallIssue]


def _weight(source: Source, name: str, parts: _Parts) -> Sparse:
    """Unpack a weight and compare it with its transposed copy and its bitmask, where they are stored."""
    if parts.packed is None:
        raise malformed(source, name, "no values but those of the transposed weight", "packed")
    rows, columns = parts.rows, parts.columns
    found = _unpacked(source, name, rows, columns, parts.packed, parts.meta, parts.cutlass)
    proved = parts.cutlass
    if parts.packed_t is not None:
        turned = _unpacked(source, name, columns, rows, parts.packed_t, parts.meta_t, parts.cutlass)
        if not torch.equal(found.unpack(), turned.unpack().t()):
            raise _unproved(source, name, "packed and packed_t are of two weights")
        proved = True
    if parts.bitmask is not None:
        if bool((found.unpack().ne(0) & ~_of_bitmask(source, name, parts)).any()):
            raise _unproved(source, name, "there are values where the bitmask has none")
        proved = True
    if not proved:
        raise _unproved(source, name, "nothing beside packed, whose metadata may be in any order")
    return Sparse(found.unpack(), found.header.pattern, keep=kept_of(found))


def _unpacked(
    source: Source, name: str, rows: int, columns: int, packed: Tensor, meta: Tensor | None, cutlass: bool
) -> Packed:
    if not cutlass:
        packed, meta = _apart(source, name, rows, columns, packed)
    if packed.dtype not in ELEMENTS or meta is None or tuple(packed.shape) != (rows, columns // 2) or columns % 2:
        got, wanted = f"packed {shown(packed)}, meta {shown(meta)}", f"{(rows, columns // 2)} values of a known type"
        raise malformed(source, name, got, wanted)
    # Pruned on the GPU the metadata is a view (rows, 2, pairs of columns) of the same memory.
    meta = meta.permute(2, 0, 1).reshape(-1) if meta.ndim == 3 else meta.reshape(-1)
    try:
        if meta.numel() % rows:
            raise PackingError("the metadata has no rows", got=shown(meta), wanted=f"a multiple of {rows} entries")
        return from_sm80(packed, meta.view(rows, -1), ELEMENTS[packed.dtype]).to_packed()
    except PackingError as error:
        raise malformed(source, name, f"{error.what}: {error.got}", error.wanted or "legal metadata") from error


def _apart(source: Source, name: str, rows: int, columns: int, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Cut cuSPARSELt's tensor into values and metadata, the latter put into CUTLASS's order.

    torch writes it in tiles of 32 x 32 values, which hold what CUTLASS's do; CUTLASS puts the tiles of a tile column
    one after the other, cuSPARSELt those of a block of 128 x 64 values, column by column, and the blocks likewise
    (aten/src/ATen/native/sparse/cuda/SparseSemiStructuredTile.cu, `MetadataCuSparseLt`).
    """
    size = rows * columns // 16 * 9
    if packed.dtype not in (torch.float16, torch.bfloat16) or rows % TILE or columns % TILE or packed.numel() != size:
        wanted = f"{size} values of float16 or bfloat16, of a weight whose sides are multiples of {TILE}"
        raise malformed(source, name, f"packed {shown(packed)} of a weight {rows} x {columns}", wanted)
    flat = packed.flatten()
    values, meta = flat[: rows * columns // 2], flat[rows * columns // 2 :].view(torch.int16)
    tiles = meta.view(columns // 64, rows // 128, 2, 4, 64).permute(0, 2, 1, 3, 4)
    return values.view(rows, columns // 2), tiles.reshape(-1)


def _of_bitmask(source: Source, name: str, parts: _Parts) -> Tensor:
    """Read torch's swizzled bitmask: for each tile of 8 x 8 four tiles of 4 x 4, the lowest bit first."""
    bitmask, rows, columns = parts.bitmask, parts.rows, parts.columns
    assert bitmask is not None
    if bitmask.dtype != torch.uint8 or rows % 8 or columns % 8 or bitmask.numel() != rows * columns // 8:
        raise malformed(source, name, f"bitmask {shown(bitmask)}", f"{rows * columns // 8} torch.uint8")
    bits = (bitmask.reshape(-1, 1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
    tiles = bits.bool().view(rows // 8, columns // 8, 2, 2, 4, 4)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(rows, columns)


def _unproved(source: Source, name: str, got: str) -> FormatError:
    return FormatError(
        "a semi-structured weight cannot be read with certainty",
        got=f"{source.path}: {got}",
        wanted="CUTLASS's form, or cuSPARSELt's with the transposed copy or the bitmask of torch's training tensors",
        remedy="on the machine that wrote it: torch.save of weight.to_dense(), which twofour.read takes too",
        layer=name,
    )
