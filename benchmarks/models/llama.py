"""One decoding step through a stack of Llama-3-8B's layers: grouped queries, rotary positions, SwiGLU, RMS norm.

Without embedding and head: the stack is as deep as memory allows, and a token's time grows linearly with the depth.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.gpt2 import visible
from models.subject import Subject

LAYERS, HEADS, GROUPS, WIDTH, FEED, CONTEXT = 2, 32, 8, 4096, 14336, 128


class RMSNorm(nn.Module):
    """x over its root mean square, times a weight: written out, because ONNX exporters do not know torch's own."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Layer(nn.Module):
    """One decoder layer; `heads` queries share `groups` keys and values."""

    def __init__(self, width: int, feed: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before_attention, self.before_feed = RMSNorm(width), RMSNorm(width)
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, feed, bias=False), nn.Linear(width, feed, bias=False)
        self.down = nn.Linear(feed, width, bias=False)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next x (batch, 1, width) and this token's key and value (batch, groups, 1, size)."""
        batch = x.shape[0]
        h = self.before_attention(x)
        # One token: the queries that share a key stand where a sequence would, so keys are never repeated.
        query = rotate(self.query(h).view(batch, self.groups, -1, self.size), *rotation)
        key = rotate(self.key(h).view(batch, self.groups, 1, self.size), *rotation)
        value = self.value(h).view(batch, self.groups, 1, self.size)
        seen = nn.functional.scaled_dot_product_attention(
            query, torch.cat([keys, key], 2), torch.cat([values, value], 2), attn_mask=mask
        )
        x = x + self.output(seen.reshape(batch, 1, -1))
        h = self.before_feed(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h)), key, value


class LlamaStep(nn.Module):
    """The hidden state of one token through the stack."""

    def __init__(self, layers: int, width: int, feed: int, heads: int, groups: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, feed, heads, groups) for _ in range(layers))
        size = width // heads
        frequencies = 500_000.0 ** (-torch.arange(0, size, 2).float() / size)
        self.register_buffer("frequencies", torch.cat([frequencies, frequencies]), persistent=False)

    def forward(self, x: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step.

        Args:
            x: (batch, 1, width).
            position: int64 (1,).
            keys: (layers, batch, groups, context, size).
            values: As `keys`.

        Returns:
            x (batch, 1, width), and this token's keys and values (layers, batch, groups, 1, size).
        """
        angle = position.float() * self.frequencies.float()
        rotation = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        mask = visible(position, keys.shape[3], x)
        own_keys, own_values = [], []
        for index, layer in enumerate(self.layers):
            x, key, value = layer(x, keys[index], values[index], mask, rotation)
            own_keys.append(key)
            own_values.append(value)
        return x, torch.stack(own_keys), torch.stack(own_values)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, the two halves of a head paired. Su et al. 2021, arXiv:2104.09864."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def llama_decode(batch: int) -> Subject:
    """One decoding step behind 128 tokens; random weights: nothing but time is measured."""
    torch.manual_seed(0)
    model = LlamaStep(LAYERS, WIDTH, FEED, HEADS, GROUPS).eval().requires_grad_(False)
    cache = torch.randn(2, LAYERS, batch, GROUPS, CONTEXT, WIDTH // HEADS)
    inputs = (torch.randn(batch, 1, WIDTH), torch.tensor([CONTEXT]), cache[0].clone(), cache[1].clone())
    note = f"random weights, {LAYERS} of 32 layers, no embedding, no head, context 128"
    return Subject("llama3-8b-decode", note, model, inputs, batch, batch)
