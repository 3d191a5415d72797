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
from collections.abc import Iterable

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
        self.large: set[int] = set()
        """Where pages begin that were asked for as large ones: these go back as a whole, small ones each by itself."""

    @property
    def unused(self) -> int:
        """Bytes that nobody has and that cannot go back, since they share a large page with what somebody has."""
        return sum(
            min(b, low + HUGE_PAGE) - max(a, low) for low in self.large for a, b in self.free if _meet(low, a, b)
        )

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
            if not any(_meet(low, a, b) for a, b in self.free):
                self.large.add(low)
                whole = begin <= low and high <= end
                ask = extension().advise_huge_pages if whole else extension().collapse_huge_pages
                ask(self.address + low, HUGE_PAGE)

    def give(self, begin: int, nbytes: int) -> None:
        """Let a part be free; pages with nothing else go back to the system."""
        end = begin + _up(nbytes, LINE)
        given = range(begin // HUGE_PAGE * HUGE_PAGE, end, HUGE_PAGE)
        for part in [(a, b) for a, b in self.free if b == begin or a == end]:
            self.free.remove(part)
            begin, end = min(begin, part[0]), max(end, part[1])
        self.free = sorted([*self.free, (begin, end)])
        for low in given:
            first, last = max(begin, low), min(end, low + HUGE_PAGE)
            if last - first == HUGE_PAGE:
                self.large.discard(low)
                self._return(first, last, mmap.MADV_DONTNEED, mmap.MADV_NOHUGEPAGE)
            elif low not in self.large:
                self._return(_up(first, mmap.PAGESIZE), last // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_DONTNEED)

    def _return(self, first: int, last: int, *advices: int) -> None:
        for advice in advices if first < last else ():
            self.map.madvise(advice, self.ahead + first, last - first)


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

    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors out of mappings with unused memory; see `gather`."""
        with self._lock:
            self._settle()
            loose = [mapping for mapping in self._mappings if mapping.unused >= HUGE_PAGE]
            self._mappings = [mapping for mapping in self._mappings if mapping not in loose]  # nothing goes there
        standing: dict[int, list[Tensor]] = {}
        for tensor in tensors if loose else ():
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.is_cpu:
                standing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        for mapping in loose:
            for address in sorted(standing):
                if mapping.address <= address < mapping.address + SHARED:
                    _move(standing.pop(address))
        with self._lock:
            self._settle()
            self._mappings += [mapping for mapping in loose if mapping.free != [(0, SHARED)]]

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
            if mapping.free == [(0, SHARED)] and mapping in self._mappings:
                self._mappings.remove(mapping)


_WEIGHTS = _Weights()


def gather(tensors: Iterable[Tensor]) -> None:
    """Move weights together where others that stood between them are gone; they stay the tensors that they are.

    A large page goes back to the system as a whole, so one that is half empty keeps all its memory: of a small ViT,
    whose compilation had made twice as many weights as it kept, 55 MB took 121. Nobody may read them meanwhile.

    Args:
        tensors: All that stand on the memory of these weights; what else does keeps its memory where it is.
    """
    _WEIGHTS.gather(tensors)


def _move(tensors: list[Tensor]) -> None:
    """Move tensors of one memory, and those that they are views of, elsewhere."""
    storage = tensors[0].untyped_storage()
    elsewhere = empty(storage.nbytes()).untyped_storage().copy_(storage)
    for tensor in {id(one): one for view in tensors for one in (view, view._base) if one is not None}.values():
        with torch.inference_mode(tensor.is_inference()):  # whether it counts writes stays as it is
            moved = torch.empty(0, dtype=tensor.dtype, device="cpu")
            tensor.data = moved.set_(elsewhere, tensor.storage_offset(), tensor.shape, tensor.stride())


def _meet(low: int, begin: int, end: int) -> bool:
    """Tell whether a part touches the page that begins at `low`."""
    return begin < low + HUGE_PAGE and low < end


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
