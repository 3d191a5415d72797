"""Two products in a row by strips of tokens: the native call, the module in a graph, and the rewrite."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import twofour
from tests.conftest import each_row, threads
from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.mlp import IN_A_ROW, MlpLayer
from twofour.compiler.normed import NormedProduct, ProductOfNormed
from twofour.errors import KernelError
from twofour.kernels.dense_matmul import ONEDNN, Float32Matmul, Mlp
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.epilogue import ACTIVATIONS, COMBINES, Epilogue
from twofour.kernels.norm import RowNorm
from twofour.kernels.norm import reference as norm_reference
from twofour.kernels.problem import Problem
from twofour.kernels.table import rows

ROWS = [row for row in rows() if isinstance(row, Float32Matmul)]
BEST = max((row for row in ROWS if row.unavailable() is None), key=lambda row: row.level)


def made(
    row: Float32Matmul, sizes: tuple[int, int, int], *, gated: bool = False, activation: str = "gelu"
) -> tuple[Mlp, list[Tensor]]:
    """Return the products and their weights: in, hidden and out features."""
    inputs, hidden, out = sizes
    weights = [torch.randn(n, m) * m**-0.5 for n, m in ((hidden, inputs), (hidden, inputs), (out, hidden))]
    first, gate, last = map(row.prepare, weights)
    biases = torch.randn(hidden), torch.randn(hidden) if gated else None, None if gated else torch.randn(out)
    return Mlp(row, first, gate if gated else None, last, hidden, out, activation, "add", biases), weights


def in_float64(
    mlp: Mlp, weights: list[Tensor], x: Tensor, other: Tensor, before: RowNorm | None, after: RowNorm | None
) -> tuple[Tensor, Tensor]:
    """The same by definition."""

    def normed(y: Tensor, norm: RowNorm | None) -> Tensor:
        return y if norm is None else norm_reference(y, norm.weight, norm.bias, norm.eps, norm.centred)

    def linear(y: Tensor, index: int) -> Tensor:
        bias = mlp.biases[index]
        return functional.linear(y, weights[index].double(), None if bias is None else bias.double())

    read = normed(x.double(), before)
    between = ACTIVATIONS[mlp.activation](linear(read, 0))
    between = between * linear(read, 1) if mlp.gate is not None else between
    y = COMBINES[mlp.combine](linear(between, 2), other.double())
    return y, normed(y, after)


@each_row(ROWS, "row")
@pytest.mark.parametrize("gated", [False, True])
def test_strips_give_what_the_products_do(row: Float32Matmul, gated: bool) -> None:
    # 2,100 between them: strips of 64 to 124 tokens, so that 131 are two or three; 1,500 inputs are two passes.
    for tokens, sizes in ((1, (1, 1, 1)), (131, (7, 2100, 33)), (130, (1500, 2100, 5)), (0, (4, 8, 4))):
        mlp, weights = made(row, sizes, gated=gated)
        x, other = torch.randn(tokens, sizes[0] + 3)[:, : sizes[0]], torch.randn(tokens, sizes[2])
        ahead = RowNorm(torch.randn(2 * sizes[0])[::2], torch.randn(sizes[0]), 1e-5, True)
        behind = RowNorm(torch.randn(sizes[2]), None, 1e-5, False)
        for before, after, team in product((None, ahead), (None, behind), (1, 3)):
            with threads(team):
                y, normed = mlp.run(x, other, before, after, keep=True)
            want, of_want = in_float64(mlp, weights, x, other, before, after)
            torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(normed.double(), of_want, rtol=1e-4, atol=1e-4)
        in_place = mlp.run(x, other, None, behind)[1]
        torch.testing.assert_close(in_place, mlp.reference(x, other, None, behind)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_in_its_row(activation: str) -> None:
    mlp, weights = made(BEST, (16, 2048, 24), activation=activation)
    x, other = torch.randn(200, 16), torch.randn(200, 24)
    x[3, 0], x[150, 5] = torch.nan, torch.inf
    want, _ = in_float64(mlp, weights, x, other, None, None)
    clean = torch.tensor([row not in (3, 150) for row in range(200)])
    y, _ = mlp.run(x, other)
    torch.testing.assert_close(y[clean].double(), want[clean], rtol=1e-4, atol=1e-4)
    assert y[3].isnan().all() and not y[150].isfinite().any()


def test_operands_that_do_not_fit_are_refused() -> None:
    mlp, _ = made(BEST, (16, 40, 24))
    x, other = torch.randn(6, 16), torch.randn(6, 24)
    for wrong in ((torch.randn(6, 15), other), (x.double(), other), (x, other[:5]), (x, None), (x, other.bfloat16())):
        with pytest.raises(KernelError):
            mlp.run(*wrong)
    with pytest.raises(KernelError, match="weight of the norm"):
        mlp.run(x, other, RowNorm(torch.randn(15), None, 1e-5, True))
    with pytest.raises(KernelError, match="bytes made for another kernel"):
        made(BEST, (16, 40, 24))[0].__class__(BEST, mlp.last, None, mlp.last, 40, 24, "gelu", "add", mlp.biases).run(
            x, other
        )


def layer(inputs: int, out: int, activation: str = "none", combine: str = "none", dispatch: str = "") -> ProductLayer:
    kernels = [BEST, ONEDNN] if dispatch else [BEST]
    weight = torch.randn(out, inputs)
    prepared = PreparedWeights([kernel.prepare(weight) for kernel in kernels])
    table = read_dispatch(dispatch or f"*={BEST.name}")
    return ProductLayer("fc", inputs, Problem(out, Epilogue(activation, combine)), table, prepared, torch.randn(out))


def test_a_count_that_another_kernel_serves_runs_product_by_product() -> None:
    few = f"4={BEST.name};*={ONEDNN.name}"
    first, gate, last = layer(16, 40, "silu", "multiply", few), layer(16, 40), layer(40, 24, "none", "add")
    normed, plain = NormedProduct(last, 1e-5, True, True), layer(16, 40, "gelu", dispatch=few)
    gated, ahead = MlpLayer(first, gate, normed), MlpLayer(ProductOfNormed(plain, 1e-5, True), None, last)
    assert (gated.label, ahead.label) == ("mlp+silu+multiply+add+norm", "norm+mlp+gelu+add")
    for tokens in (3, 5):
        x, other, weight = torch.randn(tokens, 1, 16), torch.randn(tokens, 1, 24), torch.randn(24)
        want = last(first(x, gate(x)), other)
        y, of_y = gated(x, other, (), (weight, None))
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_y, functional.layer_norm(want, (24,), weight), rtol=1e-4, atol=1e-4)
        want = last(plain(functional.layer_norm(x, (16,))), other)
        torch.testing.assert_close(ahead(x, other, (None, None), ()), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(KernelError, match="layer `fc`"):
        ahead(torch.randn(3, 16), torch.randn(3, 24), (torch.randn(15), None), ())
    negated = torch._neg_view(torch.randn(3, 16))
    want = ahead(negated.clone(), torch.zeros(3, 24), (None, None), ())
    torch.testing.assert_close(ahead(negated, torch.zeros(3, 24), (None, None), ()), want, rtol=1e-4, atol=1e-4)


class Gated(nn.Module):
    """An MLP behind a norm, a gated one, and one whose middle is read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 48), nn.Linear(48, 32), nn.LayerNorm(32)
        self.gate, self.wide, self.back = (nn.Linear(n, m, bias=False) for n, m in ((32, 64), (32, 64), (64, 32)))
        self.other, self.last = nn.Linear(32, 40), nn.Linear(40, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(functional.gelu(self.up(self.norm(x))))
        y = torch.tanh(y)
        z = y + self.back(functional.silu(self.gate(y)) * self.wide(y))
        middle = functional.relu(self.other(z))
        return self.last(middle) + middle[..., :32].cos()


def test_a_model_with_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.choose.candidates", lambda *_, **__: (BEST,))
    model, x = Gated().eval(), torch.randn(6, 32)
    fast: Any = twofour.compile(model, example=x, graph=True)
    report = fast.plan.account
    assert report.rewrites[IN_A_ROW] == 2, str(fast.plan)
    labels = [call.label for call in report.outlines["after"].calls]
    assert "norm+mlp+gelu+add" in labels and "mlp+silu+multiply+add" in labels and "linear+relu" in labels
    for tokens in (6, 1, 170):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
