"""Rows of the GPU, as far as a machine without one sees them: bytes, sizes and types of products of libraries, and the
planes of codes in Triton's interpreter, against whole numbers."""

import copy
import gc
import itertools
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from twofour.errors import KernelError
from twofour.kernels import available, rows
from twofour.kernels.base import Prepared
from twofour.kernels.bits_matmul import (
    TERNARY,
    BitsProblem,
    BitWeight,
    Levels,
    bipolar,
    bits_matmul_reference,
    twos,
    unsigned,
)
from twofour.kernels.bits_matmul.cuda import BIT_PLANES, tile_of
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
from twofour.kernels.quantization import LEVELS, REAL, Quantization
from twofour.kernels.table import listing
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
    assert len(found) == 17
    if NO_GPU:
        assert all("needs" in (row.unavailable() or "") for row in found if not row.triton)
        assert "NVIDIA GPU" in NO_GPU
    assert all(row.device == "cpu" for row in available("nm_matmul"))
    assert not any(one.measured for one in listing() if one.device == "cuda")


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


needs_triton = pytest.mark.skipif(gpu.unavailable(triton=True) is not None, reason=str(gpu.unavailable(triton=True)))
SYSTEMS = [TERNARY, *(make(bits) for bits, make in itertools.product(range(1, 9), (unsigned, twos, bipolar)))]


def weight_of(levels: Levels, out: int, columns: int) -> BitWeight:
    random = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, levels.largest_code + 1, (out, columns), generator=random, dtype=torch.uint8)
    return BitWeight(codes, levels, torch.rand(out, generator=random) + 0.5)


def assert_planes_give_the_references(
    x: torch.Tensor, weight: BitWeight, bias: torch.Tensor | None, quantization: Quantization
) -> None:
    """Bit for bit, NaN for NaN, in the type that is asked for."""
    device, want = gpu.device(), bits_matmul_reference(x, weight, bias, quantization)
    bias = None if bias is None else bias.to(device)
    with np.errstate(all="ignore"):  # the interpreter's arithmetic on tokens that are not finite
        y = BIT_PLANES.run(
            x.to(device), BIT_PLANES.prepare(weight), bias, Problem(len(weight.codes), quantization=quantization)
        )
    assert y.dtype is want.dtype and torch.equal(y.isnan().cpu(), want.isnan())
    assert torch.equal(y.cpu().nan_to_num(), want.nan_to_num()), (weight.levels, quantization)


@needs_triton
def test_planes_of_every_width_and_system_give_the_bits_of_whole_numbers() -> None:
    """Each system of a weight meets one of inputs, by turns; 35 inputs are no whole number of words."""
    turns = itertools.cycle(itertools.product(LEVELS, (1, 2, 3, 8, 1, 4, 2, 5, 1, 7, 6)))
    x = torch.randn(1, 35, generator=torch.Generator().manual_seed(0)) + 0.3
    for number, levels in enumerate(SYSTEMS):
        system, bits = next(turns)
        zero = (1 << bits) // 3 if system == "unsigned" else 0
        quantization = Quantization(0.11 if number % 2 else None, zero * (number % 2), bits=bits, levels=system)
        assert_planes_give_the_references(x, weight_of(levels, 5, 35), None, quantization)


@needs_triton
def test_planes_of_several_tiles_and_steps() -> None:
    for tokens, out, columns, dtype, kept in (
        (1, 70, 33, torch.float32, None),
        (5, 20, 1100, torch.bfloat16, torch.float32),  # the interpreter rounds to bfloat16 otherwise than a GPU
        (2, 5, 1, torch.float16, None),
    ):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight, bias = weight_of(twos(2), out, columns), torch.randn(out, generator=torch.Generator().manual_seed(2))
        assert_planes_give_the_references(x, weight, bias, Quantization(bits=3, y_dtype=kept))
    whole = Quantization(bits=2, y_dtype=torch.int8, y_scale=0.5, y_zero=3)
    assert_planes_give_the_references(x, weight_of(bipolar(1), out, columns), None, whole)


@needs_triton
def test_a_token_that_is_not_finite_is_lost_alone() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    x[0, 3], x[1, 39], x[2, 0], x[4] = torch.nan, torch.inf, -torch.inf, 0.0
    x[5, :2] = torch.tensor([3e38, -3e38])  # further apart than float32 holds
    weight, bias = weight_of(TERNARY, 5, 40), torch.ones(5)
    for system in LEVELS:
        for quantization in (Quantization(bits=4, levels=system), Quantization(0.5, bits=4, levels=system)):
            assert_planes_give_the_references(x, weight, bias, quantization)
    whole = Quantization(0.5, bits=4, y_dtype=torch.uint8, y_zero=7)
    assert_planes_give_the_references(x, weight, bias, whole)


