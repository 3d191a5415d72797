"""The mean over the pixels behind a convolution becomes a call of this package's, as a network's last pool is.

torch's takes 10 to 20 us by itself, and up to 150 inside a model that calls nothing else of torch's: what it runs
through, dispatcher and iterators, is out of the caches by then.
"""

from __future__ import annotations

from torch import Tensor, fx, nn

from twofour.compiler.graph_conv import ConvLayer
from twofour.compiler.squeeze import SqueezeExciteLayer, is_mean
from twofour.graph.base import aten, calls, is_float32, replace_with, value
from twofour.kernels.column_sums import pixel_means

PIXEL_MEANS = "means over pixels"
"""What the plan calls the rewrite."""


class PixelMeansLayer(nn.Module):
    """The mean over pixels inside a graph.

    Args:
        keeps_axes: Answer (images, channels, 1, 1), not (images, channels).
    """

    label = "mean over pixels"

    def __init__(self, keeps_axes: bool) -> None:
        super().__init__()
        self.keeps_axes = keeps_axes

    def forward(self, x: Tensor) -> Tensor:
        """Return the means; see `pixel_means`."""
        means = pixel_means(x)
        return means[:, :, None, None] if self.keeps_axes else means


def place_pixel_means(module: fx.GraphModule) -> int:
    """Replace the means of images that a convolution, or what scales its channels, lays out channels last.

    Args:
        module: The graph, its convolutions and squeeze-and-excite placed; it is changed.

    Returns:
        How many there are.
    """
    nodes = calls(module.graph, aten.adaptive_avg_pool2d.default, aten.mean.dim)
    found = [node for node in nodes if _fits(module, node)]
    for index, node in enumerate(found):
        name = f"pixel_means_{index}"
        module.add_submodule(name, PixelMeansLayer(value(node).ndim == 4))
        with module.graph.inserting_before(node):
            new = module.graph.call_module(name, (node.args[0],))
        new.meta = {"val": node.meta["val"]}
        replace_with(node, new)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return len(found)


def _fits(module: fx.GraphModule, node: fx.Node) -> bool:
    x = node.args[0]
    if not isinstance(x, fx.Node) or x.op != "call_module" or not is_float32(x) or not is_float32(node):
        return False
    layer = module.get_submodule(str(x.target))
    ours = isinstance(layer, SqueezeExciteLayer) or (isinstance(layer, ConvLayer) and layer.dimensions == 2)
    return ours and value(x).ndim == 4 and is_mean(node, x)
