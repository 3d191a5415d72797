"""Files of ours, loaded into a model as masked weights."""

from __future__ import annotations

import zlib
from functools import cache

import torch

import twofour
from tests.fuzz.cursor import Cursor
from tests.fuzz.packed_file import KINDS, WEIGHT, Model, damaged
from tests.fuzz.shelf import put
from twofour import masks, quantization
from twofour.errors import FormatError
from twofour.export import read
from twofour.export.fit import require_fit, with_ties
from twofour.export.low_bits import with_low_bits

TRACED = ("twofour.export", "twofour.packing", "twofour.checkpoints", "twofour.files")
SEEDS = tuple(
    bytes([kind]) for kind, (pattern, dtype, _) in enumerate(KINDS) if pattern != "dense" or dtype == "ternary5"
)
"""Of sparse weights or low bits: `masked=True` refuses a file without any."""


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
        twin, contents = with_low_bits(path, into, read(path))
        require_fit(path, twin, with_ties(twin, contents))
        return "fits"
    before = into.fc.weight.detach().clone()
    try:
        twofour.load(path, into, masked=True)
    except FormatError:
        assert torch.equal(into.fc.weight, before), "a refused file changed the model"
        assert not quantization.of(into), "a refused file changed how the model computes"
        raise
    finally:
        low = quantization.of(into)
        assert all(torch.isfinite(held.whole_weight(into.get_submodule(name))[1]).all() for name, held in low.items())
        if low:
            quantization.remove(into)
    if low and not masks.of(into):
        return "loaded"
    assert into.fc.weight is into.tied.weight
    (mask,) = {id(mask.keep): mask for mask in masks.of(into).values()}.values()
    assert not into.get_parameter(WEIGHT)[~mask.keep].any()
    return "loaded"
