"""Padding that transformers computes from an image's size in Python, as TensorFlow's "SAME" does.

Its `apply_tf_padding` (MobileNetV1, MobileNetV2) asks for `int(size)`, which fixes a size that may differ in a graph:
it held for the example's images alone. The same sums on the sizes themselves fix whether a stride divides them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

NAME = "apply_tf_padding"


@contextmanager
def sizes_stay_free(model: nn.Module) -> Iterator[None]:
    """Let the padding of a model's own modules of transformers be computed from sizes as they are, which is the same.

    Args:
        model: Any module; only the function that its modules call is another meanwhile.
    """
    names = {type(module).__module__ for module in model.modules()}
    homes = [sys.modules[name] for name in names if name.startswith("transformers.") and name in sys.modules]
    own = [(home, getattr(home, NAME)) for home in homes if hasattr(home, NAME)]
    for home, _ in own:
        setattr(home, NAME, padded)
    try:
        yield
    finally:
        for home, function in own:
            setattr(home, NAME, function)


def padded(features: Tensor, conv_layer: nn.Conv2d) -> Tensor:
    """Return images (..., height, width) with the zeros of "SAME" around them.

    Args:
        features: The images.
        conv_layer: Gives stride, taps and dilation.
    """
    zeros: list[int] = []
    for axis in (1, 0):  # the last first, as torch pads
        size, stride, taps = features.shape[axis - 2], conv_layer.stride[axis], conv_layer.kernel_size[axis]
        rest = size % stride
        both = max(taps - stride, 0) if rest == 0 else max(taps - rest, 0)
        zeros += [side * conv_layer.dilation[axis] for side in (both // 2, both - both // 2)]
    return nn.functional.pad(features, zeros, "constant", 0.0)
