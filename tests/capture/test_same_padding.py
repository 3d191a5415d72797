"""Padding of transformers that follows from an image's size leaves the sizes of a graph free."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twofour.capture import Guard, capture
from twofour.capture.same_padding import padded


@pytest.fixture(scope="module")
def modeling() -> Any:
    """Of transformers; it takes seconds to import, which those that run no test of this file are spared."""
    return pytest.importorskip("transformers.models.mobilenet_v2.modeling_mobilenet_v2")


def small(modeling: Any) -> nn.Module:
    from transformers import MobileNetV2Config

    torch.manual_seed(0)
    return modeling.MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.25)).eval()


def images(size: int, count: int = 2) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, size, size)}


def test_sizes_of_images_are_free(modeling: Any) -> None:
    """The graph held for the example's size alone."""
    own = modeling.apply_tf_padding
    guard = Guard(capture(small(modeling), images(64, 1)))
    assert modeling.apply_tf_padding is own
    for size in (32 * 3, 32 * 4):
        assert guard.leaves(images(size)) is not None
    assert guard.leaves(images(72)) is None  # a stride divides it otherwise, so that the zeros are others
    assert guard.limits() == " where they leave the example's remainders by strides"


def test_where_they_are_not_it_is_said() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(x, (int(x.shape[3]) % 2, int(x.shape[2]) % 2))

    guard = Guard(capture(Fixed(), {"x": torch.randn(2, 3, 5, 6)}))
    assert guard.served() == "axis 0 of `x`, axis 1 of `x`"
    assert guard.limits() == " (the forward fixes the size of images: compile the model once for each)"


@pytest.mark.parametrize(("taps", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (2, 3, 1), (5, 3, 2), (1, 2, 1)])
def test_it_pads_as_theirs(modeling: Any, taps: int, stride: int, dilation: int) -> None:
    layer = nn.Conv2d(3, 4, (taps, taps + 1), (stride, 1), dilation=dilation)
    for size in range(7, 12):
        x = torch.randn(1, 3, size, size + 1)
        assert torch.equal(padded(x, layer), modeling.apply_tf_padding(x, layer))
