"""Packed blocks: BSR that comes back to the bit, in every encoding and odd sizes; hostile ones are refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twofour
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.packing import Packed, pack
from twofour.patterns import Block


def sparse(pattern: Block, *shape: int, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return weight * pattern.project(weight, absolute=True)


@settings(max_examples=60)
@given(
    st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 6), st.integers(2, 7), st.floats(0, 0.95),
    st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_a_weight_comes_back(parts, each, columns, r, c, sparsity, seed):
    pattern = Block(r, c, sparsity, parts)
    weight = sparse(pattern, parts * each, columns, seed=seed)
    packed = pack(weight, pattern)
    packed.validate()
    assert torch.equal(packed.unpack(), weight)
    assert len(packed.values) == pattern.blocks(weight)[..., 0, 0].numel() - pattern.zeros(
        pattern.blocks(weight)[..., 0, 0].numel()
    )


def test_rows_pointers_columns_and_values_of_a_small_weight() -> None:
    weight = torch.zeros(4, 6)
    weight[0, 2:4], weight[1, 3] = torch.tensor([1.0, 2.0]), 3.0
    weight[3, 0], weight[2, 5] = 4.0, 5.0
    packed = pack(weight, "block:2x2@0.5")
    assert packed.indices.tolist() == [0, 1, 3, 1, 0, 2]
    assert packed.values.tolist() == [[1, 2, 0, 3], [0, 0, 4, 0], [0, 5, 0, 0]]
    assert packed.nbytes == 3 * 4 * 4 + 6 * 4


def test_fewer_blocks_than_allowed_are_filled_up_by_the_first_zero_ones() -> None:
    weight = torch.zeros(4, 4)
    weight[2:, 2:] = 1
    packed = pack(weight, "block:2x2@0.25")
    assert packed.indices.tolist() == [0, 2, 3, 0, 1, 1] and torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_encodings(dtype: str) -> None:
    pattern = Block(8, 4, 0.7)
    weight = sparse(pattern, 37, 66)
    packed = pack(weight, pattern, dtype)
    found = packed.unpack().float()
    assert (
        torch.equal(found != 0, weight.to(torch.float16 if dtype == "float16" else torch.float32) != 0)
        or dtype == "int8"
    )
    if dtype == "int8":
        steps = weight.abs().amax(1, keepdim=True) / 127
        assert packed.scales is not None and packed.scales.shape == (37, 1)
        assert ((found - weight).abs() <= steps * 0.5001).all()
    else:
        assert torch.equal(found, weight.to(getattr(torch, dtype)).float())


@pytest.mark.parametrize("dtype", ["int4", "tf32"])
def test_other_encodings_have_no_blocks(dtype: str) -> None:
    with pytest.raises(PackingError, match="has no"):
        pack(sparse(Block(4, 4, 0.5), 16, 64), "block:4x4@0.5", dtype)


def test_a_convolution_has_blocks_at_each_position() -> None:
    pattern = Block(4, 4, 0.5)
    weight = sparse(pattern, 10, 3, 3, 18).permute(0, 3, 1, 2).contiguous()
    packed = pack(weight, pattern, axis=1)
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(packed.unpack().movedim(1, -1), weight.movedim(1, -1))


def test_a_weight_that_breaks_the_pattern_is_refused_by_name() -> None:
    with pytest.raises(PackingError, match=r"0\.9 of its 4 x 4 blocks zero"):
        pack(torch.ones(16, 16), "block:4x4@0.9")


def hostile(packed: Packed, numbers: list[int]) -> Packed:
    return replace(packed, indices=torch.tensor(numbers, dtype=torch.int32))


@in_turn(
    ("numbers", "code"),
    [
        ([0, 1, 2, 1, 0, 2], "indices-pointers"),
        ([1, 1, 3, 1, 0, 2], "indices-pointers"),
        ([0, 4, 3, 1, 0, 2], "indices-pointers"),
        ([0, -1, 3, 1, 0, 2], "indices-pointers"),
        ([0, 1, 3, 1, 0, 3], "indices-bound"),
        ([0, 1, 3, -1, 0, 2], "indices-bound"),
        ([0, 1, 3, 1, 2, 0], "indices-order"),
        ([0, 1, 3, 1, 2, 2], "indices-order"),
        ([0, 1, 3, 1, 0], "indices-size"),
    ],
)
def test_hostile_indices_are_refused(numbers: list[int], code: str) -> None:
    weight = torch.zeros(4, 6)
    weight[0, 2], weight[3, 0], weight[2, 5] = 1.0, 4.0, 5.0
    bad = hostile(pack(weight, "block:2x2@0.5"), numbers)
    for call in (bad.validate, bad.unpack):
        with pytest.raises(PackingError) as caught:
            call()
        assert caught.value.code == code


@pytest.mark.parametrize("kind", ["linear", "lstm"])
def test_a_masked_model_survives_a_file(kind: str, tmp_path) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return (
            nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 40)) if kind == "linear" else nn.LSTM(24, 20, 2)
        )

    model = twofour.prune(made(0), "block:8x4@0.75", eligibility="any")
    twofour.save(model, tmp_path / "m.safetensors")
    loaded = twofour.load(tmp_path / "m.safetensors", made(1), masked=True)
    for name, mask in twofour.masks.of(model).items():
        other = twofour.masks.of(loaded)[name]
        assert other.pattern == mask.pattern and torch.equal(other.keep, mask.keep)
        assert torch.equal(other.parameter, mask.parameter)
    assert twofour.check(tmp_path / "m.safetensors").ok
    plain = sum(p.numel() * 4 for p in model.parameters())
    assert (tmp_path / "m.safetensors").stat().st_size < 0.6 * plain + 4096
