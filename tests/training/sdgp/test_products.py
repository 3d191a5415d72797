"""Sparse and dense products of pruned gradients: the same numbers, chosen by measuring, with the reason said."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import threads
from tests.training.sdgp.test_layers import chosen, gradients
from twofour.errors import TrainingError
from twofour.kernels.nm_gradient import packed_bytes
from twofour.layers import CARRIED
from twofour.training import sdgp
from twofour.training.sdgp import MODES
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sparse_linear import chooser

PRODUCTS = ("auto", "sparse", "dense")
LAYERS = {
    "linear": (lambda: nn.Linear(12, 24), (5, 12)),
    "linear, samples": (lambda: nn.Linear(20, 68, bias=False), (2, 3, 7, 20)),
    "1 x 1": (lambda: nn.Conv2d(6, 16, 1), (2, 6, 7, 5)),
    "3 x 3": (lambda: nn.Conv2d(6, 16, 3, padding=1), (2, 6, 7, 5)),
}


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small products too."""
    monkeypatch.setattr(chooser, "LEAST", 0)


def attached(layer: nn.Module, **options) -> sdgp.Handle:
    return sdgp.attach(layer, options.pop("pattern", "2:4"), seconds=1e-3, **options)


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    dz = torch.randn(layer(x).shape)
    if x.ndim == 4 and not isinstance(layer, nn.Linear):
        x, dz = (t.contiguous(memory_format=torch.channels_last) for t in (x, dz))
    return layer, x, dz


def against_float64(layer: nn.Module, x: Tensor, dz: Tensor, left: Tensor) -> None:
    """Gradients of the layer: the input's that of `left`, the others that of dz."""
    dense = copy.deepcopy(layer)
    dense.__class__ = type(layer).__bases__[-1]
    dense = dense.double()
    dx, *others = gradients(layer, x, dz)
    assert dx.stride() == x.stride()
    torch.testing.assert_close(dx, gradients(dense, x.double(), left.double())[0].float(), rtol=1e-4, atol=1e-5)
    for got, want in zip(others, gradients(dense, x.double(), dz.double())[1:], strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_against_float64_with_the_same_mask(every_size: None, name: str, mode: str, product: str) -> None:
    layer, x, dz = case(name)
    handle = attached(layer, mode=mode, product=product, seed=3)
    against_float64(layer, x, dz, chosen(layer, dz))
    (plan,) = handle.plan.layers
    assert plan.choices["data"].sparse == (product == "sparse" and name != "3 x 3") or product == "auto"
    assert plan.tokens == dz.numel() // (16 if "x" in name else dz.shape[-1])


@pytest.mark.parametrize("mode", MODES)
def test_every_instruction_set_multiplies_the_same_choice(isa: str, mode: str) -> None:
    layer, x, dz = case("linear, samples")
    attached(layer, mode=mode, product="sparse", seed=3)
    against_float64(layer, x, dz, chosen(layer, dz))


@given(
    inputs=st.integers(4, 70),
    outputs=st.integers(4, 140),
    samples=st.integers(1, 3),
    tokens=st.integers(1, 140),
    kernel=st.sampled_from((0, 1)),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=40, deadline=None)
def test_odd_sizes(inputs: int, outputs: int, samples: int, tokens: int, kernel: int, mode: str) -> None:
    layer = nn.Conv2d(inputs, outputs, 1) if kernel else nn.Linear(inputs, outputs)
    x = torch.randn(samples, inputs, tokens, 2) if kernel else torch.randn(samples, tokens, inputs)
    dz = torch.randn_like(layer(x))
    if kernel:
        x, dz = (t.contiguous(memory_format=torch.channels_last) for t in (x, dz))
    handle = attached(layer, mode=mode, product="sparse")
    against_float64(layer, x, dz, chosen(layer, dz))
    assert handle.plan.layers[0].choices["data"].sparse == (outputs % 4 == 0) or kernel


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_and_autocast_multiply_packed_bfloat16(mode: str) -> None:
    torch.manual_seed(0)
    layer, x, dz = nn.Linear(64, 96), torch.randn(2, 30, 64), torch.randn(2, 30, 96)
    handle = attached(layer, mode=mode, product="sparse")
    left = chosen(layer, dz.bfloat16()).double()
    want = left @ layer.weight.detach().bfloat16().double()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradients(layer, x, dz.bfloat16())[0]
    choice = handle.plan.layers[0]
    assert choice.dtype == "bfloat16" and "bf16_panels" in choice.choices["data"].kernel
    handle.load_state_dict({"": 0})
    whole = gradients(layer.bfloat16(), x.bfloat16(), dz.bfloat16())[0]
    for found in (mixed, whole.float()):
        torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["random", "unbiased"])