@needs_triton
def test_planes_with_epilogues() -> None:
    weight, device = weight_of(twos(3), 9, 50), gpu.device()
    x, bias, other = torch.randn(4, 50), torch.randn(9), torch.randn(4, 9)
    prepared, quantization = BIT_PLANES.prepare(weight), Quantization(bits=2)
    for epilogue in (Epilogue("relu"), Epilogue("gelu_tanh", "add"), Epilogue("silu", "multiply")):
        second = None if epilogue.combine == "none" else other
        given = None if second is None else second.to(device)
        with np.errstate(over="ignore"):  # the interpreter's exp
            y = BIT_PLANES.run(x.to(device), prepared, bias.to(device), Problem(9, epilogue, quantization), given)
        want = epilogue.apply(bits_matmul_reference(x, weight, bias, quantization), second)
        assert torch.allclose(y.cpu(), want, rtol=1e-5, atol=1e-5)
    assert BIT_PLANES.run(x[:0].to(device), prepared, None, Problem(9, quantization=quantization)).shape == (0, 9)


@needs_triton
def test_planes_open_to_the_weight() -> None:
    for levels in (TERNARY, bipolar(3), twos(8), unsigned(1)):
        weight = weight_of(levels, 7, 45)
        prepared = BIT_PLANES.prepare(weight)
        assert prepared.tensor.shape == (levels.bits, 2, 7)
        for one in (prepared, prepared.copy(), copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
            back = one.restore()
            assert isinstance(back, BitWeight) and back.levels == levels
            assert torch.equal(back.codes, weight.codes) and torch.equal(back.scales, weight.scales)
        assert torch.equal(BIT_PLANES.dense(prepared, 7, 45).cpu(), weight.real())
        assert prepared.nbytes == levels.bits * BIT_PLANES.least_bytes(7, 45) + sum(BIT_PLANES.beside_bytes(7, 45))


@needs_triton
def test_planes_refuse_what_they_do_not_multiply() -> None:
    weight, device = weight_of(twos(2), 6, 64), gpu.device()
    of_groups = BitWeight(weight.codes, weight.levels, torch.ones(6, 2))
    shifted = BitWeight(weight.codes, weight.levels, torch.ones(6), torch.zeros(6, dtype=torch.int8))
    for one in (of_groups, shifted):
        assert "is for no scales of groups" in (BIT_PLANES.refuses_weight(one, Quantization()) or "")
        with pytest.raises(KernelError, match="does not take a weight"):
            BIT_PLANES.prepare(one)
    assert "float inputs" in (BIT_PLANES.refuses_weight(weight, Quantization(levels=REAL)) or "")
    assert BIT_PLANES.refuses_weight(weight, Quantization()) is None
    longest = twos(8).longest(Quantization())
    assert BIT_PLANES.refuses_levels(twos(8), longest, Quantization()) is None
    assert "may exceed int32" in (BIT_PLANES.refuses_levels(twos(8), longest + 1, Quantization()) or "")
    prepared, x, problem = BIT_PLANES.prepare(weight), torch.zeros(2, 64, device=device), Problem(6)
    for wrong, said in (
        ((x[:, :63], prepared, None, problem), "inputs do not fit"),
        ((x.double(), prepared, None, problem), "inputs do not fit"),
        ((x.to(torch.uint8), prepared, None, problem), "inputs do not fit"),
        ((x[0], prepared, None, problem), "inputs do not fit"),
        ((x, prepared, torch.zeros(5, device=device), problem), "bias does not fit"),
        ((x, prepared, torch.zeros(6, device=device).bfloat16(), problem), "bias does not fit"),
        ((x, prepared, None, Problem(7)), "prepared for another"),
        ((x, Prepared(BIT_PLANES, prepared.tensor.float()), None, problem), "prepared for another"),
        ((x, prepared, None, Problem(6, quantization=Quantization(levels=REAL))), "no such numbers"),
        ((x, prepared, None, BitsProblem(6, coded=True)), "no such numbers"),
        ((x, prepared, None, Problem(6, Epilogue("none", "add"))), "second operand"),
    ):
        with pytest.raises(KernelError, match=said):
            BIT_PLANES.run(*wrong)


def test_tiles_keep_every_multiprocessor_busy() -> None:
    assert tile_of(1, 4096, 132) == (1, 16)  # the narrowest: as many programs as there can be
    assert tile_of(1, 28672, 132) == (1, 64)
    assert tile_of(64, 4096, 132) == (16, 64)
    assert tile_of(4096, 4096, 132) == (64, 64)
    assert tile_of(3, 10, 132)[0] in (1, 4) and tile_of(1, 1, 1)[0] == 1
