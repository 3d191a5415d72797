"""Calls that mean the same give a graph the same; another one names the argument that differs."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.turns import in_turn
from twofour.capture import Guard, alike, arguments, capture


class Scaled(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0, flag: bool = False, **more: object):
        return x * scale if not flag else -x


def test_what_equals_its_default_counts_as_not_given() -> None:
    model, x = Scaled(), torch.ones(2)
    assert list(arguments(model, (x,), {"scale": 2.0, "flag": False, "mask": None})) == ["x"]
    assert list(arguments(model, (x,), {"scale": 2, "flag": True})) == ["x", "scale", "flag"]
    assert list(arguments(model, (x,), {"zeta": 1, "alpha": 2})) == ["x", "alpha", "zeta"]


def test_what_the_configuration_says_counts_as_not_given() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=30
    )
    model, ids = transformers.BertModel(config), torch.ones(1, 4, dtype=torch.long)
    said = {"return_dict": True, "output_attentions": False, "output_hidden_states": None}
    assert list(arguments(model, (), {"input_ids": ids, **said})) == ["input_ids"]
    assert list(arguments(model, (), {"input_ids": ids, "return_dict": False})) == ["input_ids", "return_dict"]
    assert list(arguments(Scaled(), (ids,), {"return_dict": True})) == ["x", "return_dict"]  # means what it likes there


@pytest.mark.parametrize(
    ("call", "name", "why"),
    [
        ({"scale": 3.0}, "scale", "3.0, and the graph was captured without it"),
        ({"mask": torch.ones(2)}, "mask", r"torch.float32 \(2,\), and the graph was captured without it"),
        ({"mask": [torch.ones(2)] * 3}, "mask", r"^a list of 3 tensors, torch.float32 \(2,\) the first, and"),
        ({"x": torch.ones(2, 8).double()}, "x", "torch.float64 .* holds for torch.float32 of 2 axes"),
        ({"x": torch.ones(0, 8)}, "x", "empty"),
    ],
)
def test_the_argument_that_differs_is_named(call: dict[str, object], name: str, why: str) -> None:
    model = Scaled()
    guard = Guard(capture(model, {"x": torch.ones(2, 8)}))
    given = arguments(model, (), {"x": torch.ones(2, 8), **call})
    assert guard.leaves(given) is None
    assert guard.unlike(given)[0] == name
    assert re.search(why, guard.unlike(given)[1])


def test_an_argument_that_is_left_out_is_named() -> None:
    model = Scaled()
    guard = Guard(capture(model, {"x": torch.ones(2, 8), "flag": True}))
    assert guard.unlike({"x": torch.ones(2, 8)}) == (
        "flag",
        "left out, or its default, and the example gives another value: pass it here too",
    )


def test_mappings_in_another_order_are_the_same_call() -> None:
    class Features(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return features["a"] + features["b"]

    guard = Guard(capture(Features(), {"features": {"a": torch.ones(2, 8), "b": torch.zeros(2, 8)}}))
    leaves = guard.leaves({"features": {"b": torch.zeros(3, 8), "a": torch.ones(3, 8)}})
    assert leaves is not None and float(leaves[0].sum()) == 24
    assert guard.unlike({"features": {"a": torch.ones(2, 8)}})[0] == "features['b']"


class FixedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.avg_pool2d(torch.relu(self.conv(x)), 8), 1))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_head_that_fixes_the_image_size_leaves_the_batch_free(batch: int) -> None:
    model = FixedHead().eval()
    example = {"x": torch.randn(batch, 3, 16, 16)}
    graph = capture(model, example)
    guard = Guard(graph)
    assert guard.leaves({"x": torch.randn(5, 3, 16, 16)}) is not None
    assert guard.leaves({"x": torch.randn(5, 3, 18, 18)}) is None
    assert not any("dynamo" in name for name in vars(example["x"]))  # the caller's tensors are not marked


def test_the_axes_that_a_condition_leaves_free_are_named() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)).eval()
    guard = Guard(capture(conv, {"input": torch.randn(2, 3, 16, 16)}))
    assert guard.served() == "axis 0 of `input`, axis 2 of `input`, axis 3 of `input`"
    assert Guard(capture(FixedHead().eval(), {"x": torch.randn(3, 3, 16, 16)})).served() == "axis 0 of `x`"
    table = nn.Embedding(9, 4).eval()
    assert Guard(capture(table, {"input": torch.ones(2, 5, dtype=torch.long)})).served() == ""


def test_sizes_are_fixed_where_symbols_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.capture.forward.SYMBOL_SECONDS", -1)
    graph = capture(FixedHead().eval(), {"x": torch.randn(3, 3, 16, 16)})
    assert not graph.dynamic and "takes more than -1 s to capture" in graph.reason


def test_guards_that_round_up_are_evaluated() -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            missing = max((math.ceil(x.shape[-1] / 2) - 1) * 2 + 3 - x.shape[-1], 0)
            return F.avg_pool1d(F.pad(x, [missing // 2, missing - missing // 2]), 3, 2)

    guard = Guard(capture(Padded(), {"x": torch.randn(2, 4, 16)}))
    assert guard.leaves({"x": torch.randn(2, 4, 16)}) is not None


@in_turn(
    ("one", "other", "same"),
    [
        (2, 2, True),
        (2, 2.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ((1, "a"), (1, "a"), True),
        ((1, 2), (1, 2.0), False),
        (torch.float16, torch.float16, True),
        (np.ones(2), np.ones(2), False),
        (2, torch.tensor(2), False),
        (None, 0, False),
    ],
)
def test_constants_are_alike_where_a_forward_cannot_tell_them_apart(one: object, other: object, same: bool) -> None:
    assert alike(one, other) is same and alike(other, one) is same


def test_an_argument_of_another_type_than_the_default_is_given() -> None:
    model, x = Scaled(), torch.ones(2)
    assert "scale" not in arguments(model, (x,), {"scale": 2.0})
    assert "scale" in arguments(model, (x,), {"scale": 2})
