"""One layer at a time: which gradients are exact, which are pruned, against float64 with the same choice."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.sdgp.small import chosen, gradients
from tests.turns import in_turn
from twofour.errors import TrainingError
from twofour.layers import CARRIED
from twofour.training import sdgp
from twofour.training.sdgp import MODES
from twofour.training.sdgp.convolution import prune

LAYERS = {
    "linear": (lambda: nn.Linear(12, 18), (5, 12)),
    "linear, tokens": (lambda: nn.Linear(12, 16, bias=False), (2, 3, 7, 12)),
    "conv1d": (lambda: nn.Conv1d(5, 9, 3, stride=2, padding=1), (2, 5, 11)),
    "conv2d": (lambda: nn.Conv2d(6, 16, 3, padding=1), (2, 6, 7, 5)),
    "strided, dilated": (lambda: nn.Conv2d(6, 12, (3, 2), (2, 1), (1, 2), (1, 2), bias=False), (2, 6, 7, 5)),
    "groups": (lambda: nn.Conv2d(8, 12, 3, groups=2), (2, 8, 6, 6)),
    "same, even kernel": (lambda: nn.Conv2d(5, 8, (4, 3), padding="same"), (2, 5, 6, 6)),
    "valid": (lambda: nn.Conv1d(5, 8, 3, padding="valid"), (2, 5, 6)),
    "circular": (lambda: nn.Conv2d(5, 8, 3, padding=1, padding_mode="circular"), (2, 5, 6, 6)),
    "no batch": (lambda: nn.Conv2d(5, 8, 3, padding=1), (5, 6, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@in_turn("name", LAYERS)
@in_turn("mode", MODES)
def test_gradients_against_float64(name: str, mode: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(shape)
    dense = copy.deepcopy(layer).double()
    dz = torch.randn(layer(x).shape)
    sdgp.attach(layer, "2:4", mode=mode)
    left = chosen(layer, dz)
    assert 0 < (left != 0).sum() < left.numel()
    dx, *others = gradients(layer, x, dz)
    torch.testing.assert_close(dx, gradients(dense, x.double(), left.double())[0].float(), rtol=1e-4, atol=1e-5)
    exact = gradients(dense, x.double(), dz.double())
    for got, want in zip(others, exact[1:], strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(dx, exact[0].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@in_turn("name", LAYERS)
@in_turn("mode", MODES)
def test_keeping_everything_is_autograd(name: str, mode: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    dz = torch.randn(layer(x).shape)
    want = gradients(layer, x, dz)
    sdgp.attach(layer, "4:4", mode=mode)
    for got, exact in zip(gradients(layer, x, dz), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)


@given(
    inputs=st.integers(4, 20),
    outputs=st.integers(1, 40),
    m=st.sampled_from((2, 4, 5, 8, 32)),
    tokens=st.integers(1, 9),
    kernel=st.sampled_from((0, 1, 3)),
    channels_last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_odd_sizes(inputs: int, outputs: int, m: int, tokens: int, kernel: int, channels_last: bool) -> None:
    layer = nn.Conv2d(inputs, outputs, kernel) if kernel else nn.Linear(inputs, outputs)
    x = torch.randn(2, inputs, tokens + kernel, 5) if kernel else torch.randn(2, tokens, inputs)
    if channels_last and kernel:
        x = x.contiguous(memory_format=torch.channels_last)
    dz = torch.randn_like(layer(x))
    if outputs < m:
        with pytest.raises(TrainingError, match="no layer can have its gradient pruned"):
            sdgp.attach(layer, f"1:{m}")
        return
    exact = gradients(layer, x, dz)
    sdgp.attach(layer, f"1:{m}", mode="magnitude")
    left = chosen(layer, dz)
    axis = 1 if kernel else -1
    assert ((left != 0).movedim(axis, -1)[..., : outputs // m * m].unflatten(-1, (-1, m)).sum(-1) <= 1).all()
    dx, dw, db = gradients(layer, x, dz)
    torch.testing.assert_close([dw, db], exact[1:], rtol=1e-4, atol=1e-5)
    dense = nn.Conv2d(inputs, outputs, kernel) if kernel else nn.Linear(inputs, outputs)
    dense.load_state_dict(layer.state_dict())
    torch.testing.assert_close(dx, gradients(dense, x, left)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_groups_lie_along_the_channels_whatever_the_memory_format(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 16, 3, padding=1)
    sdgp.attach(layer, "2:4", mode="rescaled")
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=memory_format)
    dz = torch.randn(2, 16, 5, 7)
    left = prune(dz.contiguous(memory_format=memory_format), layer.__dict__[CARRIED].number)
    assert ((left != 0).unflatten(1, (4, 4)).sum(2) <= 2).all()
    assert left.is_contiguous(memory_format=memory_format)
    dx = gradients(layer, x, dz.contiguous(memory_format=memory_format))[0]
    torch.testing.assert_close(dx, gradients(layer, x.contiguous(), dz)[0])
    torch.testing.assert_close(left.abs().sum((2, 3)), dz.abs().sum((2, 3)), rtol=1e-3, atol=0)


def test_a_gradient_that_is_an_expanded_scalar() -> None:
    layer = nn.Linear(8, 8)
    sdgp.attach(layer, "2:4", mode="magnitude")
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach()[[0, 1, 4, 5]].sum(0).expand(3, 8))


def test_a_vector_is_one_token() -> None:
    layer = nn.Linear(8, 8)
    sdgp.attach(layer, "2:4")
    x = torch.randn(8, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None and x.grad.shape == (8,)


@pytest.mark.parametrize("product", ["auto", "sparse", "dense"])
def test_an_empty_batch_has_empty_gradients(product: str) -> None:
    layer = nn.Linear(8, 8)
    sdgp.attach(layer, "2:4", product=product)
    for shape in ((0, 8), (0, 4, 8), (4, 0, 8)):
        x = torch.randn(shape, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None and x.grad.shape == shape


def test_the_weight_of_hugging_face_conv1d_stands_the_other_way() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    layer, x = utils.Conv1D(16, 12), torch.randn(2, 5, 12)
    dz = torch.randn(2, 5, 16)
    exact = gradients(layer, x, dz)
    handle = sdgp.attach(layer, "2:4", mode="magnitude")
    dx, dw, db = gradients(layer, x, dz)
    left = layer.__dict__[CARRIED].sources["data"].prune(dz)
    torch.testing.assert_close([dw, db], exact[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, left @ layer.weight.detach().t())
    assert type(handle.remove()) is utils.Conv1D


def test_an_input_without_gradient_and_evaluation_take_the_layer_as_it_is() -> None:
    layer = nn.Linear(8, 8)
    sdgp.attach(layer, "1:4", mode="random")
    layer(torch.randn(3, 8)).sum().backward()
    with torch.no_grad():
        layer(torch.randn(3, 8, requires_grad=True))
    assert layer.__dict__[CARRIED].sources["data"].draws == 0


@pytest.mark.parametrize("kind", [nn.Linear(8, 8), nn.Conv2d(8, 8, 3)])
def test_a_second_derivative_is_refused(kind: nn.Module) -> None:
    sdgp.attach(kind, "2:4")
    x = torch.randn((3, 8) if isinstance(kind, nn.Linear) else (2, 8, 5, 5), requires_grad=True)
    with pytest.raises(
        TrainingError, match=r"a gradient under pruned gradients \(SDGP\) has no derivative[\s\S]*create_graph=True"
    ) as error:
        torch.autograd.grad(kind(x).square().sum(), x, create_graph=True)
    assert "skip" in str(error.value)


@in_turn("kind", [nn.Linear(8, 16), nn.Conv2d(8, 16, 3)])
@in_turn("autocast", [False, True])
@in_turn("learns", [False, True])
def test_no_more_is_saved_than_by_the_dense_layer(kind: nn.Module, autocast: bool, learns: bool) -> None:
    kind = copy.deepcopy(kind).requires_grad_(learns)
    x = torch.randn((64, 8) if isinstance(kind, nn.Linear) else (2, 8, 9, 9), requires_grad=True)

    def saved() -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = kind(x)
            del y
        return sum(kept.values())

    dense = saved()
    sdgp.attach(kind, "2:4", mode="unbiased")
    assert saved() <= dense


@pytest.mark.parametrize("kind", [nn.Linear(8, 8), nn.Conv1d(8, 8, 3), nn.Conv2d(8, 8, 3)])
def test_copies_and_pickles_work_and_draw_on_their_own(kind: nn.Module) -> None:
    sdgp.attach(kind, "2:4", mode="random")
    for other in (copy.deepcopy(kind), pickle.loads(pickle.dumps(kind))):
        assert type(other) is type(kind)
        assert other.__dict__[CARRIED] is not kind.__dict__[CARRIED]
        assert other.__dict__[CARRIED].number != kind.__dict__[CARRIED].number
        x = torch.randn((2, 8, 5, 5) if isinstance(kind, nn.Conv2d) else (2, 8, 8), requires_grad=True)
        other(x).square().sum().backward()
        assert [one.__dict__[CARRIED].sources["data"].draws for one in (other, kind)] == [1, 0]
