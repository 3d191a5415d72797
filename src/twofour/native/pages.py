"""Memory for prepared weights in pages of 2 MB: with pages of 4 KB a product of few tokens misses the TLB all the time.

Linux alone; elsewhere the memory is the usual one. Only whole pages inside a weight are asked for: none takes
more memory than its bytes.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from twofour.native import extension

HUGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64, and on AArch64 with base pages of 4 KB."""


def empty(nbytes: int) -> Tensor:
    """Return uninitialised uint8 (nbytes,); from 2 MB on it starts with a page of 2 MB; all whole ones are asked for.

    Large ones are mappings of their own: what malloc hands out again keeps the small pages it has had before.
    """
    if nbytes < HUGE_PAGE or sys.platform != "linux":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)  # what is never touched takes no memory
    address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    buffer = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=-address % HUGE_PAGE)
    extension().advise_huge_pages(buffer.data_ptr(), nbytes)
    return buffer


def copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in such memory: dtype and shape of `tensor`, a plain one on the CPU."""
    nbytes = tensor.numel() * tensor.element_size()
    return empty(nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def collapse(tensor: Tensor) -> Tensor:
    """Move what stands in small pages already, and was allocated by others, to large ones; return `tensor`.

    For the opaque weights of oneDNN (mkldnn layout). The kernel does what it can (Linux 6.1 and later).
    """
    address = torch.ops.mkldnn.data_ptr(tensor)
    extension().collapse_huge_pages(address, torch.ops.mkldnn._nbytes(tensor))
    return tensor
