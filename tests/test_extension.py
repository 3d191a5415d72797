"""A pattern, an encoding and a kernel of another package go through the whole pipeline, by registration alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import twofour
from twofour import export, kernels, masks, patterns
from twofour.kernels.problem import Problem
from twofour.packing import Packed, encodings, pack
from twofour.patterns import NM, Conformity, Pattern
from twofour.patterns.groups import check_groups


@dataclass(frozen=True)
class Halves(Pattern):
    """Of every `m` values the first or the second half is zero, so that it is m/2:m too."""

    m: int
    density = 0.5

    @property
    def name(self) -> str:
        return f"{self.m}-halves"

    @property
    def group(self) -> int:
        return self.m

    @property
    def rows(self) -> Pattern:
        return NM(self.m // 2, self.m)

    def project(self, scores: Tensor, *, absolute: bool = False) -> Tensor:
        halves = (scores.abs() if absolute else scores).unflatten(-1, (-1, 2, self.m // 2)).sum(-1)
        first = halves[..., :1] >= halves[..., 1:]
        return torch.cat((first, ~first), -1).repeat_interleave(self.m // 2, -1).flatten(-2)

    def check(self, weight: Tensor) -> Conformity:
        nonzero = weight.detach().unflatten(-1, (-1, 2, self.m // 2)).ne(0).any(-1)
        return check_groups(nonzero, 1, weight, self.m)


@dataclass(frozen=True)
class Byte(encodings.Encoding):
    """float8 e5m2, a byte for each value, which the package does not have."""

    def store(self, values: Tensor) -> Tensor:
        return values.to(torch.float8_e5m2).view(torch.uint8)

    def read(self, stored: Tensor, count: int) -> Tensor:
        return stored.view(torch.float8_e5m2).float()


@dataclass(frozen=True)
class Toy(kernels.Kernel):
    """A dense product of the unpacked values."""

    def prepare(self, weight: Packed) -> kernels.Prepared:
        return kernels.Prepared(self, weight.unpack())

    def restore(self, prepared: kernels.Prepared) -> Packed:
        return pack(prepared.tensor, self.pattern, self.dtype)

    def run(self, x: Tensor, weight: kernels.Prepared, bias: Any, problem: Problem, other: Any = None) -> Tensor:
        return problem.finish(linear(x, weight.tensor, bias), other)


BYTE = Byte("e5m2", torch.float32, 8)
TOY = Toy("nm_matmul_2x4_e5m2_toy__torch", "nm_matmul", "2:4", BYTE.name, "cpu", "any", "toy")


def pipeline(path: Path) -> None:
    model, blank = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2))
    x = torch.randn(4, 32)
    twofour.prune(model, "4-halves")
    assert {mask.pattern for mask in masks.of(model).values()} == {Halves(4)}
    assert twofour.check(model).ok

    fast = twofour.compile(model, x, dtype="e5m2", memory="small")  # whichever kernel is faster today
    assert {entry.kernel for entry in fast.plan.layers} == {TOY.name}
    rounded = [BYTE.read(BYTE.store(model[place].weight.detach()), 0) for place in (0, 2)]
    wanted = linear(linear(x, rounded[0], model[0].bias).relu(), rounded[1], model[2].bias)
    torch.testing.assert_close(fast(x), wanted)

    twofour.save(fast, path)
    assert [weight.header.dtype for weight in export.read(path).packed.values()] == 2 * [BYTE.name]
    assert twofour.check(path).ok
    again = twofour.load(path, model)
    assert {entry.kernel for entry in again.plan.layers} == {TOY.name}
    torch.testing.assert_close(again(x), wanted)
    masked = twofour.load(path, blank, masked=True)
    assert {mask.pattern for mask in masks.of(masked).values()} == {Halves(4)}
    assert torch.equal(masked[0].weight, rounded[0])


def test_a_toy_pattern_encoding_and_kernel_go_through_the_pipeline(tmp_path: Path) -> None:
    """In a process of its own: what is added stays until the process ends."""
    subprocess.run([sys.executable, __file__, str(tmp_path / "model.safetensors")], check=True, timeout=300)


if __name__ == "__main__":
    patterns.add("([0-9]{1,2})-halves", Halves)
    encodings.add(BYTE)
    kernels.add(TOY)
    pipeline(Path(sys.argv[1]))
