"""Small models as files of libtwofour, and answers that must be the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import twofour

ROOT = Path(__file__).resolve().parents[3]


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last step."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM]) -> None:
        super().__init__()
        self.inner, self.head = kind(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return {"all": (B, T, 32), "last": (B, 8)} of (B, T, 16)."""
        states, _ = self.inner(x)
        return {"all": states, "last": self.head(states[:, -1])}


class Words(nn.Module):
    """What a language model begins with: an embedding, attention, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, 32) of int64 (B, T) and its mask."""
        x = self.words(input_ids)
        heads = [layer(x).view(*x.shape[:2], 2, 16).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        mask = attention_mask[:, None, None, :].bool()
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))[:, 0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))


def conv() -> nn.Module:
    parts = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 6 * 6, 8))


def ids(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, 7, dtype=torch.int64)
    mask[-1, 3:] = 0
    return {"input_ids": torch.randint(50, (batch, 7)), "attention_mask": mask}


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "mlp": (mlp, lambda n: {"input": torch.randn(n, 64)}, {}),
    "mlp in int8": (mlp, lambda n: {"input": torch.randn(n, 64)}, {"dtype": "int8"}),
    "gru": (lambda: Recurrent(nn.GRU), lambda n: {"x": torch.randn(n, 5, 16)}, {}),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda n: {"x": torch.randn(n, 5, 16)}, {}),
    "words": (Words, ids, {}),
    "conv": (conv, lambda n: {"input": torch.randn(n, 8, 8, 8)}, {}),
}


def compiled(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, example, options = MODELS[name]
    model = twofour.prune(build().eval(), "2:4")
    fast = twofour.compile(model, example(2), graph="native", tokens=(1,), **options)
    return fast, example


def named(answer: Any) -> dict[str, Tensor]:
    return answer if isinstance(answer, dict) else {"output": answer}


def same_bits(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, one in want.items():
        assert found[name].shape == one.shape and found[name].dtype is one.dtype, name
        assert torch.equal(found[name].view(torch.uint8), one.contiguous().view(torch.uint8)), name


def pruned() -> nn.Module:
    torch.manual_seed(0)
    return twofour.prune(mlp().eval(), "2:4")
