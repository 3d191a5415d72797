"""The rows on AMX tiles: what test_nm_matmul_bf16.py and test_nm_matmul_int8.py, which run them too, do not look at."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import runs
from tests.turns import in_turn
from twofour import native
from twofour.kernels import rows
from twofour.kernels.nm_matmul import NativeMatmul, from_layout, nm_matmul_int8_reference, to_layout
from twofour.kernels.problem import Problem
from twofour.packing import HEADER_BYTES, Packed, pack
from twofour.patterns import parse

ROWS = {row.dtype: row for row in rows() if isinstance(row, NativeMatmul) and row.layout.endswith("_tiles")}
DTYPES = ("bfloat16", "int8")
needs_amx = pytest.mark.skipif(not runs("amx"), reason=native.unavailable("amx") or "")


def sparse(out: int, columns: int, dtype: str, seed: int = 0) -> Packed:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    return pack(weight * parse("2:4").project(weight, absolute=True), "2:4", dtype=dtype)


def product(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """The reference: the integer one, or float64 on the rounded operands."""
    if packed.header.dtype == "int8":
        return nm_matmul_int8_reference(x, packed, None)
    return x.bfloat16().double() @ packed.unpack().double().T


def test_both_types_have_a_row() -> None:
    assert {row.name for row in ROWS.values()} == {"nm_matmul_2x4_bf16_tiles__amx", "nm_matmul_2x4_int8_tiles__amx"}


@pytest.mark.parametrize("dtype", DTYPES)
@given(out=st.integers(1, 100), groups=st.integers(1, 60), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_layouts_come_back_as_the_canonical_form(dtype: str, out: int, groups: int, seed: int) -> None:
    packed = sparse(out, 4 * groups, dtype, seed)
    back = from_layout(to_layout(packed, ROWS[dtype].layout))
    assert torch.equal(back.values, packed.values)
    assert torch.equal(back.indices, packed.indices)
    if packed.scales is None or back.scales is None:
        assert packed.scales is back.scales
    else:
        assert torch.equal(back.scales, packed.scales)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1.125 * 64 * 256), ("int8", 0.625 * 64 * 256 + 8 * 64)])
def test_layouts_are_as_small_as_promised(dtype: str, size: float) -> None:
    assert to_layout(sparse(64, 256, dtype), ROWS[dtype].layout).nbytes == HEADER_BYTES + size


@needs_amx
@in_turn("dtype", DTYPES)
@in_turn(("columns", "tokens"), [(256, 70), (260, 64), (16384, 70), (4096, 300)])
def test_blocks_of_inputs_and_passes_over_the_weight(dtype: str, columns: int, tokens: int) -> None:
    """Sums that leave the tiles between blocks of 8 steps; as many tokens a pass as half of L2 holds."""
    packed, x = sparse(40, columns, dtype), torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))
    y, want = ROWS[dtype].run(x, ROWS[dtype].prepare(packed), None, Problem(40)), product(packed, x)
    if dtype == "int8":
        assert torch.equal(y, want)
    else:
        assert (y.double() - want).norm() <= 4e-6 * want.norm()


@needs_amx
@in_turn("kind", [torch.float32, torch.bfloat16])
@in_turn("tokens", [1, 3, 20, 70])
def test_an_infinity_makes_all_of_its_token_nan_or_infinite_and_no_other(kind: torch.dtype, tokens: int) -> None:
    packed, row = sparse(40, 68, "bfloat16"), ROWS["bfloat16"]
    x = torch.randn(tokens, 68).to(kind)
    x[tokens // 2, 67] = float("inf")
    finite = torch.isfinite(row.run(x, row.prepare(packed), None, Problem(40)))
    assert not finite[tokens // 2].any()
    assert finite.all(dim=1).sum() == tokens - 1


@needs_amx
@in_turn("dtype", DTYPES)
@in_turn("tokens", [1, 15, 17, 33, 65])
def test_nothing_beyond_the_operands_is_read_into_the_answer(dtype: str, tokens: int) -> None:
    packed, row = sparse(33, 36, dtype), ROWS[dtype]
    wide = torch.full((tokens + 3, 50), float("nan"))
    wide[:tokens, :36] = torch.randn(tokens, 36)
    x = wide[:tokens, :36]
    want = product(packed, x.contiguous())
    y = row.run(x, row.prepare(packed), None, Problem(33))
    assert torch.equal(y, want) if dtype == "int8" else (y.double() - want).norm() <= 2e-6 * want.norm()


@needs_amx
def test_denormals_count_as_zero_in_bfloat16() -> None:
    packed, row = pack(torch.tensor([[1.0, 0, 0, 1.0]]), "2:4", dtype="bfloat16"), ROWS["bfloat16"]
    x = torch.tensor([[1e-39, 0.0, 0.0, 0.0], [1e-37, 0.0, 0.0, 0.0]])
    y = row.run(x, row.prepare(packed), None, Problem(1))
    assert y[0].item() == 0.0
    assert y[1].item() == x[1, 0].bfloat16().float().item()
