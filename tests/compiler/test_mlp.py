"""Products with their norms, and two in a row by strips of tokens: the native call, the module, the rewrite."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import twofour
from tests.conftest import each_row, threads
from tests.turns import in_turn
from twofour import native
from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.mlp import IN_A_ROW, MlpLayer
from twofour.compiler.normed import NormedProduct, ProductOfNormed
from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.kernels.dense_matmul import ONEDNN, Float32Matmul
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.epilogue import ACTIVATIONS, Epilogue
from twofour.kernels.fused_matmul import Factor, FusedMatmul
from twofour.kernels.norm import RowNorm, norm, norm_to_bytes
from twofour.kernels.norm import reference as norm_reference
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import DYNAMIC, Quantization, quantize_input
from twofour.kernels.table import rows
from twofour.packing import Packed, pack
from twofour.patterns import parse

ROWS = [row for row in rows() if row.native_product is not None]
"""Every native product, of every family."""

DENSE = [row for row in ROWS if isinstance(row, Float32Matmul) and row.unavailable() is None]
BEST = max(DENSE, key=lambda row: row.level)
SPARSE = max((row for row in ROWS if row.layout == "pairs" and row.unavailable() is None), key=lambda row: row.level)

NEAR = {"float32": 1e-4, "bfloat16": 0.03, "int8": 0.1, "int4": 0.1}
"""Computing type -> how far an answer may be from the same product by product, beside its largest number."""


@cache
def packed_weight(pattern: str, dtype: str, rows: int, columns: int, seed: int) -> Packed | Tensor:
    """Return a weight as rows of a pattern prepare it: packed once for all of them, dense where they are."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    if pattern == "dense":
        return weight
    name = {"block": "block:4x4@0.5", "hybrid": "2:4+25%"}.get(pattern, pattern)
    return pack(weight * parse(name).project(weight, absolute=True), name, dtype)


def weight_of(row: Kernel, rows: int, columns: int, seed: int) -> Packed | Tensor:
    """Return a weight that a row prepares: packed where it wants that."""
    return packed_weight(row.pattern if row.sparse else "dense", row.dtype, rows, columns, seed)


def made(
    row: Kernel, sizes: tuple[int, int, int], *, gated: bool = False, activation: str = "gelu", two: bool = True
) -> FusedMatmul:
    """Return products of in, hidden and out features, or the last one alone."""
    inputs, hidden, out = sizes

    def factor(n: int, m: int, bias: bool, seed: int = 0) -> Factor:
        return Factor(row, row.prepare(weight_of(row, n, m, seed)), torch.randn(n) if bias else None, n)

    first = factor(hidden, inputs, True) if two else None
    gate = factor(hidden, inputs, False, 1) if gated and two else None
    epilogue = Epilogue("none" if two else "relu", "add")
    last = factor(out, hidden if two else inputs, not gated)
    return FusedMatmul(first, gate, last, activation, epilogue)


def by_product(
    fused: FusedMatmul, x: Tensor, other: Tensor, before: RowNorm | None, after: RowNorm | None
) -> tuple[Tensor, Tensor]:
    """The same, product by product and norm by norm, by the same kernels."""

    def product_of(factor: Factor, x: Tensor, epilogue: Epilogue, other: Tensor | None = None) -> Tensor:
        return factor.kernel.run(x, factor.weight, factor.bias, Problem(factor.rows, epilogue), other)

    def normed(x: Tensor, one: RowNorm | None) -> Tensor:
        return x if one is None else norm(x, one.weight, one.bias, one.eps, one.centred)

    x = normed(x, before)
    if fused.first is not None:
        gate = None if fused.gate is None else product_of(fused.gate, x, Epilogue())
        x = product_of(fused.first, x, Epilogue(fused.activation, "none" if gate is None else "multiply"), gate)
    y = product_of(fused.last, x, fused.epilogue, other)
    return y, normed(y, after)


