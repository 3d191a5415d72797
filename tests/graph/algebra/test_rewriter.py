"""The search on models where rewrites meet each other, and where what a rule binds is not of its kind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.graph.algebra.cases import Of
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


@pytest.mark.parametrize("function", [mixed, masks])
@pytest.mark.parametrize("narrow", [torch.uint8, torch.int32, torch.bool])
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
