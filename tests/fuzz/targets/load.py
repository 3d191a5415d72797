"""Files of ours, loaded into a model as masked weights."""

from __future__ import annotations

import zlib
from functools import cache

import torch

import twofour
from tests.fuzz.cursor import Cursor
from tests.fuzz.packed_file import KINDS, WEIGHT, Model, damaged
from tests.fuzz.shelf import put
from twofour import masks
from twofour.errors import FormatError
from twofour.export import read
from twofour.export.fit import require_fit, with_ties

TRACED = ("twofour.export", "twofour.packing", "twofour.checkpoints", "twofour.files")
SEEDS = tuple(bytes([kind]) for kind, (pattern, *_) in enumerate(KINDS) if pattern != "dense")
"""Of sparse weights: `masked=True` refuses a file without any."""


def build(data: bytes) -> bytes:
    """Return the file."""
    return damaged(Cursor(data))


@cache
def model() -> Model:
    """Return the model that all files are loaded into, one after the other."""
    torch.manual_seed(0)
    return Model()


def run(built: bytes) -> str:
    """Load one in four, of the others see whether they fit; a refusal leaves the model as it was."""
    into, path = model(), put("load.safetensors", built)
    if zlib.crc32(built) % 4:
        require_fit(path, into, with_ties(into, read(path)))
        return "fits"
    before = into.fc.weight.detach().clone()
    try:
        twofour.load(path, into, masked=True)
    except FormatError:
        assert torch.equal(into.fc.weight, before), "a refused file changed the model"
        raise
    assert into.fc.weight is into.tied.weight
    (mask,) = {id(mask.keep): mask for mask in masks.of(into).values()}.values()
    assert not into.get_parameter(WEIGHT)[~mask.keep].any()
    return "loaded"