def in_float64(
    fused: FusedMatmul,
    x: Tensor,
    other: Tensor,
    before: RowNorm | None,
    after: RowNorm | None,
    dense: dict[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same by definition, of dense weights that were made already where these are given."""

    def normed(y: Tensor, norm: RowNorm | None) -> Tensor:
        return y if norm is None else norm_reference(y, norm.weight, norm.bias, norm.eps, norm.centred)

    def linear(y: Tensor, factor: Factor) -> Tensor:
        weight = factor.dense().double() if dense is None else dense[id(factor)]
        return functional.linear(y, weight, None if factor.bias is None else factor.bias.double())

    read = normed(x.double(), before)
    if fused.first is not None:
        between = ACTIVATIONS[fused.activation](linear(read, fused.first))
        read = between if fused.gate is None else between * linear(read, fused.gate)
    y = fused.epilogue.apply(linear(read, fused.last), other.double())
    return y, normed(y, after)


def norms(sizes: tuple[int, int, int]) -> tuple[RowNorm, RowNorm]:
    """Return one of the inputs and one of the outputs."""
    ahead = RowNorm(torch.randn(2 * sizes[0])[::2], torch.randn(sizes[0]), 1e-5, True)
    return ahead, RowNorm(torch.randn(sizes[2]), None, 1e-5, False)


SHORT = ((1, (64, 64, 17)), (0, (64, 64, 17)))


def cases_of(row: Kernel) -> list[tuple[int, tuple[int, int, int]]]:
    """Strips of 64 to 124 tokens, or 128: two or three of them, and rows of 1,500 inputs that are two passes."""
    return [*SHORT, (131, (64, 2112, 33)), *([(130, (1500, 2100, 5))] if row.whole_rows else [])]


HOW = ("alone", "two", "gated")


@each_row(ROWS, "row")
@in_turn("how", HOW)
def test_strips_give_what_the_products_do(row: Kernel, how: str) -> None:
    """Rows take turns in how a strip of long ones is computed: the strips are the same code for all of them."""
    at_its_turn = how == HOW[ROWS.index(row) % len(HOW)]
    assert_strips(row, how, [case for case in cases_of(row) if at_its_turn or case in SHORT])


@pytest.mark.long
@each_row(ROWS, "row")
@in_turn("how", HOW)
def test_strips_of_long_rows_in_every_way(row: Kernel, how: str) -> None:
    assert_strips(row, how, [case for case in cases_of(row) if case not in SHORT])


def assert_strips(row: Kernel, how: str, cases: list[tuple[int, tuple[int, int, int]]]) -> None:
    made_of = {sizes: made(row, sizes, gated=how == "gated", two=how != "alone") for _, sizes in cases}
    for tokens, sizes in cases:
        fused = made_of[sizes]
        factors = [one for one in (fused.first, fused.gate, fused.last) if one is not None]
        dense = {id(one): one.dense().double() for one in factors} if tokens else {}
        x, other = torch.randn(tokens, sizes[0] + 3)[:, : sizes[0]], torch.randn(tokens, sizes[2])
        ahead, behind = norms(sizes)
        norms_of = [(None, None, 3), (ahead, None, 1), (None, behind, 3), (ahead, behind, 1)]
        if sizes[1] > 64:  # in long rows each of these with two of the three
            norms_of = {"alone": norms_of[::3], "two": norms_of[1:3], "gated": norms_of[::2]}[how]
        for before, after, team in norms_of:
            with threads(team):
                found = fused.run(x, other, before, after, keep=True)
                turn = by_product(fused, x, other, before, after)
            want = in_float64(fused, x, other, before, after, dense) if tokens else turn
            for y, apart, exact in zip(found, turn, want, strict=True):
                near(y, apart, 1e-5)
                near(y, exact, NEAR[row.dtype])
        if not tokens or (sizes[1] > 64 and how == "alone"):
            continue
        in_place = fused.run(x, other, None, behind)[1]
        near(in_place, fused.reference(x, other, None, behind)[1], NEAR[row.dtype])


@in_turn("tokens", [129, 300, 515])
def test_shorter_strips_of_small_weights_are_right(tokens: int) -> None:
    """512 hidden numbers beside 64 KB of weights: strips of 80 to 128 tokens where 512 would fit."""
    for fused in (made(BEST, (16, 512, 24)), made(SPARSE, (16, 512, 24)), made(SPARSE, (16, 256, 24), gated=True)):
        x, other, (ahead, behind) = torch.randn(tokens, 16), torch.randn(tokens, 24), norms((16, 512, 24))
        for before in (None, ahead):
            found = fused.run(x, other, before, behind, keep=True)
            for y, want in zip(found, in_float64(fused, x, other, before, behind), strict=True):
                near(y, want, 1e-4)


def near(found: Tensor, wanted: Tensor, share: float) -> None:
    """Raise where an answer is further off than a share of the largest number there is."""
    most = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=share * max(most, 1.0))


HALVES = [row for row in ROWS if torch.bfloat16 in row.reads]


@each_row(HALVES, "row")
def test_bfloat16_rows_round_where_the_products_do(row: Kernel) -> None:
    fused = made(row, (64, 2112, 33), gated=True)
    x, other = torch.randn(131, 64).bfloat16(), torch.randn(131, 33).bfloat16()
    ahead, behind = norms((64, 2112, 33))
    found, wanted = fused.run(x, other, ahead, behind, keep=True), by_product(fused, x, other, ahead, behind)
    for y, apart in zip(found, wanted, strict=True):
        assert y.dtype is torch.bfloat16
        near(y, apart.double(), 2**-6)
        # The last bit of a float32 sum may turn on a strip's size, and so, in few tokens, which bfloat16 is nearest.
        assert (y != apart).any(dim=1).sum() <= 4


def test_products_of_two_families_stand_in_one_call() -> None:
    dense, packed = made(BEST, (16, 2048, 24)), made(SPARSE, (16, 2048, 24))
    x, other, (ahead, behind) = torch.randn(200, 16), torch.randn(200, 24), norms((16, 2048, 24))
    for first, last in ((dense.first, packed.last), (packed.first, dense.last)):
        fused = FusedMatmul(first, None, last, "gelu", Epilogue(combine="add"))
        for y, want in zip(
            fused.run(x, other, ahead, behind, keep=True), in_float64(fused, x, other, ahead, behind), strict=True
        ):
            near(y, want, 1e-4)
    with pytest.raises(KernelError, match="float32"):
        fused.run(x.bfloat16(), other.bfloat16())


WHOLE = [row for row in ROWS if row.dtype == "int8"]
OF_X, HELD, NORMED = (Quantization.of_range(*ends) for ends in ((-4, 4), (-0.2, 7), (-4, 3)))


def of_ranges(fused: FusedMatmul, dtype: torch.dtype, held: torch.dtype) -> FusedMatmul:
    """Return the same products with static ranges, answers of `dtype`, what is between them of `held`."""
    assert HELD.x_scale is not None
    last = replace(HELD if fused.first is not None else OF_X, y_dtype=dtype)
    first = replace(
        OF_X, y_dtype=held, **({"y_scale": HELD.x_scale, "y_zero": HELD.x_zero} if held is torch.uint8 else {})
    )
    firsts = [None if one is None else replace(one, quantization=first) for one in (fused.first, fused.gate)]
    return replace(fused, first=firsts[0], gate=firsts[1], last=replace(fused.last, quantization=last))


def apart_in_ranges(fused: FusedMatmul, x: Tensor, other: Tensor, after: RowNorm, dtype: torch.dtype) -> list[Tensor]:
    """The same, a call for each product and one for the norm, which is answered in bytes too."""

    def product_of(one: Factor, x: Tensor, epilogue: Epilogue, other: Tensor | None = None) -> Tensor:
        return one.kernel.run(x, one.weight, one.bias, Problem(one.rows, epilogue, one.quantization), other)

    if fused.first is not None:
        gate = None if fused.gate is None else product_of(fused.gate, x, Epilogue())
        x = product_of(fused.first, x, Epilogue(fused.activation, "none" if gate is None else "multiply"), gate)
    y = product_of(fused.last, x, fused.epilogue, other)
    made = norm_to_bytes(y, after.weight, after.bias, after.eps, after.centred, after.scale, after.zero)
    assert y.dtype is dtype and isinstance(made, tuple)
    return [y, *made]


@each_row(WHOLE, "row")
@in_turn("how", [*HOW, "real between"])
def test_static_ranges_give_the_bits_of_separate_calls(row: Kernel, how: str) -> None:
    sizes, two = (64, 2112, 33), how != "alone"
    for tokens, dtype, team in (
        (131, torch.bfloat16, 1),
        (300, torch.float32, 3),
        (1, torch.bfloat16, 1),
        (0, torch.float32, 1),
    ):
        held = torch.uint8 if how == "two" else dtype
        fused = of_ranges(made(row, sizes, gated=how == "gated", two=two), dtype, held)
        other = torch.randn(tokens, 33).to(dtype)
        after = RowNorm(torch.randn(33), torch.randn(33), 1e-5, True, NORMED.x_scale or 1.0, NORMED.x_zero)
        real = torch.randn(tokens, 67)[:, :64].to(dtype)
        for x in (real, quantize_input(real, OF_X)[0]):
            with threads(team):
                want = apart_in_ranges(fused, x, other, after, dtype)
                whole = torch.full((tokens, 33), 77, dtype=torch.uint8)
                y, normed = fused.run(x, other, None, after, keep=True, whole=whole)
                for got, wanted in zip((y, normed, whole), want, strict=True):
                    assert torch.equal(got, wanted)
                whole.fill_(77)
                y, same = fused.run(x, other, None, after, keep=True, whole=whole, real=False)
                assert torch.equal(y, want[0]) and same is y and torch.equal(whole, want[2])
                whole.fill_(77)
                assert torch.equal(fused.run(x, other, None, after, whole=whole)[1], want[1]) and torch.equal(
                    whole, want[2]
                )
                assert torch.equal(fused.run(x, other)[0], want[0])
            exact = quantize_input(real, OF_X)
            dense = in_float64(fused, exact[1] * (exact[0].float() - exact[2]), other, None, after)
            if how != "gated":  # whose products leave the range between them
                near(want[0], dense[0], NEAR["int8"])
            near(want[0], fused.reference(x, other)[0], 0.02)


def test_bytes_that_a_product_cannot_read_are_refused() -> None:
    best = max((row for row in WHOLE if row.unavailable() is None), key=lambda row: row.level)
    fused = of_ranges(made(best, (16, 40, 24)), torch.float32, torch.uint8)
    x, other = torch.randint(0, 255, (6, 16), dtype=torch.uint8), torch.randn(6, 24)
    assert fused.first is not None
    dynamic = replace(fused, first=replace(fused.first, quantization=replace(DYNAMIC, y_dtype=torch.uint8)))
    with pytest.raises(KernelError, match="int8 products of a static range"):
        dynamic.run(x, other)
    with pytest.raises(KernelError, match="two int8 products of static ranges"):
        replace(fused, last=replace(fused.last, quantization=DYNAMIC)).run(x, other)
    with pytest.raises(KernelError, match="does not normalise bytes"):
        fused.run(x, other, RowNorm(None, None, 1e-5, True))
    with pytest.raises(KernelError, match="second operand"):
        fused.run(x, other.bfloat16())
    whole, after = torch.empty(6, 24, dtype=torch.uint8), RowNorm(None, None, 1e-5, True, 0.1, 300)
    with pytest.raises(KernelError, match="zero point from 0 to 255"):
        fused.run(x, other, None, after, whole=whole)
    with pytest.raises(KernelError, match="answer in bytes"):
        fused.run(x, other, None, replace(after, zero=3), whole=whole[:5])
    with pytest.raises(KernelError, match="normalised answer"):
        fused.run(x, other, None, replace(after, zero=3), real=False)
    floats = of_ranges(made(BEST, (16, 40, 24)), torch.float32, torch.float32)
    with pytest.raises(KernelError, match="input"):
        floats.run(x, other)


@in_turn("zeros", [(128, 300, True), (128, -7, True), (999, 0, False)])
def test_zero_points_of_no_byte_are_refused_at_the_border(zeros: tuple[int, int, bool]) -> None:
    """`Quantization` refuses them in Python; a program of a file has its own."""
    best = max((row for row in WHOLE if row.unavailable() is None), key=lambda row: row.level)
    fused = of_ranges(made(best, (16, 40, 24)), torch.float32, torch.uint8)
    assert fused.first is not None
    of_x, of_y, held = zeros
    x = torch.randint(0, 255, (6, 16), dtype=torch.uint8) if held else torch.randn(6, 16)
    place, none, no_norm = fused.last.place, (None, None), (-1, None, None, 0.0, False)
    operands = x, *fused.first.operands, *none, *fused.last.operands, torch.empty(6, 24), 40, 0
    codes = (False, 0.03, of_x, 0.03, of_y), (False, 0.03, 10, 1.0, 0)
    epilogue = *fused.epilogue.codes, torch.randn(6, 24)
    with pytest.raises(KernelError, match=r"zero points of bytes|between which bytes stand"):
        native.extension().fused_matmul(
            *(place, -1, place, *operands, *epilogue, *no_norm, *no_norm, None, *codes, held, None, 1.0, 0, 1)
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_in_its_row(activation: str) -> None:
    fused = made(BEST, (16, 2048, 24), activation=activation)
    x, other = torch.randn(200, 16), torch.randn(200, 24)
    x[3, 0], x[150, 5] = torch.nan, torch.inf
    want, _ = in_float64(fused, x, other, None, None)
    clean = torch.tensor([row not in (3, 150) for row in range(200)])
    y, _ = fused.run(x, other)
    torch.testing.assert_close(y[clean].double(), want[clean], rtol=1e-4, atol=1e-4)
    assert y[3].isnan().all() and not y[150].isfinite().any()


def test_operands_that_do_not_fit_are_refused() -> None:
    fused = made(BEST, (16, 40, 24))
    x, other = torch.randn(6, 16), torch.randn(6, 24)
    for wrong in ((torch.randn(6, 15), other), (x.double(), other), (x, other[:5]), (x, None), (x, other.bfloat16())):
        with pytest.raises(KernelError):
            fused.run(*wrong)
    with pytest.raises(KernelError, match="weight of the norm"):
        fused.run(x, other, RowNorm(torch.randn(15), None, 1e-5, True))
    with pytest.raises(KernelError, match=r"layout 'dense_panels' of a float32 weight \(24, 16\)"):
        FusedMatmul(None, None, fused.last, epilogue=fused.epilogue).run(x, other)
    run, place = native.extension().fused_matmul, BEST.native_product
    weight, y, dynamic = fused.last.weight.tensor, torch.empty(6, 24), (True, 1.0, 0, 1.0, 0)
    beside = (None, *(-1, None, None, 0.0, False) * 2, None, dynamic, dynamic, False, None, 1.0, 0, 1)
    for places, hidden in (((-1, place, place), 0), ((-1, -1, place), 4), ((place, -1, place), 0), ((-1, -1, -1), 0)):
        with pytest.raises((ValueError, IndexError)):
            run(*places, x, weight, None, weight, None, weight, None, y, hidden, 0, 0, 0, *beside)


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
