"""Masks and packed weights made on the GPU, at the sizes of models, against those of the CPU."""

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

import twofour
from twofour import pruning
from twofour.errors import PatternError
from twofour.kernels.nm_matmul.cuda import CUTLASS
from twofour.native import gpu
from twofour.packing import pack
from twofour.patterns import parse
from twofour.training.sdgp.rule import largest, largest_reference

needs_triton = pytest.mark.skipif(gpu.unavailable(triton=True) is not None, reason=str(gpu.unavailable(triton=True)))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "2:4-transposable", "4:8"])
def test_masks_are_those_of_the_cpu(pattern: str, dtype: torch.dtype) -> None:
    scores, rule = weight(1024, 2048, dtype), parse(pattern)
    for absolute in (True, False):
        found = rule.project(scores.cuda(), absolute=absolute)
        assert found.is_cuda and torch.equal(found.cpu(), rule.project(scores, absolute=absolute))


def test_masks_refuse_what_is_not_finite() -> None:
    scores = torch.ones(4, 8, device="cuda")
    scores[1, 2] = float("nan")
    for pattern in ("2:4", "2:4-transposable"):
        with pytest.raises(PatternError, match="ranked"):
            parse(pattern).project(scores)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (33, 1236)], ids=str)
def test_compressed_weights_are_the_canonical_ones(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from twofour.kernels.nm_compress.on_gpu import compress

    dense = weight(*shape, dtype)
    keep = parse("2:4").project(dense, absolute=True)
    found, want = compress(dense.cuda(), mask=True), pack(dense * keep, "2:4")
    assert found.mask is not None and torch.equal(found.mask.cpu(), keep)
    assert torch.equal(found.values.cpu(), want.values) and torch.equal(found.codes.cpu(), want.indices)


@needs_triton
def test_cutlass_order_multiplies_in_torchs_kernel() -> None:
    from twofour.kernels.nm_compress.on_gpu import compress

    dense = weight(256, 512, torch.bfloat16)
    pruned = dense * parse("2:4").project(dense, absolute=True)
    found = compress(dense.cuda(), cutlass=True)
    values, positions = sparse_semi_structured_from_dense_cutlass(pruned)
    assert torch.equal(found.values.cpu(), values) and torch.equal(found.codes.cpu().flatten(), positions.flatten())
    if reason := CUTLASS[0].unavailable():
        pytest.skip(f"the bytes are torch's, and not multiplied: {reason}")
    x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)
    y = torch.ops.aten._sparse_semi_structured_mm(found.values, found.codes, x)
    assert torch.allclose(y.float(), pruned.cuda().float() @ x.float(), atol=0.5, rtol=2e-2)


def test_pruned_gradients_rank_as_the_reference_does() -> None:
    scores = weight(512, 512, torch.float16).cuda().unflatten(-1, (-1, 4))
    scores[0, 0, 1] = float("nan")
    assert torch.equal(largest(scores, 2), largest_reference(scores, 2))


def test_channels_are_permuted_by_samples_that_are_elsewhere() -> None:
    """Data come from a loader, in the processor's memory; the model is on the GPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).cuda()
    twofour.prune(model, "2:4", data=[torch.randn(32, 64) for _ in range(4)], permute=True)
    assert pruning.permutation_report(model) is not None and twofour.check(model).ok
