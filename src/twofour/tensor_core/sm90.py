"""The layout of CUTLASS's Hopper kernels (3.x, torchao's CuTe kernels): values in order, metadata in atoms.

An atom is 64 rows by `tile` dense columns, as large as one tile of the kernel along K but 128 at most. Its bytes, each
two codes, are ordered so that a warp loads its registers with wide reads. Atoms follow each other along M, then along
K. Strides in codes, with a K-block of 512 / bits columns (CUTLASS 4.2, sm90_sparse_config.inl, `TensorEAtom`):

    16 and 32 bits   codes of half a K-block 1, rows + 8, K-blocks, rows 0..7, second half of the block, rows + 16
    8 bits           row-major: codes of a row 1, rows next
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.tensor_core.element import Element, element
from twofour.tensor_core.instruction import widest
from twofour.tensor_core.operand import Operand, require_operand, unit_positions

ROWS = 64
"""Rows of an atom: those of a `wgmma`."""

LARGEST_TILE = 128
"""Dense columns of an atom at most, whatever the kernel's tile."""


def evidence(kind: str | Element) -> str:
    """Say how far this layout is known for an element type that has it."""
    widest(element(kind), "wgmma.sp")
    return "equal to CuTe's layout on a CPU, not run on a GPU"


def to_sm90(operand: Operand, tile: int = LARGEST_TILE) -> tuple[Tensor, Tensor]:
    """Write an operand in the layout of CUTLASS's Hopper kernels, A K-major.

    Args:
        operand: (m, k); m a multiple of 64, k of `tile`; no 4-bit type.
        tile: Dense columns of an atom: the smaller of the kernel's tile along K and 128, a multiple of 512 / bits.

    Returns:
        Values (m, k / 2), and metadata uint8, flat, half as many bytes as there are codes.

    Raises:
        PackingError: The type has no such layout, or the shape or `tile` does not fit.
    """
    kind = operand.element
    _require_tile(kind, tile)
    require_operand(operand, ROWS, tile, "Hopper layout")
    m, k = operand.shape
    atoms = operand.codes.view(m // ROWS, ROWS, k // tile, tile // kind.chunk).permute(2, 0, 1, 3)
    flat = _split(atoms, kind).permute(_order(kind)).reshape(-1, 2)
    return operand.values, flat[:, 0] | flat[:, 1] << 4


def from_sm90(values: Tensor, meta: Tensor, kind: str | Element, tile: int = LARGEST_TILE) -> Operand:
    """Read an operand back from the layout of CUTLASS's Hopper kernels.

    Raises:
        PackingError: Shapes or dtypes do not fit together, or a code is undefined.
    """
    kind = element(kind)
    _require_tile(kind, tile)
    fits = values.ndim == 2 and values.dtype == kind.dtype and meta.dtype == torch.uint8
    m, k = (len(values), values.shape[1] * 2) if fits else (0, 0)
    if not fits or m % ROWS or k % tile or meta.numel() * 2 * kind.chunk != m * k:
        raise PackingError(
            f"this is no {kind.name} operand in the Hopper layout",
            got=f"values {tuple(values.shape)} {values.dtype}, metadata {tuple(meta.shape)} {meta.dtype}, tile {tile}",
            wanted=f"values {kind.dtype} (m, k / 2), m a multiple of {ROWS}, k of {tile}, and uint8 metadata of "
            f"m k / {2 * kind.chunk} bytes",
        )
    flat = torch.stack((meta.flatten() & 0xF, meta.flatten() >> 4), -1).flatten()
    blank = torch.empty(k // tile, m // ROWS, ROWS, tile // kind.chunk, dtype=torch.uint8, device="cpu")
    order = _order(kind)
    shape = [_split(blank, kind).shape[axis] for axis in order]
    atoms = flat.view(shape).permute([order.index(axis) for axis in range(len(order))]).reshape(blank.shape)
    codes = atoms.permute(1, 2, 0, 3).reshape(m, k // kind.chunk)
    unit_positions(codes, kind, ordered=True)
    return Operand(kind, values, codes)


def code_order(kind: Element, tile: int = LARGEST_TILE) -> Tensor:
    """Where each code of an atom stands among its codes, two a byte: int64 (64, tile / chunk)."""
    _require_tile(kind, tile)
    codes = ROWS * tile // kind.chunk
    order = _split(torch.arange(codes, device="cpu").view(1, 1, ROWS, -1), kind).permute(_order(kind)).flatten()
    return torch.empty_like(order).scatter_(0, order, torch.arange(codes, device="cpu")).view(ROWS, -1)


def _split(atoms: Tensor, kind: Element) -> Tensor:
    """View (K atoms, M atoms, 64, codes) as (.., .., 4, 2, 8, K-blocks, 2, 4) for 16 and 32 bits."""
    if kind.bits == 8:
        return atoms
    return atoms.unflatten(2, (4, 2, 8)).unflatten(-1, (-1, 2, 4))


def _order(kind: Element) -> tuple[int, ...]:
    """Axes of `_split` from the largest stride to the smallest."""
    return (0, 1, 2, 3) if kind.bits == 8 else (0, 1, 2, 6, 4, 5, 3, 7)


def _require_tile(kind: Element, tile: int) -> None:
    block = widest(kind, "wgmma.sp").k
    if tile not in range(block, LARGEST_TILE + 1, block):
        raise PackingError(
            f"the Hopper layout of {kind.name} has no such atom",
            got=f"tile {tile}",
            wanted=f"a multiple of {block} dense columns, at most {LARGEST_TILE}",
        )
