"""Attention inside the windows of an image, whose rows are read where they stand."""

import pytest
import torch

from tests.conftest import threads
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.attention import (
    attention,
    attention_of_columns,
    attention_of_windows,
)


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn(("windows", "rows"), [(1, 1), (4, 2), (3, 5), (4, 49), (7, 16)])
@in_turn("masked", ["", "added", "hidden", "one for all"])
def test_windows_of_an_image(isa: str, dtype: torch.dtype, windows: int, rows: int, masked: str) -> None:
    heads, key_heads, width, images = 4, 2, 24, 3
    sizes = (heads * width, key_heads * width, key_heads * width)
    x = torch.randn(images, windows * rows, sum(sizes), dtype=dtype)
    order = torch.randperm(windows * rows).view(windows, rows)
    masks = {
        "added": torch.randn(windows, heads, rows, rows).masked_fill(
            torch.rand(windows, 1, rows, rows) > 0.7, -torch.inf
        ),
        "hidden": torch.rand(windows, 1, rows, rows) > 0.3,
        "one for all": torch.randn(1, heads, rows, rows),
    }
    mask = masks.get(masked)
    parts = x.split(sizes, -1)
    cut = (part[:, order].flatten(0, 1).unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
    each = None if mask is None else mask.expand(windows, -1, -1, -1).repeat(images, 1, 1, 1)
    answer = attention(*cut, each, 0.2, unseen=torch.nan).transpose(1, 2).flatten(2)
    want = torch.empty(images, windows * rows, heads * width, dtype=dtype)
    want[:, order.flatten()] = answer.view(images, -1, heads * width)
    for team in (1, 3):
        with threads(team):
            found = attention_of_windows(*parts, order, width, mask, 0.2, torch.nan)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    apart = (torch.stack([part, part], -1)[..., 0] for part in parts)
    assert torch.equal(
        attention_of_windows(*apart, order, width, None, 0.2), attention_of_windows(*parts, order, width, None, 0.2)
    )


@pytest.mark.parametrize(
    "order", [[[0, 1, 2, 3, 4]], [[0, 1, 2, 3, 4, 4]], [[1, 2, 3, 4, 5, 6]], [[0, -1, -2, -3, -4, -5]], [[0.0] * 6]]
)
def test_windows_that_are_not_those_of_the_image_are_refused(order: list[list[float]]) -> None:
    x = torch.randn(2, 6, 16)
    with pytest.raises(KernelError, match="order"):
        attention_of_windows(x, x, x, torch.tensor(order), 8)


@pytest.mark.parametrize(
    ("shape", "windows", "width"), [((2, 6, 16), (6,), 8), ((2, 6, 16), (2, 3), 0), ((6, 16), (2, 3), 8)]
)
def test_windows_of_what_is_no_image_are_refused(shape: tuple[int, ...], windows: tuple[int, ...], width: int) -> None:
    with pytest.raises(KernelError, match="order"):
        attention_of_windows(*[torch.zeros(shape)] * 3, torch.arange(6).view(windows), width)


def test_negated_views_are_read_negated() -> None:
    x = torch.randn(2, 6, 16, dtype=torch.complex64).conj().imag  # a view that torch negates on reading
    assert x.is_neg()
    order, plain = torch.arange(6).view(2, 3), x.clone()
    assert torch.equal(attention_of_windows(x, x, x, order, 8), attention_of_windows(plain, plain, plain, order, 8))
    columns = (0, 0, 0), (16, 16, 16), 8
    assert torch.equal(attention_of_columns(x, x, x, *columns), attention_of_columns(plain, plain, plain, *columns))
