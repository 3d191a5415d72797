"""Training's products as on a GPU, on CPU tensors: real packing in Triton's interpreter, torch's own opening of its
bytes in the place of the instruction. What only a GPU can tell is in tests/gpu/test_training.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

from twofour import measure
from twofour.kernels.nm_matmul.cuda import CUSPARSELT, CUTLASS, CusparseltMatmul, CutlassMatmul, LibraryMatmul, Tuning
from twofour.kernels.nm_unbiased import nm_unbiased_reference
from twofour.native import gpu
from twofour.patterns import parse
from twofour.training import both_ways, sdgp

pytestmark = pytest.mark.skipif(not gpu.interpreted(), reason="Triton's interpreter is off")

TOKENS = 64
BF16 = torch.bfloat16


def mm(values: Tensor, positions: Tensor, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    return sparse_semi_structured_to_dense_cutlass(values, positions) @ x


def linear(x: Tensor, values: Tensor, positions: Tensor, *, bias: Tensor | None = None, **_: object) -> Tensor:
    return nn.functional.linear(x, sparse_semi_structured_to_dense_cutlass(values, positions), bias)


def library_compress(x: Tensor) -> Tensor:
    """The library's bytes are its own: here the values themselves and some more, after proof that they are 2:4."""
    assert parse("2:4").check(x.float()).ok
    return torch.cat((x, x.new_full((len(x), 3), 7.0)), 1)


def library_mm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    **_: object,
) -> Tensor:
    a = a[:, :-3]
    y = a @ b if bias is None else a @ b + bias[:, None]
    return y.t() if transpose_result else y


@pytest.fixture(params=["cutlass", "cusparselt"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """One of the libraries is here, and training takes CPU tensors for a GPU's."""
    monkeypatch.setattr("twofour.training.sparse_linear.implementations.on_gpu", lambda device: True)
    monkeypatch.setattr(
        "twofour.measure.chooser.compare_on_gpu", lambda ways, **given: measure.compare(ways, repeats=3, seconds=0.01)
    )
    monkeypatch.setattr("twofour.kernels.nm_matmul.cuda.cusparselt.tuned", lambda: Tuning(tmp_path / "gpu.json"))
    here, row = {"cutlass": (CUTLASS, CutlassMatmul), "cusparselt": (CUSPARSELT, CusparseltMatmul)}[request.param]
    monkeypatch.setattr(row, "unavailable", lambda self: None if self in here else "not in this test")
    with torch.library._scoped_library("aten", "IMPL") as operators:
        operators.impl("_sparse_semi_structured_mm", mm, "CPU")
        operators.impl("_sparse_semi_structured_linear", linear, "CPU")
        operators.impl("_cslt_compress", library_compress, "CPU")
        operators.impl("_cslt_sparse_mm", library_mm, "CPU")
        yield request.param


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def near(found: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(
        (found[name].double() - want[name].double()).norm() <= 0.02 * want[name].double().norm() for name in want
    )


@pytest.mark.parametrize("schedule", ["fixed", "every=3"])
def test_both_ways_equal_float64_on_masked_weights(library: str, schedule: str) -> None:
    model, x = network().to(BF16), torch.randn(TOKENS, 64).to(BF16)
    handle = both_ways.attach(model, x, schedule=schedule, kernels="sparse")
    assert len(handle.plan.layers) == 2 and all(
        library in layer.choices[product].kernel for layer in handle.plan.layers for product in ("forward", "data")
    )
    reference = network().to(BF16).double()
    for name, keep in handle.masks().items():
        reference.get_parameter(name).data.mul_(keep)
    assert near(step(model, x), step(reference, x.double()))
    with torch.no_grad():
        for name in handle.masks():  # an optimiser's step, and the operands follow
            model.get_parameter(name).mul_(2)
            reference.get_parameter(name).mul_(2)
    assert near(step(model, x), step(reference, x.double()))


def test_the_weight_gradient_is_the_estimates_product(library: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 128, bias=False)).to(BF16), torch.randn(TOKENS, 64).to(BF16)
    handle = both_ways.attach(model, x, gradient="2:4", kernels="sparse", seed=0)
    assert handle.plan.layers[0].choices["weight"].sparse
    found = step(model, x)
    gradient = (2 * found["y"].float()).to(BF16)
    estimate = nm_unbiased_reference(gradient, 0x9E3779B1)  # the first call of layer 0 under seed 0
    want = estimate.double().t() @ x.double()
    assert near({"w": found["0.weight"]}, {"w": want})
    odd = torch.randn(TOKENS - 2, 64).to(BF16)  # tokens that no row packs: exact
    found = step(model, odd)
    assert near({"w": found["0.weight"]}, {"w": (2 * found["y"].double()).t() @ odd.double()})


@pytest.mark.parametrize("mode", ["magnitude", "rescaled", "random", "unbiased"])
def test_pruned_gradients_multiply_sparse_as_dense(library: str, mode: str) -> None:
    found = {}
    for product in ("sparse", "dense"):
        model = network().to(BF16)
        handle = sdgp.attach(model, "2:4", mode=mode, product=product, seed=3)
        found[product] = step(model, torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(1)).to(BF16))
        assert (library in str(handle.plan)) == (product == "sparse"), str(handle.plan)
    assert near(found["sparse"], found["dense"])


def test_ways_are_measured_and_sizes_that_do_not_fit_are_said(library: str) -> None:
    x = torch.randn(TOKENS, 64).to(BF16)
    plan = both_ways.attach(network().to(BF16), x, gradient="2:4", seconds=0.01).plan
    assert all(choice.dense_ms for layer in plan.layers for choice in layer.choices.values())
    odd = nn.Sequential(nn.Linear(64, 24)).to(BF16)
    plan = both_ways.attach(odd, x, kernels="sparse", eligibility="any").plan
    assert not plan.layers[0].choices["forward"].sparse and "multiples of" in plan.layers[0].choices["forward"].reason
    handle = sdgp.attach(odd_copy := nn.Sequential(nn.Linear(64, 24)).to(BF16), "2:4", product="sparse")
    step(odd_copy, x)
    assert "multiples of" in str(handle.plan)


@pytest.mark.parametrize("fault", ["raises", "wrong", "nan"])
def test_a_library_that_fails_or_is_wrong_is_left_out(
    library: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"cutlass": CutlassMatmul, "cusparselt": CusparseltMatmul}[library]
    run = row.run

    def faulty(self: LibraryMatmul, *given: Any) -> Tensor:
        if fault == "raises":
            raise RuntimeError("Supported only on GPUs with compute capability 8.x")
        y = run(self, *given)
        y[0, 0] = float("nan") if fault == "nan" else 1e4
        return y

    monkeypatch.setattr(row, "run", faulty)
    plan = both_ways.attach(network().to(BF16), torch.randn(TOKENS, 64).to(BF16), seconds=0.01).plan
    assert not any(choice.sparse for layer in plan.layers for choice in layer.choices.values())
    assert "is left out: " in caplog.text and library in caplog.text


def test_float32_on_a_gpu_stays_dense_and_says_so(library: str) -> None:
    model, x = network(), torch.randn(TOKENS, 64)
    with pytest.raises(Exception, match="bfloat16"):
        both_ways.attach(model, x)
    handle = sdgp.attach(model, "2:4", product="sparse")
    step(model, x)
    assert "no 2:4 kernel for float32" in str(handle.plan)
