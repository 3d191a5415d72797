"""The dense int8 baseline: near the real product, its scales carried with the weight."""

import pickle
import warnings
from dataclasses import replace

import pytest
import torch

from tests.turns import in_turn
from twofour.compiler.layer import PreparedWeights
from twofour.kernels import find
from twofour.kernels.dense_matmul import ONEDNN_INT8
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_matmul import Quantization
from twofour.kernels.problem import Problem
from twofour.packing import Packed, pack
from twofour.patterns import parse

if reason := ONEDNN_INT8.unavailable():
    pytest.skip(reason, allow_module_level=True)


def layer(out: int = 40, columns: int = 72) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, columns, generator=generator)
    return (
        weight * parse("2:4").project(weight, absolute=True),
        torch.randn(out, generator=generator),
        torch.randn(9, columns, generator=generator),
    )


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_near_the_real_one(dtype: torch.dtype) -> None:
    weight, bias, x = layer()
    want = torch.nn.functional.linear(x, weight, bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (weight, pack(weight, "2:4"), pack(weight, "2:4", dtype="int8")):
            y = ONEDNN_INT8.run(x.to(dtype), ONEDNN_INT8.prepare(source), bias, Problem(40))
            assert y.dtype == dtype
            assert error(y, want) < 0.02
    relu = ONEDNN_INT8.run(x, ONEDNN_INT8.prepare(weight), bias, Problem(40, Epilogue("relu")))
    assert error(relu, want.relu()) < 0.02


def test_static_ranges_and_whole_answers() -> None:
    weight, bias, x = layer()
    want = torch.nn.functional.linear(x, weight, bias)
    ranges = Quantization.of_range(x.min().item(), x.max().item())
    prepared = ONEDNN_INT8.prepare(weight)
    assert error(ONEDNN_INT8.run(x, prepared, bias, Problem(40, quantization=ranges)), want) < 0.02
    whole = Quantization(ranges.x_scale, ranges.x_zero, torch.uint8, 0.25, 128)
    y = ONEDNN_INT8.run(x, ONEDNN_INT8.prepare(weight), bias, Problem(40, quantization=whole))
    assert y.dtype == torch.uint8
    assert error((y.float() - 128) * 0.25, want) < 0.05


@in_turn("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@in_turn("dtype", [torch.float32, torch.bfloat16])
def test_a_token_without_a_range_is_nan_and_the_others_are_what_they_were(value: float, dtype: torch.dtype) -> None:
    weight, bias, x = layer()
    prepared, x = ONEDNN_INT8.prepare(weight), x.to(dtype)
    others = [row for row in range(9) if row not in (2, 7)]
    want = ONEDNN_INT8.run(x[others], prepared, bias, Problem(40))
    x[2, 5], x[7, 0] = value, value
    x[2, 6] = -value
    x[7, 71] = -value
    y = ONEDNN_INT8.run(x, prepared, bias, Problem(40))
    assert y.dtype == dtype
    assert y[[2, 7]].isnan().all()
    torch.testing.assert_close(y[others], want)
    sparse = find("nm_matmul_2x4_int8_rows__scalar")
    beside = sparse.run(x, sparse.prepare(pack(weight, "2:4", dtype="int8")), bias, Problem(40))
    assert torch.equal(beside.isnan(), y.isnan())


def test_a_lost_token_in_a_whole_answer_is_what_the_sparse_rows_write() -> None:
    weight, bias, x = layer()
    prepared, whole = ONEDNN_INT8.prepare(weight), Quantization(None, 0, torch.uint8, 0.25, 128)
    x[3, 3] = torch.nan
    y = ONEDNN_INT8.run(x, prepared, bias, Problem(40, Epilogue("relu"), quantization=whole))
    sparse = find("nm_matmul_2x4_int8_rows__scalar")
    packed = sparse.prepare(pack(weight, "2:4", dtype="int8"))
    assert torch.equal(y[3], sparse.run(x, packed, bias, Problem(40, Epilogue("relu"), quantization=whole))[3])
    assert y[4].unique().numel() > 8


def test_the_weight_comes_back() -> None:
    weight, bias, x = layer()
    packed = pack(weight, "2:4", dtype="int8")
    prepared = ONEDNN_INT8.prepare(packed)
    assert torch.equal(ONEDNN_INT8.restore(prepared), packed.unpack())
    held = PreparedWeights([prepared])
    copied = pickle.loads(pickle.dumps(held))
    y = ONEDNN_INT8.run(x, prepared, bias, Problem(40))
    torch.testing.assert_close(ONEDNN_INT8.run(x, copied.weights[0], bias, Problem(40)), y)
    assert not isinstance(held.source(), Packed)


def test_copies_and_pickles_keep_whole_numbers_that_are_not_rounded_as_ours() -> None:
    packed = pack(layer()[0], "dense", dtype="int8")
    assert packed.scales is not None
    coarse = replace(packed, values=packed.values // 16, scales=packed.scales * 15.7)
    prepared = ONEDNN_INT8.prepare(coarse)
    for again in (prepared.copy(), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(again.tensor.to_dense().T, coarse.values)
        assert torch.equal(again.beside[0], coarse.scales.flatten())
