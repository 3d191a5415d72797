"""Every GPU row of the kernel table on a GPU, against float64."""

import pytest
import torch
from torch import Tensor

from twofour.compiler.choose import Case
from twofour.compiler.choose_gpu import LARGEST_ERRORS, on_gpu, trusted
from twofour.compiler.computing import Computing
from twofour.kernels import Prepared, rows
from twofour.kernels.bits_matmul import TERNARY, BitWeight, Levels, bipolar, bits_matmul_reference, twos
from twofour.kernels.bits_matmul.cuda import BIT_PLANES
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import Quantization
from twofour.packing import Packed, dense_of, shape_of
from twofour.patterns import parse

ROWS = [row for row in rows() if isinstance(row, CudaKernel) and row is not BIT_PLANES]
SHAPES = [(64, 128), (4096, 1024), (1000, 516), (70, 196)]
"""The last two are no multiples of what libraries ask."""


def source(row: CudaKernel, out: int, columns: int) -> Packed | Tensor:
    """A 2:4 weight as `compile` gives it to a row: packed, in float32 dense, which has no sparse row."""
    columns += -columns % 64 if row.dtype == "int4" else 0
    dense = torch.randn(out, columns, generator=torch.Generator().manual_seed(0)) * columns**-0.5
    dense *= parse("2:4").project(dense, absolute=True)
    found, reason = Computing.of(row.dtype, "cuda").encode(dense, parse("2:4"))
    assert isinstance(found, Packed) or row.dtype == "float32", reason
    return found


def ready(row: CudaKernel, weight: Packed | Tensor) -> Prepared:
    if reason := row.unavailable():
        pytest.skip(reason)
    if not row.fits(*shape_of(weight)):
        pytest.skip(f"{row.name} does not take {shape_of(weight)}")
    return row.prepare(weight)


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("tokens", [1, 16, 33, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_product_is_the_references(row: CudaKernel, shape: tuple[int, int], tokens: int) -> None:
    packed = source(row, *shape)
    prepared = ready(row, packed)
    x = torch.randn(tokens, shape_of(packed)[1], device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device="cuda")
    y = row.run(x, prepared, bias, Problem(shape[0]))
    assert (y.shape, y.dtype) == ((tokens, shape[0]), torch.bfloat16)
    want = x.double() @ dense_of(packed).double().cuda().T + bias.double()
    assert off(y, want) < LARGEST_ERRORS[row.dtype]


@pytest.mark.parametrize("epilogue", [Epilogue("relu"), Epilogue("gelu", "add"), Epilogue("silu", "multiply")], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_epilogues(row: CudaKernel, epilogue: Epilogue) -> None:
    packed = source(row, 256, 512)
    prepared = ready(row, packed)
    x = torch.randn(9, 512, device="cuda")
    bias, other = torch.randn(256, device="cuda"), torch.randn(9, 256, device="cuda")
    second = other if epilogue.combine != "none" else None
    y = row.run(x, prepared, bias, Problem(256, epilogue), second)
    product = x.double() @ dense_of(packed).double().cuda().T + bias.double()
    want = epilogue.apply(product, None if second is None else second.double())
    assert y.dtype is torch.float32 and off(y, want) < LARGEST_ERRORS[row.dtype]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prepared_weights_open_to_the_weight(row: CudaKernel) -> None:
    packed = source(row, 256, 512)
    prepared = ready(row, packed)
    dense = row.dense(prepared, 256, 512).double().cpu()
    limit = 1e-6 if row.operation == "nm_matmul" and row.dtype != "float8" else LARGEST_ERRORS[row.dtype]
    assert off(dense, dense_of(packed).double()) < limit
    assert off(dense_of(row.restore(prepared)).double(), dense_of(packed).double()) < limit


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_calls_are_captured_as_a_cuda_graph_and_repeat_bit_for_bit(row: CudaKernel) -> None:
    packed = source(row, 512, 512)
    prepared = ready(row, packed)
    x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = row.run(x, prepared, None, Problem(512))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = row.run(x, prepared, None, Problem(512))
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, want)


@pytest.mark.parametrize("tokens", [1, 16, 33, 512])
@pytest.mark.parametrize(
    "levels,bits", [(bipolar(1), 1), (bipolar(1), 2), (twos(2), 2), (TERNARY, 8), (twos(8), 8)], ids=str
)
def test_planes_of_codes_give_the_bits_of_whole_numbers(levels: Levels, bits: int, tokens: int) -> None:
    if reason := BIT_PLANES.unavailable():
        pytest.skip(reason)
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, levels.largest_code + 1, (1000, 2051), generator=random, dtype=torch.uint8)
    weight = BitWeight(codes, levels, torch.rand(1000, generator=random) + 0.5)
    x, bias = torch.randn(tokens, 2051, generator=random), torch.randn(1000, generator=random)
    x[0, 5] = torch.nan if tokens > 1 else 1.0
    for quantization in (Quantization(bits=bits), Quantization(0.1, bits=bits, levels="bipolar")):
        problem = Problem(1000, quantization=quantization)
        y = BIT_PLANES.run(x.cuda(), BIT_PLANES.prepare(weight), bias.cuda(), problem).cpu()
        assert torch.equal(y.nan_to_num(), bits_matmul_reference(x, weight, bias, quantization).nan_to_num())
        assert y[1:].isfinite().all() and y[0].isnan().all() == (tokens > 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8", "int4"])
def test_the_search_finds_a_trusted_configuration_of_every_row(dtype: str) -> None:
    row = next(row for row in ROWS if row.dtype == dtype and row.operation == "nm_matmul")
    if reason := row.unavailable():
        pytest.skip(reason)
    packed = source(row, 1024, 2048)
    kernels = on_gpu(packed, dtype)
    layouts = {kernel.layout: kernel.prepare(packed) for kernel in kernels}
    case = Case(Problem(1024), 2048, None, 16, torch.bfloat16)
    calls, reasons = trusted(packed, kernels, lambda kernel: layouts[kernel.layout], case, 2)
    assert not reasons and set(calls) == {kernel.name for kernel in kernels}
