"""Stacks of blocks in the shapes of BERT-large and Llama-3-8B, in plain torch: what runs end to end on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.llama import RMSNorm, rotate


class EncoderBlock(nn.Module):
    """A post-norm encoder block: width 1024, 16 heads, 4096 between, as BERT-large's 24."""

    def __init__(self, width: int = 1024, heads: int = 16, feed: int = 4096) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, feed), nn.Linear(feed, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        q, k, v = (_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.output(seen))
        return self.second(x + self.down(functional.gelu(self.up(x))))


class DecoderBlock(nn.Module):
    """A Llama-3-8B block: 32 heads share 8 keys, SwiGLU of 14336; prefill, or one token behind a cache."""

    def __init__(self, width: int = 4096, heads: int = 32, groups: int = 8, feed: int = 14336) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before_attention, self.before_feed = RMSNorm(width), RMSNorm(width)
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, feed, bias=False) for _ in range(2))
        self.down = nn.Linear(feed, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """Run the block.

        Args:
            x: (batch, tokens, width); with a cache one token.
            keys: (batch, groups, context, size): what stands before, or None.
            values: As `keys`.
        """
        h = self.before_attention(x)
        q, k = _heads(self.query(h), self.heads), _heads(self.key(h), self.groups)
        v = _heads(self.value(h), self.groups)
        begin = 0 if keys is None else keys.shape[2]
        angles = torch.arange(begin, begin + x.shape[1], device=x.device)[:, None] * self._frequencies(x)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if keys is not None and values is not None:
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=keys is None, enable_gqa=True)
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        h = self.before_feed(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    def _frequencies(self, x: Tensor) -> Tensor:
        steps = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        return torch.cat([500_000.0**-steps] * 2)


class Decoding(nn.Module):
    """One token through a stack, each block behind a cache of its own; what a token adds to it is left out."""

    def __init__(self, blocks: nn.ModuleList, context: int, batch: int) -> None:
        super().__init__()
        self.blocks = blocks
        block = blocks[0]
        assert isinstance(block, DecoderBlock)
        cache = torch.randn(2, len(blocks), batch, block.groups, context, block.size)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, width) -> the same."""
        for index, block in enumerate(self.blocks):
            x = block(x, self.cache[0, index], self.cache[1, index])
        return x


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def bert_large(layers: int = 8) -> nn.Module:
    """Return a stack of encoder blocks; eight hold 200 MB of bfloat16, more than a second-level cache."""
    torch.manual_seed(0)
    return nn.Sequential(*(EncoderBlock() for _ in range(layers)))


def llama_prefill(layers: int = 2) -> nn.Module:
    """Return a stack of decoder blocks without a cache."""
    torch.manual_seed(0)
    return nn.Sequential(*(DecoderBlock() for _ in range(layers)))


def llama_decoding(batch: int, context: int = 512, layers: int = 2) -> nn.Module:
    """Return a stack of decoder blocks behind caches."""
    torch.manual_seed(0)
    return Decoding(nn.ModuleList(DecoderBlock() for _ in range(layers)), context, batch)
