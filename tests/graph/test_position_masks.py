"""Masks that hide nothing: one that a model computes from sizes alone is a constant, and attention reads none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import twofour
from twofour.capture import capture
from twofour.errors import KernelError
from twofour.graph import fuse, simplify
from twofour.graph.base import argument, calls
from twofour.kernels.attention import attention
from twofour.kernels.attention.operands import mask_of


class Attention(nn.Module):
    """Attention as transformers' vision models have it: a mask of positions that are 0 or more, spread to the batch."""

    def __init__(self, heads: int, width: int, least: int, tokens: int | None = 7) -> None:
        super().__init__()
        self.heads, self.least, self.tokens = heads, least, tokens
        self.products = nn.ModuleList(nn.Linear(heads * width, heads * width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens or x.shape[1]
        places = (torch.arange(tokens) + -self.least)[None, None, None, :]
        mask = (places >= 0).expand(x.shape[0], -1, tokens, tokens)
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.products)
        return scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("least", "masked"), [(0, False), (1, True)])
def test_a_mask_that_is_true_everywhere_is_left_out_and_another_stays(least: int, masked: bool) -> None:
    for batch, heads, tokens in ((1, 3, 7), (3, 1, 7), (8, 5, 7), (8, 5, None)):
        model, x = Attention(heads, 8, least, tokens).eval(), torch.randn(batch, 7, heads * 8)
        graph = capture(model, {"x": x})
        simplify(graph.module)
        fuse(graph.module)
        (node,) = calls(graph.module.graph, attention)
        assert (argument(node, 3, "mask") is not None) is masked, (batch, heads, tokens)


@pytest.mark.parametrize("least", [0, 1])
def test_a_model_with_such_a_mask_answers_as_torch_and_copies_no_mask(least: int) -> None:
    torch.manual_seed(0)
    model, x = Attention(5, 8, least).eval(), torch.randn(8, 7, 40)
    fast = twofour.compile(model, x, graph=True, effort="quick", tokens=(1,), progress=False)
    for given in (x, torch.randn(3, 7, 40)):
        for _ in range(3):  # the second is recorded, the third replayed
            want = model.double()(given.double())
            assert (fast(given) - want).norm() < 1e-5 * want.norm()
            model.float()
    assert "contiguous" not in str(fast.plan)


def test_a_buffer_that_is_true_is_no_constant() -> None:
    class Buffer(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1, 1, 7, 7, dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x, self.mask)

    graph = capture(Buffer().eval(), {"x": torch.randn(2, 3, 7, 8)})
    fuse(graph.module)
    assert argument(next(iter(calls(graph.module.graph, attention))), 3, "mask") is not None


def test_a_mask_is_copied_without_what_it_repeats() -> None:
    for shape in ((1, 1, 1, 1), (5, 1, 1, 1), (5, 1, 7, 1), (5, 3, 7, 1), (1, 3, 1, 1), (1, 1, 7, 1)):
        mask = torch.rand(shape) > 0.3
        for given in (mask, mask.expand(5, 3, 7, 9)):
            found = mask_of(given, (5, 3, 7, 9))
            assert found.stride(3) == 1 and torch.equal(found, mask.expand(5, 3, 7, 9)), shape
            assert found.untyped_storage().nbytes() == mask.numel() * 9, shape
    turned = (torch.rand(5, 3, 9, 7) > 0.3).transpose(2, 3)
    assert torch.equal(mask_of(turned, (5, 3, 7, 9)), turned)
    with pytest.raises(KernelError, match="mask of attention does not fit"):
        mask_of(torch.ones(2, 9, dtype=torch.bool), (5, 3, 7, 9))
