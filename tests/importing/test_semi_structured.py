"""torch's semi-structured tensors, made on the CPU by torch's own reference functions."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import twofour
from tests.importing.small import sparse
from twofour import importing
from twofour.errors import FormatError
from twofour.patterns import parse

CASES = [
    (torch.float16, 64, 128, (2, 4)),
    (torch.bfloat16, 96, 160, (2, 4)),
    (torch.int8, 32, 192, (2, 4)),
    (torch.float32, 32, 48, (1, 2)),
]


def wrapped(kind: Any, weight: Tensor, **parts: Tensor | None) -> Tensor:
    """Make the tensor subclass as its `from_dense` does on a GPU."""
    names = ("packed", "meta", "packed_t", "meta_t", "compressed_swizzled_bitmask")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the class a prototype
        return kind(weight.shape, **{name: parts.get(name) for name in names})


def cutlass(weight: Tensor) -> Tensor:
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    return wrapped(SparseSemiStructuredTensorCUTLASS, weight, packed=packed, meta=meta)


def tiles_of_four(size: int, dtype: torch.dtype) -> Tensor:
    """Weight that is 2:4 along both axes, as torch prunes on the GPU."""
    scores = torch.randn(size, size)
    return (scores * parse("2:4-transposable").project(scores, absolute=True)).to(dtype)


def bitmask(weight: Tensor) -> Tensor:
    """torch's swizzled bitmask in its own words: 8 x 8 tiles, four 4 x 4 tiles in each, the lowest bit first."""
    row, column = weight.nonzero().t()
    tile = row % 8 // 4 * 2 + column % 8 // 4
    bit = row % 4 * 4 + column % 4
    out = torch.zeros(weight.shape[0] // 8, weight.shape[1] // 8, 8, dtype=torch.int64)
    out.index_put_((row // 8, column // 8, tile * 2 + bit // 8), 2 ** (bit % 8), accumulate=True)
    return out.to(torch.uint8)


def cusparselt(weight: Tensor) -> Tensor:
    """Values, then metadata: CUTLASS's tiles of 32 x 32, ordered as MetadataCuSparseLt in torch's CUDA source says."""
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    rows, columns = weight.shape
    flat = meta.flatten()
    out = torch.zeros_like(flat)
    for i in range(rows // 32):
        for j in range(columns // 32):
            place = (i // 4) * 512 + (j // 2) * 512 * (rows // 128) + (i % 4) * 64 + (j % 2) * 256
            source = j * rows * 2 + i * 64
            out[place : place + 64] = flat[source : source + 64]
    return torch.cat([packed.flatten(), out.view(weight.dtype)])


def written(tmp_path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.parametrize(("dtype", "rows", "columns", "pattern"), CASES)
def test_cutlass_weights_come_back(
    tmp_path: Path, dtype: torch.dtype, rows: int, columns: int, pattern: tuple[int, int]
) -> None:
    weight = sparse(rows, columns, dtype, pattern)
    state = {"fc.weight": cutlass(weight), "fc.bias": torch.ones(rows)}
    found = importing.decode(written(tmp_path, state))
    assert found.format == "semi-structured" and found.patterns == {"fc.weight": f"{pattern[0]}:{pattern[1]}"}
    assert torch.equal(found.weights()["fc.weight"], weight)
    assert torch.equal(found.weights()["fc.bias"], torch.ones(rows))
    if dtype != torch.float32:  # torch's own way back copies floats as pairs of halves, and quietens those that are NaN
        assert torch.equal(
            sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(weight)), weight
        )


def test_the_flattened_parts_are_read_from_safetensors(tmp_path: Path) -> None:
    weight = sparse(64, 64, torch.bfloat16)
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    save_file({"fc.weight.packed": packed, "fc.weight.meta": meta}, tmp_path / "m.safetensors")
    assert torch.equal(importing.decode(tmp_path / "m.safetensors").weights()["fc.weight"], weight)


@pytest.mark.parametrize("proof", ["packed_t", "compressed_swizzled_bitmask"])
def test_cusparselt_weights_come_back_where_the_file_proves_their_order(tmp_path: Path, proof: str) -> None:
    weight = tiles_of_four(256, torch.float16)
    other = cusparselt(weight.t().contiguous()) if proof == "packed_t" else bitmask(weight)
    parts = {"packed": cusparselt(weight), proof: other}
    state = {"fc.weight": wrapped(SparseSemiStructuredTensorCUSPARSELT, weight, **parts)}
    assert torch.equal(importing.decode(written(tmp_path, state)).weights()["fc.weight"], weight)


def test_cusparselt_weights_without_proof_are_refused(tmp_path: Path) -> None:
    weight = tiles_of_four(128, torch.float16)
    state = {"fc.weight": wrapped(SparseSemiStructuredTensorCUSPARSELT, weight, packed=cusparselt(weight))}
    with pytest.raises(FormatError, match=r"with certainty(.|\n)*to_dense"):
        importing.decode(written(tmp_path, state))


@pytest.mark.parametrize("proof", ["packed_t", "compressed_swizzled_bitmask"])
def test_metadata_in_another_order_is_noticed(tmp_path: Path, proof: str) -> None:
    weight = tiles_of_four(256, torch.float16)
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    foreign = torch.cat([packed.flatten(), meta.flatten().view(torch.float16)])  # CUTLASS's order in cuSPARSELt's place
    other = cusparselt(weight.t().contiguous()) if proof == "packed_t" else bitmask(weight)
    parts = {"packed": foreign, proof: other}
    with pytest.raises(FormatError, match="with certainty"):
        importing.decode(
            written(tmp_path, {"fc.weight": wrapped(SparseSemiStructuredTensorCUSPARSELT, weight, **parts)})
        )


def test_training_tensors_of_cutlass_are_compared_with_their_copies(tmp_path: Path) -> None:
    weight = tiles_of_four(64, torch.bfloat16)
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    turned = sparse_semi_structured_from_dense_cutlass(weight.t().contiguous())
    viewed = meta.view(2, 64, 2).permute(1, 2, 0)  # as _sparse_semi_structured_tile returns it
    parts = {"packed": packed, "meta": viewed, "packed_t": turned[0], "meta_t": turned[1]}
    parts["compressed_swizzled_bitmask"] = bitmask(weight)
    state = {"fc.weight": wrapped(SparseSemiStructuredTensorCUTLASS, weight, **parts)}
    assert torch.equal(importing.decode(written(tmp_path, state)).weights()["fc.weight"], weight)
    parts["packed_t"] = turned[0] * 2
    state = {"fc.weight": wrapped(SparseSemiStructuredTensorCUTLASS, weight, **parts)}
    with pytest.raises(FormatError, match="two weights"):
        importing.decode(written(tmp_path, state))


def test_they_go_into_a_model_and_through_compile(
    tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    weight, bias = sparse(64, 128, torch.float16), torch.randn(64).half()
    path = written(tmp_path, {"fc.weight": cutlass(weight), "fc.bias": bias})
    model = twofour.read(path, nn.ModuleDict({"fc": nn.Linear(128, 64)}))["fc"]  # type: ignore[index]
    assert torch.equal(model.weight, weight.float()) and twofour.check(model).ok
    x = torch.randn(4, 128)
    fast = twofour.compile(model.eval(), x, tokens=(4,))
    torch.testing.assert_close(fast(x), torch.nn.functional.linear(x, weight.float(), bias.float()))


def test_nothing_in_a_pickled_file_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (__import__("os").system, (f"touch {tmp_path / 'trapped'}",))

    torch.save({"fc.weight": torch.zeros(8, 16), "x": Trap()}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="state dict"):
        importing.decode(tmp_path / "m.pt")
    assert not (tmp_path / "trapped").exists()


def test_tensors_larger_than_their_memory_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"fc.weight": torch.zeros(1).expand(1 << 20, 1 << 20)})
    with pytest.raises(FormatError, match="all their values"):
        importing.decode(path)


DAMAGE = [
    ("packed", lambda t: t[:, :-1], "packed"),
    ("packed", lambda t: t.double(), "float64"),
    ("packed", lambda t: t * float("inf"), "NaN or infinite"),
    ("meta", lambda t: t * 0, "undefined: 0b0000"),
    ("meta", lambda t: t[:-1], "metadata"),
    ("meta", lambda t: t.int(), "int32"),
]


@pytest.mark.parametrize(("part", "change", "message"), DAMAGE)
def test_damage_is_named(tmp_path: Path, part: str, change: Any, message: str) -> None:
    weight = sparse(64, 64, torch.float16)
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    parts = {"packed": packed, "meta": meta}
    parts[part] = change(parts[part])
    state = {"fc.weight": wrapped(SparseSemiStructuredTensorCUTLASS, weight, **parts)}
    with pytest.raises(FormatError, match=message) as caught:
        importing.decode(written(tmp_path, state))
    assert caught.value.layer == "fc.weight"
