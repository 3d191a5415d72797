"""Packed weights of whole numbers with scales: the rounding, its bounds, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.packing import Packed, pack
from twofour.patterns import parse


def sparse(rows: int, columns: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + shift
    return weight * parse("2:4").project(weight, absolute=True)


@given(rows=st.integers(1, 9), groups=st.integers(1, 20), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_int8_is_within_half_a_step_of_each_row(rows: int, groups: int, seed: int) -> None:
    weight = sparse(rows, 4 * groups, seed)
    packed = pack(weight, "2:4", dtype="int8")
    packed.validate()
    assert packed.scales is not None and packed.zeros is None
    step = weight.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(packed.scales, step)
    assert ((packed.unpack() - weight).abs() <= 0.5001 * step).all()
    assert packed.values.dtype == torch.int8 and int(packed.values.min()) >= -127
    assert torch.equal(packed.indices, pack(weight, "2:4").indices)


@in_turn("symmetric", [True, False])
@in_turn("group", [32, 64, 128])
@in_turn("shift", [0.0, 3.0, -0.7])
def test_int4_is_within_half_a_step_of_each_group(group: int, symmetric: bool, shift: float) -> None:
    weight = sparse(7, 256, group, shift)
    packed = pack(weight, "2:4", dtype="int4", group=group, symmetric=symmetric)
    packed.validate()
    assert packed.scales is not None and tuple(packed.scales.shape) == (7, 256 // group)
    assert (packed.zeros is None) == symmetric and packed.values.shape == (7, 64)
    runs = weight.view(7, -1, group)
    low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
    step = runs.abs().amax(-1) / 7 if symmetric else (high - low) / 15
    assert torch.equal(packed.scales, packed.scales.bfloat16().float())
    error = (packed.unpack() - weight).view(7, -1, group).abs()
    assert (error <= (0.505 if symmetric else 1.01) * step.unsqueeze(-1)).all()  # a rounded zero point may cut an end
    assert (packed.unpack()[weight == 0] == 0).all()


def test_rows_of_zeros_and_of_tiny_values_stay_finite() -> None:
    weight = torch.zeros(3, 64)
    weight[1, ::4] = 1e-44
    weight[2, ::4] = 3e38
    for dtype in ("int8", "int4"):
        dense = pack(weight, "2:4", dtype=dtype).unpack()
        assert torch.isfinite(dense).all() and (dense[0] == 0).all()


def test_what_cannot_be_cut_into_groups_is_refused() -> None:
    for columns, group in ((96, 64), (64, 48), (64, 0)):
        with pytest.raises(PackingError, match="groups with a scale each"):
            pack(sparse(2, columns, 0), "2:4", dtype="int4", group=group)
    with pytest.raises(PackingError, match="no int4 form"):
        pack(torch.zeros(2, 64), "4:8-pairs", dtype="int4")


@in_turn(
    ("change", "said"),
    [
        (lambda p: replace(p, scales=-p.scales), "positive finite"),
        (lambda p: replace(p, scales=p.scales * float("nan")), "positive finite"),
        (lambda p: replace(p, scales=p.scales[:, :1].contiguous()), "torch.float32"),
        (lambda p: replace(p, scales=None), "where the header has groups"),
        (lambda p: replace(p, zeros=p.zeros + 0.5), "whole zero points"),
        (lambda p: replace(p, zeros=p.zeros + 99), "-8 to 7"),
        (lambda p: replace(p, header=replace(p.header, dtype="int8"), values=torch.zeros(2, 64).char()), None),
    ],
)
def test_damaged_scales_are_refused(change, said: str | None) -> None:
    packed: Packed = change(pack(sparse(2, 128, 1), "2:4", dtype="int4", symmetric=False))
    if said is None:
        packed.validate()  # int8 in groups is legal, though no kernel takes it
        return
    with pytest.raises(PackingError, match=said):
        packed.validate()
