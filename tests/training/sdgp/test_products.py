"""Products of pruned gradients are those of float64 with the same mask, in every form and type."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import threads
from tests.training.sdgp.small import LAYERS, PRODUCTS, attached, case, chosen, gradients
from tests.turns import in_turn
from twofour.errors import TrainingError
from twofour.training import sdgp
from twofour.training.sdgp import MODES


def against_float64(layer: nn.Module, x: Tensor, dz: Tensor, left: Tensor) -> None:
    """Gradients of the layer: the input's that of `left`, the others that of dz."""
    dense = copy.deepcopy(layer)
    dense.__class__ = type(layer).__bases__[-1]
    dense = dense.double()
    dx, *others = gradients(layer, x, dz)
    last = x.ndim == 4 and not x.is_contiguous()
    assert dx.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    torch.testing.assert_close(dx, gradients(dense, x.double(), left.double())[0].float(), rtol=1e-4, atol=1e-5)
    for got, want in zip(others, gradients(dense, x.double(), dz.double())[1:], strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


@in_turn("name", LAYERS)
@in_turn("mode", MODES)
@in_turn("product", PRODUCTS)
def test_gradients_against_float64_with_the_same_mask(every_size: None, name: str, mode: str, product: str) -> None:
    layer, x, dz = case(name)
    handle = attached(layer, mode=mode, product=product, seed=3)
    against_float64(layer, x, dz, chosen(layer, dz))
    (plan,) = handle.plan.layers
    assert plan.choices["data"].sparse == (product == "sparse") or product == "auto"
    assert plan.tokens == dz.numel() // (16 if " x " in name else dz.shape[-1])


@in_turn("mode", MODES)
@in_turn("name", ["linear, samples", "3 x 2, strided, dilated"])
def test_every_instruction_set_multiplies_the_same_choice(isa: str, name: str, mode: str) -> None:
    layer, x, dz = case(name)
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


@given(
    channels=st.tuples(st.integers(4, 36), st.integers(1, 18).map(lambda n: 4 * n)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    samples=st.integers(1, 3),
    forms=st.tuples(st.booleans(), st.booleans(), st.sampled_from(("last", "contiguous", "sliced"))),
)
@settings(max_examples=30, deadline=None)
def test_geometries_of_convolutions(channels, size, taps, stride, padding, dilation, samples: int, forms) -> None:
    reach = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(size, padding, reach, strict=True)))
    assume(
        all(p <= r for p, r in zip(padding, reach, strict=True))
    )  # else torch's own forward pass may end the process
    layer = nn.Conv2d(*channels, taps, stride, padding, dilation)
    x = torch.randn(samples, channels[0], *size)
    dz = torch.randn_like(layer(x))
    last_x, last_weight, form = forms
    if last_x:
        x = x.contiguous(memory_format=torch.channels_last)
    if last_weight:
        layer = layer.to(memory_format=torch.channels_last)
    if form == "last":
        dz = dz.contiguous(memory_format=torch.channels_last)
    elif form == "sliced":
        dz = dz.repeat_interleave(2, dim=3)[:, :, :, ::2]
    handle = attached(layer, mode="magnitude", product="sparse")
    against_float64(layer, x, dz, chosen(layer, dz))
    assert handle.plan.layers[0].choices["data"].sparse


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
