"""Memory that is a file's own pages: processes that map one file share them, and those that nobody reads take none.

What becomes of the file does not matter to a tensor on them. One that is removed or replaced stays until the last
mapping goes. For one that is cut or written to in place there is a lease of the system (Linux, `fcntl(2)`): the writer
waits some milliseconds, in which the pages are copied into memory of the process's own (mapped.cc). No lease is granted
on another user's file, on one that somebody has open to write to, nor by every file system; such a file is not mapped.
Nor is one where SIGIO, which tells of the writer, is not this module's or is blocked.

Such tensors are for reading. Writing to them stays in this process, but what one thread writes while they are copied,
since somebody opened the file to write to it, may be lost.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from twofour.native import extension
from twofour.native.pages import LEAST

__all__ = ["LEAST", "MappedFile", "forget", "mapped_bytes"]


_REASONS = {
    errno.EAGAIN: "somebody has it open to write to it",
    errno.EACCES: "it is another user's",
    errno.EINVAL: "its file system has no leases",
    errno.ENOSYS: "this system has no leases",
    errno.EBUSY: "SIGIO, by which the system tells of a writer, is ignored or has a handler of others",
    errno.ECANCELED: "SIGIO, by which the system tells of a writer, is blocked in this thread",
    errno.ENODATA: "it is empty by now",
}
"""Why there is no lease, by the system's number."""


class _Pages(mmap.mmap):
    """All pages of a file, written to for this process alone.

    Attributes:
        handle: The open file that has the lease, which goes with it.
    """

    handle: int = -1

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


_ALIVE: weakref.WeakSet[_Pages] = weakref.WeakSet()
_FORKS: list[bool] = []


class MappedFile:
    """A file whose bytes are memory, as long as a tensor stands on them.

    Args:
        handle: The file, open to read.

    Raises:
        OSError: The system grants no lease on it.
    """

    def __init__(self, handle: int) -> None:
        own = os.dup(handle)
        try:
            if reason := extension().lease_file(own):
                raise OSError(reason, _REASONS.get(reason, os.strerror(reason)))
            if not os.fstat(own).st_size:
                raise OSError(errno.ENODATA, _REASONS[errno.ENODATA])
            self._pages = _Pages(own, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(own)
            raise
        self._pages.handle = own
        _ALIVE.add(self._pages)
        if not _FORKS:  # a child has no leases: it shares what its parent owns, as all its memory
            _FORKS.append(True)
            os.register_at_fork(before=lambda: extension().own_pages())

    def part(self, begin: int, nbytes: int) -> Tensor | None:
        """Return bytes of the file, uint8 (nbytes,), where they stand; None where that is not possible.

        It is too short, has too many parts, or somebody waits to write to it, or already may: then it is read.
        """
        if begin + nbytes > len(self._pages):
            return None
        part = memoryview(self._pages)[begin : begin + nbytes]
        tensor = torch.frombuffer(part, dtype=torch.uint8)
        place = extension().guard_pages(tensor, self._pages.handle)
        if place < 0:
            return None
        weakref.finalize(part, _leave, self._pages, place, begin, nbytes).atexit = False
        return tensor


def _leave(pages: _Pages, place: int, begin: int, nbytes: int) -> None:
    """Give back the pages that nothing else stands on."""
    extension().leave_pages(place)
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (begin + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def forget(tensors: Iterable[Tensor]) -> None:
    """Let plain tensors that are pages of files take no memory until they are read again, page by page.

    A file that was just read for its digest is in memory as a whole. Nobody may have written to the tensors: what was
    written would be lost.
    """
    for one in _mapped(tensors):
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(one.untyped_storage())
        extension().forget_pages(whole)


def mapped_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes of plain tensors, each counted once, are pages of files."""
    return sum(one.nbytes for one in _mapped(tensors))


def _mapped(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the plain tensors that are pages of files, each memory once."""
    spans = [
        (address, address + len(pages))
        for pages in list(_ALIVE)
        for address in [torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()]
    ]
    plain = (one for one in tensors if spans and type(one) in (Tensor, torch.nn.Parameter))
    found = {one.data_ptr(): one for one in plain if one.layout is torch.strided and one.is_cpu}
    return [one for at, one in found.items() if any(a <= at < b for a, b in spans)]