def test_a_seed_decides_whatever_the_product_and_the_threads(mode: str) -> None:
    layer, x, dz = case("linear, samples")

    def run(seed: int, product: str, count: int = 1) -> Tensor:
        own = copy.deepcopy(layer)
        attached(own, mode=mode, product=product, seed=seed)
        with threads(count):
            return torch.stack([gradients(own, x, dz)[0] for _ in range(2)])

    one, same = run(1, "sparse"), run(1, "sparse", 2)
    assert torch.equal(one, same) and not torch.equal(one[0], one[1])
    torch.testing.assert_close(one, run(1, "dense"), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(one, run(2, "sparse"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_gets_through_a_sparse_product(mode: str, bad: float) -> None:
    layer, x, dz = case("linear")
    attached(layer, mode=mode, product="sparse")
    dz[2, 5] = bad
    dx = gradients(layer, x, dz)[0]
    assert not dx[2].isfinite().any()
    assert mode == "rescaled" or dx[[0, 1, 3, 4]].isfinite().all()


def test_one_buffer_of_half_the_largest_gradient_serves_all_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 512), nn.Linear(512, 64))
    attached(model, product="sparse")
    workspaces = [layer.__dict__[CARRIED].sources["data"].workspace for layer in model]
    model(torch.randn(384, 64, requires_grad=True)).sum().backward()
    buffers = {one.buffer(0).data_ptr(): one.buffer(0).nbytes for one in workspaces}
    assert list(buffers.values()) == [packed_bytes(384, 512, torch.float32)]
    assert packed_bytes(384, 512, torch.float32) < 0.54 * 384 * 512 * 4
    assert packed_bytes(384, 512, torch.bfloat16) < 0.58 * 384 * 512 * 2


def test_the_plan_says_what_runs_and_why(every_size: None) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 18), nn.Linear(18, 2))
    handle = attached(model)
    assert "0  32 x 16\n  data     - (chosen when its input first needs a gradient)" in str(handle.plan)
    model(torch.randn(9, 16, requires_grad=True)).sum().backward()
    first, second = handle.plan.layers
    assert (first.tokens, first.dtype, list(first.choices)) == (9, "float32", ["forward", "data", "weight"])
    data = first.choices["data"]
    assert data.dense_ms is not None and data.sparse_ms is not None and "times as" in data.reason
    assert second.choices["data"].reason == "18 output channels: a multiple of 4 is wanted"
    assert second.choices["data"].dense_ms is not None
    assert "2  dense: 2 output channels: no whole group of 4" in str(handle.plan)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: nn.Conv2d(8, 8, 3), {}, "3 x 3 taps: its data gradient is no matrix product"),
        (
            lambda: nn.Conv2d(8, 8, 1, stride=2),
            {},
            "strided, padded or grouped: its data gradient is no matrix product",
        ),
        (lambda: nn.Conv2d(8, 8, 1), {}, "its gradient is not channels-last"),
        (lambda: nn.Conv2d(8, 8, 1), {"pattern": "1:4"}, "1:4: kernels read 2:4"),
        (lambda: nn.Conv2d(8, 8, 1), {"product": "dense"}, "asked for"),
        (lambda: nn.Conv2d(8, 8, 1).double(), {}, "float64: float32 or bfloat16 is wanted"),
    ],
)
def test_dense_products_have_a_reason(make, options, reason: str) -> None:
    layer = make()
    handle = attached(layer, **{"product": "sparse", **options})
    x = torch.randn(2, 8, 5, 5, dtype=layer.weight.dtype)
    gradients(layer, x, torch.randn_like(layer(x)))
    assert handle.plan.layers[0].choices["data"].reason == reason


def test_small_products_are_not_measured() -> None:
    layer, x, dz = case("linear")
    handle = sdgp.attach(layer, "2:4")
    gradients(layer, x, dz)
    reasons = {choice.reason for choice in handle.plan.layers[0].choices.values()}
    assert reasons == {"fewer than 4.2 million multiply-adds, not worth measuring"}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_size_is_chosen_once(every_size: None, monkeypatch: pytest.MonkeyPatch, name: str, product: str) -> None:
    layer, x, dz = case(name)
    handle = attached(layer, product=product)
    gradients(layer, x, dz)
    (plan,), asked = handle.plan.layers, []
    kernels = PrunedGradient.kernels
    monkeypatch.setattr(PrunedGradient, "kernels", lambda *args: asked.append(1) or kernels(*args))
    gradients(layer, x, dz)
    assert handle.plan.layers[0] is plan and not asked
    gradients(layer, x[:1], dz[:1])
    other = handle.plan.layers[0]
    assert asked and other.tokens < plan.tokens
    gradients(layer, x, dz)
    assert handle.plan.layers[0] == plan


def test_a_plan_is_of_the_type_that_ran_last(every_size: None) -> None:
    layer, x, dz = case("linear")
    handle = attached(layer)
    gradients(layer, x, dz)
    plan = handle.plan.layers[0]
    late = layer(x.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert handle.plan.layers[0].dtype == "bfloat16"
    late.backward(dz)
    after = handle.plan.layers[0]
    assert after.dtype == "float32" and after.choices["data"] == plan.choices["data"]


def test_choices_stay_on_the_machine_that_measured_them(every_size: None) -> None:
    layer, x, dz = case("linear")
    attached(layer)
    want = gradients(layer, x, dz)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        products = other.__dict__[CARRIED]
        assert products.plan.choices == {} and products.chooser.known == {}
        torch.testing.assert_close(gradients(other, x, dz), want)


@pytest.mark.parametrize("name", ["linear", "1 x 1"])
def test_a_backward_pass_may_outlive_its_layer(name: str) -> None:
    layer, x, dz = case(name)
    attached(layer, product="sparse")
    x.requires_grad_()
    y = layer(x)
    del layer
    y.backward(dz)
    assert x.grad is not None and x.grad.isfinite().all()


def test_impossible_options_are_refused() -> None:
    for product, seconds in (("fast", 0.3), ("auto", 0.0)):
        with pytest.raises(TrainingError, match=r"an argument is impossible[\s\S]*'auto' or 'sparse' or 'dense'"):
            sdgp.attach(nn.Linear(8, 8), "2:4", product=product, seconds=seconds)
