"""The demo's network: a small vision transformer of plain Linear layers, wide enough for speed to mean something."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention from four Linear layers, so that each of them can be pruned."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) -> the same shape."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and around a shortcut."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) -> the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Square one-channel images in, class scores out.

    Args:
        side: Pixels along one side of the image.
        patch: Pixels along one side of a patch; a patch is a token.
        width: Numbers per token.
        hidden: Width of the perceptron's inner layer.
        layers: Number of layers.
        heads: Attention heads.
        classes: Number of classes.
    """

    def __init__(self, side: int, patch: int, width: int, hidden: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.3 * self.embed.weight.new_empty((side // patch) ** 2, width).normal_())
        self.layers = nn.Sequential(*(Layer(width, hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, side, side) -> scores (batch, classes)."""
        rows = images.unflatten(1, (-1, self.patch)).unflatten(3, (-1, self.patch))
        patches = rows.transpose(2, 3).flatten(1, 2).flatten(2)
        tokens = self.layers(self.embed(patches) + self.position)
        return self.head(self.norm(tokens).mean(1))
