"""Memory for prepared weights: aligned, in large pages where Linux gives them, and never more of it than its bytes."""

import gc
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twofour.kernels.dense_matmul import ONEDNN, PLAIN
from twofour.kernels.problem import Problem
from twofour.native import pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux alone")


def _resident() -> int:
    """Return the bytes of memory this process holds, counted page by page, without those of files."""
    line = next(
        line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Anonymous:")
    )
    return int(line.split()[1]) * 1024


@linux
@pytest.mark.parametrize("nbytes", [pages.HUGE_PAGE, 5_000_001, 3 * pages.HUGE_PAGE - 1])
def test_large_buffers_begin_with_a_page_and_take_their_own_bytes_alone(nbytes: int):
    buffer = pages.empty(nbytes)
    assert (buffer.numel(), buffer.dtype) == (nbytes, torch.uint8)
    assert buffer.data_ptr() % pages.HUGE_PAGE == 0
    assert buffer.untyped_storage().nbytes() == nbytes  # a copy or a pickle of it holds no more
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)  # what the first call of all takes
    before = _resident()
    buffer.fill_(1)
    assert abs(_resident() - before - nbytes) < 512 << 10
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert re.search(r"\bhg\b", _flags(buffer))


def _flags(buffer: Tensor) -> str:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if at := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(at[1], 16) <= buffer.data_ptr() < int(at[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line
    return ""


@linux
def test_memory_is_given_back_with_the_last_tensor_on_it():
    buffer = pages.empty(32 * pages.HUGE_PAGE).fill_(7)
    view, held = buffer[5:9], _resident()
    del buffer
    gc.collect()
    assert view.tolist() == [7] * 4
    del view
    gc.collect()
    assert held - _resident() > 28 * pages.HUGE_PAGE


@linux
def test_small_buffers_share_large_pages_and_give_them_back():
    before = _resident()
    buffers = [pages.empty(700_000).fill_(number) for number in range(12)]
    assert all(buffer.data_ptr() % 64 == 0 and buffer.untyped_storage().nbytes() == 700_000 for buffer in buffers)
    assert _resident() - before < 12 * 700_000 + (512 << 10)
    view, third = buffers[2][10:20], buffers[2].data_ptr()
    # what asks for large pages keeps what stands there
    assert [int(buffer[-1]) for buffer in buffers] == list(range(12))
    del buffers
    gc.collect()
    assert view.tolist() == [2] * 10
    assert _resident() - before < 2 * pages.HUGE_PAGE + (512 << 10)  # the pages that it stands in
    assert third not in {pages.empty(700_000).data_ptr() for _ in range(3)}  # it is taken while there is a view of it


@linux
def test_what_is_left_between_freed_weights_is_moved_together():
    buffers, before = list[Tensor](), _resident()
    for number in range(48):
        with torch.inference_mode(number % 2 == 0):
            buffers.append(pages.empty(700_000).view(torch.float32).view(700, 250).fill_(number))
    part = buffers[40][1:3].detach()
    kept = [(buffer, id(buffer)) for buffer in (*buffers[:30:3], buffers[40])]
    del buffers
    gc.collect()
    pages.gather([*(buffer for buffer, _ in kept), part, torch.zeros(3).to_sparse()])
    gc.collect()
    taken = _resident() - before
    assert [int(buffer[-1, -1]) for buffer, _ in kept] == [*range(0, 30, 3), 40]
    assert all(id(buffer) == place and buffer.shape == (700, 250) for buffer, place in kept)
    assert [buffer.is_inference() for buffer, _ in kept] == [number % 2 == 0 for number in (*range(0, 30, 3), 40)]
    assert part.data_ptr() == kept[-1][0][1].data_ptr() and part.tolist() == [[40.0] * 250] * 2
    assert taken < 11 * 700_000 + (1 << 20)
    assert not any(mapping.unused >= pages.HUGE_PAGE for mapping in pages._WEIGHTS._mappings)


@linux
def test_small_pages_go_back_each_by_itself():
    buffers = [pages.empty(200_000).fill_(number) for number in range(6)]  # less than a large page
    before = _resident()
    del buffers[1:5]
    gc.collect()
    assert before - _resident() > 3 * 200_000
    assert [int(buffer[0]) for buffer in buffers] == [0, 5]


@linux
def test_buffers_are_taken_and_given_back_by_several_threads_at_once():
    sizes, wrong = [70_000, 900_000, 3_000_000, 64 << 10], list[int]()

    def take(number: int) -> None:
        held = list[Tensor]()
        for turn in range(60):
            held.append(pages.empty(sizes[(number + turn) % 4]).fill_(number))
            wrong.extend(one.numel() for one in held if not bool((one == number).all()))
            del held[: turn % 3]

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_small_buffers_and_copies():
    assert pages.empty(0).numel() == 0
    assert pages.empty(100).numel() == 100
    for shape in ((3, 5), (1500, 1024)):
        weight = torch.randn(shape)
        for tensor in (weight, weight.T, weight.bfloat16()):
            again = pages.copy(tensor)
            assert again.is_contiguous() and again.data_ptr() != tensor.data_ptr()
            torch.testing.assert_close(again, tensor, rtol=0, atol=0)


def test_dense_weights_are_the_same_numbers_there():
    weight = torch.randn(1024, 1500)
    x = torch.randn(3, 1500)
    for kernel in (PLAIN, ONEDNN):
        if kernel.unavailable() is None:
            y = kernel.run(x, kernel.prepare(weight), None, Problem(1024))
            torch.testing.assert_close(y.double(), x.double() @ weight.T.double(), rtol=1e-4, atol=1e-4)
