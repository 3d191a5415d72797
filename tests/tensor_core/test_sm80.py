"""The CUTLASS layout against torch's own packer, which runs on a CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from tests.tensor_core.weights import FEW, NAMES, SEEDS, sparse
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import ELEMENTS, Operand, from_sm80, sm80, to_sm80, widest

TORCH = ("f16", "bf16", "tf32", "s8")
TILES = st.integers(1, 4)


def matrix(name: str, down: int, right: int, seed: int, full: bool = False) -> torch.Tensor:
    row = widest(ELEMENTS[name])
    return sparse(row.a, down * 16 * row.selectors, right * row.k, seed, full=full)


@FEW
@given(name=st.sampled_from(TORCH), down=TILES, right=TILES, seed=SEEDS)
def test_full_chunks_are_packed_bit_for_bit_as_torch_packs_them(name: str, down: int, right: int, seed: int) -> None:
    dense = matrix(name, down, right, seed, full=True)
    values, meta = to_sm80(Operand.from_dense(dense, name))
    torch_values, torch_meta = sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(values, torch_values)
    assert meta.dtype == torch_meta.dtype
    assert torch.equal(meta, torch_meta)


@FEW
@given(name=st.sampled_from(TORCH), down=TILES, right=TILES, seed=SEEDS)
def test_each_reads_what_the_other_wrote(name: str, down: int, right: int, seed: int) -> None:
    dense = matrix(name, down, right, seed)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(*to_sm80(Operand.from_dense(dense, name))), dense)
    assert torch.equal(from_sm80(*sparse_semi_structured_from_dense_cutlass(dense), name).to_dense(), dense)


@FEW
@given(seed=SEEDS)
def test_torch_cannot_read_back_any_float32_but_we_can(seed: int) -> None:
    """torch moves float32 as two halves, and a half that looks like a signalling NaN comes out as another number."""
    dense = sparse(ELEMENTS["tf32"], 32, 16, seed) * torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(from_sm80(*sparse_semi_structured_from_dense_cutlass(dense), "tf32").to_dense(), dense)


@FEW
@given(name=st.sampled_from(NAMES), down=TILES, right=TILES, seed=SEEDS)
def test_every_type_comes_back(name: str, down: int, right: int, seed: int) -> None:
    operand = Operand.from_dense(matrix(name, down, right, seed), name)
    back = from_sm80(*to_sm80(operand), name)
    assert torch.equal(back.codes, operand.codes)
    assert torch.equal(ELEMENTS[name].raw(back.values), ELEMENTS[name].raw(operand.values))


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_the_subclass_of_torch_takes_it() -> None:
    dense = matrix("f16", 1, 2, 0)
    values, meta = to_sm80(Operand.from_dense(dense, "f16"))
    weight = torch.sparse.SparseSemiStructuredTensorCUTLASS(dense.shape, values, meta, None, None, None)
    assert torch.equal(weight.to_dense(), dense)


@in_turn("name", NAMES)
def test_what_torch_has_no_packer_for_says_so(name: str) -> None:
    wanted = "equal to torch's packer" if name in TORCH else "derived, unverified"
    assert sm80.evidence(name) == wanted


def test_odd_shapes_are_refused_and_padding_helps() -> None:
    operand = Operand.from_dense(sparse(ELEMENTS["bf16"], 20, 36, 0), "bf16")
    with pytest.raises(PackingError, match=r"operand.padded\(32, 32\)"):
        to_sm80(operand)
    assert to_sm80(operand.padded(32, 32))[1].shape == (32, 4)


def test_what_is_no_such_layout_is_refused() -> None:
    values, meta = to_sm80(Operand.from_dense(matrix("f16", 1, 1, 0), "f16"))
    for wrong in (
        (values, meta[:16]),
        (values, meta.int()),
        (values[:, :8], meta),
        (values.float(), meta),
        (values[0, 0], meta),
    ):
        with pytest.raises(PackingError, match="no f16 operand in the CUTLASS layout"):
            from_sm80(*wrong, "f16")
    with pytest.raises(PackingError, match="behaviour is undefined"):
        from_sm80(values, torch.zeros_like(meta), "f16")
