"""Small models of the shapes that rewrites are for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """As Hugging Face writes it for LLaMA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kind)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class GatedBlock(nn.Module):
    """A LLaMA layer: RMSNorm, rotary positions, fewer key heads, causal attention, gated MLP."""

    def __init__(self, width: int = 64, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, key_heads * self.size, bias=False)
        self.v = nn.Linear(width, key_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.before, self.after = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.before(x)
        q = self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(h).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        v = self.v(h).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        angles = torch.arange(length)[:, None] / 100 ** (torch.arange(self.size) % (self.size // 2) / self.size)
        q, k = (rotated(t, angles.cos(), angles.sin()) for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.after(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class PreNormBlock(nn.Module):
    """A GPT-2 layer: addmm as Hugging Face's Conv1D, GELU written out with tanh, causal attention."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(a, b) / a**0.5)
            for a, b in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(weight.shape[1])) for weight in self.weights)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def product(self, index: int, x: Tensor) -> Tensor:
        weight = self.weights[index]
        y = torch.addmm(self.biases[index], x.view(-1, x.size(-1)), weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.product(0, self.first(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.product(1, y.transpose(1, 2).reshape(batch, length, width))
        h = self.product(2, self.second(x))
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.product(3, h)


class Encoder(nn.Module):
    """BERT's layer with embeddings and a padding mask."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, width), nn.Embedding(40, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.dropout(self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1]))))
        seen = None if mask is None else mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, seen)
        return x


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, seen)
        x = self.first(x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width))))
        return self.second(x + self.dropout(self.down(functional.gelu(self.up(x)))))


class Cached(nn.Module):
    """One decoding step; `given_back`: the caller wants the joined keys too."""

    def __init__(self, given_back: bool) -> None:
        super().__init__()
        self.project, self.given_back = nn.Linear(32, 96), given_back

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        joined = torch.cat([keys, k], 2)
        seen = functional.scaled_dot_product_attention(q, joined, torch.cat([values, v], dim=-2))
        return (seen, joined) if self.given_back else (seen,)
