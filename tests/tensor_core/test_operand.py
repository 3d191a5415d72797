"""Operands: compression, codes, and the way to the canonical form and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensor_core.weights import FEW, NAMES, SEEDS, bits, sparse
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.packing import pack
from twofour.tensor_core import CODES, ELEMENTS, Operand

PATTERNS = {"f16": "2:4", "bf16": "2:4", "tf32": "1:2", "s8": "2:4", "s4": "4:8-pairs"}
DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "tf32", "s8": "int8", "s4": "int4"}


@FEW
@given(name=st.sampled_from(NAMES), rows=st.integers(1, 9), chunks=st.integers(1, 9), seed=SEEDS)
def test_a_sparse_matrix_comes_back(name: str, rows: int, chunks: int, seed: int) -> None:
    kind = ELEMENTS[name]
    dense = sparse(kind, rows, chunks * kind.chunk, seed, fill=0.6)
    operand = Operand.from_dense(dense, name)
    assert operand.shape == tuple(dense.shape)
    assert set(operand.codes.flatten().tolist()) <= ({0b0100, 0b1110} if name == "tf32" else set(CODES))
    assert torch.equal(kind.raw(operand.to_dense()), kind.raw(dense))


@FEW
@given(name=st.sampled_from(sorted(PATTERNS)), rows=st.integers(1, 9), chunks=st.integers(1, 9), seed=SEEDS)
def test_it_is_the_canonical_form_in_other_words(name: str, rows: int, chunks: int, seed: int) -> None:
    kind = ELEMENTS[name]
    dense = sparse(kind, rows, chunks * kind.chunk, seed, fill=0.6)
    packed = pack(dense, PATTERNS[name], DTYPES[name])
    operand = Operand.from_packed(packed)
    assert torch.equal(operand.to_dense(), dense)
    back = operand.to_packed()
    assert back.header == packed.header
    assert torch.equal(back.values, packed.values)
    assert torch.equal(back.indices, packed.indices)
    compressed = Operand.from_dense(dense, name)
    if name != "s4":  # the canonical form ranks pairs by magnitude; among zero pairs both take the lowest
        assert torch.equal(compressed.codes, operand.codes)
        assert torch.equal(compressed.values, operand.values)


@FEW
@given(name=st.sampled_from(NAMES), seed=SEEDS)
def test_raw_bits_come_back_whatever_they_are(name: str, seed: int) -> None:
    kind = ELEMENTS[name]
    values = bits(kind, (64,), torch.Generator().manual_seed(seed))
    raw = kind.raw(values)
    assert raw.min() >= 0 and raw.max() < 1 << kind.bits
    assert torch.equal(kind.raw(kind.from_raw(raw)), raw)


def test_a_transposed_parameter_is_read_as_it_stands() -> None:
    for name in ("bf16", "e4m3"):
        dense = sparse(ELEMENTS[name], 12, 20, 0)
        turned = torch.nn.Parameter(dense.t().contiguous().t(), requires_grad=False)
        assert not turned.is_contiguous()
        assert torch.equal(Operand.from_dense(turned, name).to_dense().float(), dense.float())


def test_padding_adds_zeros_only() -> None:
    dense = sparse(ELEMENTS["bf16"], 5, 20, 0)
    operand = Operand.from_dense(dense, "bf16").padded(16, 32)
    assert operand.shape == (16, 32)
    assert torch.equal(operand.to_dense()[:5, :20], dense)
    assert operand.to_dense().count_nonzero() == dense.count_nonzero()


@in_turn("name", NAMES)
def test_too_many_non_zeros_are_refused_with_their_place(name: str) -> None:
    kind = ELEMENTS[name]
    dense = torch.zeros(2, 3 * kind.chunk).to(kind.dtype)
    dense[1, kind.chunk : 2 * kind.chunk] = torch.ones(1).to(kind.dtype)
    with pytest.raises(PackingError, match=f"row 1, columns {kind.chunk} to {2 * kind.chunk - 1}"):
        Operand.from_dense(dense, name)


def test_what_is_no_operand_is_refused() -> None:
    with pytest.raises(PackingError, match="no matrix of f16"):
        Operand.from_dense(torch.zeros(2, 6, dtype=torch.float16), "f16")
    with pytest.raises(PackingError, match="no matrix of s8"):
        Operand.from_dense(torch.zeros(2, 8), "s8")
    with pytest.raises(PackingError, match="no such element type"):
        Operand.from_dense(torch.zeros(2, 8), "fp4")
    with pytest.raises(PackingError, match="cannot read this packed weight"):
        Operand.from_packed(pack(torch.zeros(2, 8), "2:4"))
    with pytest.raises(PackingError, match="has no e4m3"):
        Operand.from_dense(torch.zeros(1, 4).to(torch.float8_e4m3fn), "e4m3").to_packed()


def test_a_position_named_twice_is_refused() -> None:
    operand = Operand(ELEMENTS["f16"], torch.zeros(1, 2, dtype=torch.float16), torch.tensor([[5]], dtype=torch.uint8))
    with pytest.raises(PackingError, match="behaviour is undefined"):
        operand.to_dense()


def test_values_and_codes_that_do_not_belong_together_are_refused() -> None:
    values, codes = torch.zeros(2, 4, dtype=torch.float16), torch.full((2, 2), 4, dtype=torch.uint8)
    assert Operand(ELEMENTS["f16"], values, codes).shape == (2, 8)
    for wrong in ((values[0], codes), (values, codes[:1]), (values, codes.int()), (values.float(), codes)):
        with pytest.raises(PackingError, match="make no operand of f16"):
            Operand(ELEMENTS["f16"], *wrong)
