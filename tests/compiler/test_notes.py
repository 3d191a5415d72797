"""What a plan says of a computing type that is not that of every layer."""

from collections.abc import Callable

import torch
from torch import nn

import twofour
from tests.compiler.small import mlp
from tests.turns import in_turn
from twofour.compiler.computing import Computing
from twofour.compiler.notes import own_widths


def convolved() -> nn.Module:
    """Its Linear is of low bits, its convolution is not."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 64)).eval()
    return twofour.quantize(model, {"0": "float", "*": "w4"}, "a8", ends=None)


def whole() -> nn.Module:
    return twofour.quantize(mlp(), "w4", "a8", ends=None)


def partly(pattern: str) -> nn.Module:
    return twofour.quantize(mlp(), {pattern: "float", "*": "w4"}, "a8", ends=None)


DATA = [torch.zeros(1, 64)]


@in_turn(
    ("make", "dtype", "given", "said"),
    [
        (mlp, "int8", {}, ""),
        (whole, "float32", {}, ""),
        (whole, "bfloat16", {"smooth": False, "data": None}, "change the 3 layers that were quantised, to widths of"),
        (whole, "bfloat16", {"smooth": "auto"}, "own (w4a8); no other layer takes it. For bfloat16 in all of them"),
        (whole, "int8", {"data": DATA, "smooth": True}, "takes it, so that `data` and `smooth` say nothing. For int8"),
        (whole, "int4", {"group": 32, "symmetric": False}, "no other layer takes it, so that `group` say"),
        (
            lambda: partly("0"),
            "int8",
            {"data": DATA},
            "the 2 layers that were quantised, to widths of their own (w4a8); it is",
        ),
        (lambda: partly("[02]"), "int8", {"data": DATA}, "the one layer that was quantised, to widths of their own"),
        (lambda: partly("[02]"), "int8", {"data": DATA}, "it is that of the other 2 layers. For"),
        (lambda: partly("0"), "int8", {}, "it is that of the one other layer. For"),
        (convolved, "int8", {"data": DATA}, "it is that of the one other layer. For"),
        (convolved, "bfloat16", {}, "no other layer takes it. For bfloat16"),
    ],
)
def test_layers_of_low_bits_keep_their_widths(
    make: Callable[[], nn.Module], dtype: str, given: dict[str, object], said: str
) -> None:
    """Data and options that no layer reads were taken without a word, and convolutions counted as none."""
    found = own_widths(make(), Computing(dtype), **given)
    assert (said in found[0]) if said else found == ()
