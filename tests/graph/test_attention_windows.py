"""Attention between windows of an image reads and writes the rows where they stand; anything else stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.turns import in_turn
from twofour.capture import capture
from twofour.graph import fuse, lower_activations, simplify
from twofour.kernels.attention import attention_of_windows

SIDE, WINDOW, WIDTH, HEADS = 6, 3, 16, 2
RULE = "windows read in place"


class Windows(nn.Module):
    """A block of Swin: windows of an image, shifted ones with a mask, a bias of positions, the residual sum.

    Args:
        shift: Rows and columns by which the image is rolled before it is cut.
        back: What the windows are rolled by behind the output layer.
        between: What happens to the windows before the products.
        scores: The mask of all windows, from one over (windows, heads, rows, rows) and their number.
    """

    def __init__(
        self,
        shift: int = 0,
        back: int | None = None,
        between: Callable[[Tensor], Tensor] = lambda x: x,
        scores: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shift, self.back, self.between, self.scores = shift, shift if back is None else back, between, scores
        rows, windows = WINDOW * WINDOW, (SIDE // WINDOW) ** 2
        self.bias = nn.Parameter(torch.randn(1, HEADS, rows, rows))
        hidden = torch.rand(windows, 1, rows, rows) > 0.6
        hidden[1, :, 4] = True  # a row that sees nothing
        self.register_buffer("hidden", torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf))

    def joined(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        images, across = x.shape[0], SIDE // WINDOW
        y = self.norm(x).view(images, SIDE, SIDE, WIDTH)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(images, across, WINDOW, across, WINDOW, WIDTH).permute(0, 1, 3, 2, 4, 5)
        y = self.between(y.contiguous().view(-1, WINDOW * WINDOW, WIDTH))
        q, k, v = (
            layer(y).view(y.shape[0], y.shape[1], HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mask = self.bias
        if self.scores is not None:
            mask = self.bias + self.scores(self.hidden, images)
        y = functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
        y = self.out(self.joined(y))
        y = y.view(-1, across, across, WINDOW, WINDOW, WIDTH).permute(0, 1, 3, 2, 4, 5).contiguous()
        y = y.view(images, SIDE, SIDE, WIDTH)
        if self.back:
            y = torch.roll(y, (self.back, self.back), (1, 2))
        return x + y.view(images, SIDE * SIDE, WIDTH)


class Wide(Windows):
    """Heads of values that are wider than those of queries and keys.

    Args:
        times: How much wider.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.v, self.out = nn.Linear(WIDTH, times * WIDTH), nn.Linear(times * WIDTH, WIDTH)

    def joined(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], self.out.in_features)


def repeated(hidden: Tensor, images: int) -> Tensor:
    return hidden[None].expand(images, -1, -1, -1, -1).reshape(-1, *hidden.shape[1:])


def interleaved(hidden: Tensor, images: int) -> Tensor:
    """Another mask than that of an image's windows, one after the other, as soon as there are two images."""
    return hidden[:, None].expand(-1, images, -1, -1, -1).reshape(-1, *hidden.shape[1:])


TAKEN = {
    "plain": Windows,
    "shifted": lambda: Windows(1, scores=repeated),
    "shifted far": lambda: Windows(5),
}
LEFT = {
    "put back elsewhere": lambda: Windows(1, 2),
    "not put back": lambda: Windows(1, 0),
    "rows changed": lambda: Windows(between=lambda x: x.flip(1).cumsum(1)),
    "windows in another order": lambda: Windows(between=lambda x: x.roll(1, 0)),
    "windows of six images in another order": lambda: Windows(between=lambda x: x.roll(24, 0)),  # of 1, 2, 3: the same
    "all values in another order": lambda: Windows(between=lambda x: x.roll(24 * 9 * WIDTH)),
    "values of another width": lambda: Wide(2),
    "another mask for each image": lambda: Windows(1, scores=interleaved),
}


def images(count: int) -> Tensor:
    torch.manual_seed(count)
    return torch.randn(count, SIDE * SIDE, WIDTH)


def rewritten(model: nn.Module) -> tuple[dict[str, int], torch.fx.GraphModule]:
    graph = capture(model.eval(), {"x": images(2)})
    simplify(graph.module)
    return fuse(graph.module), graph.module


@pytest.mark.parametrize("name", TAKEN)
def test_windows_become_five_calls(name: str) -> None:
    counts, module = rewritten(TAKEN[name]())
    assert counts[RULE] == counts["products of one input joined"] == counts["sums and gates into products"] == 1
    copies = {"contiguous", "clone", "roll", "reshape", "expand"}
    assert not copies & {getattr(node.target, "__name__", "").partition(".")[0] for node in module.graph.nodes}
    (node,) = [node for node in module.graph.nodes if node.target is attention_of_windows]
    assert lower_activations(module) and node.meta["val"].dtype is torch.bfloat16


@in_turn("name", LEFT)
def test_other_cuts_stay(name: str) -> None:
    counts, _ = rewritten(LEFT[name]())
    assert counts[RULE] == 0
