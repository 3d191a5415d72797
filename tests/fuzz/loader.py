"""What must hold of any file whatever: it is refused with a reason, or what comes out of it is whole and correct."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.fuzz.damage import ROWS, WEIGHT
from twofour.errors import FormatError, PackingError
from twofour.export import Contents, read
from twofour.kernels import available, matmul
from twofour.packing import Packed
from twofour.patterns import VNM, parse

LARGEST = 1 << 22
"""Values of a weight at most that are unpacked and multiplied with: a file of a kilobyte cannot have more."""


def outcome(path: Path) -> str:
    """Read a file, and run every kernel on what it holds; return "read", or the code of the refusal.

    Raises:
        AssertionError: Something came out that the file's own header contradicts. Any exception but a FormatError
            with a code is a finding too.
    """
    try:
        contents = read(path)
    except FormatError as error:
        assert error.code and error.got and error.wanted, error
        return error.code
    for name, weight in contents.packed.items():
        require_sound(name, weight)
    return fits(path, contents)


def require_sound(name: str, weight: Packed) -> None:
    """Require of a weight that was read: its shape, finite values, its pattern, and kernels that agree with it."""
    header = weight.header
    dense = weight.unpack()
    assert tuple(dense.shape) == header.shape and dense.numel() <= LARGEST, (name, header)
    assert torch.isfinite(dense).all(), name
    rule = parse(header.pattern)
    rule = rule.rows if isinstance(rule, VNM) else rule
    assert rule.check(dense.movedim(header.axis, -1)).ok, name
    if len(header.shape) == 2 and header.axis == 1:
        x = torch.linspace(-1, 1, 3 * header.reduction).view(3, -1).sin()
        for kernel in available("nm_matmul"):
            if kernel.refuses(weight) is None:
                require_product(kernel.name, x, weight, dense)


def require_product(kernel: str, x: Tensor, weight: Packed, dense: Tensor) -> None:
    """Require that a kernel's product is that of the dense weight, to what its encoding allows."""
    scales = weight.scales
    if weight.header.dtype == "int4" and scales is not None and not torch.equal(scales, scales.bfloat16().float()):
        with pytest.raises(PackingError, match="bfloat16 scale"):  # legal in files; the kernels' layouts have two bytes
            matmul(x, weight, kernel=kernel)
        return
    y = matmul(x, weight, kernel=kernel).double()
    assert tuple(y.shape) == (3, weight.header.rows), kernel
    reach = x.double().abs() @ dense.double().abs().T
    close = (y - x.double() @ dense.double().T).abs() <= 0.05 * reach + 1e-30
    assert (close | (reach > 1e37)).all(), kernel  # a sum of finite values may overflow float32


class Model(nn.Module):
    """The model that the good files are of."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tied = nn.Linear(96, ROWS), nn.Linear(96, ROWS)
        self.tied.weight, self.tied.bias = self.fc.weight, self.fc.bias


def fits(path: Path, contents: Contents) -> str:
    """Fill a model with the file as masked weights."""
    with torch.device("meta"):
        model = Model()
    try:
        back = twofour.load(path, model, masked=True)
    except FormatError as error:
        assert error.code, error
        return error.code
    assert back.fc.weight is back.tied.weight
    if WEIGHT in contents.packed:
        want = contents.packed[WEIGHT].unpack()
        assert torch.equal(back.get_parameter(WEIGHT).detach(), want), "another weight was filled in"
    return "read"
