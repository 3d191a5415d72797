"""The blocks of the case `algebra`: what users run, written as they write it, that has fewer products in it.

Random weights: what is computed does not depend on them. Each note says where the block comes from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.subject import Subject


class Adapted(nn.Linear):
    """A linear layer beside adapters that were not merged: x W + s (x A) B for each, as peft computes it."""

    def __init__(self, inputs: int, outputs: int, adapters: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.ModuleList(nn.Linear(inputs, rank, bias=False) for _ in range(adapters))
        self.up = nn.ModuleList(nn.Linear(rank, outputs, bias=False) for _ in range(adapters))

    def forward(self, x: Tensor) -> Tensor:
        """Add what each adapter says."""
        result = super().forward(x)
        for down, up in zip(self.down, self.up, strict=True):
            result = result + up(down(x)) * 0.5
        return result


class Encoder(nn.Module):
    """One layer of an encoder, every projection with its adapters."""

    def __init__(self, width: int, heads: int, adapters: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (Adapted(width, width, adapters, rank) for _ in range(4))
        self.wide = Adapted(width, 4 * width, adapters, rank)
        self.narrow = Adapted(4 * width, width, adapters, rank)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then the MLP, each beside the residual."""
        y = self.before(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class Decomposed(nn.Module):
    """A linear layer as its singular vectors and values: x V, times S, times U."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.right, self.left = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
        self.values = nn.Parameter(torch.rand(rank))

    def forward(self, x: Tensor) -> Tensor:
        """Go through the rank."""
        return self.left(self.right(x) * self.values)


class Block(nn.Module):
    """A function of the inputs and of layers that it is given."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        """Call the function."""
        given = [tensor for tensor in (x, y, z) if tensor is not None]
        return self.function(*given, *self.layers)


def multi_lora() -> Subject:
    """Three adapters of rank 16 that were not merged, on every projection of an encoder layer."""
    return _subject("multi-LoRA encoder", Encoder(384, 6, 3, 16), torch.randn(1, 64, 384))


def narrow() -> Subject:
    """Two layers in a row with nothing between them, wide in the middle, narrow at the end."""
    model = nn.Sequential(nn.Linear(768, 3072), nn.Linear(3072, 16))
    return _subject("narrow projections", model, torch.randn(1, 128, 768))


def wide_head() -> Subject:
    """(A V) W of one wide head that ends in few features: https://github.com/pytorch/pytorch/issues/194473."""

    def attend(q: Tensor, k: Tensor, v: Tensor, out: nn.Module) -> Tensor:
        return out((q @ k.transpose(-1, -2)).softmax(-1) @ v)

    inputs = (torch.randn(1, 256, 64), torch.randn(1, 256, 64), torch.randn(1, 256, 1024))
    return _subject("wide attention head", Block(attend, nn.Linear(1024, 32)), *inputs)


def experts() -> Subject:
    """A product of experts: the probabilities of eight are multiplied, then the logarithm is taken."""

    def multiply(x: Tensor) -> Tensor:
        return torch.log(torch.prod(torch.exp(x), dim=1))

    return _subject("log of a product of experts", Block(multiply), 0.1 * torch.randn(64, 8, 4096))


def decomposed() -> Subject:
    """Layers that an SVD left at nine tenths of their rank, with the singular values apart."""
    model = nn.Sequential(*(part for _ in range(2) for part in (Decomposed(512, 460), nn.ReLU())))
    return _subject("factors of an SVD", model, torch.randn(1, 128, 512))


def sums() -> Subject:
    """Four branches of one input that are added, as models that train with branches write them."""

    def add(x: Tensor, *branches: nn.Module) -> Tensor:
        return branches[0](x) + branches[1](x) + branches[2](x) + branches[3](x)

    return _subject("sum of branches", Block(add, *(nn.Linear(512, 512) for _ in range(4))), torch.randn(1, 128, 512))


def bilinear() -> Subject:
    """A B + A C - A D of activations."""

    def add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a @ b + a @ c

    return _subject("sum of products", Block(add), torch.randn(384, 512), torch.randn(512, 512), torch.randn(512, 512))


def linear_attention() -> Subject:
    """Attention without a softmax, written as (Q K) V."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)) @ v * 0.125

    return _subject("linear attention", Block(attend), *(torch.randn(1, 4, 512, 64) for _ in range(3)))


def pooled() -> Subject:
    """An embedding: every token is projected, then their mean is taken."""

    def pool(x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x).mean(1)

    return _subject("pooled projection", Block(pool, nn.Linear(768, 768)), torch.randn(8, 64, 768))


def _subject(name: str, model: nn.Module, *inputs: Tensor) -> Subject:
    tokens = inputs[0].numel() // inputs[0].shape[-1]
    return Subject(name, "random weights", model.eval().requires_grad_(False), inputs, 1, tokens)


def _seeded(build: Callable[[], Subject]) -> Callable[[], Subject]:
    def built() -> Subject:
        torch.manual_seed(0)
        return build()

    return built


ALGEBRA: dict[str, Callable[[], Subject]] = {
    "multi-lora": _seeded(multi_lora),
    "narrow": _seeded(narrow),
    "wide-head": _seeded(wide_head),
    "experts": _seeded(experts),
    "svd": _seeded(decomposed),
    "branches": _seeded(sums),
    "products": _seeded(bilinear),
    "linear-attention": _seeded(linear_attention),
    "pooled": _seeded(pooled),
}
