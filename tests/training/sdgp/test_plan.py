"""Sparse or dense products of pruned gradients: chosen once by measuring, and the plan says why."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.training.sdgp.small import LAYERS, PRODUCTS, attached, case, gradients
from twofour.kernels.nm_gradient import packed_bytes
from twofour.layers import CARRIED
from twofour.training import sdgp
from twofour.training.sdgp.pruned_gradient import PrunedGradient


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
        (lambda: nn.Conv2d(8, 8, 3, groups=2), {}, "2 groups of channels: the kernels take one"),
        (lambda: nn.Conv2d(8, 10, 3), {}, "10 output channels: a multiple of 4 is wanted"),
        (lambda: nn.Conv2d(8, 8, 3).bfloat16(), {}, "no 2:4 kernel for a convolution in bfloat16 on cpu"),
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
