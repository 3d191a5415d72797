"""The search on models where rewrites meet each other, and where what a rule binds is not of its kind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.graph.algebra.cases import Of
from tests.turns import in_turn
from twofour.capture import capture
from twofour.graph import CLOSE, Outcome, Program, rewrite


def rewritten(model: Of, *inputs: Tensor, kind: str = CLOSE) -> tuple[Program, Outcome]:
    graph = capture(model.eval(), dict(zip("abc", inputs, strict=False)), dynamic=False)
    outcome = rewrite(graph.module, kind=kind)
    return Program(graph.module), outcome


def in_a_row(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.linear(torch.nn.functional.linear(x, w), v)


@pytest.mark.parametrize(
    "after",
    [
        lambda h, u: h + h * u,
        lambda h, u: h * u + h * u.cos(),
        lambda h, u: h.square().sqrt() + u,
        lambda h, u: h.exp() * u.exp(),
    ],
)
def test_a_rewrite_waits_for_the_one_that_erased_what_it_reads(after: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    weights = [0.1 * torch.randn(64, 32), 0.1 * torch.randn(32, 64)]
    model, inputs = Of(lambda x, u, w, v: after(in_a_row(x, w, v), u), 2, weights), torch.randn(2, 400, 32)
    program, outcome = rewritten(model, *inputs)
    assert outcome.counts.get("linear layers in a row") == 1
    assert len(outcome.done) >= 2, outcome.counts
    torch.testing.assert_close(program(*inputs)[0], model(*inputs), rtol=1e-4, atol=1e-5)


def test_a_product_of_a_value_with_itself_is_no_function_of_one_operand() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        t = (x[:, :, None] * y[:, None, :] + w).transpose(1, 2)
        return (t * t).transpose(1, 2)

    model, inputs = Of(function, 2, [torch.randn(8, 8)]), torch.randn(2, 2, 8)
    program, _ = rewritten(model, *inputs)
    torch.testing.assert_close(program(*inputs)[0], model(*inputs))


def mixed(small: Tensor, wide: Tensor) -> Tensor:
    return small * 3 + wide * 3


def masks(mask: Tensor, wide: Tensor) -> Tensor:
    return wide * wide + wide * wide.abs() + (mask + mask.flip(0))


@in_turn("function", [mixed, masks])
@in_turn("narrow", [torch.uint8, torch.int32, torch.bool])
def test_integers_of_another_type_are_no_terms(function: Callable[..., Tensor], narrow: torch.dtype) -> None:
    most = {torch.uint8: 2**8, torch.int32: 2**31, torch.bool: 2}[narrow]
    inputs = torch.randint(most, (400, 16)).to(narrow), torch.randint(-5, 5, (400, 16))
    program, _ = rewritten(Of(function, 2, []), *inputs)
    assert torch.equal(program(*inputs)[0], function(*inputs))


def test_a_chain_of_products_keeps_its_vector() -> None:
    def function(x: Tensor, p: Tensor, v: Tensor, q: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return ((p * x.sum()) @ v) @ ((q * x.sum()) @ r @ t)

    torch.manual_seed(0)
    weights = [torch.randn(16, 16, 8), torch.randn(8), torch.randn(16, 20), torch.randn(20, 30), torch.randn(30, 7)]
    model, x = Of(function, 1, weights), torch.randn(2, 8)
    program, _ = rewritten(model, x)
    torch.testing.assert_close(program(x)[0], model(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("end", [lambda y: y.transpose(1, 2).view(-1), lambda y: y])
def test_a_rewrite_keeps_strides_that_are_looked_at(end: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor, a: Tensor) -> Tensor:
        c = torch.sin(x.transpose(1, 2))
        return end(c * a + c * torch.cos(a))

    model, inputs = Of(function, 2, []), (torch.randn(8, 64, 16), torch.randn(8, 16, 64))
    program, _ = rewritten(model, *inputs)
    found, want = program(*inputs)[0], model(*inputs)
    assert found.stride() == want.stride()
    torch.testing.assert_close(found, want)


def half(number: float) -> Tensor:
    return torch.full((64, 64), number, dtype=torch.float16)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a, b: a * 0.25 + b * 0.25, (half(4e4), half(4e4))),
        (lambda a, b: (a / 64).sum(-1) + b, (half(2e3), half(1.0))),
        (lambda a, b: a @ b + a @ (b * 0.5), (half(2.0**-7), half(6e4))),
    ],
)
def test_what_is_finite_in_float16_stays_finite(
    function: Callable[[Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor]
) -> None:
    program, _ = rewritten(Of(function, 2, []), *inputs)
    assert function(*inputs).isfinite().all() and program(*inputs)[0].isfinite().all()


def test_the_magnitude_of_a_negated_whole_number_is_kept() -> None:
    x = torch.arange(5, dtype=torch.uint8)
    program, _ = rewritten(Of(lambda x: (-x).abs() + 1, 1, []), x)
    assert torch.equal(program(x)[0], (-x).abs() + 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.rsqrt().sqrt().square(),
        lambda x: x.relu().reciprocal().log().exp(),
        lambda x: (1 / x.sqrt()).log().exp(),
    ],
)
def test_the_reciprocal_of_a_negative_zero_is_negative(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, 4.0])
    program, _ = rewritten(Of(function, 1, []), x)
    torch.testing.assert_close(program(x)[0], function(x), equal_nan=True)


@pytest.mark.parametrize(
    "function", [lambda x, w, v: linear(x, w) + linear(x, v), lambda x, w, v: linear(linear(x, v), w)]
)
def test_a_weight_of_one_axis_is_merged_with_none(function: Callable[..., Tensor]) -> None:
    model, x = Of(function, 1, [torch.randn(4, 4), torch.randn(4)]), torch.randn(4, 4)
    program, outcome = rewritten(model, x)
    assert not outcome.counts
    torch.testing.assert_close(program(x)[0], model(x))


def test_an_operator_of_others_is_called_each_time() -> None:
    @torch.library.custom_op("test_rewriter::noise", mutates_args=())
    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape)

    noise.register_fake(torch.empty_like)
    x = torch.randn(64)
    program, _ = rewritten(Of(lambda x: noise(x) - noise(x), 1, []), x)
    assert program(x)[0].abs().max() > 0.1
