"""A prepared weight as one buffer on the device: a header, then its parts, each at a multiple of 256 bytes.

One tensor, because the registered operator, copies and pickling carry one tensor a layout. The header is the one that
layouts on the CPU have (docs/formats.md); kernels never read it, sizes say where the parts stand.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from twofour.errors import KernelError
from twofour.files import bytes_of
from twofour.native import gpu
from twofour.packing import HEADER_BYTES

ALIGNED = 256
"""Bytes to whose multiples parts are moved: what the device's own allocator keeps."""


_opened = cast("MutableMapping[Tensor, tuple[Sequence[Part], tuple[Tensor, ...]]]", WeakTensorKeyDictionary())


@dataclass(frozen=True)
class Part:
    """One tensor of a prepared weight; a size of -1 takes what is left."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part; 0 where its size is open."""
        return 0 if -1 in self.shape else prod(self.shape) * self.dtype.itemsize


def size(parts: Sequence[Part]) -> int:
    """Return the bytes of a buffer with these parts, open ones counted as empty."""
    return ALIGNED + sum(-(-part.nbytes // ALIGNED) * ALIGNED for part in parts)


def joined(header: bytes, tensors: Sequence[Tensor], *, open_end: bool = False) -> Tensor:
    """Return a uint8 buffer on the device: a header of 64 bytes, then the tensors; `open_end` as in `beside`."""
    assert len(header) == HEADER_BYTES, len(header)
    buffer = beside([tensor.to(gpu.device()) for tensor in tensors], open_end=open_end)
    buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(buffer.device)
    return buffer


def beside(tensors: Sequence[Tensor], *, open_end: bool = False) -> Tensor:
    """Return the same without a header, on the tensors' own device: nothing waits for it, so a graph can hold it.

    Args:
        tensors: The parts.
        open_end: End with the last part's last byte: its size is open, and what is left of the buffer is its own.
    """
    begins: list[int] = []
    end = ALIGNED
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    end = begins[-1] + tensors[-1].nbytes if open_end else end
    buffer = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
    for tensor, begin in zip(tensors, begins, strict=True):
        flat = bytes_of(tensor)
        buffer[begin : begin + len(flat)] = flat
    return buffer


def opened(buffer: Tensor, parts: Sequence[Part], kernel: str) -> tuple[Tensor, ...]:
    """Return the parts of a buffer; kept while the buffer lives, because views cost microseconds each.

    Raises:
        KernelError: The buffer is too small: it was made for another kernel or shape.
    """
    known = _opened.get(buffer)
    if known is not None and known[0] == parts:
        return known[1]
    if buffer.dtype is not torch.uint8 or buffer.ndim != 1 or buffer.numel() < size(parts):
        raise KernelError(
            f"{kernel} was given bytes made for another kernel",
            got=f"{buffer.numel()} numbers of {buffer.dtype}",
            wanted=f"at least {size(parts)} bytes",
            remedy="prepare the weight with kernel.prepare(packed)",
        )
    plain = buffer.data  # a view of the buffer itself would keep it alive for good
    found: list[Tensor] = []
    begin = ALIGNED
    for part in parts:
        end = begin + part.nbytes if part.nbytes else buffer.numel()
        found.append(plain[begin:end].view(part.dtype).view(part.shape))
        begin += -(-(end - begin) // ALIGNED) * ALIGNED
    views = tuple(found)
    _opened[buffer] = parts, views
    return views
