"""Rows of GPU libraries, as far as a machine without a GPU sees them: bytes, and sizes and types of products."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from twofour.errors import KernelError
from twofour.kernels import available, rows
from twofour.kernels.base import Prepared
from twofour.kernels.cuda import HALVES, CudaKernel, held_bias
from twofour.kernels.dense_matmul.cuda import CUDA_DENSE
from twofour.kernels.dense_matmul.cuda_int4 import TINY_INT4
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_matmul.cuda import CUSPARSELT, CUTLASS
from twofour.kernels.nm_matmul.cuda.eight_bits import (
    LARGEST,
    rescaled,
    rescaled_reference,
    rounded,
    rounded_reference,
)
from twofour.kernels.nm_matmul.cuda.sealed_buffers import Part, joined, opened, size
from twofour.kernels.problem import Problem
from twofour.native import gpu
from twofour.packing import Packed, pack
from twofour.patterns import parse

NO_GPU = gpu.unavailable()
ON_CPU = gpu.interpreted()


def packed(rows: int, columns: int, dtype: str) -> Packed:
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return pack(dense * parse("2:4").project(dense, absolute=True), "2:4", dtype)


def test_every_row_says_where_it_runs() -> None:
    found = [row for row in rows() if isinstance(row, CudaKernel)]
    assert len(found) == 16
    if NO_GPU:
        assert all("needs" in (row.unavailable() or "") for row in found if not row.triton)
        assert "NVIDIA GPU" in NO_GPU
    assert all(row.device == "cpu" for row in available("nm_matmul"))


@pytest.mark.skipif(not ON_CPU, reason="Triton's interpreter is off: prepared weights go to the GPU")
@pytest.mark.parametrize("row", CUTLASS, ids=lambda row: row.dtype)
def test_cutlass_bytes_are_torchs_and_open_to_the_weight(row: CudaKernel) -> None:
    weight = packed(70, 196, row.dtype)
    prepared = row.prepare(weight)
    back = row.restore(prepared)
    assert isinstance(back, Packed)
    assert torch.equal(back.values, weight.values) and torch.equal(back.indices, weight.indices)
    assert torch.equal(row.dense(prepared, 70, 196).float(), weight.unpack().float())
    whole = replace(weight, scales=None).unpack()
    multiple = 128 if row.dtype == "int8" else 64
    padded = torch.nn.functional.pad(whole, (0, -196 % multiple, 0, -70 % 32))
    values, positions, *_ = opened(prepared.tensor, row._parts(70, 196), row.name)
    assert torch.equal(values, sparse_semi_structured_from_dense_cutlass(padded)[0])
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(values, positions), padded)


def fake(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("tokens,rows,columns", [(1, 48, 64), (17, 70, 196), (64, 4096, 1024)])
@pytest.mark.parametrize("row", [*CUSPARSELT, *CUTLASS], ids=lambda row: row.name.split("_", 3)[3])
def test_products_have_the_sizes_of_the_answer(
    row: CudaKernel, tokens: int, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch checks the operators' operands on tensors without numbers; nothing is computed."""
    monkeypatch.setattr(gpu, "runs", lambda _: False)
    for x_dtype, epilogue in ((torch.float32, Epilogue("gelu", "add")), (torch.bfloat16, Epilogue())):
        x, bias = fake(x_dtype, tokens, columns), fake(torch.float32, rows)
        other = fake(x_dtype, tokens, rows) if epilogue.combine != "none" else None
        parts = row._parts(row._padded(rows, columns)[0]) if row in CUSPARSELT else row._parts(rows, columns)
        more = 256 * row._padded(rows, columns)[0] if row in CUSPARSELT else 0
        prepared = Prepared(row, fake(torch.uint8, size(parts) + more))
        run = row.run_as if row in CUSPARSELT else row.run
        given = ((3, 2, 1),) if row in CUSPARSELT else ()
        y = run(*given, x, prepared, bias, Problem(rows, epilogue), other)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((tokens, rows), x_dtype, True)


@pytest.mark.parametrize("row", CUDA_DENSE, ids=lambda row: row.dtype)
def test_dense_products_have_the_sizes_of_the_answer(row: CudaKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "runs", lambda _: False)
    kind = HALVES.get(row.dtype, torch.float32)
    eight = row.dtype in ("int8", "float8")
    prepared = Prepared(row, fake(torch.uint8, row.least_bytes(70, 196)) if eight else fake(kind, 70, 196))
    y = row.run(fake(torch.float32, 5, 196), prepared, fake(torch.float32, 70), Problem(70))
    assert (y.shape, y.dtype) == ((5, 70), torch.float32)


