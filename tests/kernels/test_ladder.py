import pytest
import torch

from twofour.errors import KernelError
from twofour.kernels import available, rows
from twofour.kernels.dense_matmul import MKL, ONEDNN, ONEDNN_BF16, ONEDNN_INT8, PLAIN, PLAIN_BF16
from twofour.kernels.ladder import Ladder, climb, read
from twofour.kernels.nm_matmul import REFERENCE
from twofour.kernels.operator import linear
from twofour.packing import pack
from twofour.patterns import parse

A, B = "nm_matmul_2x4_f32_rows__scalar", "nm_matmul_2x4_f32_panels__scalar"
DENSE = "dense_matmul_f32_linear__torch"


def test_climb_merges_equal_neighbours_and_splits_between_measured_counts() -> None:
    ladder = climb({1: A, 8: A, 32: B, 128: DENSE, 512: B})
    assert ladder == Ladder((16, 64, 256), (A, B, DENSE, B))
    assert [ladder.at(tokens)[0].name for tokens in (1, 16, 17, 64, 65, 256, 257, 10**6)] == [
        A, A, B, B, DENSE, DENSE, B, B,
    ]  # fmt: skip
    assert ladder.layouts == ("rows", "panels", "dense")
    assert ladder.sparse


def test_a_kernel_for_one_count_serves_that_count_alone() -> None:
    only = "dense_matmul_f32_packed32__mkl"
    for best in ({1: A, 32: B, 128: DENSE}, {32: B}, {1: A, 31: A, 32: B, 33: DENSE}):
        plain, ladder = climb(best), climb(best, {32: only})
        for tokens in range(1, 200):
            want = only if tokens == 32 else plain.at(tokens)[0].name
            assert ladder.at(tokens)[0].name == want, (best, tokens, ladder)
        assert read(ladder.to_text()) == ladder
    assert climb({1: A}, {1: only}) == Ladder((1,), (only, A))


def test_text_round_trip() -> None:
    for ladder in (Ladder((), (A,)), Ladder((16,), (A, B)), climb({1: DENSE})):
        assert read(ladder.to_text()) == ladder
    assert not climb({1: DENSE}).sparse


@pytest.mark.parametrize("text", ["", "16=x", f"{A}", f"8={A};4={B};*={A}", f"*={A};8={B}", f"x={A};*={B}"])
def test_what_is_no_ladder_is_refused(text: str) -> None:
    with pytest.raises(KernelError):
        read(text)


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
    assert {row.operation for row in rows()} == {"nm_matmul", "dense_matmul"}
    assert all(row.pattern != "any" for row in available("nm_matmul"))


def test_the_registered_operator_passes_opcheck() -> None:
    weight = torch.randn(24, 32)
    weight *= parse("2:4").project(weight, absolute=True)
    packed = pack(weight, "2:4")
    ladder = Ladder((4,), (A, B))
    layouts = [kernel.prepare(packed) for kernel, _ in ladder.steps]
    x, bias = torch.randn(6, 32), torch.randn(24)
    torch.library.opcheck(
        torch.ops.twofour.linear.default, (x, layouts, bias, ladder.to_text(), 24), test_utils="test_schema"
    )
    torch.library.opcheck(
        torch.ops.twofour.linear.default, (x, layouts, bias, ladder.to_text(), 24), test_utils="test_faketensor"
    )
    want = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(torch.ops.twofour.linear(x, layouts, bias, ladder.to_text(), 24), want, atol=1e-5)
    assert torch.allclose(linear(x[:2], layouts, bias, ladder, 24), want[:2], atol=1e-5)
    with pytest.raises(KernelError, match="gradient"):
        torch.ops.twofour.linear(x.requires_grad_(), layouts, bias, ladder.to_text(), 24)
