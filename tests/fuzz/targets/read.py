"""Files of ours: read, their weights unpacked, and a kernel run on some."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from tests.fuzz.cursor import Cursor
from tests.fuzz.packed_file import KINDS, damaged
from tests.fuzz.shelf import put
from twofour.errors import PackingError
from twofour.export import read
from twofour.kernels import available, matmul
from twofour.kernels.nm_matmul.layout import LARGEST_SCALE
from twofour.packing import Packed, read_pattern
from twofour.patterns import VNM

TRACED = ("twofour.export", "twofour.packing", "twofour.checkpoints", "twofour.kernels", "twofour.files")
SEEDS = tuple(bytes([kind]) for kind in range(len(KINDS)))

LARGEST = 1 << 22
"""Values of a weight at most: a file of a kilobyte cannot have more."""


def build(data: bytes) -> bytes:
    """Return the file."""
    return damaged(Cursor(data))


def run(built: bytes) -> str:
    """Read it; whatever comes out is whole and correct, which one in two is looked at for."""
    contents, draw = read(put("read.safetensors", built)), zlib.crc32(built)
    for name, weight in contents.packed.items() if draw % 2 else ():
        require_sound(name, weight, draw // 2)
    return "read"


def require_sound(name: str, weight: Packed, draw: int) -> None:
    """Require of a weight that was read: its shape, finite values, its pattern, and a kernel that agrees with it."""
    header = weight.header
    dense = weight.unpack()
    assert tuple(dense.shape) == header.shape and dense.numel() <= LARGEST, (name, header)
    assert torch.isfinite(dense).all(), name
    rule = read_pattern(header.pattern)
    rule = rule.rows if isinstance(rule, VNM) else rule
    assert rule.check(dense.movedim(header.axis, -1)).ok, name
    if len(header.shape) == 2 and header.axis == 1 and draw % 4 == 0:
        fitting = [kernel.name for kernel in available("nm_matmul") if kernel.refuses(weight) is None]
        if fitting:
            require_product(fitting[draw // 4 % len(fitting)], weight, dense)


def require_product(kernel: str, weight: Packed, dense: Tensor) -> None:
    """Require that a kernel's product is that of the dense weight, to what its encoding allows."""
    x = torch.linspace(-1, 1, 3 * weight.header.reduction).view(3, -1).sin()
    scales = weight.scales
    if weight.header.dtype == "int4" and scales is not None and not torch.equal(scales, scales.bfloat16().float()):
        with pytest.raises(PackingError, match="bfloat16 scale"):  # legal in files; the kernels' layouts have two bytes
            matmul(x, weight, kernel=kernel)
        return
    if weight.header.dtype == "int4" and scales is not None and scales.abs().max() > LARGEST_SCALE:
        with pytest.raises(PackingError, match="stay finite"):
            matmul(x, weight, kernel=kernel)
        return
    y = matmul(x, weight, kernel=kernel).double()
    assert tuple(y.shape) == (3, weight.header.rows), kernel
    reach = x.double().abs() @ dense.double().abs().T
    close = (y - x.double() @ dense.double().T).abs() <= 0.05 * reach + 1e-30
    assert (close | (reach > 1e37)).all(), kernel  # a sum of finite values may overflow float32
