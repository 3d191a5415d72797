"""Products that end in a normalisation: the native call, the module in a graph, and the rewrite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.conftest import each_row, threads
from tests.turns import in_turn
from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.normed import NORMED, OF_NORMED, NormedProduct, ProductOfNormed
from twofour.errors import KernelError
from twofour.kernels.dense_matmul import ONEDNN, Float32Matmul
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.fused_matmul import Factor, FusedMatmul
from twofour.kernels.norm import RowNorm
from twofour.kernels.norm import reference as norm_reference
from twofour.kernels.problem import Problem
from twofour.kernels.table import rows

ROWS = [row for row in rows() if isinstance(row, Float32Matmul)]
BEST = max((row for row in ROWS if row.unavailable() is None), key=lambda row: row.level)


@each_row(ROWS, "row")
@in_turn("keep", [True, False])
@in_turn("centred", [True, False])
def test_rows_are_normalised_behind_the_epilogue(row: Float32Matmul, keep: bool, centred: bool) -> None:
    for tokens, out, columns in ((1, 1, 1), (5, 33, 40), (29, 64, 1500), (200, 40, 2100)):
        x, weight, other = torch.randn(tokens, columns), torch.randn(out, columns), torch.randn(tokens, out)
        norm = RowNorm(torch.randn(out), torch.randn(out) if centred else None, 1e-5, centred)
        problem, bias = Problem(out, Epilogue("relu", "add")), torch.randn(out)
        for team in (1, 3):
            with threads(team):
                prepared = row.prepare(weight)
                fused = FusedMatmul(None, None, Factor(row, prepared, bias, out), epilogue=problem.epilogue)
                y, normed = fused.run(x, other, None, norm, keep=keep)
                plain = row.run(x, prepared, bias, problem, other)
            want = norm_reference(plain.double(), norm.weight, norm.bias, norm.eps, centred)
            torch.testing.assert_close(normed.double(), want.double(), rtol=1e-4, atol=1e-4)
            assert torch.equal(y, plain if keep else normed)


@each_row(ROWS, "row")
@pytest.mark.parametrize("centred", [True, False])
def test_rows_are_normalised_before_they_are_packed(row: Float32Matmul, centred: bool) -> None:
    for tokens, out, columns in ((1, 1, 1), (5, 33, 40), (29, 64, 1500), (200, 40, 2100), (0, 4, 4)):
        x, weight, other = (
            torch.randn(tokens, columns + 3)[:, :columns],
            torch.randn(out, columns),
            torch.randn(tokens, out),
        )
        norm = RowNorm(torch.randn(2 * columns)[::2], torch.randn(columns) if centred else None, 1e-5, centred)
        problem, bias, given = Problem(out, Epilogue("relu", "add")), torch.randn(out), x.clone()
        if tokens > 4:
            x[1, 0], x[3, columns // 2] = torch.nan, torch.inf
        normed = norm_reference(x.double(), norm.weight, norm.bias, norm.eps, centred)
        want = problem.epilogue.apply(normed @ weight.double().T + bias, other.double())
        given = x.clone()
        for team in (1, 3):
            with threads(team):
                factor = Factor(row, row.prepare(weight), bias, out)
                y, _ = FusedMatmul(None, None, factor, epilogue=problem.epilogue).run(x, other, norm)
            torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-3, equal_nan=True)
        torch.testing.assert_close(x, given, rtol=0, atol=0, equal_nan=True)


def layer(row: Float32Matmul, dispatch: str = "") -> ProductLayer:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    kernels = [row, ONEDNN] if dispatch else [row]
    prepared = PreparedWeights([kernel.prepare(weight) for kernel in kernels])
    table = read_dispatch(dispatch or f"*={row.name}")
    return ProductLayer("fc", 16, Problem(24), table, prepared, torch.ones(24))


def test_a_count_that_another_kernel_serves_is_normalised_after_it() -> None:
    inner = layer(BEST, f"4={BEST.name};*={ONEDNN.name}")
    weight = torch.randn(24)
    for keeps in (True, False):
        normed = NormedProduct(inner, 1e-5, True, keeps)
        assert normed.label == "linear+norm"
        for tokens in (3, 5):
            x = torch.randn(tokens, 1, 16)
            found = normed(x, None, weight, None)
            y = inner(x)
            want = torch.nn.functional.layer_norm(y, (24,), weight)
            torch.testing.assert_close(found[1] if keeps else found, want, rtol=1e-4, atol=1e-5)
            if keeps:
                torch.testing.assert_close(found[0], y)


def test_rows_before_a_product_that_another_kernel_serves_are_normalised_first() -> None:
    inner = layer(BEST, f"4={BEST.name};*={ONEDNN.name}")
    weight, other = torch.randn(16), torch.randn(24)
    module = ProductOfNormed(inner, 1e-5, False)
    assert module.label == "norm+linear"
    for tokens in (3, 5):
        x = torch.randn(tokens, 1, 16)
        want = inner(torch.nn.functional.rms_norm(x, (16,), weight, 1e-5))
        torch.testing.assert_close(module(x, None, weight, None), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(KernelError, match=r"layer `fc`"):
        module(torch.randn(3, 16), None, other, None)


def test_an_input_that_torch_negates_on_reading_is_read_so() -> None:
    inner, x = layer(BEST), torch._neg_view(torch.randn(3, 16))
    found = ProductOfNormed(inner, 1e-5, True)(x, None, None, None)
    want = inner(torch.nn.functional.layer_norm(x.clone(), (16,)))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    found = NormedProduct(inner, 1e-5, True, False)(x, None, None, None)
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(inner(x.clone()), (24,)), rtol=1e-4, atol=1e-5)


def test_an_operand_that_does_not_fit_names_the_layer() -> None:
    with pytest.raises(KernelError, match=r"layer `fc`"):
        NormedProduct(layer(BEST), 1e-5, True, False)(torch.randn(3, 16), None, torch.randn(23), None)


class Blocks(nn.Module):
    """Post-norm, whose product nobody else reads, and pre-norm, whose product is the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.one(x) + x)
        z = self.two(y) + y
        return self.three(self.second(z)) + z


def test_a_compiled_model_has_no_norm_of_its_own_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.choose.candidates", lambda *_, **__: (BEST,))
    model, x = Blocks().eval(), torch.randn(6, 32)
    fast = twofour.compile(model, example=x, graph=True)
    report = fast.plan.account
    assert report.rewrites[NORMED] == 2, str(fast.plan)
    labels = [call.label for call in report.outlines["after"].calls]
    assert "norm" not in labels and "norm_in_place" not in labels and labels.count("linear+add+norm") == 2
    for tokens in (6, 1, 17):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Reading(nn.Module):
    """Norms that one product reads, that two read, and that the product's own sum reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(self.norms[0](x).relu().cos()) * 2 + self.two(self.norms[1](x.sin())) * x
        z = self.norms[2](y.cos())
        return self.three(z) + z


def test_a_norm_is_taken_by_the_product_that_alone_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.compiler.choose.candidates", lambda *_, **__: (BEST,))
    model, x = Reading().eval(), torch.randn(6, 32)
    fast = twofour.compile(model, example=x, graph=True)
    assert fast.plan.account.rewrites[OF_NORMED] == 1, str(fast.plan)
    for tokens in (6, 1, 17):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
