"""One decoding step of GPT-2 small at batch 1, over a key-value cache of fixed size. Radford et al. 2019.

The cache is an input and the step answers with its own keys and values, which the caller writes into the cache: a pure
function, which every runtime can convert, without copies of the whole cache on the way out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.subject import Subject

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 12, 12, 768, 128, 50257


class Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next x (batch, 1, width) and this token's key and value (batch, heads, 1, width / heads)."""
        batch = x.shape[0]
        qkv = self.qkv(self.before_attention(x)).view(batch, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
        seen = nn.functional.scaled_dot_product_attention(
            query, torch.cat([keys, key], 2), torch.cat([values, value], 2), attn_mask=mask
        )
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, 1, -1))
        feed = nn.functional.gelu(self.up(self.before_feed(x)), approximate="tanh")
        return x + self.down(feed), key, value


class Gpt2Step(nn.Module):
    """One token in, its logits out."""

    def __init__(
        self, layers: int, heads: int, width: int, context: int, vocabulary: int, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step.

        Args:
            token: int64 (batch, 1).
            position: int64 (1,): entries of the cache from here on are not looked at.
            keys: (layers, batch, heads, context, width / heads).
            values: As `keys`.

        Returns:
            Logits (batch, 1, vocabulary), and this token's keys and values (layers, batch, heads, 1, width / heads).
        """
        x = self.token(token) + self.position(position)
        mask = visible(position, keys.shape[3], x)
        own_keys, own_values = [], []
        for index, block in enumerate(self.blocks):
            x, key, value = block(x, keys[index], values[index], mask)
            own_keys.append(key)
            own_values.append(value)
        return self.head(self.norm(x)), torch.stack(own_keys), torch.stack(own_values)


def visible(position: Tensor, context: int, like: Tensor) -> Tensor:
    """Return the additive mask (1, 1, 1, context + 1) of a token at `position`: 0 where it looks, else -1e9."""
    hidden = torch.arange(context + 1, device=position.device) >= position
    hidden = hidden & (torch.arange(context + 1, device=position.device) < context)  # the last entry is its own key
    return hidden.to(like.dtype).view(1, 1, 1, -1) * -1e9


def gpt2_decode(batch: int) -> Subject:
    """One decoding step behind 128 tokens: the head is the embedding, a third of the weights, and stays dense."""
    return _decode(
        "gpt2-decode", "random weights, context 128, head tied to the embedding and dense", VOCABULARY, batch
    )


def gpt2_untied_decode(batch: int) -> Subject:
    """The same with a head of its own, padded to 50304 rows as is usual: it can be 2:4 too."""
    note = "random weights, context 128, head of its own with 50304 rows"
    return _decode("gpt2-untied-decode", note, 50304, batch)


def _decode(name: str, note: str, vocabulary: int, batch: int) -> Subject:
    torch.manual_seed(0)
    model = Gpt2Step(LAYERS, HEADS, WIDTH, CONTEXT, vocabulary, tied=vocabulary == VOCABULARY)
    nn.init.normal_(model.token.weight, std=0.02)
    model = model.eval().requires_grad_(False)
    cache = torch.randn(2, LAYERS, batch, HEADS, CONTEXT, WIDTH // HEADS)
    inputs = (torch.randint(VOCABULARY, (batch, 1)), torch.tensor([CONTEXT]), cache[0].clone(), cache[1].clone())
    return Subject(name, note, model, inputs, batch, batch)
