"""Memory for prepared weights in pages of 2 MB: with pages of 4 KB a product of few tokens misses the TLB all the time.

Linux alone; elsewhere the memory is the usual one. Small weights stand one behind the other in mappings that they
share, so that a page of 2 MB is full of them. Only whole pages that are taken are asked for: no weight takes more
memory than its bytes.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from twofour.native import extension

HUGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64, and on AArch64 with base pages of 4 KB."""

LEAST = 64 << 10
"""Bytes from which a weight's memory is not the usual one: what is smaller stays in the caches."""

SHARED = 64 << 20
"""Bytes of a mapping that weights share; one of more than half of them has its own."""

LINE = 64


def empty(nbytes: int) -> Tensor:
    """Return uninitialised uint8 (nbytes,); from 2 MB on it starts with a page of 2 MB; all whole ones are asked for.

    The memory is never malloc's: what that hands out again keeps the small pages it has had before.
    """
    if nbytes < LEAST or sys.platform != "linux":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes <= SHARED // 2:
        return _WEIGHTS.empty(nbytes)
    alone = _Mapping(nbytes)
    extension().advise_huge_pages(alone.address, nbytes)
    return torch.frombuffer(alone.memory[:nbytes], dtype=torch.uint8)


class _Mapping:
    """Memory that begins with a page, and its parts that are free: (begin, end), in order, none beside another."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)  # what is never touched takes no memory
        self.ahead = -torch.frombuffer(self.map, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
        self.memory = memoryview(self.map)[self.ahead : self.ahead + nbytes]
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        self.free = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Return where so many bytes are taken now, None where there is no room."""
        step = HUGE_PAGE if nbytes >= HUGE_PAGE else LINE
        for index, (begin, end) in enumerate(self.free):
            first = _up(begin, step)
            last = first + _up(nbytes, LINE)
            if last <= end:
                self.free[index : index + 1] = [(a, b) for a, b in ((begin, first), (last, end)) if a < b]
                self._ask(first, last)
                return first
        return None

    def _ask(self, begin: int, end: int) -> None:
        """Ask for the large pages that were filled up by what was taken; those begun by others have small ones."""
        for low in range(begin // HUGE_PAGE * HUGE_PAGE, end, HUGE_PAGE):
            high = low + HUGE_PAGE
            if not any(a < high and low < b for a, b in self.free):
                whole = begin <= low and high <= end
                ask = extension().advise_huge_pages if whole else extension().collapse_huge_pages
                ask(self.address + low, HUGE_PAGE)

    def give(self, begin: int, nbytes: int) -> None:
        """Let a part be free; pages with nothing else go back to the system."""
        end = begin + _up(nbytes, LINE)
        for part in [(a, b) for a, b in self.free if b == begin or a == end]:
            self.free.remove(part)
            begin, end = min(begin, part[0]), max(end, part[1])
        self.free = sorted([*self.free, (begin, end)])
        first, last = self.ahead + _up(begin, HUGE_PAGE), self.ahead + end // HUGE_PAGE * HUGE_PAGE
        if first < last:
            for advice in (mmap.MADV_DONTNEED, mmap.MADV_NOHUGEPAGE):
                self.map.madvise(advice, first, last - first)


class _Weights:
    """The mappings that weights share. What a tensor took is free when its memory is no tensor's any more."""

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []
        self._lock = threading.Lock()
        self._given: deque[tuple[_Mapping, int, int]] = deque()

    def empty(self, nbytes: int) -> Tensor:
        """Return uninitialised uint8 (nbytes,)."""
        with self._lock:
            self._settle()
            for mapping in self._mappings:
                if (begin := mapping.take(nbytes)) is not None:
                    break
            else:
                self._mappings.append(mapping := _Mapping(SHARED))
                begin = mapping.take(nbytes)
                assert begin is not None
        part = mapping.memory[begin : begin + nbytes]
        weakref.finalize(part, self._give, mapping, begin, nbytes).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    def _give(self, *part: *tuple[_Mapping, int, int]) -> None:
        self._given.append(part)
        # The collector may call this in the midst of `empty`, whose next call settles it then.
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._given:
            mapping, begin, nbytes = self._given.popleft()
            mapping.give(begin, nbytes)
            if mapping.free == [(0, SHARED)]:
                self._mappings.remove(mapping)


_WEIGHTS = _Weights()


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


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