def test_the_dense_int4_product_knows_its_sizes() -> None:
    assert TINY_INT4.fits(4096, 4096) and not TINY_INT4.fits(4096, 64)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_eight_bits_round_and_rescale(dtype: torch.dtype) -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(2))
    x[1], x[2, 3], x[3, 0] = 0.0, float("nan"), float("inf")
    whole, scale = rounded_reference(x, dtype)
    assert torch.isnan(scale[2:4]).all() and torch.isfinite(scale[[0, 1, 4]]).all()
    back = whole.float() * scale
    limit = scale[[0, 4]] * (0.5 if dtype is torch.int8 else 16.0)
    assert ((back - x)[[0, 4]].abs() <= limit * 1.001).all() and (back[1] == 0).all()
    w_scale, bias, other = torch.rand(7), torch.randn(7), torch.randn(5, 7)
    total = torch.randint(-99, 99, (7, 5)).t()
    y = rescaled_reference(total, scale, w_scale, bias, Epilogue("relu", "add"), other, torch.float32)
    assert torch.equal(y[4], torch.relu(total[4] * scale[4] * w_scale + bias) + other[4])


@pytest.mark.skipif(gpu.unavailable(triton=True) is not None, reason=str(gpu.unavailable(triton=True)))
def test_eight_bits_in_triton_are_the_references() -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(2)).to(gpu.device())
    x[1], x[2, 3] = 0.0, float("nan")
    (found, scale), (want, want_scale) = rounded(x, torch.int8), rounded_reference(x, torch.int8)
    assert torch.allclose(scale, want_scale, rtol=1e-6, equal_nan=True)
    assert (found.int() - want.int()).abs().max() <= 1
    total = torch.randint(-99, 99, (7, 5), dtype=torch.int32, device=x.device).t()
    given = torch.rand(7, device=x.device), torch.randn(7, device=x.device), Epilogue("silu", "multiply")
    other = torch.randn(5, 7, device=x.device)
    y = rescaled(total, want_scale, *given, other, torch.float32)
    assert torch.allclose(
        y, rescaled_reference(total, want_scale, *given, other, torch.float32), atol=1e-5, equal_nan=True
    )


@pytest.mark.skipif(not ON_CPU, reason="Triton's interpreter is off: prepared weights go to the GPU")
@pytest.mark.parametrize("width", [36, 117, 128])
def test_a_part_of_open_size_keeps_its_width(width: int) -> None:
    """The libraries' compressed rows are as wide as they say: 80 rows of 117 are no multiple of 256 bytes."""
    scales, compressed = torch.rand(80), torch.randn(80, width).bfloat16()
    buffer = joined(bytes(64), [scales, compressed.view(torch.uint8)], open_end=True)
    parts = (Part(torch.float32, (80,)), Part(torch.bfloat16, (80, -1)))
    found = opened(buffer, parts, "a row")
    assert torch.equal(found[0], scales) and torch.equal(found[1], compressed)


def test_a_bias_is_converted_once_and_again_when_it_changes() -> None:
    bias = torch.randn(5)
    first = held_bias(bias, 8, torch.bfloat16)
    assert first is not None and first.shape == (8,) and held_bias(bias, 8, torch.bfloat16) is first
    bias += 1
    again = held_bias(bias, 8, torch.bfloat16)
    assert again is not None and torch.equal(again[:5], bias.bfloat16())
    assert held_bias(None, 8, torch.bfloat16) is None


@pytest.mark.skipif(not ON_CPU, reason="Triton's interpreter is off: buffers go to the GPU")
def test_opened_parts_do_not_keep_a_buffer() -> None:
    buffer = joined(bytes(64), [torch.arange(10, dtype=torch.int32)])
    opened(buffer, (Part(torch.int32, (10,)),), "kernel")
    seen = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert seen() is None


@pytest.mark.skipif(not ON_CPU, reason="Triton's interpreter is off: buffers go to the GPU")
def test_parts_stand_at_multiples_of_256_bytes_and_are_opened_once() -> None:
    tensors = [torch.arange(10, dtype=torch.int32), torch.randn(3, 5)]
    parts = (Part(torch.int32, (10,)), Part(torch.float32, (3, 5)))
    buffer = joined(bytes(64), tensors)
    assert buffer.numel() == size(parts) == 768
    found = opened(buffer, parts, "kernel")
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert opened(buffer, parts, "kernel") is found
    with pytest.raises(KernelError, match="bytes made for another kernel"):
        opened(buffer[:256], parts, "kernel")
