"""Weights of convolutions: their layouts and geometries, batch norm folded into them, and copies of their own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.conftest import each_row
from tests.kernels.conv_cases import ROWS, sparse
from twofour.errors import KernelError
from twofour.kernels.conv import ConvKernel, Geometry
from twofour.kernels.fold import fold_batch_norm
from twofour.kernels.nm_conv import from_conv_layout, nm_conv_reference, to_conv_layout
from twofour.kernels.nm_conv.layout import from_rows, to_rows, to_turned_rows
from twofour.packing import Packed
from twofour.patterns import parse


@given(channels=st.integers(1, 50), out=st.integers(1, 9), height=st.integers(1, 5), width=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_weights_come_back(channels: int, out: int, height: int, width: int) -> None:
    geometry = Geometry(8 * channels, 2 * out, (height, width), groups=2)
    weight = sparse(geometry)
    assert torch.equal(from_rows(to_rows(weight), 4 * channels, height, width), weight)
    for form in (torch.contiguous_format, torch.channels_last):
        turned = to_rows(weight.transpose(0, 1).flip(2, 3))
        assert torch.equal(to_turned_rows(weight.contiguous(memory_format=form)), turned)
    assert torch.equal(from_conv_layout(to_conv_layout(weight, geometry), geometry).unpack(), weight)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(8, 4, 3, 2, 1, dilation=2),
        nn.Conv2d(8, 4, (4, 3), padding="same", dilation=(1, 3)),
        nn.Conv2d(8, 4, 5, padding="valid"),
        nn.Conv1d(8, 6, 3, 2, 4, groups=2),
        nn.Conv1d(8, 4, 4, padding="same"),
    ],
    ids=lambda module: module.extra_repr(),
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_geometry_of_torch_layers(module: nn.Conv1d | nn.Conv2d) -> None:
    geometry = Geometry.of(module)
    x = torch.randn(2, 8, 11, 14) if isinstance(module, nn.Conv2d) else torch.randn(2, 8, 14)
    image = x if x.ndim == 4 else x.unsqueeze(2)
    weight = module.weight if x.ndim == 4 else module.weight.unsqueeze(2)
    found = nm_conv_reference(image, weight, module.bias, geometry)
    torch.testing.assert_close(found.view(module(x).shape), module(x))
    assert geometry.output(*image.shape[2:]) == found.shape[2:]


def test_batch_norm_folds_and_zeros_stay() -> None:
    conv, norm = nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6).eval()
    conv.weight.data = sparse(Geometry(8, 6, (3, 3)))
    norm.running_mean, norm.running_var = torch.randn(6), torch.rand(6) + 0.5
    norm.weight.data, norm.bias.data = torch.randn(6), torch.randn(6)
    x = torch.randn(2, 8, 7, 7)
    for bias in (None, torch.randn(6)):
        weight, shift = fold_batch_norm(conv.weight, bias, norm)
        want = norm(torch.conv2d(x, conv.weight, bias))
        torch.testing.assert_close(torch.conv2d(x, weight, shift), want, atol=1e-5, rtol=1e-5)
        assert torch.equal(weight == 0, conv.weight == 0)
    with pytest.raises(KernelError, match="cannot be folded"):
        fold_batch_norm(conv.weight, None, nn.BatchNorm2d(6, track_running_stats=False))


@each_row(ROWS)
def test_a_prepared_weight_is_not_the_callers_own(row: ConvKernel) -> None:
    geometry = Geometry(16, 8, (1, 1))
    weight = torch.randn(8, 16, 1, 1)  # dense in both orders: nothing has to move
    weight *= parse("2:4").project(weight.movedim(1, -1), absolute=True).movedim(-1, 1)
    prepared, want = row.prepare(nn.Parameter(weight), geometry, (1, 4, 4)), weight.clone()
    weight.zero_()
    found = prepared.restore()
    assert torch.equal(found.unpack() if isinstance(found, Packed) else found, want)
