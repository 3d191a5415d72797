"""What stands between products of a graph, row by row: norms, rotary positions and gates, against float64."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.activation import gated_activation
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.norm import norm, norm_in_place, norm_to_bytes, reference
from twofour.kernels.quantization import Quantization, quantize_input
from twofour.kernels.rotation import reference as rotation_reference
from twofour.kernels.rotation import rotation

SETTINGS = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@SETTINGS
@hypothesis.given(
    rows=st.integers(0, 5),
    width=st.integers(1, 150),
    centred=st.booleans(),
    weighted=st.booleans(),
    shift=st.booleans(),
)
def test_rows_against_float64(isa: str, rows: int, width: int, centred: bool, weighted: bool, shift: bool) -> None:
    torch.manual_seed(rows * 1000 + width)
    x = torch.randn(rows, 2, width) + 3
    weight = torch.randn(width) if weighted else None
    bias = torch.randn(width) if shift else None
    exact = [None if t is None else t.double() for t in (weight, bias)]
    want = reference(x.double(), exact[0], exact[1], 1e-3, centred)
    torch.testing.assert_close(norm(x, weight, bias, 1e-3, centred).double(), want, atol=1e-5, rtol=1e-5)


@SETTINGS
@hypothesis.given(rows=st.integers(0, 3), width=st.integers(1, 150), centred=st.booleans(), low=st.booleans())
def test_bfloat16_in_and_out(isa: str, rows: int, width: int, centred: bool, low: bool) -> None:
    torch.manual_seed(rows * 1000 + width)
    x, weight, bias = torch.randn(rows, width) + 3, torch.randn(width), torch.randn(width)
    x = x.bfloat16() if low else x
    want = reference(x.double(), weight.double(), bias.double(), 1e-3, centred)
    for dtype in (torch.float32, torch.bfloat16, None):
        y = norm(x, weight, bias, 1e-3, centred, dtype)
        assert y.dtype is (dtype or x.dtype)
        rounding = 2**-8 if y.dtype is torch.bfloat16 else 0.0  # one rounding, of the answer
        assert ((y.double() - want).abs() <= rounding * (1 + 1e-4) * want.abs() + 1e-5 * (1 + want.abs())).all()


def test_rounding_of_special_numbers(isa: str) -> None:
    x = torch.tensor([[1.0, 2.0, torch.nan], [torch.inf, 1.0, 2.0], [1.0, -1.0, 3.0]])
    want = norm(x, None, None, 1e-5).bfloat16()
    assert torch.equal(norm(x, None, None, 1e-5, dtype=torch.bfloat16).nan_to_num(7), want.nan_to_num(7))
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8] * 7)  # ties go to even
    bias = norm(torch.zeros(1, 21), torch.zeros(21), halves, 1e-5, dtype=torch.bfloat16)
    assert torch.equal(bias[0], halves.bfloat16())


def test_strided_rows_and_threads(isa: str) -> None:
    x = torch.randn(700, 300)[:, :96]
    threads = torch.get_num_threads()
    want = torch.nn.functional.layer_norm(x.double(), (96,))
    for count in (1, 2):
        torch.set_num_threads(count)
        torch.testing.assert_close(norm(x, None, None, 1e-5).double(), want, atol=1e-5, rtol=1e-5)
    torch.set_num_threads(threads)


def test_in_place(isa: str) -> None:
    x = torch.randn(5, 37)
    want = norm(x, None, None, 1e-5)
    assert norm_in_place(x, None, None, 1e-5).data_ptr() == x.data_ptr()
    assert torch.equal(x, want)
    low = torch.randn(5, 37).bfloat16()
    want = norm(low, None, None, 1e-5)
    assert torch.equal(norm_in_place(low, None, None, 1e-5), want) and torch.equal(low, want)


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("width", [1, 37, 384])
def test_bytes_are_those_that_a_product_would_make(isa: str, dtype: torch.dtype, width: int) -> None:
    x, weight, bias = torch.randn(2, 5, width).to(dtype) + 3, torch.randn(width), torch.randn(width)
    for low, high in ((-1.5, 2.5), (0.0, 1e-3), (-4.0, 0.0)):  # numbers outside of a range take its ends
        found = Quantization.of_range(low, high)
        assert found.x_scale is not None
        want = quantize_input(norm(x, weight, bias, 1e-5, dtype=torch.float32), found)[0]
        given = weight, bias, 1e-5, True, found.x_scale, found.x_zero
        y, whole = norm_to_bytes(x, *given)
        assert torch.equal(whole, want) and torch.equal(y, norm(x, weight, bias, 1e-5))
        assert torch.equal(norm_to_bytes(x, *given, keep=False), want)
        there = x.clone()
        y, whole = norm_to_bytes(there, *given, in_place=True)
        assert y.data_ptr() == there.data_ptr() and torch.equal(y, norm(x, weight, bias, 1e-5))
        assert torch.equal(whole, want)


def test_bytes_of_special_numbers(isa: str) -> None:
    x = torch.tensor([[1.0, 2.0, torch.nan], [torch.inf, 1.0, 2.0], [1.0, -1.0, 3.0]])
    y, whole = norm_to_bytes(x, None, None, 1e-5, True, 0.01, 128)
    assert not whole[:2].any() and y[:2].isnan().all() and whole[2].any()
    with pytest.raises(KernelError, match="a zero point from 0 to 255"):
        norm_to_bytes(x, None, None, 1e-5, True, 0.01, 256)
    with pytest.raises(KernelError, match="an operand of a normalisation does not fit"):
        norm_to_bytes(x.double(), None, None, 1e-5, True, 0.01, 128)


def test_registered_operator() -> None:
    arguments = (torch.randn(3, 8), torch.randn(8), None, 1e-5, False, torch.bfloat16)
    torch.library.opcheck(torch.ops.twofour.norm.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(KernelError, match="an operand of a normalisation does not fit"):
        norm(torch.randn(3, 8).double(), None, None, 1e-5)
    with pytest.raises(KernelError, match=r"wanted  float32 \(8,\)"):
        norm(torch.randn(3, 8), torch.ones(7), None, 1e-5)
    with pytest.raises(KernelError, match="a normalisation cannot answer in this dtype"):
        norm(torch.randn(3, 8), None, None, 1e-5, dtype=torch.float16)


@SETTINGS
@hypothesis.given(
    batch=st.integers(0, 3),
    length=st.integers(0, 5),
    heads=st.integers(1, 4),
    half=st.integers(1, 40),
    around=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    axes=st.integers(0, 3),
    low=st.booleans(),
)
def test_heads_against_float64(
    isa: str, batch: int, length: int, heads: int, half: int, around: tuple[int, int], axes: int, low: bool
) -> None:
    torch.manual_seed(batch * 1000 + length * 100 + half)
    size, (before, after) = 2 * half * heads, around
    x = torch.randn(batch, length, before + size + after)
    leading = [(), (1,), (1, 1), (batch, 1)][axes]
    cos, sin = torch.randn(2, *leading, length, 2 * half)
    x = x.bfloat16() if low else x
    y = rotation(x, cos, sin, before, size)
    want = rotation_reference(x[..., before : before + size].double(), cos.double(), sin.double())
    assert y.dtype is x.dtype and y.shape == want.shape and y.is_contiguous()
    assert ((y.double() - want).abs() <= (2**-8 if low else 0) * want.abs() + 4e-6).all()


def test_operands_of_a_rotation_that_do_not_fit() -> None:
    x, factor = torch.randn(2, 3, 16), torch.randn(3, 8)
    for given in (
        (x.double(), factor, factor),
        (x[0], factor, factor),
        (x, factor, factor.bfloat16()),
        (x, factor[:2], factor[:2]),
        (x, factor[:, :7], factor[:, :7]),
        (x, factor, factor[:, :4]),
        (x, factor.expand(3, 3, 8), factor.expand(3, 3, 8)),
        (x[..., :12], factor, factor),
    ):
        with pytest.raises(KernelError):
            rotation(*given)


@in_turn("name", [name for name in ACTIVATIONS if name != "none"])
@pytest.mark.parametrize("behind", [False, True])
def test_gates_against_float64(isa: str, name: str, behind: bool) -> None:
    for shape in ((2,), (0, 6), (3, 5, 34), (40, 600)):
        for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2**-8)):
            x = (2 * torch.randn(shape)).to(dtype)
            halves = x.double().chunk(2, -1)
            want = ACTIVATIONS[name](halves[behind]) * halves[not behind]
            y = gated_activation(x, name, behind)
            assert y.dtype is dtype and y.shape == want.shape
            assert ((y.double() - want).abs() <= bound * want.abs() + 3e-6 * (1 + halves[not behind].abs())).all()
    with pytest.raises(KernelError, match="2 \\* width"):
        gated_activation(torch.randn(2, 3), name)
