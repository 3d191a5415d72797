"""Training with sparse products on the GPU, against the same training with dense ones."""

import pytest
import torch
from torch import Tensor, nn

from twofour.kernels.nm_matmul.cuda import CUSPARSELT, CUTLASS, LibraryMatmul
from twofour.kernels.problem import Problem
from twofour.native import gpu
from twofour.patterns import parse
from twofour.training import both_ways, sdgp

needs_triton = pytest.mark.skipif(gpu.unavailable(triton=True) is not None, reason=str(gpu.unavailable(triton=True)))
TOKENS = 512


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024, bias=False)).cuda()


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def assert_near(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert error < 0.02, (name, float(error))


@needs_triton
@pytest.mark.parametrize(
    "row", [row for row in (*CUSPARSELT, *CUTLASS) if row.dtype == "bfloat16"], ids=lambda r: r.name
)
def test_packed_again_and_multiplied_from_both_sides(row: LibraryMatmul) -> None:
    if reason := row.unavailable():
        pytest.skip(reason)
    weight = torch.randn(512, 1024, device="cuda")
    keep = parse("2:4-transposable").project(weight, absolute=True)
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    z = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    dense = (weight * keep).to(torch.bfloat16).double()
    packed, turned = row.repack(weight, keep), row.repack(weight.t(), keep.t())
    assert_near({"y": row.run(x, packed, None, Problem(512))}, {"y": x.double() @ dense.t()})
    assert_near({"dx": row.run(z, turned, None, Problem(1024))}, {"dx": z.double() @ dense})
    columns = torch.randn(1024, 260, device="cuda", dtype=torch.bfloat16)  # 260: padded to a multiple of 8
    assert_near({"y": row.run_columns(columns, packed, 512)}, {"y": dense @ columns.double()})


@needs_triton
@pytest.mark.parametrize("kernels", ["sparse", "measured"])
def test_both_ways_equal_dense_products_of_masked_weights(kernels: str) -> None:
    model, x = network(), torch.randn(TOKENS, 1024, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        handle = both_ways.attach(model, x, kernels=kernels)
    masked = network()
    for name, keep in handle.masks().items():
        masked.get_parameter(name).data.mul_(keep)
    assert_near(step(model, x), step(masked, x))


@needs_triton
@pytest.mark.parametrize("mode", ["magnitude", "rescaled", "random", "unbiased"])
def test_pruned_gradients_multiply_sparse_as_dense(mode: str) -> None:
    x, found = torch.randn(TOKENS, 1024, device="cuda"), {}
    for product in ("sparse", "auto", "dense"):
        model = network()
        handle = sdgp.attach(model, "2:4", mode=mode, product=product, seed=3)
        found[product] = step(model, x)
        if product == "sparse":
            assert "__cuda" in str(handle.plan), str(handle.plan)
    assert_near(found["sparse"], found["dense"])
    assert_near(found["auto"], found["dense"])
