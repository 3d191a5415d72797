"""Products with both activations transposed, and new values in a layout whose mask stays."""

import pytest
import torch

from tests.conftest import threads
from tests.turns import in_turn
from twofour import native, packing, patterns
from twofour.errors import KernelError
from twofour.kernels import Prepared, available
from twofour.kernels.nm_matmul import NativeMatmul, native_rows
from twofour.kernels.nm_matmul.layout import to_layout

LAYOUTS = [("panels", torch.float32), ("pairs", torch.float32), ("bf16_panels", torch.bfloat16)]


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return dense, patterns.parse("2:4-transposable").project(dense, absolute=True)


@in_turn(("layout", "dtype"), LAYOUTS)
@in_turn(("rows", "inner", "tokens"), [(4, 4, 1), (48, 68, 53), (392, 132, 140), (100, 64, 17)])
def test_columns_equal_float64(isa: str, layout: str, dtype: torch.dtype, rows: int, inner: int, tokens: int) -> None:
    dense, keep = weight(rows, inner)
    w = (dense * keep).to(dtype)
    x = torch.randn(inner, tokens + 5).to(dtype)[:, 2 : 2 + tokens]  # rows further apart than long
    want = w.double() @ x.double()
    kernels = [k for k in available("nm_matmul") if isinstance(k, NativeMatmul) and k.layout == layout]
    assert kernels
    for kernel in kernels:
        for count in (1, 3):
            with threads(count):
                y = kernel.run_columns(x, kernel.prepare(packing.pack(w, "2:4")), rows)
            limit = 1e-6 if dtype is torch.float32 else 5e-3
            assert y.dtype == dtype and (y.double() - want).norm() <= limit * want.norm(), kernel.name


def by_layout(layout: str) -> NativeMatmul:
    return next(row for row in native_rows() if row.layout == layout)


@in_turn(("layout", "dtype"), LAYOUTS)
@in_turn("source", [torch.float32, torch.bfloat16])
@in_turn(("rows", "columns"), [(4, 4), (100, 68), (392, 136)])
def test_refilling_equals_packing_anew(
    layout: str, dtype: torch.dtype, source: torch.dtype, rows: int, columns: int
) -> None:
    old, keep = weight(rows, columns)
    new = torch.randn(rows, columns).to(source)
    for turned in (False, True):
        before, after = (value.T.contiguous() if turned else value for value in (old * keep, new * keep))
        packed = to_layout(packing.pack(before, "2:4", dtype=dtype), layout)
        with threads(2):
            row = by_layout(layout)
            row.refill(Prepared(row, packed), new.T if turned else new)
        assert torch.equal(packed, to_layout(packing.pack(after, "2:4", dtype=dtype), layout))


@in_turn(("layout", "dtype"), LAYOUTS)
@in_turn("source", [torch.float32, torch.bfloat16])
@in_turn(("rows", "columns"), [(4, 4), (100, 68), (392, 136)])
def test_refilling_from_kept_values_equals_refilling_from_dense_ones(
    layout: str, dtype: torch.dtype, source: torch.dtype, rows: int, columns: int
) -> None:
    old, keep = weight(rows, columns)
    packed = packing.pack(torch.randn(rows, columns).to(source) * keep, "2:4")
    row, new = by_layout(layout), packed.unpack()
    for turned in (False, True):
        before = (old * keep).T.contiguous() if turned else old * keep
        ways = [Prepared(row, to_layout(packing.pack(before, "2:4", dtype=dtype), layout)) for _ in range(2)]
        with threads(2):
            row.refill(ways[0], new.T if turned else new)
            row.refill(ways[1], packed.transposed() if turned else packed)
        assert torch.equal(ways[0].tensor, ways[1].tensor)


def test_layouts_without_a_refill_say_so() -> None:
    assert not native.extension().layout_refills("rows")
    row = by_layout("rows")
    packed = row.prepare(packing.pack(torch.zeros(4, 4), "2:4"))
    with pytest.raises(KernelError, match="layout_refill cannot read its packed weight") as error:
        row.refill(packed, torch.zeros(4, 4))
    assert "a layout whose values can be written anew in place" in str(error.value)
