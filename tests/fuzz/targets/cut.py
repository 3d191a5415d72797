"""Plans of cuts: read, made true on a model, written and read again."""

from __future__ import annotations

import json
from functools import cache

import torch
from torch import nn

from tests.fuzz.cursor import WORDS, Cursor, edit_bytes, edit_json
from twofour.structure.shrink import AttributeCut, AxisCut, Cut, cuts_of
from twofour.structure.shrink.surgery import apply, require_fit, tensors_of

TRACED = ("twofour.structure.shrink.cut", "twofour.structure.shrink.surgery", "twofour.structure.shrink.layers")
SEEDS = (b"",)

CHANNELS = [("conv.weight", 0), *((f"norm.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var"))]
TEXTS = ["0-3,7", "0", "7", "0-7", "3-1", "-1", "0-", ",", "0,0", "00", "1e3", "0-99999999", "9" * 30, "²", " 1"]
TEXTS += ["conv", "conv.weight", "conv.bias", "norm.num_batches_tracked", "blocks.0", "blocks.1", "blocks", "blocks.9"]
TEXTS += ["head.weight", "head.bias", "tied.weight", "heads", "training", "__class__", "weight", "\x00", "é", "." * 40]
PLACES = [["head.bias", 0], ["conv.weight", 63], ["conv.weight", -1], ["norm.weight", True], [], ["blocks.0.weight", 1]]
AXES = [{"size": 8, "kept": "0-3", "places": [["blocks.0.weight", 0], ["blocks.0.bias", 0]]}]
KEYS = ("axes", "attributes", "layers", "biases", "version", "size", "kept", "places", "x")


class Net(nn.Module):
    """Every kind of thing that a plan names: channels with their norm, a list of layers, a number, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.tied = nn.Linear(8, 4), nn.Linear(8, 4)
        self.tied.weight = self.head.weight
        self.heads = 8


@cache
def model() -> Net:
    """Return what plans are made for."""
    with torch.device("meta"):
        return Net()


def build(data: bytes) -> bytes:
    """Return the JSON."""
    cursor = Cursor(data)
    channels = AxisCut(8, (0, 1, 2, 5), (*CHANNELS, ("head.weight", 1)))
    layers = ("blocks.1",) if cursor.number(2) else ()
    plan = Cut((channels,), (AttributeCut("", "heads", 8, 4),), layers, ("conv",)).to_dict()
    for _ in range(5):
        if cursor.empty:
            break
        if cursor.number(8) == 7:
            return edit_bytes(cursor, json.dumps(plan).encode())
        edit_json(cursor, plan, WORDS + TEXTS + PLACES + AXES, KEYS)
    return json.dumps(plan).encode()


@cache
def sizes() -> dict[str, tuple[int, ...]]:
    """Return the sizes of its tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model()).items()}


def run(built: bytes) -> str:
    """Read it and cut; what was cut has the sizes that the plan says, and is put back as it was."""
    plan = Cut.from_text(built.decode("utf-8", "replace"))
    assert Cut.from_text(plan.to_text()) == plan
    net = model()
    require_fit(net, plan)
    undo = apply(net, plan)
    try:
        assert cuts_of(net) == (() if plan == Cut() else (plan,))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(net).items()}
        named = () if plan.layers else plan.kept.items()  # those that follow have other names then
        assert all(shapes[name][axis] == len(kept) for (name, axis), kept in named)
        assert all(getattr(net.get_submodule(a.module), a.name) == a.after for a in plan.attributes if not plan.layers)
    finally:
        undo()
    assert {name: tuple(tensor.shape) for name, tensor in tensors_of(net).items()} == sizes() and not cuts_of(net)
    assert net.heads == 8 and net.conv.bias is None and len(net.blocks) == 2
    return "cut"
