import pickle

import pytest
import torch

from twofour.errors import KernelError
from twofour.kernels import Kernel, available, convolutions, rows, table
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul import MKL, ONEDNN, ONEDNN_BF16, ONEDNN_INT8, PLAIN, PLAIN_BF16
from twofour.kernels.dispatch import DispatchTable, build_dispatch, read_dispatch
from twofour.kernels.nm_matmul import REFERENCE
from twofour.kernels.operator import linear
from twofour.kernels.problem import Problem
from twofour.packing import pack
from twofour.patterns import parse

A, B = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
DENSE = "dense_matmul_f32_linear__torch"


def test_it_merges_equal_neighbours_and_splits_between_measured_counts() -> None:
    dispatch = build_dispatch({1: A, 8: A, 32: B, 128: DENSE, 512: B})
    assert dispatch == DispatchTable((16, 64, 256), (A, B, DENSE, B))
    assert [dispatch.at(tokens)[0].name for tokens in (1, 16, 17, 64, 65, 256, 257, 10**6)] == [
        A, A, B, B, DENSE, DENSE, B, B,
    ]  # fmt: skip
    assert dispatch.layouts == ("rows", "panels", "dense")
    assert dispatch.sparse


def test_a_kernel_for_one_count_serves_that_count_alone() -> None:
    only = "dense_matmul_f32_packed32__mkl"
    for best in ({1: A, 32: B, 128: DENSE}, {32: B}, {1: A, 31: A, 32: B, 33: DENSE}):
        plain, dispatch = build_dispatch(best), build_dispatch(best, {32: only})
        for tokens in range(1, 200):
            want = only if tokens == 32 else plain.at(tokens)[0].name
            assert dispatch.at(tokens)[0].name == want, (best, tokens, dispatch)
        assert read_dispatch(dispatch.to_text()) == dispatch
    assert build_dispatch({1: A}, {1: only}) == DispatchTable((1,), (only, A))


def test_text_round_trip() -> None:
    for dispatch in (DispatchTable((), (A,)), DispatchTable((16,), (A, B)), build_dispatch({1: DENSE})):
        assert read_dispatch(dispatch.to_text()) == dispatch
    assert not build_dispatch({1: DENSE}).sparse


@pytest.mark.parametrize("text", ["", "16=x", f"{A}", f"8={A};4={B};*={A}", f"*={A};8={B}", f"x={A};*={B}"])
def test_what_is_no_dispatch_table_is_refused(text: str) -> None:
    with pytest.raises(KernelError):
        read_dispatch(text)


def test_a_row_of_a_convolution_is_no_kernel_of_the_registered_operator() -> None:
    x, weights = torch.ones(3, 64), [torch.zeros(64, 64)]
    for row in convolutions():
        with pytest.raises(KernelError, match="there is no such kernel"):
            torch.ops.twofour.linear(x, weights, None, f"*={row.name}", 64)
        assert read_dispatch(f"*={row.name}").names == (row.name,)


def test_rows_are_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in (*rows(), *convolutions()):
        written = pickle.dumps(Prepared(row, torch.zeros(1)))
        assert pickle.loads(written).kernel == row
        assert b"any_axes" not in written and b"tokens_least" not in written and b"index" not in written, row.name
    written = pickle.dumps(row)
    monkeypatch.setattr(table, "_by_name", lambda: {})
    with pytest.raises(KernelError, match="there is no such kernel"):
        pickle.loads(written)
    assert pickle.loads(pickle.dumps(row)) == row  # of no table: by value


LIBRARIES = {
    "torch": (REFERENCE, PLAIN, PLAIN_BF16),
    "onednn": (ONEDNN, ONEDNN_BF16, ONEDNN_INT8),
    "mkl": MKL,
}
"""What multiplies in the kernels that are not ours; ours end with their instruction set."""


def test_names_follow_the_grammar_and_are_unique() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    for row in rows():
        head, hardware = row.name.split("__")
        assert head.startswith(row.operation)
        if row.device == "cuda":
            assert hardware == ("triton" if row.triton else "cuda") and row.isa.startswith("sm_")
            continue
        libraries = [library for library, kernels in LIBRARIES.items() if row in kernels]
        assert [hardware] == (libraries or [row.isa])
        assert bool(libraries) == (row.isa == "any")
    products = {"nm_matmul", "hybrid_matmul", "block_matmul", "dense_matmul", "bits_matmul"}
    assert {row.operation for row in rows()} == products
    assert all(row.pattern != "any" for row in available("nm_matmul"))


def test_the_registered_operator_passes_opcheck() -> None:
    weight = torch.randn(24, 32)
    weight *= parse("2:4").project(weight, absolute=True)
    packed = pack(weight, "2:4")
    dispatch = DispatchTable((4,), (A, B))
    prepared = [kernel.prepare(packed) for kernel in dispatch.kernels if isinstance(kernel, Kernel)]
    layouts = [part.tensor for part in prepared]
    x, bias = torch.randn(6, 32), torch.randn(24)
    torch.library.opcheck(
        torch.ops.twofour.linear.default, (x, layouts, bias, dispatch.to_text(), 24), test_utils="test_schema"
    )
    torch.library.opcheck(
        torch.ops.twofour.linear.default, (x, layouts, bias, dispatch.to_text(), 24), test_utils="test_faketensor"
    )
    want = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(torch.ops.twofour.linear(x, layouts, bias, dispatch.to_text(), 24), want, atol=1e-5)
    assert torch.allclose(linear(x[:2], prepared, bias, dispatch, Problem(24)), want[:2], atol=1e-5)
    with pytest.raises(KernelError, match="gradient"):
        torch.ops.twofour.linear(x.requires_grad_(), layouts, bias, dispatch.to_text(), 24)
