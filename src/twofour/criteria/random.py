"""Random: a control. What a criterion gains over it is what the criterion knows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.base import Scored


@dataclass(frozen=True)
class Random(Scored):
    """Keep random values of each group, the same ones for the same seed, name of the weight and shape.

    Attributes:
        seed: Starts the random numbers, which are drawn on the CPU whatever the weight's device.
    """

    kind = "random"

    seed: int = 0

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return uniform random float32 scores of the weight's shape."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu").to(weight.device)
